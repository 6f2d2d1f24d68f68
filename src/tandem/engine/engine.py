"""The engine's loop: schedule, execute, update.

The engine holds every request: prompt, parameters and output tokens. Ranks are disposable: a new rank group receives its
sequences from the engine and resumes them.
"""

from __future__ import annotations

import logging
import secrets
import time
from typing import Protocol

import zmq
from msgspec.structs import replace

from tandem.config.settings import Settings
from tandem.engine.adapters import AdapterManager
from tandem.engine.build_layout import RankGroupLayout, make_executor
from tandem.engine.cache_queries import CacheQueryHandler, Reply
from tandem.engine.metrics import DrainRate, EngineMetrics
from tandem.engine.pictures import PictureManager
from tandem.engine.recovery import RankGroup
from tandem.engine.result_collector import ResultCollector
from tandem.engine.sizing import MemoryGuard
from tandem.engine.status_report import StatusReport
from tandem.errors import EngineStuck, OverloadedError, RankFailure, RequestError, UnavailableError
from tandem.executors.executor import Executor, Progress, Report, do_nothing
from tandem.protocol.adapters import AdapterLoaded
from tandem.protocol.cached_prefixes import QueryCache
from tandem.protocol.control import EngineMessage, EngineStatus, HandedOver, Output, Refused, Stepped
from tandem.protocol.keys import ClusterKeys
from tandem.protocol.kv_blocks import UseRemoteStores
from tandem.protocol.pictures import PictureEncoded
from tandem.protocol.request import EngineRequest
from tandem.protocol.step import NO_GRAMMAR, GrammarReady
from tandem.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

POLL_MS, IDLE_MS = 100, 500
"""Longest waits of the loop in milliseconds, with and without work."""
FETCH_S = 20.0
"""Seconds without disk reads after which waiting requests are computed instead."""
WRITE_S = 10.0
"""Seconds without disk writes after which migrating requests no longer wait for them."""
GRAMMAR_S = 60.0
"""Seconds that the sampling rank may take to compile a grammar."""


class EngineStopped(BaseException):
    """Raised to leave the engine's loop at any point, also during recovery."""


class MessageSource(Protocol):
    """Source of messages for the engine's loop, and sink for its answers."""

    @property
    def socket(self) -> object:
        """Socket (ZeroMQ or plain) that is readable when there are messages to take."""

    def take(self, *, replacing: bool = False) -> None:
        """Pass received messages to the engine. `replacing`: ranks are being replaced. Raises EngineStopped."""

    def deliver(self, messages: list[EngineMessage]) -> None:
        """Deliver the engine's messages."""


class _Standstill:
    """Timer of how long an awaited operation has made no progress."""

    def __init__(self) -> None:
        self._state: object = None
        self._since = 0.0

    def seconds(self, state: object, now: float) -> float:
        """Return the seconds since `state` last changed. It must change with any progress; None means no work."""
        if state != self._state:
            self._state, self._since = state, now
        return now - self._since if state is not None else 0.0


