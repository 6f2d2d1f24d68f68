"""In-flight requests. Each goes to the replica that the router chooses, and to another when that one is lost.

The api holds the prompt, the parameters and every token that it has handed on, so a request that loses its engine is
sent to another one with the tokens so far, and its client sees no more than a pause.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import repeat
from typing import Protocol

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter

from tandem.errors import OverloadedError, RequestError, ServerError, UnavailableError
from tandem.protocol.control import Output
from tandem.protocol.events import History
from tandem.protocol.request import EngineRequest
from tandem.protocol.supervisor import NoteEvent
from tandem.protocol.suspicion import Suspicion
from tandem.server.engines.client import NOBODY, Departed, EngineLost, Member, Stranded, why_none
from tandem.server.engines.router import Placement, Router

logger = logging.getLogger(__name__)

RETRY_S = 0.2
"""Seconds until a request that was accepted once, and lost its replica, tries full or absent ones again."""


class Answers(Protocol):
    """Takes the answers to requests that belong together."""

    def push(self, output: Output) -> None:
        """Take the next output of one of them."""

    def fail(self, error: RequestError) -> None:
        """End all of them with `error`."""


class Flight:
    """A request, the tokens that its client has, and where it is. Takes the engine's answers as a `Sink`."""

    def __init__(self, request: EngineRequest, answers: Answers, dispatcher: Dispatcher,
                 only: int | None = None) -> None:
        """Draw a seed where the client gave none, so that the text is the same on any replica.

        `only`: the one replica that will do.
        """
        self.only = only
        params = request.params
        if params.seed is None and params.temperature > 0:
            params = replace(params, seed=secrets.randbits(63))
        self.request = replace(request, params=params)
        self.request_id = request.request_id
        """The id that the api knows."""
        self.answers = answers
        self._dispatcher = dispatcher
        self._sendings = 0
        self._heard = False
        """True once its replica has sent something."""
        self.produced = list(request.produced)
        self.placement: Placement | None = None
        self.replica: int | None = None
        """Replica that has it; None between two."""
        self.losses = 0
        """Replicas that died under it."""
        self.suspicion = Suspicion()
        self.trial: bool | None = None
        """True while its replica runs it alone; False while nothing runs there, to see whether that dies anyway."""
        self.judged = ""
        """The sending whose loss has been judged."""
        self.kept = 0
        """Leading tokens that its last replica had written to disk when it handed the request over."""
        self.written: dict[str, int] = {}
        """Tokens written, by KV store."""
        self.left: tuple[int, str] | None = None
        """The replica that handed it over and the id known there, until it continues elsewhere."""
        self.leaves = False
        """True if its replica hands it over once its prompt is computed."""
        self.perhaps_kept = 0
        """Upper bound of tokens on disk after a replica died before it handed the request over."""
        self.lost_at: float | None = None
        """Event loop time when it lost its last replica, or followed others of its HTTP request. It was accepted once:
        it is not turned away now because others are full."""
        self.refused_by: set[int] = set()

    @property
    def wire_id(self) -> str:
        """The id for the replica: another one each time, as a slow engine may still be busy with the last."""
        return self.request_id if self._sendings == 1 else f"{self.request_id}+{self._sendings - 1}"

    @property
    def suspect(self) -> bool:
        """True if it must run alone."""
        return self.suspicion.end >= 0 and self.suspicion.suspect

    @property
    def may_leave(self) -> bool:
        """True if one replica may compute its prompt and another continue: none has begun so far."""
        request = self.request
        return (request.on_disk and not self.kept and self.only is None and not self.suspect
                and request.pooling is None and not request.warms and request.params.prompt_logprobs is None)

    def lose(self, now: float, *, died: bool, kept: int = 0) -> None:
        """Take it off its replica, which `died` unless it was leaving anyway and has `kept` its tokens on disk."""
        self.kept = max(self.kept, kept)
        if self.leaves and not kept:
            self.perhaps_kept = len(self.request.prompt)
        self.lost_at, self.replica = now, None
        self.refused_by.clear()
        self.losses += died

    @property
    def computed(self) -> int:
        """Positions that its replica has surely computed."""
        return len(self.request.prompt) + len(self.produced) if self._heard else 0

    def blame(self, *, alone: bool) -> None:
        """Note that its replica died while it worked on it."""
        self.suspicion.died(self.computed, len(self.request.prompt) + len(self.produced), alone=alone)

    def depart(self) -> EngineRequest:
        """Return what to send now."""
        self._sendings += 1
        self.trial, self._heard, self.leaves = None, False, False
        return replace(self.request, request_id=self.wire_id, produced=list(self.produced),
                       suspicion=replace(self.suspicion))

    def place(self, router: Router, avoid: Collection[int]) -> Placement | None:
        """Choose a replica among those that are not to be avoided; None when none takes it."""
        request = self.request
        key = f"{request.group}:{request.cache_key}" if request.cache_key else ""  # keys are each client's own
        self.placement = router.place([*request.prompt, *self.produced], request.params.max_tokens,
                                      done=len(self.produced), avoid=self.refused_by.union(avoid), key=key,
                                      on_disk=request.on_disk, may_leave=self.may_leave, written=self.written)
        return self.placement

    def end_placement(self) -> None:
        """Take it off the router's account of its replica."""
        if self.placement is not None:
            self.placement.end()

    def push(self, output: Output) -> None:
        """Take an output of the replica."""
        self.produced += output.tokens
        self._heard = True
        if self._sendings > 1:
            output = replace(output, request_id=self.request_id)
        self._dispatcher.arrived(self, output)

    def tried(self, *, resting: bool) -> None:
        """Take note that it runs alone now, or will when its replica has stood idle and lived."""
        self.trial = not resting

    def fail(self, error: RequestError) -> None:
        """Take the replica's refusal, or the news that it is lost."""
        self._dispatcher.failed(self, error)


