"""What Metal's errors lead to: ranks raise them in its words, for no Metal is at hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engines import launched, plant, settings_of
from tandem.engine import recovery
from tandem.engine.build_layout import plan_layout, say_what_is_idle
from tandem.engine.engine import Engine
from tandem.errors import ConfigError, GpuSilent, RankFailure
from tandem.executors import gpu_probe, watchdog
from tandem.executors.failure_cause import rank_failure
from tandem.launchers.local import LocalLauncher
from tandem.protocol.control import Output, Refused
from tandem.protocol.request import EngineRequest, SamplingParams

FULL = "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
LATE = "[METAL] Command buffer execution failed: Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)"
IGNORED = "Command buffer execution failed: Ignored (for causing prior/excessive GPU errors)"
PROMPT = [*range(10, 50)]

BEFORE = f"""
how, marks, full = os.environ["HOW"], Path(os.environ["MARKS"]), RuntimeError("{FULL}")
if how == "wedged" and rank == 1:
    from tandem.executors import gpu_probe

    gpu_probe.PROBE_S = 0.2
    gpu_probe.on_gpu = lambda: True
    gpu_probe.small_product = lambda: time.sleep(1000)


def once():
    # True for the first rank group alone.
    mark = marks / str(rank)
    first = not mark.exists()
    mark.touch()
    return first
"""
FORWARD = f"""
positions = h.shape[0] * h.shape[1]
if rank == 1 and (how == "always full" or (how == "full" and positions > 4)):
    raise full
