"""The ranks that serve: how they are started, replaced when they fail, and laid out over the machines that are there.

Ranks are disposable. The scheduler holds every request; a new gang gets its sequences from there, and goes on where the
old one stopped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from tandem.config.settings import Settings
from tandem.engine.canary import REPEAT_S, send_canary
from tandem.engine.fallback import fallback
from tandem.engine.layout import GangLayout
from tandem.engine.metrics import EngineMetrics
from tandem.engine.sizing import make_limits
from tandem.errors import RankFailure
from tandem.executors.base import Executor, Progress
from tandem.protocol.control import EngineMessage, Ready
from tandem.scheduler.scheduler import Limits, Scheduler

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


class Gang:
    """One gang of ranks after the other. Used by one thread."""

    def __init__(self, settings: Settings, layout: GangLayout, executor: Executor, metrics: EngineMetrics) -> None:
        """Nothing is started."""
        self._settings = settings
        self._metrics = metrics
        self._whole = layout
        self.executor = executor
        self.layout = layout
        self.degraded = ""
        """Why fewer machines serve than the settings name; empty when all do."""
        self.state = "starting"
        self.detail = "loading the model"
        self.restarts = 0
        self.ready: list[Ready] = []
        """What each rank said when it was ready."""
        self.load_s = 0.0
        """Seconds that the last start took."""
        self.on_wait: Callable[[], None] | None = None
        """Called about every 0.1 s while ranks are replaced. It may submit and abort requests."""
        self._failures_in_a_row = 0
        self._canary_s = 0.0
        self._ready_at = 0.0
        self._facts: list[Ready] = []
        """What the ranks of the whole layout have said of their machines."""
        self._sought_at = 0.0

    def start(self, progress: Progress | None = None) -> Scheduler:
        """Load the model everywhere, for the first time. Raises UsageError or RankFailure, with nothing left running.

        A rank that is lost meanwhile (`LOSSES`) is replaced with the others, as later; what else goes wrong is raised.
        """
        while True:
            try:
                self._launch(progress)
                if specs := self.executor.specs:
                    self._whole = self.layout = replace(self.layout, ranks=tuple(specs))
                limits = self._limits()
                self._facts = self.ready
                scheduler = Scheduler(limits, first_step=self._canary(limits, 0))
                break
            except RankFailure as failure:
                if failure.cause not in LOSSES or self._failures_in_a_row >= self._settings.scheduler.max_restarts:
                    self.executor.shutdown()
                    raise
                self._count_failure(failure)
                self.executor.close()
                self.state, self.detail = "starting", f"starting again after: {failure.message}"
            except BaseException:
                self.executor.shutdown()
                raise
        self._metrics.kv_total.set(limits.kv_tokens)
        self._stand()
        return scheduler

    def _launch(self, progress: Progress | None = None) -> None:
        started = time.monotonic()
        self.ready = self.executor.start(progress)
        self.load_s = time.monotonic() - started
        self._metrics.load_seconds.set(self.load_s)

    def _stand(self) -> None:
        if self.state != "draining":
            self.state, self.detail = "ready", ""
        self._ready_at = time.monotonic()

    def _limits(self) -> Limits:
        return make_limits(self._settings, self.layout, self.ready, shrink=bool(self.degraded))

    def _canary(self, limits: Limits, first_step: int) -> int:
        """Check the ranks against one another; returns the number of the next step. Raises RankFailure."""
        if not self._settings.scheduler.canary or len(self.layout.ranks) == 1:
            return first_step
        outcome = send_canary(self.executor, self.layout, limits, self.ready, first_step)
        self._canary_s = outcome.seconds
        return outcome.next_step

    def proven(self) -> None:
        """The gang has brought something: what fails next is the first failure in a row."""
        self._failures_in_a_row = 0

    def recover(self, scheduler: Scheduler, failure: RankFailure | None) -> list[EngineMessage]:
        """A new gang, and every request queued again with the tokens it has.

        Without a failure the old one ends on purpose, for the whole layout.
        """
        noticed, before = time.monotonic(), self.layout
        if noticed - self._ready_at > STABLE_S:
            self._failures_in_a_row = 0
        messages = scheduler.restart(blame=failure is not None)
        # Deaths that a request is to blame for say nothing against the machines.
        self._failures_in_a_row = max(self._failures_in_a_row - len(messages), 0)
        while True:
            if failure is None:
                self._announce("recovering", "all machines are back; the model is laid out over them again")
            else:
                self._count_failure(failure)
            self.executor.close()
            if failure is None:
                self._lay_out(self._whole, None, "")
            elif self._failures_in_a_row > self._settings.scheduler.max_restarts:
                self.state = "failed"
                raise RankFailure(f"gave up after {self._failures_in_a_row} failures in a row (max_restarts); the "
                                  f"last: {failure.message}", rank=failure.rank, cause=failure.cause)
            elif failure.cause == "host":
                self._do_without(failure)
            elif self._failures_in_a_row > 1:
                self._wait(min(BACKOFF_S * 2 ** self._failures_in_a_row, MAX_BACKOFF_S))
            try:
                self.executor.on_wait = self.on_wait
                self._launch()
                if self.layout is not before:
                    messages += scheduler.resize(self._limits())
                    self._metrics.kv_total.set(scheduler.limits.kv_tokens)
                if self._canary_s < REPEAT_S:
                    scheduler.next_step = self._canary(scheduler.limits, scheduler.next_step)
                break
            except RankFailure as again:
                failure = again
        self._stand()
        self._metrics.recovery_seconds.observe(self._ready_at - noticed)
        log.info("the ranks are back after %.1f s; %d requests go on", self._ready_at - noticed,
                 len(scheduler.sequences))
        return messages

    # --- machines that are lost for longer ---

    def _do_without(self, failure: RankFailure) -> None:
        """Lay the model out over the machines that are there, if it fits; else go on waiting for the others."""
        present = self.executor.present()
        if present is None or not present or len(present) == len(self._whole.ranks):
            return
        found = fallback(self._settings, self._whole, self._facts, present)
        if found is None:
            log.error("the model does not fit on the %d machine(s) that remain; waiting for the others", len(present))
            return
        ranks = len(found.layout.ranks)
        self._lay_out(found.layout, found.slots, f"{ranks} of {len(self._whole.ranks)} ranks: {failure.message}")

    def _lay_out(self, layout: GangLayout, slots: tuple[int, ...] | None, degraded: str) -> None:
        if self.degraded != degraded:
            log.warning("degraded: %s", degraded) if degraded else log.info("all machines are back")
        self.layout, self.degraded = layout, degraded
        self.ready = []
        self.executor.relay(layout.ranks, slots)
        self._metrics.degraded.set(bool(degraded))

    def all_back(self) -> bool:
        """All machines are there, while fewer serve. Looked for once a second."""
        now = time.monotonic()
        if not self.degraded or now - self._sought_at < SEEK_S:
            return False
        self._sought_at = now
        return len(self.executor.present() or ()) == len(self._whole.ranks)

    def _count_failure(self, failure: RankFailure) -> None:
        self._failures_in_a_row += 1
        self.restarts += 1
        self._metrics.restarts.inc()
        self._metrics.failures.labels(failure.cause).inc()
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