class Trials:
    """Runs suspects one at a time: which is on trial, and which wait for it."""

    def __init__(self, send: Callable[[Flight], None]) -> None:
        """`send` starts one whose turn has come."""
        self._send = send
        self._current: Flight | None = None
        self._waiting: deque[Flight] = deque()

    def must_wait(self, flight: Flight) -> bool:
        """Return True for a suspect while another is on trial; it is sent later. Call before a flight is sent."""
        if not flight.suspect:
            return False
        if self._current not in (None, flight):
            if flight not in self._waiting:
                self._waiting.append(flight)
            return True
        self._current = flight
        return False

    def judge(self, replica: int, flights: Collection[Flight]) -> None:
        """Blame those of `flights` that may have killed a replica."""
        here = [flight for flight in flights if flight.replica == replica]
        for flight in here:
            flight.judged = flight.wire_id
        tried = [flight for flight in here if flight.trial is not None]
        if any(flight.trial is False for flight in tried):
            # It died while nothing ran there: something else kills engines.
            for flight in flights:
                flight.suspicion.clear()
            self._current = None
        for flight in tried or here:
            if flight.trial is not False:
                flight.blame(alone=flight.trial is True)
        self._call_next()

    def look(self, flight: Flight, *, over: bool = False) -> None:
        """Clear a flight that has passed the point of death; if it was on trial, or is over, call the next."""
        if over and flight in self._waiting:
            self._waiting.remove(flight)
        if flight.suspicion.end >= 0 and flight.suspicion.passed(flight.computed):
            flight.trial = None
        if flight is not self._current or (flight.suspect and not over):
            return
        self._current = None
        self._call_next()

    def _call_next(self) -> None:
        """Send those that wait, as long as nobody is on trial; one that is no suspect any more need not wait."""
        while self._waiting and self._current is None:
            self._send(self._waiting.popleft())


