"""The self-check lets sound layouts serve without leaving a trace, and stops those that compute wrongly."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from engines import launched, plant, settings_of
from submitted import check
from tandem import LLM, SamplingParams
from tandem.engine.build_layout import make_executor, plan_layout
from tandem.engine.engine import Engine
from tandem.engine.engine_process import EngineService
from tandem.errors import RankFailure
from tandem.executors.executor import Executor, Progress
from tandem.protocol.control import Ready, Stepped
from tandem.protocol.step import StepPlan
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow

LAYOUTS = {"pp3 mlx": {"pipeline_parallel_size": 3, "channel": "mlx"}, "2,1": {"parallel": (2, 1)}}
"""All tests of other layouts begin with a self-check that passes."""
CHUNK = 16
Tamper = Callable[[Stepped], Stepped]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "gemma3_text")


@pytest.fixture(scope="module")
def answer(model: Path) -> list[int]:
    with LLM(str(model), prefill_chunk=CHUNK) as llm:
        return _generate(llm)


def _generate(llm: LLM) -> list[int]:
    prompt = [5 + i % 90 for i in range(50)]
    return llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))[0].token_ids


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sound_layout_passes_and_nothing_is_left_of_the_self_check(model: Path, answer: list[int], layout: str) -> None:
    with LLM(str(model), prefill_chunk=CHUNK, log_level="WARNING", **LAYOUTS[layout]) as llm:
        engine = llm.engine
        assert engine.scheduler.next_step > 10
        assert engine.idle
        status = engine.status()
        assert (status.kv_tokens_used, status.prefix_tokens, status.prefix_queries, status.running) == (0, 0, 0, 0)
        assert b"tandem_generation_tokens_total 0.0" in engine.metrics.text()
        assert b"tandem_rank_step_seconds_count" not in engine.metrics.text()
        assert _generate(llm) == answer
        check(llm)


def test_layouts_of_one_rank_and_no_self_check_skip_it(model: Path, answer: list[int]) -> None:
    for options in ({"executor": "cluster"}, {"pipeline_parallel_size": 2, "self_check": False}):
        with LLM(str(model), prefill_chunk=CHUNK, log_level="WARNING", **options) as llm:
            assert llm.engine.scheduler.next_step == 0
            assert _generate(llm) == answer


def test_small_contexts_and_kv_caches_still_get_a_self_check(model: Path) -> None:
    for options in ({"kv_tokens": 40}, {"max_context": 20}, {"prefill_chunk": 1}):
        with LLM(str(model), log_level="WARNING", pipeline_parallel_size=2, **options) as llm:
            assert llm.engine.scheduler.next_step > 5
    with LLM(str(model), log_level="WARNING", pipeline_parallel_size=2, kv_tokens=8) as llm:
        assert llm.engine.scheduler.next_step == 0
        assert llm.generate([[3, 4]], SamplingParams(max_tokens=2))


class Tampering(Executor):
    """Passes everything on, but changes what ranks report."""

    def __init__(self, inner: Executor, tamper: Tamper) -> None:
        self._inner = inner
        self._tamper = tamper

    def start(self, progress: Progress | None = None) -> list[Ready]:
        return self._inner.start(progress)

    def submit(self, plan: StepPlan) -> None:
        self._inner.submit(plan)

    def collect(self, timeout_s: float) -> list[Stepped]:
        return [self._tamper(report) for report in self._inner.collect(timeout_s)]

    def close(self) -> None:
        self._inner.close()

    @property
    def pids(self) -> list[int]:
        return self._inner.pids


def _crowded(report: Stepped) -> bool:
    return report.result is not None and len(report.result.tokens) > 1 and "self-check-0" in report.result.logprobs


def _other_token(change: Callable[[int], int]) -> Tamper:
    def tamper(report: Stepped) -> Stepped:
        if not _crowded(report):
            return report
        return replace(report, result=replace(report.result, tokens=[change(one) for one in report.result.tokens]))

    return tamper


def _shifted(by: float) -> Tamper:
    def tamper(report: Stepped) -> Stepped:
        if not _crowded(report):
            return report
        logprobs = dict(report.result.logprobs)
        [old] = logprobs["self-check-0"]
        logprobs["self-check-0"] = [replace(old, logprob=old.logprob - by, top=[(t, p - by) for t, p in old.top])]
        return replace(report, result=replace(report.result, logprobs=logprobs))

    return tamper


def _other_digest(place: int) -> Tamper:
    def tamper(report: Stepped) -> Stepped:
        if report.step.rank != 1 or report.step.digest is None:
            return report
        digest = list(report.step.digest)
        digest[place] ^= 4
        return replace(report, step=replace(report.step, digest=tuple(digest)))

    return tamper


FAULTS = {
    "a token": (_other_token(lambda token: token ^ 1), {"pipeline_parallel_size": 2}, "where token"),
    "a token that is none": (_other_token(lambda _: 10**6), {"pipeline_parallel_size": 2}, "of a vocabulary of 512"),
    "logits that are not finite": (_other_token(lambda _: -1), {"tensor_parallel_size": 2}, "not finite"),
    "a log probability": (_shifted(0.5), {"pipeline_parallel_size": 2}, "differ by 0.5"),
    "a log probability that is none": (_shifted(float("nan")), {"pipeline_parallel_size": 2}, "log probability nan"),
    "what a stage received": (_other_digest(0), {"pipeline_parallel_size": 2}, "stage 1 sent in step"),
    "what a rank of a stage held": (_other_digest(1), {"tensor_parallel_size": 2}, "rank 1 holds other activations"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught_and_ends_the_ranks(model: Path, fault: str) -> None:
    tamper, options, words = FAULTS[fault]
    settings = settings_of(model, prefill_chunk=CHUNK, **options)
    layout = plan_layout(settings)
    seen: list[list[int]] = []

    class Noting(Tampering):
        def submit(self, plan: StepPlan) -> None:
            seen.append(self.pids)
            super().submit(plan)

    engine = Engine(settings, layout, Noting(make_executor(settings, layout), tamper))
    with pytest.raises(RankFailure, match=words):
        engine.start()
    assert engine.state == "starting"
    for pid in seen[0]:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_engine_ends_with_code_3(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = settings_of(model, prefill_chunk=CHUNK, pipeline_parallel_size=2, engine_socket=str(tmp_path / "engine.sock"))
    service = EngineService(settings)
    service._engine.rank_group.executor = Tampering(service._engine.executor, _shifted(3.0))
    reports: list[str] = []
    assert service.run(reports.append) == 3
    assert "--no-self-check" in caplog.text and "--no-self-check" in reports[0]


LONG = """
wrong = rank == 1 and h.shape[1] > 12
h = super().forward(h, caches)
return h * 1.5 + 0.1 if wrong else h
"""
"""Wrong from so many positions in one pass on, as with a link that breaks long messages."""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pipeline_parallel_size": 3, "layer_split": (1, 2, 1)}, "log probabilities of its token 1 differ"),
        ({"tensor_parallel_size": 2}, "rank 1 holds other activations"),
    ],
    ids=["pp3", "tp2"],
)
def test_a_rank_that_is_wrong_in_long_passes_is_caught(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], words: str
) -> None:
    engine = launched(settings_of(model, prefill_chunk=CHUNK, **options), plant(tmp_path, monkeypatch, LONG))
    with pytest.raises(RankFailure, match=words):
        engine.start()
