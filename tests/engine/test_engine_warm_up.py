"""Before an engine is ready its ranks have met the shapes of a burst, within the time allowed, and nothing is left of it."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engines import ready, settings_of, stepped
from scheduler_invariants import make_limits
from tandem import LLM, SamplingParams
from tandem.engine.build_layout import plan_layout
from tandem.engine.engine import Engine
from tandem.engine.warm_up import chosen_chunk, warm_up
from tandem.executors.executor import Executor, Progress, Report
from tandem.protocol.control import Ready, Stepped
from tandem.protocol.step import GrammarReady, StepPlan
from tandem.runner.runner import Runner
from tandem.scheduler.limits import Limits
from tandem.testing import tiny_model


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("long"), config={"max_position_embeddings": 16_384})


class Recording(Executor):
    """Ranks that compute nothing and record their plans. A prompt token takes 0.1 ms, and each pass `pass_s` more."""

    def __init__(self, pass_s: float = 0.0, **said: Any) -> None:
        self.plans: list[StepPlan] = []
        self._pass_s, self._said = pass_s, said
        self._unanswered: list[StepPlan] = []

    def start(self, progress: Progress | None = None) -> list[Ready]:
        return [ready(0, **self._said)]

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._unanswered.append(plan)

    def collect(self, timeout_s: float) -> Sequence[Report]:
        plans, self._unanswered = self._unanswered, []
        constrained = [one for plan in plans for one in plan.inserts if one.params.structured_outputs is not None]
        return [*(GrammarReady(0, one.request_id) for one in constrained), *(self._report(plan) for plan in plans)]

    def _report(self, plan: StepPlan) -> Stepped:
        [report] = stepped(plan, 1)
        tokens = sum(op.count for op in plan.prefill)
        return replace(report, step=replace(report.step, busy_s=tokens / 10_000 + (self._pass_s if tokens else 0.0)))

    def close(self) -> None: ...


def _started(model: Path, executor: Recording, **settings: Any) -> Engine:
    wanted = settings_of(model, **settings)
    engine = Engine(wanted, plan_layout(wanted), executor)
    engine.start()
    return engine


def test_every_number_of_rows_a_chunk_and_all_samplers_are_met_before_ready(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    executor = Recording()
    with caplog.at_level(logging.INFO):
        engine = _started(
            model,
            executor,
            warm_up_seconds=60,
            max_batch_size=12,
            prefill_chunk=16,
            speculative_method="ngram",
            num_speculative_tokens=5,
        )
    assert engine.state == "ready" and engine.idle
    assert engine.scheduler.next_step == executor.plans[-1].step_id + 1
    assert {len(plan.decode) for plan in executor.plans} >= {1, 2, 4, 8, 12}
    assert {op.count for plan in executor.plans for op in plan.prefill} >= {16, 2}
    assert {plan.width for plan in executor.plans} == {1, 2, 3, 4, 5, 6}
    params = [insert.params for plan in executor.plans for insert in plan.inserts]
    for unlike in ("top_k", "top_p", "min_p", "repetition_penalty", "logprobs"):
        assert len({getattr(one, unlike) for one in params}) > 1
    inserted = [insert.request_id for plan in executor.plans for insert in plan.inserts]
    assert sorted(inserted) == sorted(request_id for plan in executor.plans for request_id in plan.removes)
    [line] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Warm-up: ")]
    assert "a prompt of 18 tokens, 1 rows, 2 rows" in line and "12 rows, steps with drafts, grammars" in line


def test_a_cpu_has_no_warm_up_unless_asked_and_a_gpu_has(model: Path) -> None:
    for gpu, changes, some in ((False, {}, False), (True, {}, True), (True, {"warm_up_seconds": 0}, False)):
        executor = Recording(gpu=gpu)
        _started(model, executor, **changes)
        assert bool(executor.plans) == some


def test_the_time_of_a_warm_up_ends_it_and_leaves_nothing(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    executor = Recording()
    with caplog.at_level(logging.INFO):
        engine = _started(model, executor, warm_up_seconds=1e-9)
    assert engine.idle and engine.state == "ready"
    assert "stopped by --warm-up-seconds at a prompt of " in caplog.text
    assert not any(plan.decode for plan in executor.plans)


@pytest.mark.parametrize(
    ("chosen", "pass_s", "memory", "changes"),
    [
        pytest.param(2048, 0.2, 2**40, {}, id="fastest"),
        pytest.param(512, 0.0, 2**40, {}, id="no faster"),
        pytest.param(512, 2.0, 2**40, {}, id="others would wait for it too long"),
        pytest.param(512, 0.2, 2**40, {"prefill_time_ms": 100}, id="longer than the setting"),
        pytest.param(512, 0.2, 2**30, {}, id="no memory for its activations"),
        pytest.param(64, 0.2, 2**40, {"prefill_chunk": 64}, id="set"),
    ],
)
def test_the_chunk_of_prompts_is_the_size_that_was_measured_as_fastest(
    long_model: Path, chosen: int, pass_s: float, memory: int, changes: dict[str, Any]
) -> None:
    executor = Recording(pass_s, gpu=True, memory_bytes=memory)
    limits = _started(long_model, executor, max_batch_size=2, warm_up_seconds=600, **changes).scheduler.limits
    assert limits.prefill_chunk == chosen


def test_chunks_that_shrink_over_stages_are_measured_whole(long_model: Path) -> None:
    executor, wanted = Recording(), settings_of(long_model)
    limits = make_limits(max_context=8192, kv_tokens=10_000, stages=2, prefill_chunk=512, prefill_doubling=64, max_batch_size=2)
    _, chunk = warm_up(executor, plan_layout(wanted), limits, 600, 0, [512, 1024, 2048, 256])
    assert [op.count for plan in executor.plans for op in plan.prefill].count(2048) == 4
    assert chunk == 512


def test_chunks_are_small_enough_to_fill_the_stages() -> None:
    limits = make_limits(max_context=4096)
    times = {512: 0.05, 1024: 0.09, 2048: 0.16, 256: 0.026}
    assert chosen_chunk(times, limits, 1) == 2048
    assert chosen_chunk(times, limits, 4) == 256
    assert chosen_chunk({512: 0.5, 2048: 1.0}, limits, 1) == 512


def test_answers_are_the_same_after_a_warm_up(model: Path) -> None:
    answers = []
    for seconds in (0, 600):
        with LLM(str(model), warm_up_seconds=seconds, max_batch_size=2, log_level="WARNING") as llm:
            assert (llm.engine.scheduler.next_step > 0) == bool(seconds)
            answers.append(llm.generate([[3, 4, 5]], SamplingParams(max_tokens=8, temperature=0.0))[0].token_ids)
            assert b"tandem_generation_tokens_total 8.0" in llm.engine.metrics.text()
            status = llm.engine.status()
            assert (status.kv_tokens_used, status.prefix_queries, status.running) == (0, 1, 0)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("family", "kv_dtype"), [("llama", "8bit"), ("gpt_oss", "auto"), ("qwen3_next", "auto")])
def test_prompts_padded_to_few_shapes_have_the_same_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kv_dtype: str
) -> None:
    model, rng, answers, shapes = (
        tiny_model(tmp_path, family, dtype="float32", config={"head_dim": 32, "sliding_window": 100}),
        random.Random(3),
        [],
        [],
    )
    prompts = [[rng.randrange(300) for _ in range(length)] for length in (5, 21, 22, 23, 40, 70, 71)]
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=1, prompt_logprobs=1)
    real = Runner._forward

    def forward(self: Runner, pending: Any, rows: tuple[int, int], *rest: Any) -> Any:
        shapes.append(rows)
        return real(self, pending, rows, *rest)

    for pads in (False, True):
        monkeypatch.setattr(Limits, "pads", lambda *_, pads=pads: pads)
        monkeypatch.setattr(Runner, "_forward", forward)
        with LLM(str(model), prefill_chunk=64, kv_dtype=kv_dtype, warm_up_seconds=0, log_level="WARNING") as llm:
            shapes.clear()
            found = llm.generate(prompts, params) + llm.generate([one[:64] + [7, 8] for one in prompts[5:]], params)
            answers.append([one.token_ids for one in found])
            if pads and family != "qwen3_next":
                assert {width for _, width in shapes if width > 1} <= {16, 32, 48, 64}
                assert {rows for rows, width in shapes if width > 1} <= {1, 2, 4}
    assert answers[0] == answers[1]
