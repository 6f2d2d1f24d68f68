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
from tandem.protocol.quarantine import QuarantineRecord
from tandem.protocol.request import EngineRequest
from tandem.protocol.supervisor_messages import NoteEvent
from tandem.server.engines.engine_client import NOBODY, Departed, EngineLost, Member, Stranded, why_none
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


class InflightRequest:
    """A request, the tokens that its client has, and where it is. Takes the engine's answers as a `Sink`."""

    def __init__(self, request: EngineRequest, answers: Answers, dispatcher: Dispatcher, only: int | None = None) -> None:
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
        self._attempts = 0
        self._heard = False
        """True once its replica has sent something."""
        self.produced = list(request.produced)
        self.placement: Placement | None = None
        self.replica: int | None = None
        """Replica that has it; None between two."""
        self.losses = 0
        """Replicas that died under it."""
        self.quarantine_record = QuarantineRecord()
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
        return self.request_id if self._attempts == 1 else f"{self.request_id}+{self._attempts - 1}"

    @property
    def suspect(self) -> bool:
        """True if it must run alone."""
        return self.quarantine_record.end >= 0 and self.quarantine_record.suspect

    @property
    def may_leave(self) -> bool:
        """True if one replica may compute its prompt and another continue: none has begun so far."""
        request = self.request
        return (
            request.on_disk
            and not self.kept
            and self.only is None
            and not self.suspect
            and request.pooling is None
            and not request.warms
            and request.params.prompt_logprobs is None
        )

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
        self.quarantine_record.died(self.computed, len(self.request.prompt) + len(self.produced), alone=alone)

    def depart(self) -> EngineRequest:
        """Return what to send now."""
        self._attempts += 1
        self.trial, self._heard, self.leaves = None, False, False
        return replace(
            self.request, request_id=self.wire_id, produced=list(self.produced), quarantine_record=replace(self.quarantine_record)
        )

    def place(self, router: Router, avoid: Collection[int]) -> Placement | None:
        """Choose a replica among those that are not to be avoided; None when none takes it."""
        request = self.request
        key = f"{request.group}:{request.cache_key}" if request.cache_key else ""  # keys are each client's own
        self.placement = router.place(
            [*request.prompt, *self.produced],
            request.params.max_tokens,
            done=len(self.produced),
            avoid=self.refused_by.union(avoid),
            key=key,
            on_disk=request.on_disk,
            may_leave=self.may_leave,
            written=self.written,
        )
        return self.placement

    def end_placement(self) -> None:
        """Take it off the router's account of its replica."""
        if self.placement is not None:
            self.placement.end()

    def push(self, output: Output) -> None:
        """Take an output of the replica."""
        self.produced += output.tokens
        self._heard = True
        if self._attempts > 1:
            output = replace(output, request_id=self.request_id)
        self._dispatcher.arrived(self, output)

    def tried(self, *, resting: bool) -> None:
        """Take note that it runs alone now, or will when its replica has stood idle and lived."""
        self.trial = not resting

    def fail(self, error: RequestError) -> None:
        """Take the replica's refusal, or the news that it is lost."""
        self._dispatcher.failed(self, error)