class Dispatcher:
    """Sends requests to the replicas of one model, and sends them again. Belongs to one event loop."""

    def __init__(self, router: Router, members: Mapping[int, Member], patience_s: float) -> None:
        """`members` are the replicas that there are, by number; others change them, and tell the router.

        A request that was accepted waits up to `patience_s` seconds for a replica when all are lost.
        """
        self._router = router
        self._members = members
        self._patience_s = patience_s
        self._flights: dict[str, Flight] = {}
        self._trials = Trials(self._retry)
        self.history = History()
        """Events that this api has noticed, and, without a supervisor, those of engines."""
        self.tell: Callable[[NoteEvent], None] | None = None
        """Tells the supervisor."""
        self.closing = False
        """True once requests whose engines go are not sent again."""
        self._over = ""
        """Why no engine will come any more."""
        self.registry = CollectorRegistry()
        self._moved = Counter("tandem_requests_moved", "Requests that went on at another replica after theirs was lost",
                              registry=self.registry)
        self._handed_over = Counter("tandem_requests_handed_over", "Requests whose prompt one replica computed "
                                    "and that went on at another by their roles", registry=self.registry)

    def give_up(self, over: str) -> None:
        """End requests that no replica has. `over`: why no engine will come any more; nothing is done if empty."""
        self._over = over
        if over:
            for flight in [flight for flight in self._flights.values() if not self._reaches(flight)]:
                self._end(flight, UnavailableError(f"The server ends: {over}", retry_after=10.0, code="engine_failed"))

    def _reaches(self, flight: Flight) -> bool:
        member = self._member(flight)
        return member is not None and member.client.alive

    def _member(self, flight: Flight) -> Member | None:
        """The replica that has it, unless that has gone."""
        return None if flight.replica is None else self._members.get(flight.replica)

    def open(self, requests: Sequence[EngineRequest], answers: Answers, replicas: Sequence[int] | None = None, *,
             accepted: bool = False) -> None:
        """Start requests that belong together, each at its replica if these are named.

        The caller must `abort` each that is not over. `accepted`: they are the rest of what was accepted before, and
        wait where there is no room. Raises UnavailableError; then none of them runs.
        """
        for request, only in zip(requests, replicas or repeat(None), strict=False):
            flight = Flight(request, answers, self, only)
            self._flights[flight.request_id] = flight
            if accepted:
                flight.lost_at = asyncio.get_running_loop().time()
            if not (self._move(flight, UnavailableError(NOBODY)) if accepted else self._send(flight)):
                for opened in requests:
                    self.abort(opened.request_id)
                raise why_none(self._members.values()) or UnavailableError(NOBODY)

    def abort(self, request_id: str, *, answered: bool = False) -> None:
        """Stop a request wherever it is, without a further answer. Unknown ones are ignored.

        `answered`: its client has all that it wants.
        """
        flight = self._flights.pop(request_id, None)
        if flight is None:
            return
        self._trials.look(flight, over=True)
        self._let_go(flight)
        flight.end_placement()
        if (member := self._member(flight)) is not None:
            member.client.abort(flight.wire_id, answered=answered)

    def _send(self, flight: Flight) -> bool:
        """Send it to the best replica that takes it, or later if it must stand trial; False when there is none."""
        if self._trials.must_wait(flight):
            return True
        others = () if flight.only is None else self._members.keys() - {flight.only}
        while True:
            flight.replica = None
            request = flight.depart()
            placement = flight.place(self._router, others)
            if placement is None:
                return False
            flight.replica, flight.leaves = placement.replica, placement.leaves
            kept = max(placement.kept, flight.kept, flight.perhaps_kept)
            if self._members[placement.replica].client.send(replace(request, kept=kept, leaves=flight.leaves), flight):
                return True
            placement.end()
            flight.refused_by.add(placement.replica)

    def leave(self, index: int) -> None:
        """Send what a replica has to others, but for what has to be done there, or is tried there alone."""
        for flight in [flight for flight in self._flights.values() if flight.replica == index]:
            if flight.only is None and flight.trial is None:
                self._members[index].client.abort(flight.wire_id)
                self.failed(flight, Stranded())

    def arrived(self, flight: Flight, output: Output) -> None:
        """Count an output of a flight and hand it on."""
        self._let_go(flight)
        over = output.finish_reason is not None
        if over:
            flight.end_placement()
            self._flights.pop(flight.request_id, None)
        elif flight.placement is not None:
            flight.placement.advance(len(output.tokens))
        if over or flight.suspicion.end >= 0:
            self._trials.look(flight, over=over)
        flight.answers.push(output)

    def _let_go(self, flight: Flight) -> None:
        """Release the replica that handed it over, if one did: what it has computed is not needed any more."""
        if flight.left is not None:
            (index, wire_id), flight.left = flight.left, None
            if index in self._members:
                self._members[index].client.abort(wire_id)

    def failed(self, flight: Flight, error: RequestError) -> None:
        """Send a flight that was refused, or whose replica was lost, to another if that can help."""
        flight.end_placement()
        if self._flights.get(flight.request_id) is not flight:
            return
        member = self._member(flight)
        if not self.closing and isinstance(error, OverloadedError | UnavailableError):
            if isinstance(error, Departed) and flight.replica is not None:
                flight.left = flight.replica, flight.wire_id
                status = None if member is None else member.client.status
                flight.written = {} if status is None else {status.kv_store: error.positions}
            if isinstance(error, EngineLost):
                died = not isinstance(error, Departed | Stranded) and member is not None and not member.draining
                self._lost(flight, died=died, kept=error.positions if isinstance(error, Departed) else 0)
            elif flight.replica is not None:
                flight.refused_by.add(flight.replica)
                flight.replica = None
            if not flight.suspicion.guilty:
                if self._move(flight, error):
                    return
            else:
                error = ServerError(f"{flight.losses} engines were lost while they worked on this request, the last "
                                    "ones while it ran alone; it is not tried again", code="engine_lost")
                self._note_refused(flight, error)
        self._end(flight, error)

    def _note_refused(self, flight: Flight, error: RequestError) -> None:
        event = self.history.note("request_refused", f"a request is not tried again: {error.message}", level="error",
                                  request_id=flight.request_id, group=flight.request.group,
                                  remedy="Send it shorter or changed; if it fails alike, report it with the log.")
        if self.tell is not None:
            self.tell(NoteEvent(event))

    def _lost(self, flight: Flight, *, died: bool, kept: int) -> None:
        now = asyncio.get_running_loop().time()
        if died and flight.judged != flight.wire_id and flight.replica is not None:
            self._trials.judge(flight.replica, self._flights.values())
        flight.lose(now, died=died, kept=kept)

    def _end(self, flight: Flight, error: RequestError) -> None:
        self._flights.pop(flight.request_id, None)
        flight.end_placement()
        self._let_go(flight)
        self._trials.look(flight, over=True)
        flight.answers.fail(error)

    def _move(self, flight: Flight, error: RequestError) -> bool:
        """Send it elsewhere, or have that tried again soon; False when nothing more can be done for it."""
        by_role = flight.leaves and isinstance(error, Departed)
        if self._send(flight):
            if isinstance(error, EngineLost) and flight.replica is not None:
                (self._handed_over if by_role else self._moved).inc()
                logger.log(logging.DEBUG if by_role else logging.INFO, "request %s goes on at replica %s; tokens so "
                           "far: %d", flight.request_id, flight.replica, len(flight.produced))
            return True
        if flight.lost_at is None:
            return False
        loop = asyncio.get_running_loop()
        some = bool(self._members) and not self._over and loop.time() < flight.lost_at + self._patience_s
        if isinstance(error, OverloadedError) or some:
            loop.call_later(RETRY_S, self._retry, flight, error)
            return True
        return False

    def _retry(self, flight: Flight, error: RequestError | None = None) -> None:
        """Send a request again; `error` is what its client gets if that cannot be, by default that nobody is there."""
        error = error or EngineLost(NOBODY)
        if self._flights.get(flight.request_id) is not flight:
            return
        flight.refused_by.clear()
        if not self._move(flight, error):
            self._end(flight, error)
