"""A step in the engine's own process that does not end."""

from __future__ import annotations

import gc
import os
import resource
import threading
import weakref
from typing import Any

import pytest

from tandem.errors import EngineStuck, RankFailure
from tandem.executors.inline import InlineExecutor
from tandem.protocol.control import Ready
from tandem.protocol.layout import StageSpec
from tandem.protocol.step import StepPlan

SPEC = StageSpec(
    model_path="",
    model_name="m",
    rank=0,
    stage_sizes=(1,),
    layers=(0, 1),
    tensor_split=None,
    micro_batches=1,
    dtype="auto",
    dequantize="auto",
    vocab_size=10,
    memory_share=1.0,
    eos_token_ids=(),
    channel="",
    backend="",
    blas="none",
    log_level="INFO",
)
READY = Ready(
    rank=0, weight_bytes=1, kv_bytes_per_token=1, memory_bytes=1, peak_bytes=1, gpu=False, host="h", pid=1, trimmable=True
)


class StuckRunner:
    """Computes for good."""

    waiting = False
    disk = pictures = None

    def __init__(self, over: threading.Event) -> None:
        self.over = over

    def execute(self, plan: StepPlan) -> Any:
        self.over.wait(240)
        raise RuntimeError("over")


def wait_in_vain(executor: InlineExecutor) -> None:
    """As long as the executor has patience."""
    while True:
        assert executor.collect(0.1) == []


def test_it_is_noticed_and_only_another_process_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    executor = InlineExecutor(SPEC, step_timeout_s=0.5)
    monkeypatch.setattr(executor, "_build", lambda progress: (StuckRunner(over), READY))
    assert executor.start() == [READY]
    executor.submit(StepPlan(0, 0, decode=["a"]))
    with pytest.raises(EngineStuck, match="step 0 made no progress"):
        wait_in_vain(executor)
    over.set()
    executor.close()


def test_a_program_with_many_open_files_hears_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]  # select() takes descriptors below 1024
    executor = InlineExecutor(SPEC, step_timeout_s=60)
    over = threading.Event()
    monkeypatch.setattr(executor, "_build", lambda progress: (StuckRunner(over), READY))
    try:
        assert executor.start() == [READY]
        assert executor.collect(0.01) == []
        threading.Timer(0.05, over.set).start()
        executor.submit(StepPlan(0, 0, decode=["a"]))
        with pytest.raises(RankFailure, match="rank 0: RuntimeError: over"):
            executor.collect(60.0)
    finally:
        executor.close()
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_model_that_failed_is_not_held_by_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is loaded while the error is handled."""
    over = threading.Event()
    over.set()
    runners = [StuckRunner(over)]
    runner = weakref.ref(runners[0])
    executor = InlineExecutor(SPEC, step_timeout_s=60)
    monkeypatch.setattr(executor, "_build", lambda progress: (runners.pop(), READY))
    executor.start()
    executor.submit(StepPlan(0, 0, decode=["a"]))
    with pytest.raises(RankFailure, match="rank 0: RuntimeError: over") as failure:
        executor.collect(60.0)
    executor.close()
    gc.collect()
    assert runner() is None and failure.value.__cause__ is not None
