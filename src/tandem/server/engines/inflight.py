"""In-flight requests: dispatch to replicas, and migration when a replica is lost.

The api holds the prompt, the parameters and all output tokens so far. A request that loses its engine is sent with
them to another one, and its client sees only a pause.
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
"""Seconds between attempts to place an accepted request while replicas are full or absent."""


class Answers(Protocol):
    """Receiver of the answers to a group of requests."""

    replica: int | None
    """Replica that one of the requests was sent to last."""

    def push(self, output: Output) -> None:
        """Process the next output of one of the requests."""

    def fail(self, error: RequestError) -> None:
        """End all of the requests with `error`."""


class InflightRequest:
    """A request with its output tokens so far and its current replica; the `Sink` of the engine's answers."""

    def __init__(self, request: EngineRequest, answers: Answers, dispatcher: Dispatcher, only: int | None = None) -> None:
        """Set a random seed if sampling without one, so that any replica draws the same text.

        `only`: the only replica allowed; None for any.
        """
        self.only = only
        params = request.params
        if params.seed is None and params.temperature > 0:
            params = replace(params, seed=secrets.randbits(63))
        self.request = replace(request, params=params)
        self.request_id = request.request_id
        """Id within the api; replicas get `wire_id`."""
        self.answers = answers
        self._dispatcher = dispatcher
        self._attempts = 0
        self._heard = False
        """True once the current replica has sent an output."""
        self.produced = list(request.produced)
        self.placement: Placement | None = None
        self.replica: int | None = None
        """Replica that has the request; None between two."""
        self.losses = 0
        """Number of replicas that crashed while they had the request."""
        self.quarantine_record = QuarantineRecord()
        self.trial: bool | None = None
        """Quarantine phase: True while the replica runs only this request, False while it idles first, else None."""
        self.judged = ""
        """`wire_id` of the last attempt whose loss was judged."""
        self.kept = 0
        """Leading tokens whose KV was on disk when the last replica handed over the request."""
        self.written: dict[str, int] = {}
        """Leading tokens in each KV store, by store."""
        self.left: tuple[int, str] | None = None
        """Replica that handed over the request and its id there, until another replica continues; else None."""
        self.leaves = False
        """True if the current replica only prefills and then hands over."""
        self.perhaps_kept = 0
        """Upper bound of leading tokens on disk, if a prefill replica was lost before the hand-over."""
        self.lost_at: float | None = None
        """Event loop time of the loss of the last replica, or of the submission if accepted with an earlier window.

        If set, the request was accepted before: full replicas make it wait instead of fail.
        """
        self.refused_by: set[int] = set()

    @property
    def wire_id(self) -> str:
        """Id for the replica, distinct per attempt, as a slow engine may still work on an earlier one."""
        return self.request_id if self._attempts == 1 else f"{self.request_id}+{self._attempts - 1}"

    @property
    def suspect(self) -> bool:
        """True if the request may have crashed engines and must run alone (quarantine)."""
        return self.quarantine_record.end >= 0 and self.quarantine_record.suspect

    @property
    def may_leave(self) -> bool:
        """True if prefill and decode may run at different replicas."""
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
        """Record the loss of the replica at `now` (event loop time).

        `died`: the replica crashed. `kept`: leading tokens whose KV it left on disk.
        """
        self.kept = max(self.kept, kept)
        if self.leaves and not kept:
            self.perhaps_kept = len(self.request.prompt)
        self.lost_at, self.replica = now, None
        self.refused_by.clear()
        self.losses += died

    @property
    def computed(self) -> int:
        """Number of positions that the current replica has certainly computed."""
        return len(self.request.prompt) + len(self.produced) if self._heard else 0

    def blame(self, *, alone: bool) -> None:
        """Record in the quarantine record that the replica crashed; `alone`: nothing else ran there."""
        self.quarantine_record.died(self.computed, len(self.request.prompt) + len(self.produced), alone=alone)

    def depart(self) -> EngineRequest:
        """Start a new attempt and return the request to send, with the output tokens so far."""
        self._attempts += 1
        self.trial, self._heard, self.leaves = None, False, False
        return replace(
            self.request, request_id=self.wire_id, produced=list(self.produced), quarantine_record=replace(self.quarantine_record)
        )

    def place(self, router: Router, avoid: Collection[int]) -> Placement | None:
        """Choose a replica, except `avoid` and those that refused; None if none takes requests."""
        request = self.request
        key = f"{request.group}:{request.cache_key}" if request.cache_key else ""  # cache keys are per client
        self.placement = router.place(
            [*request.prompt, *self.produced],
            request.params.max_tokens,
            done=len(self.produced),
            avoid=self.refused_by.union(avoid),
            key=key,
            on_disk=request.on_disk,
            may_leave=self.may_leave,
            written=self.written,
            adapter=request.adapter,
        )
        return self.placement

    def end_placement(self) -> None:
        """Remove the request from the router's load of its replica."""
        if self.placement is not None:
            self.placement.end()

    def push(self, output: Output) -> None:
        """Append an output of the replica and pass it to the dispatcher."""
        self.produced += output.tokens
        self._heard = True
        if self._attempts > 1:
            output = replace(output, request_id=self.request_id)
        self._dispatcher.arrived(self, output)

    def inputs_of(self, key: str) -> bytes:
        """Return the inputs of a picture of the request."""
        return next(one.inputs for one in self.request.pictures if one.key == key)

    def tried(self, *, resting: bool) -> None:
        """Note the quarantine phase: it runs alone, or (`resting`) its replica idles first."""
        self.trial = not resting

    def fail(self, error: RequestError) -> None:
        """Pass a refusal by the replica, or its loss, to the dispatcher."""
        self._dispatcher.failed(self, error)


