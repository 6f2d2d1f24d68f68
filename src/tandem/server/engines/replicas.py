"""All replicas of a model: connections, merged status, metrics, and draining."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from msgspec.structs import replace
from prometheus_client import Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from tandem.crash_guard import start_task
from tandem.errors import UnavailableError
from tandem.protocol.cached_prefixes import CacheReport
from tandem.protocol.control import EngineStatus, Refused
from tandem.protocol.events import Event
from tandem.protocol.supervisor_messages import ReplicaInfo
from tandem.server.engines.engine_client import HEARTBEAT_S, NOBODY, EngineClient, Member, ReplicaState, why_none
from tandem.server.engines.inflight import RETRY_S, Dispatcher
from tandem.server.engines.router import Router
from tandem.server.engines.supervisor import SupervisorLink

logger = logging.getLogger(__name__)

STRANDED_S = 10.0
"""Seconds, plus twice the last load time, that requests wait for a replica's ranks before they migrate."""


_ORDER = ("ready", "recovering", "starting", "draining", "failed")
"""States of engines by precedence: the merged state is the first that any engine has."""


def merged_status(parts: Sequence[tuple[int, EngineStatus]]) -> EngineStatus:
    """Merge the statuses of at least one engine (number, status): summed counts, all ranks, the smallest context."""
    if len(parts) == 1 and parts[0][0] == 0:
        return parts[0][1]
    states = [status for _, status in parts]
    first = min(states, key=lambda status: _ORDER.index(status.state) if status.state in _ORDER else len(_ORDER))

    def total(name: str) -> int:
        return sum(getattr(status, name) for status in states)

    summed = (
        "queued",
        "running",
        "kv_tokens_used",
        "kv_tokens_total",
        "restarts",
        "prefix_tokens",
        "prefix_queries",
        "prefix_hits",
        "generated_tokens",
        "draft_tokens",
        "accepted_tokens",
    )
    ranks = [replace(rank, replica=index) for index, status in parts for rank in status.ranks]
    limits = [status.max_context for status in states if status.max_context > 0]
    waits = [status.ttft_s for status in states if status.ttft_s]
    return replace(
        first,
        ttft_s=sum(waits) / max(len(waits), 1),
        max_context=min(limits, default=0),
        ranks=ranks,
        **{name: total(name) for name in summed},
    )


def merged_metrics(texts: Mapping[int, bytes] | Mapping[str, bytes], label: str = "replica") -> bytes:
    """Merge texts in Prometheus' format by metric family; each sample gets its text's name as the label `label`."""
    families: dict[str, Metric] = {}
    for name, text in texts.items():
        for family in text_string_to_metric_families(text.decode()):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            whole.samples += [sample._replace(labels={**sample.labels, label: str(name)}) for sample in family.samples]
    return generate_latest(_Merged(list(families.values())))


@dataclass(frozen=True)
class _Merged(Collector):
    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families