class IsolatedRetries:
    """Runs suspects one at a time: which is on trial, and which wait for it."""

    def __init__(self, send: Callable[[InflightRequest], None]) -> None:
        """`send` starts one whose turn has come."""
        self._send = send
        self._current: InflightRequest | None = None
        self._waiting: deque[InflightRequest] = deque()

    def must_wait(self, inflight: InflightRequest) -> bool:
        """Return True for a suspect while another is on trial; it is sent later. Call before an in-flight request is sent."""
        if not inflight.suspect:
            return False
        if self._current not in (None, inflight):
            if inflight not in self._waiting:
                self._waiting.append(inflight)
            return True
        self._current = inflight
        return False

    def judge(self, replica: int, inflights: Collection[InflightRequest]) -> None:
        """Blame those of `inflights` that may have killed a replica."""
        here = [inflight for inflight in inflights if inflight.replica == replica]
        for inflight in here:
            inflight.judged = inflight.wire_id
        tried = [inflight for inflight in here if inflight.trial is not None]
        if any(inflight.trial is False for inflight in tried):
            # It died while nothing ran there: something else kills engines.
            for inflight in inflights:
                inflight.quarantine_record.clear()
            self._current = None
        for inflight in tried or here:
            if inflight.trial is not False:
                inflight.blame(alone=inflight.trial is True)
        self._call_next()

    def look(self, inflight: InflightRequest, *, over: bool = False) -> None:
        """Clear an in-flight request that has passed the point of death; if it was on trial, or is over, call the next."""
        if over and inflight in self._waiting:
            self._waiting.remove(inflight)
        if inflight.quarantine_record.end >= 0 and inflight.quarantine_record.passed(inflight.computed):
            inflight.trial = None
        if inflight is not self._current or (inflight.suspect and not over):
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
        self._inflights: dict[str, InflightRequest] = {}
        self._retries = IsolatedRetries(self._retry)
        self.history = History()
        """Events that this api has noticed, and, without a supervisor, those of engines."""
        self.tell: Callable[[NoteEvent], None] | None = None
        """Tells the supervisor."""
        self.closing = False
        """True once requests whose engines go are not sent again."""
        self._over = ""
        """Why no engine will come any more."""
        self.registry = CollectorRegistry()
        self._moved = Counter(
            "tandem_requests_moved", "Requests that went on at another replica after theirs was lost", registry=self.registry
        )
        self._handed_over = Counter(
            "tandem_requests_handed_over",
            "Requests whose prompt one replica computed and that went on at another by their roles",
            registry=self.registry,
        )

    def give_up(self, over: str) -> None:
        """End requests that no replica has. `over`: why no engine will come any more; nothing is done if empty."""
        self._over = over
        if over:
            for inflight in [inflight for inflight in self._inflights.values() if not self._reaches(inflight)]:
                self._end(inflight, UnavailableError(f"The server ends: {over}", retry_after=10.0, code="engine_failed"))

    def _reaches(self, inflight: InflightRequest) -> bool:
        member = self._member(inflight)
        return member is not None and member.client.alive

    def _member(self, inflight: InflightRequest) -> Member | None:
        """The replica that has it, unless that has gone."""
        return None if inflight.replica is None else self._members.get(inflight.replica)

    def open(
        self,
        requests: Sequence[EngineRequest],
        answers: Answers,
        replicas: Sequence[int] | None = None,
        *,
        accepted: bool = False,
    ) -> None:
        """Start requests that belong together, each at its replica if these are named.

        The caller must `abort` each that is not over. `accepted`: they are the rest of what was accepted before, and
        wait where there is no room. Raises UnavailableError; then none of them runs.
        """
        for request, only in zip(requests, replicas or repeat(None), strict=False):
            inflight = InflightRequest(request, answers, self, only)
            self._inflights[inflight.request_id] = inflight
            if accepted:
                inflight.lost_at = asyncio.get_running_loop().time()
            if not (self._move(inflight, UnavailableError(NOBODY)) if accepted else self._send(inflight)):
                for opened in requests:
                    self.abort(opened.request_id)
                raise why_none(self._members.values()) or UnavailableError(NOBODY)

    def abort(self, request_id: str, *, answered: bool = False) -> None:
        """Stop a request wherever it is, without a further answer. Unknown ones are ignored.

        `answered`: its client has all that it wants.
        """
        inflight = self._inflights.pop(request_id, None)
        if inflight is None:
            return
        self._retries.look(inflight, over=True)
        self._let_go(inflight)
        inflight.end_placement()
        if (member := self._member(inflight)) is not None:
            member.client.abort(inflight.wire_id, answered=answered)

    def _send(self, inflight: InflightRequest) -> bool:
        """Send it to the best replica that takes it, or later if it must stand trial; False when there is none."""
        if self._retries.must_wait(inflight):
            return True
        others = () if inflight.only is None else self._members.keys() - {inflight.only}
        while True:
            inflight.replica = None
            request = inflight.depart()
            placement = inflight.place(self._router, others)
            if placement is None:
                return False
            inflight.replica, inflight.leaves = placement.replica, placement.leaves
            kept = max(placement.kept, inflight.kept, inflight.perhaps_kept)
            if self._members[placement.replica].client.send(replace(request, kept=kept, leaves=inflight.leaves), inflight):
                return True
            placement.end()
            inflight.refused_by.add(placement.replica)

    def leave(self, index: int) -> None:
        """Send what a replica has to others, but for what has to be done there, or is tried there alone."""
        for inflight in [inflight for inflight in self._inflights.values() if inflight.replica == index]:
            if inflight.only is None and inflight.trial is None:
                self._members[index].client.abort(inflight.wire_id)
                self.failed(inflight, Stranded())

    def arrived(self, inflight: InflightRequest, output: Output) -> None:
        """Count an output of an in-flight request and hand it on."""
        self._let_go(inflight)
        over = output.finish_reason is not None
        if over:
            inflight.end_placement()
            self._inflights.pop(inflight.request_id, None)
        elif inflight.placement is not None:
            inflight.placement.advance(len(output.tokens))
        if over or inflight.quarantine_record.end >= 0:
            self._retries.look(inflight, over=over)
        inflight.answers.push(output)

    def _let_go(self, inflight: InflightRequest) -> None:
        """Release the replica that handed it over, if one did: what it has computed is not needed any more."""
        if inflight.left is not None:
            (index, wire_id), inflight.left = inflight.left, None
            if index in self._members:
                self._members[index].client.abort(wire_id)

    def failed(self, inflight: InflightRequest, error: RequestError) -> None:
        """Send an in-flight request that was refused, or whose replica was lost, to another if that can help."""
        inflight.end_placement()
        if self._inflights.get(inflight.request_id) is not inflight:
            return
        member = self._member(inflight)
        if not self.closing and isinstance(error, OverloadedError | UnavailableError):
            if isinstance(error, Departed) and inflight.replica is not None:
                inflight.left = inflight.replica, inflight.wire_id
                status = None if member is None else member.client.status
                inflight.written = {} if status is None else {status.kv_store: error.positions}
            if isinstance(error, EngineLost):
                died = not isinstance(error, Departed | Stranded) and member is not None and not member.draining
                self._lost(inflight, died=died, kept=error.positions if isinstance(error, Departed) else 0)
            elif inflight.replica is not None:
                inflight.refused_by.add(inflight.replica)
                inflight.replica = None
            if not inflight.quarantine_record.guilty:
                if self._move(inflight, error):
                    return
            else:
                error = ServerError(
                    f"{inflight.losses} engines were lost while they worked on this request, the last "
                    "ones while it ran alone; it is not tried again",
                    code="engine_lost",
                )
                self._note_refused(inflight, error)
        self._end(inflight, error)

    def _note_refused(self, inflight: InflightRequest, error: RequestError) -> None:
        event = self.history.note(
            "request_refused",
            f"a request is not tried again: {error.message}",
            level="error",
            request_id=inflight.request_id,
            group=inflight.request.group,
            remedy="Send it shorter or changed; if it fails alike, report it with the log.",
        )
        if self.tell is not None:
            self.tell(NoteEvent(event))

    def _lost(self, inflight: InflightRequest, *, died: bool, kept: int) -> None:
        now = asyncio.get_running_loop().time()
        if died and inflight.judged != inflight.wire_id and inflight.replica is not None:
            self._retries.judge(inflight.replica, self._inflights.values())
        inflight.lose(now, died=died, kept=kept)

    def _end(self, inflight: InflightRequest, error: RequestError) -> None:
        self._inflights.pop(inflight.request_id, None)
        inflight.end_placement()
        self._let_go(inflight)
        self._retries.look(inflight, over=True)
        inflight.answers.fail(error)

    def _move(self, inflight: InflightRequest, error: RequestError) -> bool:
        """Send it elsewhere, or have that tried again soon; False when nothing more can be done for it."""
        by_role = inflight.leaves and isinstance(error, Departed)
        if self._send(inflight):
            if isinstance(error, EngineLost) and inflight.replica is not None:
                (self._handed_over if by_role else self._moved).inc()
                logger.log(
                    logging.DEBUG if by_role else logging.INFO,
                    "request %s goes on at replica %s; tokens so far: %d",
                    inflight.request_id,
                    inflight.replica,
                    len(inflight.produced),
                )
            return True
        if inflight.lost_at is None:
            return False
        loop = asyncio.get_running_loop()
        some = bool(self._members) and not self._over and loop.time() < inflight.lost_at + self._patience_s
        if isinstance(error, OverloadedError) or some:
            loop.call_later(RETRY_S, self._retry, inflight, error)
            return True
        return False

    def _retry(self, inflight: InflightRequest, error: RequestError | None = None) -> None:
        """Send a request again; `error` is what its client gets if that cannot be, by default that nobody is there."""
        error = error or EngineLost(NOBODY)
        if self._inflights.get(inflight.request_id) is not inflight:
            return
        inflight.refused_by.clear()
        if not self._move(inflight, error):
            self._end(inflight, error)
