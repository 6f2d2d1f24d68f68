"""Requests on their way. Each goes to the replica that the router chooses, and moves on when that is lost.

The api holds the prompt, the parameters and every token that it has handed on, so a request that loses its engine is
sent to another one with the tokens so far, and its client sees no more than a pause.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import repeat

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from tandem.errors import OverloadedError, RequestError, ServerError, UnavailableError
from tandem.protocol.control import Output
from tandem.protocol.events import History
from tandem.protocol.request import EngineRequest
from tandem.protocol.supervisor import NoteEvent
from tandem.router.router import Router
from tandem.server.engines.flight import Flight, Subscription
from tandem.server.engines.member import NOBODY, Member, why_none
from tandem.server.engines.protocol import Departed, EngineLost, Stranded

logger = logging.getLogger(__name__)

RETRY_S = 0.2
"""Seconds until a request that was accepted once, and lost its replica, tries full or absent ones again."""


class Trials:
    """Who is on trial, and who waits for it."""

    def __init__(self, send: Callable[[Flight], None]) -> None:
        """`send` starts one whose turn has come."""
        self._send = send
        self._current: Flight | None = None
        self._waiting: deque[Flight] = deque()

    def must_wait(self, flight: Flight) -> bool:
        """Called before a flight is sent. True when it is a suspect and another is on trial; it is sent later."""
        if not flight.suspicion.suspect:
            return False
        if self._current not in (None, flight):
            if flight not in self._waiting:
                self._waiting.append(flight)
            return True
        self._current = flight
        return False

    def judge(self, replica: int, flights: Collection[Flight]) -> None:
        """A replica has died: who of all `flights` may have done it?"""
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
        """A flight has got further, or is over: if it was on trial, the next one's turn may have come."""
        if over and flight in self._waiting:
            self._waiting.remove(flight)
        if flight.suspicion.passed(flight.computed):
            flight.trial = None
        if flight is not self._current or (flight.suspicion.suspect and not over):
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
        """`members` are the replicas that there are, by number; others change them.

        A request that was accepted waits up to `patience_s` seconds for a replica when all are lost.
        """
        self._router = router
        self._members = members
        self._patience_s = patience_s
        self._flights: dict[str, Flight] = {}
        self._trials = Trials(self._retry)
        self.history = History()
        """What this api has noticed, and, without a supervisor, what engines tell."""
        self.tell: Callable[[NoteEvent], None] | None = None
        """Takes what the supervisor is to know."""
        self.closing = False
        """Requests whose engines go now are not sent again."""
        self._over = ""
        """Why no engine will come any more."""
        self.registry = CollectorRegistry()
        self._moved = Counter("tandem_requests_moved", "Requests that went on at another replica after theirs was lost",
                              registry=self.registry)
        self._handed_over = Counter("tandem_requests_handed_over", "Requests whose prompt one replica computed "
                                    "and that went on at another by their roles", registry=self.registry)
        self.load = Gauge("tandem_replica_outstanding_tokens", "Work before a replica as the router counts it",
                          ["replica"], registry=self.registry)

    def refresh(self) -> None:
        """Tell the router how the replicas are."""
        for index, member in self._members.items():
            self._router.set_state(index, member.state)
            if (status := member.client.status) is not None:
                self._router.set_disk(index, status.kv_store, status.disk_saves, status.kv_reach, status.lent_saves)
                self._router.set_role(index, member.role, status.prompt_tokens_s, status.prefix_room)
            self.load.labels(str(index)).set(self._router.outstanding(index))

    def give_up(self, over: str) -> None:
        """`over`: why the server ends, as no engine will come any more, or nothing; what waits for one ends at once."""
        self._over = over
        if over:
            for flight in [one for one in self._flights.values() if not self._reaches(one)]:
                self._end(flight, UnavailableError(f"The server ends: {over}", retry_after=10.0, code="engine_failed"))

    def _reaches(self, flight: Flight) -> bool:
        """The replica that has it answers."""
        member = None if flight.replica is None else self._members.get(flight.replica)
        return member is not None and member.client.alive

    def open(self, requests: Sequence[EngineRequest], replicas: Sequence[int] | None = None, *,
             accepted: bool = False) -> Subscription:
        """Start requests that belong together, each at its replica if these are named. The caller must close what it
        got. `accepted`: they are the rest of what was accepted before, and wait where there is no room. Raises
        UnavailableError."""
        subscription = Subscription([request.request_id for request in requests], self.abort)
        self.refresh()
        for request, only in zip(requests, replicas or repeat(None), strict=False):
            flight = Flight(request, subscription, self, only)
            self._flights[flight.request_id] = flight
            if accepted:
                flight.lost_at = asyncio.get_running_loop().time()
            if not (self._move(flight, UnavailableError(NOBODY)) if accepted else self._send(flight)):
                subscription.close()
                raise why_none(self._members.values()) or UnavailableError(NOBODY)
        return subscription

    def abort(self, request_id: str, *, answered: bool = False) -> None:
        """Stop a request wherever it is; its subscription hears no more of it. Unknown ones are ignored.

        `answered`: its client has all that it wants.
        """
        flight = self._flights.pop(request_id, None)
        if flight is None:
            return
        self._trials.look(flight, over=True)
        self._let_go(flight)
        if flight.replica is not None:
            self._router.end(flight.wire_id)
            if flight.replica in self._members:
                self._members[flight.replica].client.abort(flight.wire_id, answered=answered)

    def _send(self, flight: Flight) -> bool:
        """To the best replica that takes it, or later when it has to stand trial; False when there is none."""
        if self._trials.must_wait(flight):
            return True
        while True:
            flight.replica = None
            request = flight.depart()
            others = () if flight.only is None else self._members.keys() - {flight.only}
            index = self._router.place(request.request_id, flight.tokens, request.params.max_tokens,
                                       done=len(flight.produced), avoid=flight.refused_by.union(others),
                                       key=flight.cache_key, on_disk=request.on_disk, may_leave=flight.may_leave,
                                       written=flight.written)
            if index is None:
                return False
            flight.replica = index
            kept = max(self._router.kept(request.request_id), flight.kept, flight.perhaps_kept)
            flight.leaves = self._router.leaves(request.request_id)
            request = msgspec.structs.replace(request, kept=kept, leaves=flight.leaves)
            if self._members[index].client.send(request, flight):
                return True
            self._router.end(request.request_id)
            flight.refused_by.add(index)

    def leave(self, index: int) -> None:
        """Send what a replica has to others, but for what has to be done there, or is tried there alone."""
        for flight in [one for one in self._flights.values() if one.replica == index]:
            if flight.only is None and flight.trial is None:
                self._members[index].client.abort(flight.wire_id)
                self.failed(flight, Stranded())

    def arrived(self, flight: Flight, output: Output) -> None:
        """An output of a flight: count it and hand it on."""
        self._let_go(flight)
        self._router.advance(flight.wire_id, len(output.tokens))
        over = output.finish_reason is not None
        if over:
            self._router.end(flight.wire_id)
            self._flights.pop(flight.request_id, None)
            if flight.replica is not None and flight.replica in self._members:
                self._members[flight.replica].client.forget(flight.wire_id)
        self._trials.look(flight, over=over)
        flight.subscription.push(output)

    def _let_go(self, flight: Flight) -> None:
        """The replica that handed it over, if one did, may go: nobody needs what it has computed any more."""
        if flight.left is not None:
            (index, wire_id), flight.left = flight.left, None
            if index in self._members:
                self._members[index].client.abort(wire_id)

    def failed(self, flight: Flight, error: RequestError) -> None:
        """A flight was refused, or its replica lost: send it to another if that can help."""
        self._router.end(flight.wire_id)
        if self._flights.get(flight.request_id) is not flight:
            return
        member = None if flight.replica is None else self._members.get(flight.replica)
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
        self._let_go(flight)
        self._trials.look(flight, over=True)
        flight.subscription.fail(error)

    def _move(self, flight: Flight, error: RequestError) -> bool:
        """Send it elsewhere, or have that tried again soon; False when nothing more can be done for it."""
        self.refresh()
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
