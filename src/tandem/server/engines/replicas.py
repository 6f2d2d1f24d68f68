"""Several engines as one: which there are, and how they are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Literal

from prometheus_client import generate_latest

from tandem.errors import UnavailableError
from tandem.protocol.control import EngineStatus
from tandem.protocol.events import Event
from tandem.protocol.kept import CacheReport
from tandem.protocol.supervisor import ReplicaInfo
from tandem.router.router import Router
from tandem.server.engines.client import HEARTBEAT_S, EngineClient
from tandem.server.engines.dispatcher import Dispatcher
from tandem.server.engines.member import NOBODY, Member, why_none
from tandem.server.engines.merged import merged_metrics, merged_status
from tandem.server.engines.protocol import ReplicaState
from tandem.server.engines.supervisor import SupervisorLink

logger = logging.getLogger(__name__)

STRANDED_S = 10.0
"""Seconds, beyond twice what its last start took, for which a replica's requests wait for its ranks to come back."""


class Replicas:
    """Engines by number. Belongs to the event loop that called `start`."""

    def __init__(self, router: Router, endpoints: Mapping[int, str] | None = None, *,
                 link: SupervisorLink | None = None, heartbeat_s: float = HEARTBEAT_S,
                 patience_s: float = 0.0) -> None:
        """`endpoints` are the zmq addresses of engines by number; with `link` the supervisor says which there are.
        `patience_s`: as for `Dispatcher`."""
        self._router = router
        self._endpoints = dict(endpoints or {})
        self._link = link
        self._heartbeat_s = heartbeat_s
        self._members: dict[int, Member] = {}
        self.requests = Dispatcher(router, self._members, patience_s)
        """Takes what they are to work on."""
        self.requests.tell = None if link is None else link.tell
        self.warmed: set[int] | None = None
        """Replicas that have the prompts of `--warm`; none else counts as reached. None without such prompts."""
        self._merged: tuple[list[tuple[int, EngineStatus]], EngineStatus | None] = ([], None)

    async def start(self) -> None:
        """Connect, and ask the supervisor which replicas there are."""
        for index, endpoint in self._endpoints.items():
            await self._join(index, endpoint)
        if self._link is not None:
            await self._link.start(lambda latest: self.update(latest.replicas, latest.over), self.reached)

    async def close(self) -> None:
        """Leave all engines. All subscriptions fail."""
        self.requests.closing = True
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
        self.requests.refresh()
        self._relieve()
        self.requests.give_up(over)

    async def _join(self, index: int, endpoint: str) -> None:
        self._members[index] = Member(EngineClient(endpoint, heartbeat_s=self._heartbeat_s))
        self._router.join(index)
        self.requests.load.labels(str(index)).set(0)
        await self._members[index].client.start()

    async def _leave(self, index: int) -> None:
        """Drop a replica; what it still had moves on."""
        member = self._members.pop(index)
        self._router.leave(index)
        self.requests.load.remove(str(index))
        logger.info("replica %d has left", index)
        await member.client.close()

    def reached(self) -> int:
        """Replicas that are connected and take requests at once."""
        return sum(member.state == "ready" and (self.warmed is None or index in self.warmed)
                   for index, member in self._members.items())

    def _relieve(self) -> None:
        """Have replicas that drain let go of what they have, where others can have what they have computed."""
        ready = [index for index, one in self._members.items() if one.state == "ready"]
        for index, member in self._members.items():
            status = member.client.status
            if member.draining and not member.leaves and status is not None \
                    and any(self._router.reads(one, status.kv_store) for one in ready):
                logger.info("what replica %d works on goes on at others, who read what it has computed", index)
                member.leaves = True
                member.client.hand_over()
            self._leave_stranded(index, member, others=[one for one in ready if one != index])

    def _leave_stranded(self, index: int, member: Member, others: Sequence[int]) -> None:
        """Take away what a replica has whose machine does not come back, as others can go on with it."""
        now, status = asyncio.get_running_loop().time(), member.client.status
        if member.state != "recovering" or status is None:
            member.without_ranks = None
            return
        member.without_ranks = member.without_ranks or now
        if others and now > member.without_ranks + STRANDED_S + 2 * status.load_s:
            self.requests.leave(index)

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
        why, status = why_none(self._members.values()), self.status
        if why is not None or status is None:
            raise why or UnavailableError(NOBODY)
        return status

    def replicas(self) -> list[ReplicaState]:
        """Each engine by itself."""
        return [one.shown(index, self._router.outstanding(index)) for index, one in self._members.items()]

    def events(self) -> list[Event]:
        """What happened lately, as the supervisor tells it, or the engines if there is none."""
        if self._link is not None:
            return list(self._link.events)
        for index, status in self.parts():
            self.requests.history.take(status.events, replica=index)
        return self.requests.history.after()

    async def metrics(self, timeout: float = 2.0) -> bytes:
        """Metrics of all engines that answer, labelled with their numbers, and the router's."""
        self.requests.refresh()
        indices = list(self._members)
        texts = await asyncio.gather(*(self._members[index].client.metrics(timeout) for index in indices))
        return merged_metrics(dict(zip(indices, texts, strict=True))) + generate_latest(self.requests.registry)

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
