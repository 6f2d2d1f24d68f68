"""Inline executor: the whole model on one device, run by threads of the engine's process."""

from __future__ import annotations

import logging
import time
import traceback
from functools import partial

from msgspec.structs import replace

from tandem.errors import EngineStuck, GpuSilent, RankFailure, UsageError
from tandem.executors.assembly import build_runner, load_slice, require_memory
from tandem.executors.executor import Executor, Progress, Report
from tandem.executors.failure_cause import rank_failure
from tandem.executors.gpu_probe import probe_gpu
from tandem.executors.rank_loop import Event, Loaded, RankLoop
from tandem.executors.rank_loop import Report as LoadReport
from tandem.executors.watchdog import Watchdog
from tandem.executors.weight_source import obtain_files
from tandem.loading.memory import choose_device, memory_use
from tandem.protocol.adapters import LoadAdapter
from tandem.protocol.control import Ready
from tandem.protocol.kv_blocks import Fetch, Survey, UseRemoteStores
from tandem.protocol.layout import StageSpec
from tandem.protocol.pictures import EncodePicture
from tandem.protocol.step import StepPlan
from tandem.runner.runner import Runner
from tandem.transport.mailbox import Mailbox

log = logging.getLogger(__name__)

POLL_S = 0.1
STOP_S = 10.0


class InlineExecutor(Executor):
    """Executor of plans on one rank in this process, without bus or channel. A step that hangs can only be ended with the
    process."""

    def __init__(self, spec: StageSpec, *, step_timeout_s: float) -> None:
        self._spec = spec
        self.watchdog = Watchdog(1, step_timeout_s)
        self._loop: RankLoop | None = None
        self._mailbox: Mailbox[Event] | None = None

    def start(self, progress: Progress | None = None) -> list[Ready]:
        """Load the model into this process."""
        self.watchdog.begin(time.monotonic())
        self._mailbox = Mailbox()
        self._loop = RankLoop(0, self._build, self._mailbox, memory_use)
        while True:
            for event in self._wait(POLL_S):
                if isinstance(event, Loaded) and progress is not None:
                    progress(0, event.done, event.total, event.phase)
                elif isinstance(event, Ready):
                    self.watchdog.loaded(time.monotonic(), gpu=event.gpu, hosts=1)
                    return [event]
            self.on_wait()

    def _build(self, progress: LoadReport) -> tuple[Runner, Ready]:
        choose_device(self._spec.device)
        assert self._mailbox is not None
        probe_gpu(self._mailbox.put)
        # Ignore `weights_from`, as the engine's machine is this one.
        files = obtain_files(self._spec, None, partial(progress, "fetch"), accept=partial(require_memory, self._spec))
        stage = load_slice(self._spec, partial(progress, "load"), files=files)
        return build_runner(self._spec, stage, None, files=files, report=self._mailbox.put)

    def _started(self) -> tuple[RankLoop, Mailbox[Event]]:
        if self._loop is None or self._mailbox is None:
            raise RankFailure("the executor is not started", rank=0)
        return self._loop, self._mailbox

    def keep_apart(self, kv_space: str) -> None:
        """Set the KV namespace in the rank's specification."""
        self._spec = replace(self._spec, kv_space=kv_space)

    def submit(self, plan: StepPlan) -> None:
        """Queue a step for the thread that owns the device."""
        loop, _ = self._started()
        self.watchdog.planned(plan, time.monotonic())
        loop.submit(plan)

    def fetch(self, order: Fetch | UseRemoteStores | Survey) -> None:
        """Pass an order to the disk thread."""
        self._started()[0].fetch(order)

    def load_adapter(self, order: LoadAdapter) -> None:
        """Queue the order for the thread that owns the device."""
        self._started()[0].submit(order)

    def encode(self, order: EncodePicture) -> None:
        """Queue the order for the thread that owns the device."""
        loop, _ = self._started()
        self.watchdog.encodes([self._spec], time.monotonic())
        loop.submit(order)

    def collect(self, timeout_s: float) -> list[Report]:
        """Return finished steps and other reports; wait up to `timeout_s` seconds for the first. Raises EngineStuck."""
        reports = [event for event in self._wait(timeout_s) if isinstance(event, Report)]
        for report in reports:
            self.watchdog.take(report, time.monotonic())
        try:
            self.watchdog.look(time.monotonic(), lambda _: False)
        except RankFailure as failure:
            raise EngineStuck(failure.message, rank=0, cause=failure.cause) from failure
        return reports

    def _wait(self, timeout_s: float) -> list[Event]:
        """Wait for events. Any error of MLX is raised as a failure of the rank, since the runner's state is lost."""
        events = list(self._started()[1].take(timeout_s))
        for event in events:
            if not isinstance(event, Exception):
                continue
            if isinstance(event, GpuSilent):
                raise EngineStuck(f"rank 0: {event.message}", rank=0, cause=event.cause)
            known = isinstance(event, RankFailure | UsageError)
            if not known:
                log.error("Rank 0 failed: loading it again, requests continue\n%s", "".join(traceback.format_exception(event)))
            # The traceback references the model; free it, as another may be loaded while the error is handled.
            event.__traceback__ = event.__context__ = event.__cause__ = None
            if known:
                raise event
            raise rank_failure(0, type(event).__name__, str(event)) from event
        return events

    @property
    def wait_socket(self) -> object | None:
        """Socket that is readable when there are reports; None before `start`."""
        return self._mailbox.socket if self._mailbox else None

    def close(self) -> None:
        """Stop the threads and release the model."""
        if self._loop is not None:
            self._loop.stop(STOP_S)
            self._loop = None
        if self._mailbox is not None:
            self._mailbox.close()
            self._mailbox = None