if how in ("stopped", "slow") and positions > 1 and once():
    if rank == 0:
        time.sleep(0.5)
        raise RuntimeError("{LATE}")
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
return super().forward(h, caches)
"""


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalLauncher:
    monkeypatch.setattr(recovery, "BACKOFF_S", 0.01)
    monkeypatch.setenv("MARKS", str(tmp_path))
    return plant(tmp_path, monkeypatch, FORWARD, BEFORE)


def answered(model: Path, launcher: LocalLauncher, **parallel: int) -> tuple[Engine, list[int], list[Refused]]:
    """The engine after one greedy request, its tokens, and refusals."""
    engine = launched(settings_of(model, prefill_chunk=16, self_check=False, kv_tokens=400, **parallel), launcher)
    engine.start()
    try:
        engine.submit(
            EngineRequest(request_id="a", prompt=PROMPT, params=SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
        )
        tokens: list[int] = []
        refused: list[Refused] = []
        while not engine.idle:
            for message in engine.pump(0.1):
                tokens += message.tokens if isinstance(message, Output) else []
                refused += [message] if isinstance(message, Refused) else []
        return engine, tokens, refused
    finally:
        engine.close()


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> list[int]:
    return answered(model, LocalLauncher(1))[1]


def failures(engine: Engine, cause: str) -> float:
    return engine.metrics.failures.labels(cause)._value.get()


@pytest.mark.slow
def test_a_gpu_that_is_full_gets_less_to_do_and_the_request_is_answered(
    model: Path, launcher: LocalLauncher, undisturbed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOW", "full")
    engine, tokens, refused = answered(model, launcher, pipeline_parallel_size=2)
    assert (tokens, refused) == (undisturbed, [])
    assert failures(engine, "memory") == engine.rank_group.restarts == 2
    limits = engine.scheduler.limits
    assert (limits.prefill_chunk, limits.kv_tokens, limits.max_batch_size) == (4, 100, 8)


@pytest.mark.slow
def test_a_request_that_no_gpu_has_room_for_does_not_end_the_engine(
    model: Path, launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOW", "always full")
    monkeypatch.setattr("tandem.scheduler.quarantine.REST_S", 0.5)
    engine, tokens, refused = answered(model, launcher, pipeline_parallel_size=2)
    assert tokens == []
    assert [(one.status, one.code) for one in refused] == [(500, "rank_failure")]
    assert failures(engine, "memory") == 6  # twice with less to do, four times blamed on the request: twice alone


@pytest.mark.slow
@pytest.mark.parametrize(("how", "cause"), [("stopped", "stopped"), ("slow", "timeout")])
def test_the_rank_whose_gpu_waited_is_not_to_blame(
    model: Path,
    launcher: LocalLauncher,
    undisturbed: list[int],
    how: str,
    cause: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("HOW", how)
    for limit in ("STOPPED_S", "SILENT_S"):  # it is the other rank's word by which it is noticed
        monkeypatch.setattr(watchdog, limit, 600.0)
    engine, tokens, refused = answered(model, launcher, tensor_parallel_size=2)
    assert (tokens, refused) == (undisturbed, [])
    assert failures(engine, cause) == engine.rank_group.restarts == 1
    words = {
        "stopped": r"part 2 on \S+ stands still: its process is stopped; the GPU of part 1 on \S+ waited for it",
        "slow": r"part 1 on \S+: a command took its GPU longer than macOS allows",
    }
    assert re.search(words[how], caplog.text)


def test_a_gpu_that_takes_work_and_never_ends_it_is_named_before_anything_is_loaded(
    model: Path, launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOW", "wedged")
    with pytest.raises(RankFailure, match="rank 1: its GPU does not answer.*restart that machine") as failure:
        answered(model, launcher, pipeline_parallel_size=2)
    assert (failure.value.cause, failure.value.rank, failure.value.blame) == ("gpu", 1, False)


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"fast_sync": "on", "device": "cpu"}, "--device cpu leaves them idle; leave one out"),
        ({"fast_sync": "on", "tensor_parallel_size": 2}, "all ranks run on this machine, which is none"),
    ],
)
def test_fast_fences_are_refused_where_no_rank_can_have_them(model: Path, parallel: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_layout(settings_of(model, **parallel))
    with pytest.raises(ConfigError, match="--wired 1GB: is about the GPUs of Macs, and --device cpu"):
        plan_layout(settings_of(model, device="cpu", wired="1GB"))
    with pytest.raises(ConfigError, match="--wired 1GB: is about the GPUs of Macs, and all ranks run on this machine"):
        plan_layout(settings_of(model, wired="1GB"))
    ranks = plan_layout(settings_of(model, fast_sync="auto", parallel=(2, 1))).ranks
    assert [rank.fast_fences for rank in ranks] == [True, True, False]


def test_an_option_that_has_no_effect_is_said_once_in_a_line(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    for parallel, lines in (
        ({"backend": "jaccl", "pipeline_parallel_size": 2}, 1),
        ({"backend": "ring", "tensor_parallel_size": 2}, 0),
        ({}, 0),
    ):
        settings = settings_of(model, **parallel)
        caplog.clear()
        say_what_is_idle(settings, plan_layout(settings))
        assert caplog.text.count("--backend jaccl does nothing here") == len(caplog.messages) == lines


def test_the_probe_costs_nothing_on_a_cpu_and_names_a_gpu_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Exception] = []
    gpu_probe.probe_gpu(told.append)  # MLX computes on the CPU here, or its GPU answers
    monkeypatch.setattr(gpu_probe, "on_gpu", lambda: True)
    gpu_probe.probe_gpu(told.append)  # a real product
    for words, error in ((f"[METAL] {IGNORED}", GpuSilent), (FULL, RuntimeError)):

        def refuse(words: str = words) -> None:
            raise RuntimeError(words)

        monkeypatch.setattr(gpu_probe, "small_product", refuse)
        with pytest.raises(error) as raised:
            gpu_probe.probe_gpu(told.append)
        assert type(raised.value) is error
    assert told == []


@pytest.mark.parametrize(("message", "cause"), [(FULL, "memory"), (LATE, "timeout"), ("division by zero", "error")])
def test_errors_are_told_apart_by_their_words(message: str, cause: str) -> None:
    failure = rank_failure(3, "RuntimeError", message)
    assert (failure.cause, failure.rank) == (cause, 3)
    assert message in failure.message
    assert ("lower --max-batch-size" in failure.message) == (cause == "memory")
