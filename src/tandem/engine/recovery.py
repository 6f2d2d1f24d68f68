"""The rank group: start of ranks, replacement after failures, and layout over the present machines.

Ranks are disposable. The scheduler holds every request; a new rank group receives its sequences from there and resumes them.

At the first start, a usage error (missing file, too little memory) ends the engine, as the user must fix it. After a rank
group has served, the cause of such an error may be temporary, so the start is retried.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace

from tandem.config.settings import Settings
from tandem.engine.build_layout import RankGroupLayout, kv_space
from tandem.engine.degrade import MOST_HALVINGS, ActiveLayout, Alternatives, ExcludedMachines, MemoryBackoff
from tandem.engine.metrics import EngineMetrics
from tandem.engine.self_check import REPEAT_S, send_self_check
from tandem.engine.sizing import make_limits, require_quantized
from tandem.engine.warm_up import AGAIN_S, chunk_sizes, seconds_of, warm_up
from tandem.errors import RankFailure, UnsupportedModel, UsageError
from tandem.executors.executor import Executor, Progress, do_nothing
from tandem.launchers.host_addresses import role_of
from tandem.models.kv_types import unsupported_role
from tandem.protocol.adapters import AdapterLoaded, LoadAdapter
from tandem.protocol.control import EngineMessage, Ready, Refused
from tandem.protocol.events import History
from tandem.scheduler.limits import Limits
from tandem.scheduler.scheduler import Scheduler
from tandem.system.origin import MEND, build

log = logging.getLogger(__name__)

BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
STABLE_S = 60.0
"""Seconds of service after which the count of consecutive failures restarts."""
WAIT_S = 0.05
KEPT_EVENTS = 32
"""Events kept in the history; the supervisor copies new ones each second."""
LOSSES = ("died", "stopped", "silent", "link", "stuck")
"""Causes of failures that may be temporary."""
REMEDIES = {
    "host": "See that the machine is on and in the network; it is taken in again by itself.",
    "link": "See to the cable or network between the machines; `tandem doctor` measures it.",
    "silent": "See that the machine is awake and reachable; `tandem doctor` checks it.",
    "gpu": "Restart that machine: its GPU does not answer.",
    "memory": "A smaller --max-context or --memory-fraction leaves more room.",
}
"""Remedies for the operator, by cause of failure."""
REMEDY = "If this was the only time, nothing is needed; else see the log, and `tandem doctor`."
FEWER = "machines were lost, and those that remain have no room"
FULL = "a GPU's memory was full, and the KV cache that it has now has no room"
"""Reasons for refusing a request that no longer fits, after `FEWER` machines or halved limits."""


class RankGroup:
    """Ranks of an engine: their start, and the replacement of all when one fails. Not thread-safe."""

    def __init__(self, settings: Settings, layout: RankGroupLayout, executor: Executor, metrics: EngineMetrics) -> None:
        """Store the collaborators; call `start` to launch ranks."""
        self._settings = settings
        self._metrics = metrics
        self._full = self._active = ActiveLayout(layout)
        self._space = layout.ranks[0].kv_space
        """KV namespace on disk, from the model files at their last loading."""
        self.executor = executor
        self.state = "starting"
        self.detail = "loading the model"
        self.restarts = 0
        self.ready: list[Ready] = []
        """`Ready` of each rank, in rank order; empty while none runs."""
        self.adapters = {adapter.name: adapter for adapter in layout.adapters}
        """LoRA adapters that the ranks hold, by name."""
        self.encoders: dict[int, int] = {}
        """Id of the process that encodes pictures beside a rank; 0 if the rank encodes."""
        self.history = History(KEPT_EVENTS)
        self.neighbours: list[tuple[str, str]] = []
        """(`Ready.store`, endpoint) of KV directories of other replicas."""
        self.lost: int | None = None
        """Rank whose failure ended the last rank group; None once ranks are ready again."""
        self.load_s = 0.0
        """Seconds that the last start of ranks took."""
        self.on_wait: Callable[[], None] = do_nothing
        """Callback, called about every 0.1 s while ranks are replaced. It may submit and abort requests."""
        self._failures_in_a_row = 0
        self._blameless = 0
        """Consecutive failures for which no request was blamed."""
        self._memory = MemoryBackoff()
        self._excluded = ExcludedMachines()
        self._limits_for = (layout, 0)
        """(Layout, number of halvings) for which the scheduler's limits were computed."""
        self._self_check_s = 0.0
        self._chunk = (layout, 0)
        """(Layout, prefill chunk size measured on it); 0 if not measured."""
        self._ready_at = 0.0

    @property
    def layout(self) -> RankGroupLayout:
        """Current layout of the model over the ranks."""
        return self._active.layout

    @property
    def degraded(self) -> str:
        """Reason why fewer machines serve than the settings name; empty if all serve."""
        return self._active.degraded

    def start(self, progress: Progress | None = None) -> Scheduler:
        """Load the model on all ranks for the first time. Raises UsageError or RankFailure, with nothing left running.

        After a possibly temporary failure (`LOSSES`, or full GPU memory) all ranks are started again, up to `max_restarts`
        times.
        """
        while True:
            try:
                self._launch(progress)
                if specs := self.executor.specs:
                    self._full = self._active = ActiveLayout(replace(self.layout, ranks=tuple(specs)))
                if trouble := next((ready for ready in self.ready if ready.disk_trouble), None):
                    raise UsageError(f"rank {trouble.rank}: {trouble.disk_trouble}", param="kv_disk")
                require_quantized(self.layout, self.ready)
                role = role_of(self._settings.parallel)
                if role != "both" and any(ready.disk_blocks is None for ready in self.ready):
                    raise UnsupportedModel(unsupported_role(role, self.layout.description.family), param="roles")
                limits = self._limits()
                step = self._warm_up(limits, self._self_check(limits, 0, progress), progress)
                limits = self._limits()
                scheduler = Scheduler(limits, first_step=step)
                break
            except RankFailure as failure:
                worth_it = self._halve_limits(failure) or failure.cause in LOSSES
                if not worth_it or self._failures_in_a_row >= self._settings.scheduler.max_restarts:
                    self.executor.shutdown()
                    raise
                # The state stays `starting`: no scheduler exists yet to take requests.
                self._count_failure(failure)
                self.executor.close()
                self.detail = f"starting again after: {failure.message}"
            except BaseException:
                self.executor.shutdown()
                raise
        self._limits_for = (self.layout, self._memory.halvings)
        self._alternatives = Alternatives(self._settings, self.layout, self.ready)
        self._metrics.kv_total.set(limits.kv_tokens)
        self._mark_ready()
        self._begin(scheduler)
        return scheduler

    def _begin(self, scheduler: Scheduler) -> None:
        for ready in self.ready:
            if ready.disk_trouble:
                log.warning("Rank %d: %s; KV disk not used until the ranks start again", ready.rank, ready.disk_trouble)
        scheduler.disk.begin(
            (ready.disk_blocks for ready in self.ready), scheduler.waiting, scheduler.prefixes, self.remote_stores.items()
        )

    @property
    def lends(self) -> dict[str, str]:
        """KV directories that these ranks serve to others, with their endpoints."""
        return {ready.store: ready.lends for ready in self.ready if ready.lends}

    @property
    def remote_stores(self) -> dict[str, str]:
        """KV directories that these ranks can read, with endpoints: those for the same model, type and version."""
        spaces = {ready.store.rpartition("/")[2] for ready in self.ready if ready.store}
        return {store: endpoint for store, endpoint in self.neighbours if store.rpartition("/")[2] in spaces} | self.lends

    def _launch(self, progress: Progress | None = None) -> None:
        started = time.monotonic()
        self._refresh_kv_namespace()
        self.ready = self.executor.start(progress)
        for ready in self.ready:
            if ready.build not in ("", build()):
                log.warning("Rank %d on %s runs Tandem %s, its engine %s; %s", ready.rank, ready.host, ready.build, build(), MEND)
        self._load_adapters()
        self.load_s = time.monotonic() - started
        self._metrics.load_seconds.set(self.load_s)

    def _load_adapters(self) -> None:
        """Load the adapters on new ranks. Raises UsageError at the first start for one that cannot be loaded."""
        for adapter in self.adapters.values():
            self.executor.load_adapter(LoadAdapter(adapter))
        missing = {(rank, one.index) for rank in range(len(self.ready)) for one in self.adapters.values()}
        until = time.monotonic() + self._settings.scheduler.start_timeout
        while missing:
            for report in self.executor.collect(WAIT_S):
                if isinstance(report, AdapterLoaded):
                    missing.discard((report.rank, report.index))
                    if report.error:
                        self._drop_adapter(report)
            self.on_wait()
            if time.monotonic() > until:
                raise RankFailure(f"ranks have not loaded their LoRA adapters: {sorted(missing)}", cause="start")

    def _drop_adapter(self, report: AdapterLoaded) -> None:
        """Go on without an adapter whose files no longer load, unless no rank group has served yet or all requests use it."""
        adapter = next((one for one in self.adapters.values() if one.index == report.index), None)
        if self.state == "starting" or (adapter is not None and not adapter.name):
            raise UsageError(f"rank {report.rank}: {report.error}", param="lora_modules")
        if adapter is not None:
            log.error("LoRA adapter %s cannot be loaded again: %s; its requests end with an error", adapter.name, report.error)
            del self.adapters[adapter.name]
            self.executor.load_adapter(LoadAdapter(adapter, unload=True))

    def _refresh_kv_namespace(self) -> None:
        """Set the KV namespace from the model's current files, which ranks are about to load."""
        if not self.layout.ranks[0].kv_disk:
            return
        # Missing or broken files are reported by the ranks.
        with suppress(UsageError, OSError):
            space = kv_space(self._settings.model, self.layout.files)
            if space != self._space:
                log.warning("Model files have changed since their last loading: KV on disk of the old ones is not used")
            self._space = space
            self.executor.keep_apart(space)

    def _mark_ready(self) -> None:
        if self.state != "draining":
            self.state, self.detail = "ready", ""
        self.lost = None
        self._ready_at = time.monotonic()
        self.executor.keep_standbys()

    def _limits(self) -> Limits:
        halvings, (layout, chunk) = self._memory.halvings, self._chunk
        limits = make_limits(self._settings, self.layout, self.ready, shrink=bool(self.degraded), halvings=halvings)
        return replace(limits, prefill_chunk=max(chunk >> halvings, 1)) if chunk and layout is self.layout else limits

    def _self_check(self, limits: Limits, first_step: int, progress: Progress | None = None) -> int:
        """Run the self-check if enabled; return the next step id. Raises RankFailure."""
        if not self._settings.scheduler.self_check or len(self.layout.ranks) == 1:
            return first_step
        if progress is not None:
            for ready in self.ready:
                progress(ready.rank, 0, 0, "check")
        outcome = send_self_check(self.executor, self.layout, limits, self.ready, first_step)
        self._self_check_s = outcome.seconds
        return outcome.next_step

    def _warm_up(self, limits: Limits, first_step: int, progress: Progress | None = None) -> int:
        """Run the warm-up within its time; return the next step id. The first start measures the prefill chunk, unless memory
        was full. Raises RankFailure."""
        chosen, first = self._settings.scheduler, self.state == "starting"
        if not (seconds := seconds_of(chosen, self.ready)):
            return first_step
        if progress is not None:
            for ready in self.ready:
                progress(ready.rank, 0, 0, "warm")
        sizes = chunk_sizes(chosen, self.layout, limits, self.ready) if first and not self._memory.halvings else []
        seconds = seconds if first else min(seconds, AGAIN_S)
        first_step, chunk = warm_up(self.executor, self.layout, limits, seconds, first_step, sizes)
        if first:
            self._chunk = self.layout, chunk
        return first_step

    def proven(self) -> None:
        """Reset the failure counters, as ranks have produced tokens."""
        self._failures_in_a_row = self._blameless = 0

    def _halve_limits(self, failure: RankFailure) -> bool:
        """Halve the next ranks' limits if `failure` is full GPU memory. False for other failures, or after `MOST_HALVINGS`."""
        if failure.cause != "memory" or not self._memory.halve(time.monotonic()):
            return False
        log.warning(
            "GPU out of memory: halving batch and KV limits (%d of at most %d times)", self._memory.halvings, MOST_HALVINGS
        )
        text = "a device's memory was full; the ranks get half as much to do at once, and half the KV cache"
        remedy = "A smaller --max-context or --memory-fraction leaves more room; so does ending other programs on that machine."
        self.history.note("memory_full", text, level="warning", rank=failure.rank, remedy=remedy)
        return True

    def widen(self, scheduler: Scheduler) -> None:
        """Double halved limits again if no GPU's memory was full for some time, as another program may have filled it."""
        if not self._memory.restore(time.monotonic()):
            return
        scheduler.widen(self._limits())
        self._limits_for = (self.layout, self._memory.halvings)
        pause_s, tokens = self._memory.pause_s, scheduler.limits.kv_tokens
        self._metrics.kv_total.set(tokens)
        log.info("No GPU out of memory for %.0f s: doubling limits, KV cache of %d tokens", pause_s, tokens)
        text = f"no device has been full for {pause_s:.0f} s; the ranks get twice as much to do again"
        self.history.note("memory_restored", text)

    def _blames(self, failure: RankFailure | None) -> bool:
        """Return True if running requests may have caused the failure. The first few memory failures and timeouts blame none."""
        if failure is None or failure.cause not in ("memory", "timeout") or self._blameless >= MOST_HALVINGS:
            return failure is not None and failure.blame
        self._blameless += 1
        return False

    # --- replacing ranks ---

    def recover(self, scheduler: Scheduler, failure: RankFailure | None, out: list[EngineMessage]) -> None:
        """Start new ranks, and queue every request again with its tokens. Refusals are added to `out` at once.

        Without `failure`, the old ranks end on purpose, to return to the full layout. Raises RankFailure after
        `max_restarts`.
        """
        noticed, before = time.monotonic(), self._active
        if noticed - self._ready_at > STABLE_S:
            self._failures_in_a_row = 0
        self.executor.on_wait = self.on_wait
        groups = {name: sequence.request.group for name, sequence in scheduler.sequences.items()}
        refused = scheduler.restart(died=failure is not None, blame=self._blames(failure))
        out += refused
        for refusal in refused:
            if isinstance(refusal, Refused):
                self.history.note_refused(refusal.message, refusal.request_id, groups.get(refusal.request_id, ""))
        # Failures blamed on a request do not count against the machines.
        self._failures_in_a_row = max(self._failures_in_a_row - len(refused), 0)
        if failure is None:
            self._announce("recovering", "all machines are back; the model is laid out over them again")
            self.executor.close()
            self._lay_out(self._full)
            failure = self._bring_up(scheduler, out)
            if failure is not None:
                self._go_back(before, failure)
                failure = self._bring_up(scheduler, out)
        while failure is not None:
            self._count_failure(failure)
            self._halve_limits(failure)
            self.executor.close()
            if self._failures_in_a_row > self._settings.scheduler.max_restarts:
                self.state = "failed"
                text = f"the ranks failed {self._failures_in_a_row} times in a row; the last: {failure.message}"
                self.history.note("engine_failed", text, level="error", rank=failure.rank, remedy=REMEDY)
                why = f"gave up after {self._failures_in_a_row} failures in a row (max_restarts); the last: {failure.message}"
                raise RankFailure(why, rank=failure.rank, cause=failure.cause)
            self._do_without(failure)
            if failure.cause != "host" and self._failures_in_a_row > 1:
                self._pause(failure)
            failure = self._bring_up(scheduler, out)
        self._mark_ready()
        self._begin(scheduler)
        self._metrics.recovery_seconds.observe(self._ready_at - noticed)
        hosts = ", ".join(dict.fromkeys(ready.host for ready in self.ready))
        seconds, left = self._ready_at - noticed, len(scheduler.sequences)
        log.warning("Serving again on %s after %.1f s: %d unfinished request(s) go on", hosts, seconds, left)
        self.history.note(
            "ranks_replaced", f"{len(self.layout.ranks)} part(s) serve again after {seconds:.1f} s; {left} request(s) go on"
        )

    def _bring_up(self, scheduler: Scheduler, out: list[EngineMessage]) -> RankFailure | None:
        """Start the next ranks. Return the failure if they could not start, else None."""
        try:
            self._launch()
            out += scheduler.refuse_without(self.adapters.values())
            layout, halvings = self._limits_for
            if self.layout is not layout or self._memory.halvings != halvings:
                out += scheduler.resize(self._limits(), FULL if self._memory.halvings != halvings else FEWER)
                self._limits_for = (self.layout, self._memory.halvings)
                self._metrics.kv_total.set(scheduler.limits.kv_tokens)
            if self._self_check_s < REPEAT_S:
                scheduler.next_step = self._self_check(scheduler.limits, scheduler.next_step)
            scheduler.next_step = self._warm_up(scheduler.limits, scheduler.next_step)
        except RankFailure as failure:
            return failure
        except UsageError as mistake:
            # The engine has served before, so the cause is new and may be temporary.
            return RankFailure(mistake.message, rank=mistake.rank, cause="start")
        self._excluded.started(full=self._active is self._full)
        return None

    def _pause(self, failure: RankFailure) -> None:
        seconds = min(BACKOFF_S * 2**self._failures_in_a_row, MAX_BACKOFF_S)
        words = (
            f"the ranks cannot be replaced: {failure.message}; the next try in {seconds:.0f} s (failure "
            f"{self._failures_in_a_row} in a row, max_restarts is {self._settings.scheduler.max_restarts})"
        )
        log.warning("%s", words)
        self._announce("recovering", words)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.on_wait()
            time.sleep(WAIT_S)

    def _count_failure(self, failure: RankFailure) -> None:
        self._failures_in_a_row += 1
        self.restarts += 1
        self._metrics.restarts.inc()
        self._metrics.failures.labels(failure.cause).inc()
        words = self._by_machine(failure.message)
        log.error("%s; all parts restart, requests wait (failure %d since the start)", words, self.restarts)
        self.lost = failure.rank
        self.history.note("rank_lost", words, level="error", rank=failure.rank, remedy=REMEDIES.get(failure.cause, REMEDY))
        self._announce("recovering", words)

    def _by_machine(self, message: str) -> str:
        """Return the message with machines in place of ranks, where these are known; parts are counted from 1."""
        hosts = [ready.host for ready in self.ready]
        for rank, host in reversed([*enumerate(hosts)]):  # rank 12 before rank 1
            message = message.replace(f") on {host}", ")")
            message = message.replace(f"rank {rank}", host if hosts.count(host) == 1 else f"part {rank + 1} on {host}")
        return message

    def _announce(self, state: str, detail: str) -> None:
        if self.state not in ("starting", "draining"):
            self.state, self.detail = state, detail
        self.on_wait()

    # --- machines that are lost for longer, or cannot start their ranks ---

    def _do_without(self, failure: RankFailure) -> None:
        """Lay the model out over the usable machines if others are missing or cannot start their ranks.

        If no such layout fits, the current layout is tried again.
        """
        present = self.executor.present()
        if present is None:
            return
        self._excluded.note(failure, self._active.slots, time.monotonic())
        usable = self._excluded.usable(present)
        lost = failure.cause in ("host", "gpu") or (failure.cause == "start" and bool(self.degraded or self._excluded.barred))
        if not lost or not usable or len(usable) == len(self._full.layout.ranks):
            return
        smaller = self._plan_fallback(usable)
        if smaller is None:
            log.error("Model does not fit on the %d usable machine(s): waiting for the others", len(usable))
            return
        ranks = f"{len(smaller.layout.ranks)} of {len(self._full.layout.ranks)} ranks"
        why = self.degraded.partition(": ")[2] if failure.cause == "start" and self.degraded else failure.message
        self._lay_out(replace(smaller, degraded=f"{ranks}: {why}"))

    def _plan_fallback(self, usable: Sequence[int]) -> ActiveLayout | None:
        """Plan a layout over these places in a thread, as planning may take seconds while requests arrive."""
        with ThreadPoolExecutor(1, "planner") as pool:
            planned = pool.submit(self._alternatives.next, usable)
            while not planned.done():
                self.on_wait()
                wait((planned,), WAIT_S)
        return planned.result()

    def _go_back(self, before: ActiveLayout, failure: RankFailure) -> None:
        """Return to the layout `before`, as the full one could not start; it is tried again later."""
        log.warning("All machines are back, but: %s; trying them again in %.0f s", failure.message, self._excluded.pause_s)
        self._metrics.failures.labels(failure.cause).inc()
        self.executor.close()
        self._excluded.full_layout_failed(failure, time.monotonic())
        self._lay_out(before)

    def _lay_out(self, active: ActiveLayout) -> None:
        if self.degraded != active.degraded:
            if active.degraded:
                log.warning("Degraded: fewer machines serve, more slowly, until the others are back")
                text = f"the model is laid out over fewer machines ({active.degraded}); all is answered, slower"
                remedy = "Bring the machine back; it is taken in again by itself."
                self.history.note("layout_degraded", text, level="warning", remedy=remedy)
            else:
                log.info("All machines are back")
                self.history.note("layout_restored", "all machines are back; the model is laid out over them again")
        self._active = active
        self.ready = []
        self.executor.relay(active.layout.ranks, active.slots)
        self._metrics.degraded.set(bool(active.degraded))

    def all_back(self) -> bool:
        """Return True if fewer machines serve and all are present again. Checks once a second at most."""
        if not self.degraded or not self._excluded.due(time.monotonic()):
            return False
        return self._excluded.all_back(self.executor.present() or (), len(self._full.layout.ranks))
