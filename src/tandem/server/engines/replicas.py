"""Several engines as one. Each request goes to the replica that the router chooses, and moves on when that is lost.

The api holds the prompt, the parameters and every token that it has handed on, so a request that loses its engine is
sent to another one with the tokens so far, and its client sees no more than a pause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Literal, Protocol

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from tandem.errors import OverloadedError, RequestError, ServerError, UnavailableError
from tandem.protocol.control import EngineStatus, Output
from tandem.protocol.events import Event, History
from tandem.protocol.kept import CacheReport
from tandem.protocol.request import EngineRequest
from tandem.protocol.supervisor import NoteEvent, ReplicaInfo
from tandem.server.engines.client import HEARTBEAT_S, EngineClient
from tandem.server.engines.flight import Flight
from tandem.server.engines.merged import merged_metrics, merged_status
from tandem.server.engines.protocol import Departed, EngineLost, ReplicaState, replica_state
from tandem.server.engines.subscription import Subscription
from tandem.server.engines.supervisor import SupervisorLink
from tandem.server.engines.trials import Trials

logger = logging.getLogger(__name__)

RETRY_S = 0.2
"""Seconds until a request that was accepted once, and lost its replica, tries full or absent ones again."""
_NOBODY = "The engine is not reachable (it is starting or has gone); try again shortly."


class Placement(Protocol):
    """What this needs of a router; `tandem.router.Router` says it in full."""

    def join(self, replica: int) -> None:
        """A new replica."""

    def leave(self, replica: int) -> None:
        """It is gone for good."""

    def set_state(self, replica: int, state: str) -> None:
        """An engine's state, or `silent`."""

    def set_disk(self, replica: int, store: str, saves: float) -> None:
        """Where it keeps prompts, and the share of computing one that reading it from there saves."""

    def outstanding(self, replica: int) -> int:
        """Tokens of work before a replica."""

    def place(self, request_id: str, tokens: Sequence[int], max_tokens: int, *, done: int = 0,
              avoid: Collection[int] = (), key: str = "", on_disk: bool = True) -> int | None:
        """Choose a replica, and count the request there."""

    def kept(self, request_id: str) -> int:
        """So many of its tokens have others written to that replica's disk."""

    def advance(self, request_id: str, tokens: int) -> None:
        """Output tokens have come."""

    def end(self, request_id: str) -> None:
        """The request is over, or has left its replica."""


@dataclass
class _Member:
    client: EngineClient
    info: ReplicaInfo | None = None
    """What the supervisor last said of it, if there is one."""
    leaves: bool = False
    """It was told to let go of what it has."""

    @property
    def draining(self) -> bool:
        return self.info is not None and self.info.state == "draining"

    @property
    def told_state(self) -> str | None:
        """The supervisor's word for it, where that says more than the engine's own."""
        told = None if self.info is None or self.info.state == "running" else self.info.state
        return told if told == "draining" or not self.client.alive else None