class Engine:
    """Engine with all requests and its loop. Not thread-safe; with the inline executor its thread runs all MLX work."""

    def __init__(
        self, settings: Settings, layout: RankGroupLayout, executor: Executor | None = None, lending: ClusterKeys | None = None
    ) -> None:
        """Store the collaborators; `start` launches ranks. `executor` replaces the default one in tests. `lending`: keys for
        KV transfers between the ranks of all engines of the model."""
        self.settings = settings
        self.metrics = EngineMetrics()
        self.rank_group = RankGroup(settings, layout, executor or make_executor(settings, layout, lending), self.metrics)
        self._report = StatusReport(self.rank_group, self.metrics)
        self._cache_queries = CacheQueryHandler(self.rank_group, self._report)
        self.adapters = AdapterManager(settings.model, self.rank_group)
        self.pictures = PictureManager(self.rank_group)
        self._result_collector = ResultCollector()
        self._guard = MemoryGuard(settings.scheduler.memory_fraction)
        self._scheduler: Scheduler | None = None
        self._drain_rate = DrainRate()
        self._out: list[EngineMessage] = []
        """Messages not yet delivered."""
        self._fetching, self._writing, self._compiling = _Standstill(), _Standstill(), _Standstill()
        """Timers of disk reads, disk writes for migrations, and grammar compilation."""

    @property
    def executor(self) -> Executor:
        """Executor that runs the plans."""
        return self.rank_group.executor

    @property
    def layout(self) -> RankGroupLayout:
        """Layout of the model over the current ranks."""
        return self.rank_group.layout

    @property
    def state(self) -> str:
        """State, as in `EngineStatus.state`."""
        return self.rank_group.state

    @property
    def restarts(self) -> int:
        """Number of times the ranks were replaced."""
        return self.rank_group.restarts

    @property
    def scheduler(self) -> Scheduler:
        """Scheduler that makes the plans. Available only after `start`."""
        assert self._scheduler is not None
        return self._scheduler

    def start(self, progress: Progress | None = None) -> None:
        """Load the model on all ranks. Raises UsageError or RankFailure, with nothing left running."""
        self._scheduler = self.rank_group.start(progress)
        if self.layout.ranks[0].kv_disk and self._report.kv_disk != "on":
            log.warning("KV disk not used (--kv-disk): %s", self._report.kv_disk)

    # --- requests ---

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError (bad request, queue full, draining)."""
        if self._scheduler is None or self.state in ("draining", "failed"):
            raise UnavailableError(f"the engine is {self.state}: {self.rank_group.detail or 'try again later'}")
        if (request.pooling is None or request.label_token_ids) and not self.layout.description.generates:
            raise RequestError(
                f"{self.layout.served_name} has no output projection, so it only embeds; use /v1/embeddings",
                param="model",
                code="model_cannot_generate",
            )
        if request.pictures:
            self.pictures.check(request, self._scheduler.sequences.values())
        adapter = self.rank_group.adapters.get(request.adapter)
        if request.adapter and adapter is None:
            raise UnavailableError(f"The lora adapter '{request.adapter}' is not loaded.", code="adapter_not_loaded")
        seed = request.params.seed
        try:
            self._scheduler.submit(request, secrets.randbits(63) if seed is None else seed & (2**64 - 1), adapter)
        except OverloadedError as error:
            error.retry_after = self._drain_rate.retry_after(self._scheduler.queued_tokens)
            raise
        self.metrics.arrived(request.request_id, len(request.prompt), begun=bool(request.produced))

    def abort(self, request_id: str, *, answered: bool = False) -> bool:
        """Abort a request without further output. Return False if it is not live. `answered`: its client has the whole
        answer, as a stop string was found."""
        live = self._scheduler is not None and self._scheduler.abort(request_id)
        if live and answered:
            self.metrics.ended(request_id, "stop")
        elif live:
            self.metrics.aborted.inc()
        self.metrics.forget(request_id)
        return live

    def hand_over(self, request_id: str) -> None:
        """Migrate a request to another replica (`HandedOver`), if it can migrate."""
        if self._scheduler is not None and (sequence := self._scheduler.sequences.get(request_id)) is not None:
            self._scheduler.migrations.ask(sequence)

    def meet(self, neighbours: UseRemoteStores) -> None:
        """Set the remote KV stores of other replicas."""
        if neighbours.remote_stores != self.rank_group.neighbours:
            self.rank_group.neighbours = neighbours.remote_stores
            log.info(
                "Remote KV available from %d directories of other replicas",
                len(self.rank_group.remote_stores.keys() - self.rank_group.lends.keys()),
            )
            if self._scheduler is not None:
                self._scheduler.disk.use_remote_stores(self.rank_group.remote_stores.items())

    def query_cache(self, query: QueryCache, reply: Reply) -> None:
        """Query or drop cached prefixes. `reply` is called with the answer, now or during a later `pump`."""
        self._cache_queries.ask(query, reply, self._scheduler)

    def noted(self, request_id: str) -> None:
        """Record that the api acknowledged the `QuarantineNotice`, so the request may run."""
        sequence = None if self._scheduler is None else self._scheduler.sequences.get(request_id)
        if sequence is not None:
            sequence.noted = sequence.announced

    @property
    def idle(self) -> bool:
        """True if no request is live, no plan is in progress and no eviction is pending."""
        return self._scheduler is None or self._scheduler.idle

    # --- steps ---

    def serve(self, source: MessageSource) -> None:
        """Run until the source raises EngineStopped or `pump` raises. Messages are exchanged during recovery too."""

        def exchange() -> None:
            source.deliver(self.take_messages())
            source.take(replacing=True)

        self.rank_group.on_wait = exchange
        while True:
            source.take()
            source.deliver(self.pump(0.0))
            # Limit the wait, as ranks must be watched.
            poller = zmq.Poller()
            for socket in filter(None, (source.socket, self.executor.wait_socket)):
                poller.register(socket, zmq.POLLIN)
            poller.poll(IDLE_MS if self.idle else POLL_MS)

    def pump(self, timeout_s: float) -> list[EngineMessage]:
        """Send all possible plans and process available results, waiting up to `timeout_s` seconds for them.

        Also monitors the ranks, so call it regularly even when idle. Replaces the rank group when it fails. Raises
        RankFailure after too many failures; `failures()` then ends the requests. Raises EngineStuck if only another process
        can resume them.
        """
        if self._scheduler is None:
            return []
        try:
            if self.rank_group.all_back():
                self._recover(self._scheduler, None)
            self.rank_group.widen(self._scheduler)
            self._send_plans()
            waits = (
                self._scheduler.under_way or self._scheduler.disk.fetching or self._scheduler.compiling or self.pictures.encoding
            )
            for report in self.executor.collect(timeout_s if waits else 0.0):
                self._take(report)
            # Send the next plans before the results are processed, so that ranks are not idle.
            self._send_plans()
            self._await_grammars(time.monotonic())
            self._cache_queries.look(self._scheduler)
            if self.adapters.changes:
                self.adapters.look(self._scheduler)
        except EngineStuck:
            self.rank_group.state = "failed"
            raise
        except RankFailure as failure:
            self._recover(self._scheduler, failure)
        return self.take_messages()

    def _recover(self, scheduler: Scheduler, failure: RankFailure | None) -> None:
        self._compiling = _Standstill()
        self._cache_queries.give_up()
        self.adapters.give_up()
        self.pictures.forget()
        self._result_collector.forget()
        self.rank_group.recover(scheduler, failure, self._out)

    def take_messages(self) -> list[EngineMessage]:
        """Return the messages for clients since the last call. `pump` returns them too."""
        messages = list(self._out)
        self._out.clear()  # clear in place: `recover` appends to this list while its callbacks take messages
        outputs = [message for message in messages if isinstance(message, Output)]
        timings = self.metrics.produced(outputs)
        for index, message in enumerate(messages) if timings or len(outputs) < len(messages) else ():
            if isinstance(message, Output):
                if message.request_id in timings:  # its first one gets them
                    messages[index] = replace(message, timing=timings.pop(message.request_id))
            elif isinstance(message, Refused):
                self.metrics.refused.labels(str(message.status)).inc()
                self.metrics.forget(message.request_id)
            elif isinstance(message, HandedOver):
                self.metrics.forget(message.request_id)
        return messages

    def _send_plans(self) -> None:
        now = time.monotonic()
        self._send_disk_orders(now)
        if self.scheduler.had_pictures:
            self._out += self.pictures.look(self.scheduler)
        self._migrate(now)
        self._out += self.scheduler.quarantine.watch(self.scheduler.suspect, now)
        while (plan := self.scheduler.next_plan()) is not None:
            self.metrics.admitted(plan)
            self.executor.submit(plan)
        self._drain_rate.observe(now, self.scheduler.admitted_tokens, waiting=bool(self.scheduler.waiting))

    def _send_disk_orders(self, now: float) -> None:
        """Send the disk tier's orders to the ranks. After `FETCH_S` without progress, requests stop waiting for disks."""
        disk = self.scheduler.disk
        for order in disk.orders:
            self.executor.fetch(order)
        disk.orders.clear()
        if self._fetching.seconds(disk.fetching, now) > FETCH_S:
            log.warning("KV disk silent for %.0f s: computing the prompts that wait for it", FETCH_S)
            disk.lose_patience()

    def _migrate(self, now: float) -> None:
        migrations = self.scheduler.migrations
        self._out += migrations.depart()
        if self._writing.seconds(migrations.progress, now) > WRITE_S:
            log.warning("KV disk wrote nothing for %.0f s: migrating requests of a drain without it, keeping others", WRITE_S)
            migrations.lose_patience()

    def _await_grammars(self, now: float) -> None:
        """Fail a request whose grammar takes longer than `GRAMMAR_S` to compile."""
        sequence = self.scheduler.compiling
        if self._compiling.seconds(sequence, now) > GRAMMAR_S and sequence is not None:
            log.error("Grammar not compiled in %.0f s: ending request %s with an error", GRAMMAR_S, sequence.request_id)
            self._out.append(self.scheduler.fail(sequence, NO_GRAMMAR))

    def _take(self, report: Report) -> None:
        if isinstance(report, GrammarReady):
            self.scheduler.compiled(report.request_id)
            return
        if isinstance(report, PictureEncoded):
            self._out += self.pictures.take(report, self.scheduler)
            return
        if isinstance(report, AdapterLoaded):
            self.adapters.take(report)
            return
        if not isinstance(report, Stepped):
            self.scheduler.disk.take(report, self.scheduler.prefixes)
            self.metrics.disk(self.scheduler.disk.counts)
            return
        self._report.stepped(report)
        self._guard.watch(self.rank_group.ready, report, self.scheduler)
        whole = self._result_collector.complete(report, self.rank_group.layout.ranks)
        if whole is None:
            return
        assert whole.result is not None
        messages = self.scheduler.update(whole.result, time.monotonic(), whole.step.busy_s)
        self.metrics.scheduled(self.scheduler.batches.preemptions, self.scheduler.speculation.counts)
        if messages:
            self.rank_group.proven()
        self._out += messages

    def failures(self, error: Exception) -> list[EngineMessage]:
        """Return the remaining messages, and an error for every live request, as the engine has failed."""
        live = [] if self._scheduler is None else list(self._scheduler.sequences)
        self._out += [Refused(name, 503, f"the engine stopped: {error}", code="engine_failed") for name in live]
        return self.take_messages()

    def drain(self) -> None:
        """Refuse new requests; `idle` becomes true once the running ones are done."""
        self.rank_group.state, self.rank_group.detail = "draining", "the server is shutting down"

    def close(self) -> None:
        """End all ranks and release their machines."""
        self.executor.on_wait = do_nothing
        self.executor.shutdown()

    def status(self) -> EngineStatus:
        """Return the engine's status and refresh the gauges."""
        return self._report.status(self._scheduler)
