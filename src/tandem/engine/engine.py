"""The loop schedule -> execute -> update, and the replacement of a gang that failed.

The engine holds every request: prompt, parameters and the tokens produced so far. Ranks are disposable; a new gang
gets its sequences from here and goes on where the old one stopped.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tandem.cache.budget import kv_capacity
from tandem.config.settings import Settings
from tandem.config.speculation import with_speculative_config
from tandem.engine.canary import REPEAT_S, send_canary
from tandem.engine.drain_rate import DrainRate
from tandem.engine.fallback import fallback
from tandem.engine.layout import Layout, make_executor
from tandem.engine.metrics import EngineMetrics
from tandem.errors import EngineStuck, OutOfMemory, OverloadedError, RankFailure, RequestError, UnavailableError
from tandem.executors.base import Executor, Progress
from tandem.protocol.control import EngineMessage, EngineStatus, Output, RankInfo, Ready, Refused, Stepped
from tandem.protocol.request import EngineRequest
from tandem.scheduler.scheduler import Limits, Scheduler
from tandem.speculation.proposers import SpeculationCounts, SpeculationLimits

log = logging.getLogger(__name__)

BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
STABLE_S = 60.0
"""A gang that has stood for so long was sound: the failure that ends it is the first in a row."""
WAIT_S = 0.05
LOSSES = ("died", "stopped", "silent", "link", "stuck")
"""Causes of a failure that may well not come again."""
SEEK_S = 1.0
"""Seconds between two looks for machines that were lost."""
GPU_PREFILL_CHUNK, CPU_PREFILL_CHUNK = 512, 192


class Engine:
    """Used by one thread, which with the inline executor owns all MLX work."""

    def __init__(self, settings: Settings, layout: Layout, executor: Executor | None = None) -> None:
        """Nothing is started; `executor` is for tests."""
        self.settings = settings
        self.layout = layout
        self.degraded = ""
        """Why fewer machines serve than the settings name; empty when all do."""
        self._whole = layout
        self.metrics = EngineMetrics()
        self.state = "starting"
        self.detail = "loading the model"
        self.restarts = 0
        self.on_wait: Callable[[], None] | None = None
        """Called about every 0.1 s while `pump` replaces the ranks. It may submit and abort requests."""
        self._executor = executor or make_executor(settings, layout)
        self._scheduler: Scheduler | None = None
        self._failures_in_a_row = 0
        self._ready: list[Ready] = []
        self._step_s: dict[int, float] = {}
        self._latest: dict[int, Stepped] = {}
        self._canary_s = 0.0
        self._drain_rate = DrainRate()
        self._load_s = 0.0
        self._ready_at = 0.0
        self._facts: list[Ready] = []
        """What the ranks of the whole layout have said of their machines."""
        self._sought_at = 0.0

    @property
    def executor(self) -> Executor:
        """What runs the plans."""
        return self._executor

    @property
    def scheduler(self) -> Scheduler:
        """What makes the plans. Only after `start`."""
        assert self._scheduler is not None
        return self._scheduler

    def start(self, progress: Progress | None = None) -> None:
        """Load the model everywhere. Raises UsageError or RankFailure, with nothing left running.

        A rank that is lost meanwhile (`LOSSES`) is replaced with the others, as later; what else goes wrong is raised.
        """
        while True:
            try:
                self._launch(progress)
                if specs := self._executor.specs:
                    self._whole = self.layout = replace(self.layout, ranks=tuple(specs))
                limits = self._limits()
                self._facts = self._ready
                self._scheduler = Scheduler(limits, first_step=self._canary(limits, 0))
                break
            except RankFailure as failure:
                if failure.cause not in LOSSES or self._failures_in_a_row >= self.settings.scheduler.max_restarts:
                    self._executor.shutdown()
                    raise
                self._count_failure(failure)
                self._executor.close()
                self.state, self.detail = "starting", f"starting again after: {failure.message}"
            except BaseException:
                self._executor.shutdown()
                raise
        self.metrics.kv_total.set(self._scheduler.limits.kv_tokens)
        self._stand()

    def _launch(self, progress: Progress | None = None) -> None:
        started = time.monotonic()
        self._ready = self._executor.start(progress)
        self._load_s = time.monotonic() - started
        self.metrics.load_seconds.set(self._load_s)

    def _stand(self) -> None:
        if self.state != "draining":
            self.state, self.detail = "ready", ""
        self._ready_at = time.monotonic()

    def _canary(self, limits: Limits, first_step: int) -> int:
        """Check the ranks against one another; returns the number of the next step. Raises RankFailure."""
        if not self.settings.scheduler.canary or len(self.layout.ranks) == 1:
            return first_step
        outcome = send_canary(self._executor, self.layout, limits, self._ready, first_step)
        self._canary_s = outcome.seconds
        return outcome.next_step

    def _limits(self) -> Limits:
        chosen, layout = self.settings.scheduler, self.layout
        chunk = chosen.prefill_chunk or (GPU_PREFILL_CHUNK if self._ready[0].gpu else CPU_PREFILL_CHUNK)
        kv_tokens = self._kv_tokens()
        return Limits(
            prefix_tokens=int(kv_tokens * chosen.prefix_cache),
            prefix_trimmable=all(ready.trimmable for ready in self._ready),
            lanes=layout.lanes, max_batch_size=chosen.max_batch_size, prefill_chunk=chunk, kv_tokens=kv_tokens,
            max_context=layout.max_context, max_queue=chosen.max_queue, max_queue_tokens=chosen.max_queue_tokens,
            eos_token_ids=frozenset(layout.description.eos_token_ids), vocab_size=layout.description.vocab_size,
            speculation=self._speculation())

    def _speculation(self) -> SpeculationLimits | None:
        chosen = with_speculative_config(self.settings.speculation)
        if chosen.speculative_method == "none":
            return None
        return SpeculationLimits(drafts=chosen.num_speculative_tokens, shortest=chosen.prompt_lookup_min,
                                 longest=chosen.prompt_lookup_max, model=chosen.speculative_method == "draft_model")

    def _kv_tokens(self) -> int:
        """What the tightest memory has room for, or what the settings say if that is less."""
        chosen, pools = self.settings.scheduler, dict[tuple[str, int], list[Ready]]()
        for ready in self._ready:
            pools.setdefault((ready.host, ready.rank if ready.own_memory else -1), []).append(ready)
        room = [kv_capacity(ranks[0].memory_bytes, chosen.memory_fraction,
                            [(ready.weight_bytes, ready.kv_bytes_per_token) for ready in ranks])
                for ranks in pools.values()]
        useful = self.layout.max_context * chosen.max_batch_size
        tokens = min(*room, useful) if chosen.kv_tokens is None else chosen.kv_tokens
        if self.degraded:
            tokens = min(*room, tokens)
        if tokens > min(room) or tokens < 2:
            raise OutOfMemory(f"the KV cache has room for {min(room)} tokens beside the weights and would need "
                              f"{max(tokens, 2)}; lower --kv-tokens, use more stages, or raise --memory-fraction",
                              param="kv_tokens")
        return tokens

    # --- requests ---

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError (bad request, queue full, draining)."""
        if self._scheduler is None or self.state in ("draining", "failed"):
            raise UnavailableError(f"the engine is {self.state}: {self.detail or 'try again later'}")
        if request.pooling is None and not self.layout.description.generates:
            raise RequestError(f"{self.layout.served_name} has no output projection, so it only embeds; use "
                               "/v1/embeddings", param="model", code="model_cannot_generate")
        seed = request.params.seed
        try:
            self._scheduler.submit(request, secrets.randbits(63) if seed is None else seed & (2**64 - 1))
        except OverloadedError as error:
            error.retry_after = self._drain_rate.retry_after(self._scheduler.queued_tokens)
            raise
        self.metrics.arrived(request.request_id, len(request.prompt))

    def abort(self, request_id: str) -> bool:
        """End a request without further output; False if it is not live."""
        self.metrics.forget(request_id)
        if self._scheduler is None or not self._scheduler.abort(request_id):
            return False
        self.metrics.aborted.inc()
        return True

    @property
    def idle(self) -> bool:
        """True when there is nothing to do."""
        return self._scheduler is None or self._scheduler.idle

    # --- steps ---

    def pump(self, timeout_s: float) -> list[EngineMessage]:
        """Send the plans that can be sent, and take what results there are, waiting up to `timeout_s` seconds.

        Also looks after the ranks, and is to be called now and then when there is nothing to do. Replaces the gang when
        it fails. Raises RankFailure when it gives up; `failures()` then ends the requests. EngineStuck means that only
        another process can go on with them.
        """
        if self._scheduler is None:
            return []
        messages: list[EngineMessage] = []
        try:
            if self.degraded and self._all_back():
                messages += self._recover(None)
            self._send_plans()
            for report in self._executor.collect(timeout_s if self._scheduler.under_way else 0.0):
                messages += self._take(report)
            # At once, so that the ranks have their next step before anybody looks at this one's outcome.
            self._send_plans()
        except EngineStuck:
            self.state = "failed"
            raise
        except RankFailure as failure:
            messages += self._recover(failure)
        return messages

    def _send_plans(self) -> None:
        while (plan := self.scheduler.next_plan()) is not None:
            self._executor.submit(plan)
        self._drain_rate.observe(time.monotonic(), self.scheduler.admitted_tokens, waiting=bool(self.scheduler.waiting))

    def _take(self, report: Stepped) -> list[EngineMessage]:
        self.metrics.stepped(report)
        rank = report.step.rank
        self._step_s[rank] = 0.9 * self._step_s.get(rank, report.step.busy_s) + 0.1 * report.step.busy_s
        self._latest[rank] = report
        if report.result is None or self._scheduler is None:
            return []
        messages = self._scheduler.update(report.result, time.monotonic())
        self.metrics.speculated(self._scheduler.speculation.counts)
        if messages:
            self._failures_in_a_row = 0
        self._count(messages)
        return messages

    def _count(self, messages: Sequence[EngineMessage]) -> None:
        for message in messages:
            if isinstance(message, Output):
                self.metrics.produced(message.request_id, len(message.tokens), message.finish_reason)
            elif isinstance(message, Refused):
                self.metrics.refused.labels(str(message.status)).inc()
                self.metrics.forget(message.request_id)

    def _recover(self, failure: RankFailure | None) -> list[EngineMessage]:
        """A new gang, and every request queued again with the tokens it has.

        Without a failure the old one ends on purpose, for the whole layout.
        """
        assert self._scheduler is not None
        noticed, before = time.monotonic(), self.layout
        if noticed - self._ready_at > STABLE_S:
            self._failures_in_a_row = 0
        messages = self._scheduler.restart(blame=failure is not None)
        # Deaths that a request is to blame for say nothing against the machines.
        self._failures_in_a_row = max(self._failures_in_a_row - len(messages), 0)
        while True:
            if failure is None:
                self._announce("recovering", "all machines are back; the model is laid out over them again")
            else:
                self._count_failure(failure)
            self._executor.close()
            if failure is None:
                self._lay_out(self._whole, None, "")
            elif self._failures_in_a_row > self.settings.scheduler.max_restarts:
                self.state = "failed"
                raise RankFailure(f"gave up after {self._failures_in_a_row} failures in a row (max_restarts); the "
                                  f"last: {failure.message}", rank=failure.rank, cause=failure.cause)
            elif failure.cause == "host":
                self._do_without(failure)
            elif self._failures_in_a_row > 1:
                self._wait(min(BACKOFF_S * 2 ** self._failures_in_a_row, MAX_BACKOFF_S))
            try:
                self._executor.on_wait = self.on_wait
                self._launch()
                if self.layout is not before:
                    messages += self._scheduler.resize(self._limits())
                    self.metrics.kv_total.set(self._scheduler.limits.kv_tokens)
                if self._canary_s < REPEAT_S:
                    self._scheduler.next_step = self._canary(self._scheduler.limits, self._scheduler.next_step)
                break
            except RankFailure as again:
                failure = again
        self._stand()
        self._count(messages)
        self.metrics.recovery_seconds.observe(self._ready_at - noticed)
        log.info("the ranks are back after %.1f s; %d requests go on", self._ready_at - noticed,
                 len(self._scheduler.sequences))
        return messages

    # --- machines that are lost for longer ---

    def _do_without(self, failure: RankFailure) -> None:
        """Lay the model out over the machines that are there, if it fits; else go on waiting for the others."""
        present = self._executor.present()
        if present is None or not present or len(present) == len(self._whole.ranks):
            return
        found = fallback(self.settings, self._whole, self._facts, present)
        if found is None:
            log.error("the model does not fit on the %d machine(s) that remain; waiting for the others", len(present))
            return
        ranks = len(found.layout.ranks)
        self._lay_out(found.layout, found.slots, f"{ranks} of {len(self._whole.ranks)} ranks: {failure.message}")

    def _lay_out(self, layout: Layout, slots: tuple[int, ...] | None, degraded: str) -> None:
        if self.degraded != degraded:
            log.warning("degraded: %s", degraded) if degraded else log.info("all machines are back")
        self.layout, self.degraded = layout, degraded
        self._ready = []
        self._latest.clear()
        self._step_s.clear()
        self._executor.relay(layout.ranks, slots)
        self.metrics.degraded.set(bool(degraded))

    def _all_back(self) -> bool:
        """Looked for once a second."""
        now = time.monotonic()
        if now - self._sought_at < SEEK_S:
            return False
        self._sought_at = now
        return len(self._executor.present() or ()) == len(self._whole.ranks)

    def _count_failure(self, failure: RankFailure) -> None:
        self._failures_in_a_row += 1
        self.restarts += 1
        self.metrics.restarts.inc()
        self.metrics.failures.labels(failure.cause).inc()
        log.error("%s; replacing all ranks (failure %d in a row)", failure.message, self._failures_in_a_row)
        self._announce("recovering", f"replacing the ranks after: {failure.message}")

    def _announce(self, state: str, detail: str) -> None:
        if self.state != "draining":
            self.state, self.detail = state, detail
        if self.on_wait is not None:
            self.on_wait()

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.on_wait is not None:
                self.on_wait()
            time.sleep(WAIT_S)

    def failures(self, error: Exception) -> list[EngineMessage]:
        """End every request with an error, because the engine cannot go on."""
        live = [] if self._scheduler is None else list(self._scheduler.sequences)
        return [Refused(request_id, 503, f"the engine stopped: {error}", code="engine_failed") for request_id in live]

    def drain(self) -> None:
        """Take no new requests; `idle` turns true when the others are done."""
        self.state, self.detail = "draining", "the server is shutting down"

    def close(self) -> None:
        """End all ranks, and let go of their machines."""
        self._executor.shutdown()

    # --- state ---

    def status(self) -> EngineStatus:
        """Snapshot for the api; also refreshes the gauges."""
        scheduler, layout = self._scheduler, self.layout
        queued = len(scheduler.waiting) if scheduler else 0
        running = scheduler.running if scheduler else 0
        used = scheduler.kv_positions if scheduler else 0
        self.metrics.running.set(running)
        self.metrics.waiting.set(queued)
        self.metrics.kv_used.set(used)
        self.metrics.preemptions.set(scheduler.preemptions if scheduler else 0)
        counts = scheduler.speculation.counts if scheduler else SpeculationCounts()
        return EngineStatus(
            query_id=0, state=self.state, detail=self.detail, model=layout.served_name, source=str(layout.files.path),
            max_context=min(layout.max_context, scheduler.limits.kv_tokens) if scheduler else layout.max_context,
            vocab_size=layout.description.vocab_size, queued=queued, running=running, kv_tokens_used=used,
            kv_tokens_total=scheduler.limits.kv_tokens if scheduler else 0, restarts=self.restarts,
            prefix_tokens=scheduler.prefixes.positions if scheduler else 0,
            prefix_queries=scheduler.prefixes.queries if scheduler else 0,
            prefix_hits=scheduler.prefixes.hits if scheduler else 0, load_s=self._load_s, degraded=self.degraded,
            stages=layout.ranks[0].stages, lanes=layout.lanes, generated_tokens=self.metrics.generated,
            draft_tokens=counts.draft_tokens, accepted_tokens=counts.accepted_tokens,
            hidden_size=layout.description.hidden_size, pooling=layout.pooling,
            generates=layout.description.generates, ttft_s=self.metrics.recent_ttft_s,
            ranks=[self._rank_info(ready) for ready in self._ready])

    def _slowdown(self, rank: int) -> float:
        slowdowns = self._executor.slowdowns
        slowdown = slowdowns[rank] if rank < len(slowdowns) else 1.0
        self.metrics.slowdown.labels(str(rank)).set(slowdown)
        return slowdown

    def _rank_info(self, ready: Ready) -> RankInfo:
        spec, latest = self.layout.ranks[ready.rank], self._latest.get(ready.rank)
        return RankInfo(rank=ready.rank, stage=spec.stage, layers=spec.layers, pid=ready.pid, host=ready.host,
                        weight_bytes=ready.weight_bytes, peak_bytes=latest.peak_bytes if latest else ready.peak_bytes,
                        step_s=self._step_s.get(ready.rank, 0.0), kv_bytes=latest.step.kv_bytes if latest else 0,
                        slowdown=self._slowdown(ready.rank), memory_bytes=ready.memory_bytes)
