"""A rank's two threads: one owns MLX and executes plans, the other waits for results.

While the device computes a step the next one is built, and tokens are sent as soon as they exist. That helps on CPUs too,
where dispatching takes nearly as long as computing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from msgspec import Struct

from tandem.crash_guard import start_thread
from tandem.executors.lent_threads import LentThread
from tandem.protocol.adapters import LoadAdapter
from tandem.protocol.control import Answer, Ready, Stepped
from tandem.protocol.kv_blocks import Fetch, Survey, UseRemoteStores
from tandem.protocol.pictures import EncodePicture, PictureEncoded
from tandem.protocol.step import RankStep, StepPlan
from tandem.runner.runner import PendingStep, Runner
from tandem.transport.mailbox import Mailbox


class Loaded(Struct, frozen=True):
    """Loading progress: `done` of `total` bytes in `phase` (`fetch` or `load`)."""

    phase: str
    done: int
    total: int


Event = Loaded | Ready | Stepped | Answer | Exception
Report = Callable[[str, int, int], None]
"""Callback for loading progress: (phase, bytes done, total bytes)."""
Build = Callable[[Report], tuple[Runner, Ready]]
"""Function that loads the model with a progress callback, and returns the runner and its `Ready`."""


class RankLoop:
    """Loop that loads the model, then executes plans in the order of `submit`. All reports and errors go to the mailbox."""

    def __init__(self, rank: int, build: Build, mailbox: Mailbox[Event], memory: Callable[[], tuple[int, int]]) -> None:
        """Start loading. `memory` returns (peak bytes, bytes in use)."""
        self._rank = rank
        self._build = build
        self._mailbox = mailbox
        self._memory = memory
        self._plans: queue.SimpleQueue[StepPlan | LoadAdapter | EncodePicture | None] = queue.SimpleQueue()
        self._steps: queue.SimpleQueue[PendingStep | None] = queue.SimpleQueue()
        self._finished_at = 0.0
        self._runner: Runner | None = None
        self._begun = -1
        self._threads: tuple[LentThread | threading.Thread, ...] = (
            LentThread(self._compute),
            start_thread(self._report, name="results"),
        )

    def submit(self, plan: StepPlan | LoadAdapter | EncodePicture) -> None:
        """Queue a plan, or an order to carry out between plans, and return at once."""
        self._plans.put(plan)

    def fetch(self, order: Fetch | UseRemoteStores | Survey) -> None:
        """Pass an order to the disk thread, which runs beside the computation."""
        assert self._runner is not None and self._runner.disk is not None
        self._runner.disk.take_order(order)

    def where(self) -> tuple[int, bool]:
        """Return the last step begun (-1 before the first), and True if waiting for another stage. Thread-safe."""
        return self._begun, self._runner is not None and self._runner.waiting

    def stop(self, timeout_s: float) -> bool:
        """Finish queued plans and end the threads. Return False after `timeout_s` seconds."""
        self._plans.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        if self._runner is not None and self._runner.pictures is not None and self._runner.pictures.features is not None:
            self._runner.pictures.features.close()
        if self._runner is not None and self._runner.disk is not None:
            self._runner.disk.close(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _compute(self) -> None:
        try:
            runner, ready = self._build(lambda *progress: self._mailbox.put(Loaded(*progress)))
            self._runner = runner
            self._mailbox.put(ready)
            while (plan := self._plans.get()) is not None:
                if isinstance(plan, LoadAdapter):
                    self._mailbox.put(runner.adapt(plan, self._rank))
                elif isinstance(plan, EncodePicture):
                    assert runner.pictures is not None and runner.pictures.features is not None
                    if (error := runner.pictures.features.encode(plan, self._mailbox.put)) is not None:
                        self._mailbox.put(PictureEncoded(self._rank, plan.key, error))
                else:
                    self._begun = plan.step_id
                    self._steps.put(runner.execute(plan))
        except Exception as error:  # noqa: BLE001 - the thread's border: whoever reads the mailbox decides
            self._mailbox.put(error)
        finally:
            self._steps.put(None)

    def _report(self) -> None:
        try:
            while (step := self._steps.get()) is not None:
                result = step.finish()
                now = time.perf_counter()
                busy = step.busy_s(self._finished_at, now)
                self._finished_at = now
                peak, used = self._memory()
                account = RankStep(self._rank, step.plan.step_id, busy, step.kv_bytes, step.prefix_bytes, step.digest())
                self._mailbox.put(Stepped(account, peak, result, used))
        except Exception as error:  # noqa: BLE001 - as above
            self._mailbox.put(error)