class IsolatedRetries:
    """Queue that retries quarantined requests one at a time."""

    def __init__(self, send: Callable[[InflightRequest], None]) -> None:
        """`send` sends a request whose turn has come."""
        self._send = send
        self._current: InflightRequest | None = None
        self._waiting: deque[InflightRequest] = deque()

    def must_wait(self, inflight: InflightRequest) -> bool:
        """Return whether to hold back a request; call before each send.

        True for a quarantined request while another one runs alone: it is queued and sent later.
        """
        if not inflight.suspect:
            return False
        if self._current not in (None, inflight):
            if inflight not in self._waiting:
                self._waiting.append(inflight)
            return True
        self._current = inflight
        return False

    def judge(self, replica: int, inflights: Collection[InflightRequest]) -> None:
        """Record the crash of `replica` with those of `inflights` that may have caused it."""
        here = [inflight for inflight in inflights if inflight.replica == replica]
        for inflight in here:
            inflight.judged = inflight.wire_id
        tried = [inflight for inflight in here if inflight.trial is not None]
        if any(inflight.trial is False for inflight in tried):
            # The replica crashed while idle, so no request is the cause.
            for inflight in inflights:
                inflight.quarantine_record.clear()
            self._current = None
        for inflight in tried or here:
            if inflight.trial is not False:
                inflight.blame(alone=inflight.trial is True)
        self._call_next()

    def look(self, inflight: InflightRequest, *, over: bool = False) -> None:
        """Clear a request that has passed the position of the crash; if it ran alone or is `over`, send the next."""
        if over and inflight in self._waiting:
            self._waiting.remove(inflight)
        if inflight.quarantine_record.end >= 0 and inflight.quarantine_record.passed(inflight.computed):
            inflight.trial = None
        if inflight is not self._current or (inflight.suspect and not over):
            return
        self._current = None
        self._call_next()

    def _call_next(self) -> None:
        """Send waiting requests until one of them runs alone; cleared ones need not wait."""
        while self._waiting and self._current is None:
            self._send(self._waiting.popleft())