class Replicas:
    """Engines by number. Belongs to the event loop that called `start`."""

    def __init__(self, router: Placement, endpoints: Mapping[int, str] | None = None, *,
                 link: SupervisorLink | None = None, heartbeat_s: float = HEARTBEAT_S,
                 patience_s: float = 0.0) -> None:
        """`endpoints` are the zmq addresses of engines by number; with `link` the supervisor says which there are.

        A request that was accepted waits up to `patience_s` seconds for a replica when all are lost.
        """
        self._router = router
        self._endpoints = dict(endpoints or {})
        self._link = link
        self._heartbeat_s = heartbeat_s
        self._members: dict[int, _Member] = {}
        self._patience_s = patience_s
        self._flights: dict[str, Flight] = {}
        self._trials = Trials(self._retry)
        self._history = History()
        """What this api has noticed, and, without a supervisor, what engines tell."""
        self.tell: Callable[[NoteEvent], None] | None = None if link is None else link.tell
        """Takes what the supervisor is to know."""
        self.warmed: set[int] | None = None
        """Replicas that have the prompts of `--warm`; None where there are none."""
        self._closing = False
        self._over = ""
        """Why no engine will come any more."""
        self._merged: tuple[list[tuple[int, EngineStatus]], EngineStatus | None] = ([], None)
        self._registry = CollectorRegistry()
        self._moved = Counter("tandem_requests_moved", "Requests that went on at another replica after theirs was lost",
                              registry=self._registry)
        self._load = Gauge("tandem_replica_outstanding_tokens", "Work before a replica as the router counts it",
                           ["replica"], registry=self._registry)

    # --- replicas ---

    async def start(self) -> None:
        """Connect, and ask the supervisor which replicas there are."""
        for index, endpoint in self._endpoints.items():
            await self._join(index, endpoint)
        if self._link is not None:
            await self._link.start(lambda latest: self.update(latest.replicas, latest.over), self.reached)

    async def close(self) -> None:
        """Leave all engines. All subscriptions fail."""
        self._closing = True
        if self._link is not None:
            await self._link.close()
        for member in self._members.values():
            await member.client.close()

    async def update(self, replicas: Sequence[ReplicaInfo], over: str = "") -> None:
        """Make these the replicas: connect to new ones, leave those that are not named.

        `over`: why the server ends, as no engine will come any more; requests that wait for one end at once.
        """
        named = {one.replica: one for one in replicas}
        for index in [index for index in self._members if index not in named]:
            await self._leave(index)
        for index, one in named.items():
            if index not in self._members:
                await self._join(index, one.endpoint)
            self._members[index].info = one
        self._over = over
        self._refresh()
        self._relieve()
        if over:
            for flight in [one for one in self._flights.values() if not self._reaches(one)]:
                self._end(flight, UnavailableError(f"The server ends: {over}", retry_after=10.0, code="engine_failed"))

    def _reaches(self, flight: Flight) -> bool:
        """The replica that has it answers."""
        member = None if flight.replica is None else self._members.get(flight.replica)
        return member is not None and member.client.alive

    async def _join(self, index: int, endpoint: str) -> None:
        self._members[index] = _Member(EngineClient(endpoint, heartbeat_s=self._heartbeat_s))
        self._router.join(index)
        self._load.labels(str(index)).set(0)
        await self._members[index].client.start()

    async def _leave(self, index: int) -> None:
        """Drop a replica; what it still had moves on."""
        member = self._members.pop(index)
        self._router.leave(index)
        self._load.remove(str(index))
        logger.info("replica %d has left", index)
        await member.client.close()

    def reached(self) -> int:
        """Replicas that are connected and take requests at once."""
        return sum(self._state(member) == "ready" and (self.warmed is None or index in self.warmed)
                   for index, member in self._members.items())

    def _refresh(self) -> None:
        """Tell the router how the replicas are."""
        for index, member in self._members.items():
            self._router.set_state(index, self._state(member))
            if (status := member.client.status) is not None:
                self._router.set_disk(index, status.kv_store, status.disk_saves)
            self._load.labels(str(index)).set(self._router.outstanding(index))

    def _relieve(self) -> None:
        """Have replicas that drain let go of what they have, where others read from disk what they have computed."""
        stores = {one.client.status.kv_store for one in self._members.values()
                  if one.client.status is not None and self._state(one) == "ready"}
        for index, member in self._members.items():
            status = member.client.status
            if member.draining and not member.leaves and status is not None and status.kv_store in stores - {""}:
                logger.info("what replica %d works on goes on at others, who read what it has computed", index)
                member.leaves = True
                member.client.hand_over()

    @staticmethod
    def _state(member: _Member) -> str:
        status = member.client.status
        if status is None or not member.client.alive:
            return "silent"
        return "draining" if member.draining else status.state

    # --- state ---

    @property
    def alive(self) -> bool:
        """True while any engine is connected and answers."""
        return any(member.client.alive for member in self._members.values())

    @property
    def status(self) -> EngineStatus | None:
        """The engines that answer as one; the last that was known when none does; None before any has answered."""
        parts = self.parts()
        before, merged = self._merged
        if not parts:
            return merged
        if len(parts) != len(before) or any(new[0] != old[0] or new[1] is not old[1]
                                            for new, old in zip(parts, before, strict=True)):
            self._merged = (parts, merged_status(parts))
        return self._merged[1]

    def parts(self) -> list[tuple[int, EngineStatus]]:
        """Number and status of each engine that answers."""
        known = [(index, one.client.status, one.client.alive) for index, one in self._members.items()]
        return [(index, status) for index, status, alive in known if status is not None and alive]

    def check(self) -> EngineStatus:
        """The status of the whole. Raises UnavailableError when no engine takes requests."""
        error: UnavailableError | None = None
        for member in self._members.values():
            try:
                member.client.check()
            except UnavailableError as reason:
                error = error or reason
            else:
                if not member.draining and (status := self.status) is not None:
                    return status
        raise error or UnavailableError(_NOBODY)

    def replicas(self) -> list[ReplicaState]:
        """Each engine by itself."""
        return [replica_state(index, one.client.status, alive=one.client.alive, state=one.told_state,
                              outstanding_tokens=self._router.outstanding(index),
                              detail=one.info.detail if one.info else "")
                for index, one in self._members.items()]

    def events(self) -> list[Event]:
        """What happened lately, as the supervisor tells it, or the engines if there is none."""
        if self._link is not None:
            return list(self._link.events)
        for index, status in self.parts():
            self._history.take(status.events, replica=index)
        return self._history.after()

    async def metrics(self, timeout: float = 2.0) -> bytes:
        """Metrics of all engines that answer, labelled with their numbers, and the router's."""
        self._refresh()
        indices = list(self._members)
        texts = await asyncio.gather(*(self._members[index].client.metrics(timeout) for index in indices))
        return merged_metrics(dict(zip(indices, texts, strict=True))) + generate_latest(self._registry)

    async def refresh(self) -> None:
        """Ask all engines how they are."""
        await asyncio.gather(*(member.client.refresh() for member in self._members.values()))

    async def cache(self, tokens: Sequence[int] = (), drop: Literal["", "memory", "all"] = "",
                    replica: int | None = None) -> dict[int, CacheReport]:
        """What each replica that answers keeps of prefixes, or one of them."""
        asked = {index: one.client for index, one in self._members.items()
                 if one.client.alive and replica in (None, index)}
        reports = await asyncio.gather(*(client.cache(tokens, drop) for client in asked.values()))
        return dict(zip(asked, reports, strict=True))

    # --- requests ---

    def open(self, requests: Sequence[EngineRequest], replicas: Sequence[int] | None = None) -> Subscription:
        """Start requests that belong together, each at its replica if these are named. The caller must `release` what
        it got. Raises UnavailableError."""
        self.check()
        request_ids = [request.request_id for request in requests]
        subscription = Subscription(request_ids, self.abort)
        self._refresh()
        for request, only in zip(requests, replicas or repeat(None), strict=False):
            flight = Flight(request, subscription, self, only)
            self._flights[flight.request_id] = flight
            if not self._send(flight):
                self.release(subscription, request_ids)
                raise UnavailableError(_NOBODY)
        return subscription

    def release(self, subscription: Subscription, request_ids: Sequence[str]) -> None:
        """Abort what still runs of a subscription and forget it."""
        subscription.close()
        for request_id in request_ids:
            self.abort(request_id)

    def abort(self, request_id: str, *, answered: bool = False) -> None:
        """Stop a request wherever it is; its subscription hears no more of it. Unknown ones are ignored.

        `answered`: its client has all that it wants.
        """
        flight = self._flights.pop(request_id, None)
        if flight is None:
            return
        self._trials.look(flight, over=True)
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
            index = self._router.place(request.request_id, flight.tokens, flight.max_tokens, done=len(flight.produced),
                                       avoid=flight.refused_by.union(others), key=flight.cache_key,
                                       on_disk=flight.on_disk)
            if index is None:
                return False
            flight.replica = index
            kept = max(self._router.kept(request.request_id), flight.kept)
            request = msgspec.structs.replace(request, kept=kept)
            if self._members[index].client.send(request, flight):
                return True
            self._router.end(request.request_id)
            flight.refused_by.add(index)

    def arrived(self, flight: Flight, output: Output) -> None:
        """An output of a flight: count it and hand it on."""
        self._router.advance(flight.wire_id, len(output.tokens))
        over = output.finish_reason is not None
        if over:
            self._router.end(flight.wire_id)
            self._flights.pop(flight.request_id, None)
            if flight.replica in self._members:
                self._members[flight.replica].client.forget(flight.wire_id)
        self._trials.look(flight, over=over)
        flight.subscription.push(output)

    def failed(self, flight: Flight, error: RequestError) -> None:
        """A flight was refused, or its replica lost: send it to another if that can help."""
        self._router.end(flight.wire_id)
        if self._flights.get(flight.request_id) is not flight:
            return
        member = None if flight.replica is None else self._members.get(flight.replica)
        if not self._closing and isinstance(error, OverloadedError | UnavailableError):
            if isinstance(error, EngineLost):
                self._lost(flight, died=member is not None and not member.draining,
                           kept=error.positions if isinstance(error, Departed) else 0)
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
        event = self._history.note("request_refused", f"a request is not tried again: {error.message}", level="error",
                                   request_id=flight.request_id, group=flight.group,
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
        self._trials.look(flight, over=True)
        flight.subscription.fail(error)

    def _move(self, flight: Flight, error: RequestError) -> bool:
        """Send it elsewhere, or have that tried again soon; False when nothing more can be done for it."""
        self._refresh()
        if self._send(flight):
            if isinstance(error, EngineLost) and flight.replica is not None:
                self._moved.inc()
                logger.info("request %s goes on at replica %s after %d tokens", flight.request_id, flight.replica,
                            len(flight.produced))
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
        error = error or EngineLost(_NOBODY)
        if self._flights.get(flight.request_id) is not flight:
            return
        flight.refused_by.clear()
        if not self._move(flight, error):
            self._end(flight, error)