class Replicas:
    """All engines of one model, by number. Use only on the event loop that called `start`."""

    def __init__(
        self,
        router: Router,
        endpoints: Mapping[int, str] | None = None,
        *,
        link: SupervisorLink | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        patience_s: float = 0.0,
    ) -> None:
        """`endpoints`: ZMQ addresses of engines by number; with `link`, the supervisor provides them.

        `patience_s`: as for `Dispatcher`.
        """
        self._router = router
        self._endpoints = dict(endpoints or {})
        self._link = link
        self._heartbeat_s = heartbeat_s
        self._members: dict[int, Member] = {}
        self.requests = Dispatcher(router, self._members, patience_s)
        self.requests.tell = None if link is None else link.tell
        self.warmed: set[int] | None = None
        """Replicas that have finished `--warmup-prompts`; only these count as reached. None without such prompts."""
        self.status: EngineStatus | None = None
        """Merged status of the engines that answer, or the last one known; None before the first answer."""
        self.adapters: dict[str, str] = {}
        """Directories of the LoRA adapters that requests can name, by name."""
        self._unloaded: dict[str, str] = {}
        """Adapters that were unloaded: new engines load them by their settings, or for requests that go on, and unload them."""
        self._taking = False
        """True while some engine takes requests."""
        self._load = Gauge(
            "tandem_replica_outstanding_tokens",
            "Work before a replica as the router counts it",
            ["replica"],
            registry=self.requests.registry,
        )

    async def start(self) -> None:
        """Connect to the engines and start polling the supervisor, if any."""
        for index, endpoint in self._endpoints.items():
            await self._join(index, endpoint)
        if self._link is not None:
            await self._link.start(lambda latest: self.update(latest.replicas, latest.over, latest.rolling), self.reached)

    async def close(self) -> None:
        """Disconnect from all engines. All running requests fail."""
        self.requests.closing = True
        if self._link is not None:
            await self._link.close()
        for member in self._members.values():
            await member.client.close()

    async def update(self, replicas: Sequence[ReplicaInfo], over: str = "", rolling: bool = False) -> None:
        """Connect to new replicas, and remove those not in `replicas`.

        `over`: if not empty, why no engine will start again; waiting requests then fail at once. `rolling`: new
        requests wait while no replica takes them.
        """
        self.requests.rolling = rolling
        named = {info.replica: info for info in replicas}
        for index in [index for index in self._members if index not in named]:
            await self._leave(index)
        for index, info in named.items():
            if index not in self._members:
                await self._join(index, info.endpoint)
            self._members[index].info = info
            self._changed(index)
        self._relieve()
        self.requests.give_up(over)

    async def _join(self, index: int, endpoint: str) -> None:
        client = EngineClient(endpoint, heartbeat_s=self._heartbeat_s, on_change=partial(self._changed, index))
        self._members[index] = Member(client)
        self._router.join(index)
        await client.start()

    def _changed(self, index: int) -> None:
        """Update router and merged status after a change of an engine's status or its loss."""
        if index in self._members:
            self._tell_router(index)
            self._tell_adapters(self._members[index])
        self._merge()

    def _tell_router(self, index: int) -> None:
        member = self._members[index]
        self._router.set_state(index, member.state)
        if (status := member.client.status) is not None:
            self._router.set_disk(index, status.kv_store, status.disk_saves, status.kv_reach, status.lent_saves)
            self._router.set_role(index, member.role, status.prompt_tokens_s, status.prefix_room)

    def _tell_adapters(self, member: Member) -> None:
        """Send an engine that became ready the adapters that it lacks, and those that were unloaded; take over those that only
        it has."""
        status, ready = member.client.status, member.state == "ready"
        if ready and not member.adapted and status is not None:
            theirs = {adapter.name: adapter.path for adapter in status.adapters}
            wanted = self.adapters | {name: path for name, path in self._unloaded.items() if self.requests.uses(name)}
            for name in wanted.keys() ^ theirs.keys() & (wanted | self._unloaded).keys():
                start_task(member.client.change_adapter(name, wanted.get(name, "")), name="adapter")
            self.adapters |= {name: path for name, path in theirs.items() if name not in self._unloaded}
        member.adapted = ready or (member.adapted and member.client.alive)

    async def change_adapter(self, name: str, path: str = "") -> None:
        """Load an adapter in all engines, or in none; without `path` unload it once its running requests are finished.

        Raises RequestError.
        """
        if not path and name in self.adapters:
            self._unloaded[name] = self.adapters.pop(name)  # new requests get 404
        while not path and self.requests.uses(name):  # also where they go on once their engine is lost
            await asyncio.sleep(RETRY_S)
        clients = [member.client for member in self._members.values() if member.client.alive]
        answers = await asyncio.gather(*(client.change_adapter(name, path) for client in clients))
        done = [client for client, answer in zip(clients, answers, strict=True) if answer.status == 200]
        if wrong := next((answer for answer in answers if answer.status != 200 and (path or not done)), None):
            await asyncio.gather(*(client.change_adapter(name) for client in done))
            raise Refused("", wrong.status, wrong.message, "adapter_refused", "lora_path" if path else "lora_name").as_error()
        if path:
            self.adapters[name] = path
            self._unloaded.pop(name, "")

    def _merge(self) -> None:
        taking = why_none(self._members.values()) is None
        self._taking = taking or self.requests.rolling
        if (parts := self.parts()) and (taking or not self.requests.rolling):  # else requests wait, by the last status
            self.status = merged_status(parts)

    async def _leave(self, index: int) -> None:
        """Remove a replica; its remaining requests move to others."""
        member = self._members.pop(index)
        self._router.leave(index)
        self._load.clear()
        self._merge()
        logger.info("Replica %d removed", index)
        await member.client.close()

    def reached(self) -> int:
        """Return the number of replicas that are connected, ready and warmed."""
        return sum(
            member.state == "ready" and (self.warmed is None or index in self.warmed) for index, member in self._members.items()
        )

    def _relieve(self) -> None:
        """Migrate the requests of draining replicas whose KV another ready replica can read, and of stranded ones."""
        ready = [index for index, member in self._members.items() if member.state == "ready"]
        for index, member in self._members.items():
            status = member.client.status
            if (
                member.draining
                and not member.leaves
                and status is not None
                and any(self._router.reads(other, status.kv_store) for other in ready)
            ):
                logger.info("Replica %d draining: migrating its requests", index)
                member.leaves = True
                member.client.hand_over()
            self._leave_stranded(index, member, others=[other for other in ready if other != index])

    def _leave_stranded(self, index: int, member: Member, others: Sequence[int]) -> None:
        """Move a replica's requests to `others` once its ranks have been gone for too long."""
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

    def parts(self) -> list[tuple[int, EngineStatus]]:
        """Return number and status of each engine that answers."""
        known = [(index, member.client.status, member.client.alive) for index, member in self._members.items()]
        return [(index, status) for index, status, alive in known if status is not None and alive]

    def check(self) -> EngineStatus:
        """Return the merged status. Raises UnavailableError if no engine takes requests."""
        if self.status is None or not self._taking:
            raise why_none(self._members.values()) or UnavailableError(NOBODY)
        return self.status

    def replicas(self) -> list[ReplicaState]:
        """Return the state of each replica."""
        return [member.shown(index, self._router.outstanding(index)) for index, member in self._members.items()]

    def events(self) -> list[Event]:
        """Return recent events from the supervisor, or, without one, from the engines."""
        if self._link is not None:
            return list(self._link.events)
        for index, status in self.parts():
            self.requests.history.take(status.events, replica=index)
        return self.requests.history.after()

    async def metrics(self, timeout: float = 2.0) -> bytes:
        """Return the metrics of all engines, labelled by replica, and the router's. `timeout`: seconds per engine."""
        indices = list(self._members)
        for index in indices:
            self._load.labels(str(index)).set(self._router.outstanding(index))
        texts = await asyncio.gather(*(self._members[index].client.metrics(timeout) for index in indices))
        return merged_metrics(dict(zip(indices, texts, strict=True))) + generate_latest(self.requests.registry)

    async def refresh(self) -> None:
        """Query the status of all engines."""
        await asyncio.gather(*(member.client.refresh() for member in self._members.values()))

    async def cache(
        self, tokens: Sequence[int] = (), drop: Literal["", "memory", "all"] = "", replica: int | None = None
    ) -> dict[int, CacheReport]:
        """Return the cache reports of all connected replicas, or only of `replica`, by number.

        `tokens`: prompt to look up; `drop`: prefixes to drop first.
        """
        asked = {
            index: member.client for index, member in self._members.items() if member.client.alive and replica in (None, index)
        }
        reports = await asyncio.gather(*(client.cache(tokens, drop) for client in asked.values()))
        return dict(zip(asked, reports, strict=True))
