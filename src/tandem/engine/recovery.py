"""The rank group: how ranks are started, replaced when they fail, and laid out over the machines that are present.

Ranks are disposable. The scheduler holds every request; a new rank group gets its sequences from there, and goes on where the
old one stopped.

At the first start a mistake (a file that is missing, too little memory) is for the user to mend, and ends the engine.
Once a rank group has served, the same error says that something has gone away which may come back: it is waited for.
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
from tandem.errors import RankFailure, UnsupportedModel, UsageError
from tandem.executors.executor import Executor, Progress, do_nothing
from tandem.launchers.host_addresses import role_of
from tandem.models.kv_types import unsupported_role
from tandem.protocol.control import EngineMessage, Ready, Refused
from tandem.protocol.events import History
from tandem.scheduler.limits import Limits
from tandem.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
STABLE_S = 60.0
"""Seconds after which a failure counts as the first in a row."""
WAIT_S = 0.05
KEPT_EVENTS = 32
"""Events kept in the history; the supervisor takes new ones each second."""
LOSSES = ("died", "stopped", "silent", "link", "stuck")
"""Causes of failures that may not come again."""
REMEDIES = {
    "host": "See that the machine is on and in the network; it is taken in again by itself.",
    "link": "See to the cable or network between the machines; `tandem doctor` measures it.",
    "silent": "See that the machine is awake and reachable; `tandem doctor` checks it.",
    "gpu": "Restart that machine: its GPU does not answer.",
    "memory": "A smaller --max-context or --memory-fraction leaves more room.",
}
"""By the cause of a failure."""
REMEDY = "Nothing to do if it stays at this once; else the log of that rank and `tandem doctor` say more."
FEWER = "machines were lost, and those that remain have no room"
FULL = "a GPU's memory was full, and the KV cache that it has now has no room"
"""Reasons why a request no longer fits."""


class RankGroup:
    """Starts ranks, and replaces all of them when one fails. Used by one thread."""

    def __init__(self, settings: Settings, layout: RankGroupLayout, executor: Executor, metrics: EngineMetrics) -> None:
        """Store the collaborators; call `start` to launch ranks."""
        self._settings = settings
        self._metrics = metrics
        self._full = self._active = ActiveLayout(layout)
        self._space = layout.ranks[0].kv_space
        """Name on disk of KV that the model's files make, as of their last loading."""
        self.executor = executor
        self.state = "starting"
        self.detail = "loading the model"
        self.restarts = 0
        self.ready: list[Ready] = []
        """Report of each rank when it was ready."""
        self.history = History(KEPT_EVENTS)
        self.neighbours: list[tuple[str, str]] = []
        """KV directories of other replicas (`Ready.store`), and the endpoint of each."""
        self.lost: int | None = None
        """The rank whose failure ended the last rank group, until the next one stands."""
        self.load_s = 0.0
        """Seconds that the last start took."""
        self.on_wait: Callable[[], None] = do_nothing
        """Called about every 0.1 s while ranks are replaced. It may submit and abort requests."""
        self._failures_in_a_row = 0
        self._blameless = 0
        """Failures in a row that no request was blamed for."""
        self._memory = MemoryBackoff()
        self._excluded = ExcludedMachines()
        self._limits_for = (layout, 0)
        """Layout and halvings that the scheduler's limits are for."""
        self._self_check_s = 0.0
        self._ready_at = 0.0

    @property
    def layout(self) -> RankGroupLayout:
        """The layout of the model over the ranks."""
        return self._active.layout

    @property
    def degraded(self) -> str:
        """Why fewer machines serve than the settings name; empty when all do."""
        return self._active.degraded

    def start(self, progress: Progress | None = None) -> Scheduler:
        """Load the model everywhere, for the first time. Raises UsageError or RankFailure, with nothing left running.

        A rank that is lost meanwhile (`LOSSES`) is replaced with the others, as later; what else goes wrong is raised.
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
                scheduler = Scheduler(limits, first_step=self._self_check(limits, 0, progress))
                break
            except RankFailure as failure:
                worth_it = self._halve_limits(failure) or failure.cause in LOSSES
                if not worth_it or self._failures_in_a_row >= self._settings.scheduler.max_restarts:
                    self.executor.shutdown()
                    raise
                # The state stays `starting`: there is no scheduler yet that could take requests.
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
        """KV directories that these ranks serve to others, and the endpoint of each."""
        return {ready.store: ready.lends for ready in self.ready if ready.lends}

    @property
    def remote_stores(self) -> dict[str, str]:
        """KV directories and endpoints that these ranks can use: those of the same model, type and version."""
        spaces = {ready.store.rpartition("/")[2] for ready in self.ready if ready.store}
        return {store: endpoint for store, endpoint in self.neighbours if store.rpartition("/")[2] in spaces} | self.lends

    def _launch(self, progress: Progress | None = None) -> None:
        started = time.monotonic()
        self._refresh_kv_namespace()
        self.ready = self.executor.start(progress)
        self.load_s = time.monotonic() - started
        self._metrics.load_seconds.set(self.load_s)

    def _refresh_kv_namespace(self) -> None:
        """Set the KV namespace from the model's current files, which ranks are about to load."""
        if not self.layout.ranks[0].kv_disk:
            return
        # Where files are missing or broken, the ranks say it.
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
        return make_limits(self._settings, self.layout, self.ready, shrink=bool(self.degraded), halvings=self._memory.halvings)

    def _self_check(self, limits: Limits, first_step: int, progress: Progress | None = None) -> int:
        """Check the ranks against one another; returns the number of the next step. Raises RankFailure."""
        if not self._settings.scheduler.self_check or len(self.layout.ranks) == 1:
            return first_step
        if progress is not None:
            for ready in self.ready:
                progress(ready.rank, 0, 0, "check")
        outcome = send_self_check(self.executor, self.layout, limits, self.ready, first_step)
        self._self_check_s = outcome.seconds
        return outcome.next_step

    def proven(self) -> None:
        """Reset the failure counters: ranks have produced tokens."""
        self._failures_in_a_row = self._blameless = 0

    def _halve_limits(self, failure: RankFailure) -> bool:
        """Halve the next ranks' limits after a GPU's memory was full; False for other failures, and after two times."""
        if failure.cause != "memory" or not self._memory.halve(time.monotonic()):
            return False
        log.warning(
            "GPU out of memory: halving batch and KV limits (%d of at most %d times)", self._memory.halvings, MOST_HALVINGS
        )
        self.history.note(
            "memory_full",
            "a device's memory was full; the ranks get half as much to do at once, and half the KV cache",
            level="warning",
            rank=failure.rank,
            remedy="A smaller --max-context "
            "or --memory-fraction leaves more room; so does ending other programs on that machine.",
        )
        return True

    def widen(self, scheduler: Scheduler) -> None:
        """Double limits again when a GPU's memory has not been full for long: other programs may have filled it."""
        if not self._memory.restore(time.monotonic()):
            return
        scheduler.widen(self._limits())
        self._limits_for = (self.layout, self._memory.halvings)
        self._metrics.kv_total.set(scheduler.limits.kv_tokens)
        log.info(
            "No GPU out of memory for %.0f s: doubling limits, KV cache of %d tokens",
            self._memory.pause_s,
            scheduler.limits.kv_tokens,
        )
        self.history.note(
            "memory_restored",
            f"no device has been full for {self._memory.pause_s:.0f} s; the ranks get twice as much to do again",
        )

    def _blames(self, failure: RankFailure | None) -> bool:
        """True if the requests under way may have ended the ranks; a GPU's limits are blamed on none at first."""
        if failure is None or failure.cause not in ("memory", "timeout") or self._blameless >= MOST_HALVINGS:
            return failure is not None and failure.blame
        self._blameless += 1
        return False

    # --- replacing ranks ---

    def recover(self, scheduler: Scheduler, failure: RankFailure | None, out: list[EngineMessage]) -> None:
        """Start new ranks, and queue every request again with the tokens it has. Refusals go to `out` at once.

        Without a failure the old ranks end on purpose, for the full layout. Raises RankFailure after `max_restarts`.
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
                self.history.note(
                    "request_refused",
                    f"a request is not tried again: {refusal.message}",
                    level="error",
                    request_id=refusal.request_id,
                    group=groups.get(refusal.request_id, ""),
                    remedy="Send it shorter or changed; if it fails alike, report it with the log.",
                )
        # Deaths that a request is to blame for say nothing against the machines.
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
                self.history.note(
                    "engine_failed",
                    f"the ranks failed {self._failures_in_a_row} times in a row; the last: {failure.message}",
                    level="error",
                    rank=failure.rank,
                    remedy=REMEDY,
                )
                raise RankFailure(
                    f"gave up after {self._failures_in_a_row} failures in a row (max_restarts); the last: {failure.message}",
                    rank=failure.rank,
                    cause=failure.cause,
                )
            self._do_without(failure)
            if failure.cause != "host" and self._failures_in_a_row > 1:
                self._pause(failure)
            failure = self._bring_up(scheduler, out)
        self._mark_ready()
        self._begin(scheduler)
        self._metrics.recovery_seconds.observe(self._ready_at - noticed)
        log.info("Ranks ready again after %.1f s: resuming %d requests", self._ready_at - noticed, len(scheduler.sequences))
        self.history.note(
            "ranks_replaced",
            f"{len(self.layout.ranks)} rank(s) serve again after "
            f"{self._ready_at - noticed:.1f} s; {len(scheduler.sequences)} request(s) go on",
        )

    def _bring_up(self, scheduler: Scheduler, out: list[EngineMessage]) -> RankFailure | None:
        """Start the next ranks; returns why they could not start."""
        try:
            self._launch()
            layout, halvings = self._limits_for
            if self.layout is not layout or self._memory.halvings != halvings:
                out += scheduler.resize(self._limits(), FULL if self._memory.halvings != halvings else FEWER)
                self._limits_for = (self.layout, self._memory.halvings)
                self._metrics.kv_total.set(scheduler.limits.kv_tokens)
            if self._self_check_s < REPEAT_S:
                scheduler.next_step = self._self_check(scheduler.limits, scheduler.next_step)
        except RankFailure as failure:
            return failure
        except UsageError as mistake:
            # It did serve: what is amiss came since, and may go again.
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
        log.error("%s; replacing all ranks (failure %d in a row)", failure.message, self._failures_in_a_row)
        self.lost = failure.rank
        self.history.note(
            "rank_lost",
            f"{failure.message}; all ranks are replaced",
            level="error",
            rank=failure.rank,
            remedy=REMEDIES.get(failure.cause, REMEDY),
        )
        self._announce("recovering", f"replacing the ranks after: {failure.message}")

    def _announce(self, state: str, detail: str) -> None:
        if self.state not in ("starting", "draining"):
            self.state, self.detail = state, detail
        self.on_wait()

    # --- machines that are lost for longer, or cannot start their ranks ---

    def _do_without(self, failure: RankFailure) -> None:
        """Lay the model out over the usable machines if others are missing, or cannot start their ranks.

        Where it fits on no such layout the one that failed is tried again.
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
        """Plan a layout over these places, in a thread: that may take seconds, and requests come and go meanwhile."""
        with ThreadPoolExecutor(1, "planner") as pool:
            planned = pool.submit(self._alternatives.next, usable)
            while not planned.done():
                self.on_wait()
                wait((planned,), WAIT_S)
        return planned.result()

    def _go_back(self, before: ActiveLayout, failure: RankFailure) -> None:
        """Serve with the layout `before` again, as the full one could not start, and try that later."""
        log.warning("All machines are back, but: %s; trying them again in %.0f s", failure.message, self._excluded.pause_s)
        self._metrics.failures.labels(failure.cause).inc()
        self.executor.close()
        self._excluded.full_layout_failed(failure, time.monotonic())
        self._lay_out(before)

    def _lay_out(self, active: ActiveLayout) -> None:
        if self.degraded != active.degraded:
            if active.degraded:
                log.warning("Degraded: %s; answering more slowly until they are back", active.degraded)
                self.history.note(
                    "layout_degraded",
                    f"the model is laid out over fewer machines ({active.degraded}); all is answered, slower",
                    level="warning",
                    remedy="Bring the machine back; it is taken in again by itself.",
                )
            else:
                log.info("All machines are back")
                self.history.note("layout_restored", "all machines are back; the model is laid out over them again")
        self._active = active
        self.ready = []
        self.executor.relay(active.layout.ranks, active.slots)
        self._metrics.degraded.set(bool(active.degraded))

    def all_back(self) -> bool:
        """True when all machines are present while fewer serve; looks once a second."""
        if not self.degraded or not self._excluded.due(time.monotonic()):
            return False
        return self._excluded.all_back(self.executor.present() or (), len(self._full.layout.ranks))