class Dispatcher:
    """Dispatcher of requests to the replicas of one model, with retries. Not thread-safe: use on one event loop."""

    def __init__(self, router: Router, members: Mapping[int, Member], patience_s: float) -> None:
        """`members`: current replicas by number, maintained by `Replicas` together with the router.

        `patience_s`: seconds that an accepted request waits for a replica when all are lost.
        """
        self._router = router
        self._members = members
        self._patience_s = patience_s
        self._inflights: dict[str, InflightRequest] = {}
        self._retries = IsolatedRetries(self._retry)
        self.history = History()
        """Events of this api, and, without a supervisor, of the engines."""
        self.tell: Callable[[NoteEvent], None] | None = None
        """Function that sends an event to the supervisor; None without one."""
        self.closing = False
        """True during shutdown: lost requests are not sent again."""
        self.rolling = False
        """True during a rolling restart: new requests wait for a replica instead of being refused."""
        self._over = ""
        """Why no engine will start again; empty if one may."""
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
        """End requests without a connected replica. `over`: why no engine will start again; if empty, do nothing."""
        self._over = over
        if over:
            for inflight in [inflight for inflight in self._inflights.values() if not self._reaches(inflight)]:
                self._end(inflight, UnavailableError(f"The server ends: {over}", retry_after=10.0, code="engine_failed"))

    def _reaches(self, inflight: InflightRequest) -> bool:
        member = self._member(inflight)
        return member is not None and member.client.alive

    def uses(self, adapter: str) -> bool:
        """Return whether a request in flight has this LoRA adapter."""
        return any(one.request.adapter == adapter for one in self._inflights.values())

    def _member(self, inflight: InflightRequest) -> Member | None:
        """Return the replica that has the request; None if there is none or it was removed."""
        return None if inflight.replica is None else self._members.get(inflight.replica)

    def open(
        self,
        requests: Sequence[EngineRequest],
        answers: Answers,
        replicas: Sequence[int] | None = None,
        *,
        accepted: bool = False,
    ) -> None:
        """Start a group of requests, at `replicas[i]` each if given.

        The caller must `abort` each unfinished one. `accepted`: the group belongs to an HTTP request accepted before, so
        full replicas make it wait, as in a rolling restart. Raises UnavailableError, and then none of them runs.
        """
        accepted = accepted or self.rolling
        for request, only in zip(requests, replicas or repeat(None), strict=False):
            inflight = InflightRequest(request, answers, self, only)
            self._inflights[inflight.request_id] = inflight
            if accepted:
                inflight.lost_at = asyncio.get_running_loop().time()
            try:
                if self._move(inflight, UnavailableError(NOBODY)) if accepted else self._send(inflight):
                    continue
                raise why_none(self._members.values()) or UnavailableError(NOBODY)
            except Exception:
                for opened in requests:
                    self.abort(opened.request_id)
                raise

    def abort(self, request_id: str, *, answered: bool = False) -> None:
        """Abort a request at its replica, without a further answer. Unknown ids are ignored.

        `answered`: it counts as finished, as after a stop string.
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
        """Send a request to the best replica, or queue it if quarantined; return False if no replica takes it."""
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
                inflight.answers.replica = placement.replica
                return True
            placement.end()
            inflight.refused_by.add(placement.replica)

    def leave(self, index: int) -> None:
        """Migrate the requests of replica `index`, except those bound to it and quarantined ones."""
        for inflight in [inflight for inflight in self._inflights.values() if inflight.replica == index]:
            if inflight.only is None and inflight.trial is None:
                self._members[index].client.abort(inflight.wire_id)
                self.failed(inflight, Stranded())

    def arrived(self, inflight: InflightRequest, output: Output) -> None:
        """Account for an output of a request and pass it to its receiver."""
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
        """Tell the replica that handed over the request, if any, to free its KV."""
        if inflight.left is not None:
            (index, wire_id), inflight.left = inflight.left, None
            if index in self._members:
                self._members[index].client.abort(wire_id)

    def failed(self, inflight: InflightRequest, error: RequestError) -> None:
        """Handle a refusal or a lost replica: send the request elsewhere if that may help, else end it with `error`."""
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
        event = self.history.note_refused(error.message, inflight.request_id, inflight.request.group)
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
        """Send a request to another replica, or schedule a retry; return False if neither is possible."""
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
        """Send a request again; if that fails, end it with `error` (default: no engine is reachable)."""
        error = error or EngineLost(NOBODY)
        if self._inflights.get(inflight.request_id) is not inflight:
            return
        inflight.refused_by.clear()
        if not self._move(inflight, error):
            self._end(inflight, error)
