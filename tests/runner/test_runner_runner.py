"""A rank does what plans say and refuses anything else before it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from stages import tiny_stage
from tandem.errors import BatchDesync
from tandem.loading.stage import StageModel
from tandem.protocol.request import SamplingParams
from tandem.protocol.step import InsertOp, MoveOp, PrefillOp, SavePrefixOp, StepPlan, batch_fingerprint
from tandem.runner.runner import PendingStep, Runner

PARAMS = SamplingParams(max_tokens=8, temperature=0.0)
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> StageModel:
    return tiny_stage(tmp_path_factory.mktemp("model"))


@pytest.fixture
def runner(stage: StageModel) -> Runner:
    return Runner(stage, micro_batches=1, vocab_size=stage.vocab_size, eos_token_ids=(2,))


def first(**changes: object) -> StepPlan:
    values: dict[str, object] = {
        "inserts": [InsertOp("a", PROMPT, 4, PARAMS)],
        "prefill": [PrefillOp("a", 0, 4, True)],
        "sampling_seeds": {"a": 1},
        "fingerprint": batch_fingerprint([("a", 0)]),
        **changes,
    }
    return StepPlan(0, 0, **values)  # type: ignore[arg-type]


def decode(step: int, length: int, **changes: object) -> StepPlan:
    values: dict[str, object] = {"decode": ["a"], "fingerprint": batch_fingerprint([("a", length)]), **changes}
    return StepPlan(step, 0, **values)  # type: ignore[arg-type]


def test_steps_feed_on_the_token_that_the_rank_holds(runner: Runner, stage: StageModel) -> None:
    tokens = [runner.execute(first()).finish().tokens[0]]
    tokens += [runner.execute(decode(i, 3 + i)).finish().tokens[0] for i in (1, 2, 3)]
    caches, expected, feed = stage.make_caches(), [], PROMPT
    for _ in range(4):
        logits = stage.head(stage.forward(mx.array([feed]), caches)[:, -1:])
        feed = [int(mx.argmax(logits[0, -1]))]
        expected += feed
    assert tokens == expected


def test_a_part_of_a_prompt_is_computed_with_its_step(runner: Runner) -> None:
    """Otherwise all of a long prompt would be computed, and held in memory, with its last part."""
    mx.synchronize()
    before = mx.get_active_memory()
    pending = runner.execute(first(prefill=[PrefillOp("a", 0, 2, False)]))
    mx.synchronize()
    assert pending.kv_bytes and mx.get_active_memory() - before >= pending.kv_bytes


def test_a_long_prompt_has_caches_of_its_length_from_its_first_chunk_on(runner: Runner) -> None:
    sizes = []
    for number, at in enumerate((0, 200)):
        known = {"prefill": [PrefillOp("a", at, 200, False)], "fingerprint": batch_fingerprint([("a", at)])}
        inserts = [] if number else [InsertOp("a", [1] * 600, 600, PARAMS)]
        runner.execute(msgspec.structs.replace(first(inserts=inserts, **known), step_id=number))
        caches = runner._micro_batches[0].held["a"].caches
        assert caches is not None
        sizes.append(caches[0].keys.shape[2])
    assert sizes == [600, 600]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_texts_of_like_length_are_embedded_in_one_pass(pooling: Any, stage: StageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = {"a": 5, "b": 12, "c": 4, "d": 5, "e": 24, "f": 5}
    texts = {name: [ord(name) + i for i in range(length)] for name, length in lengths.items()}
    seen, forward = [], stage.forward
    monkeypatch.setattr(stage, "forward", lambda x, caches: (seen.append(x.shape), forward(x, caches))[1])

    def vectors(names: str) -> dict[str, bytes]:
        runner = Runner(stage, micro_batches=1, vocab_size=stage.vocab_size, eos_token_ids=(2,))
        params, fingerprint = SamplingParams(max_tokens=0), batch_fingerprint([(one, 0) for one in names])
        plan = StepPlan(
            0,
            0,
            inserts=[InsertOp(one, texts[one], lengths[one], params) for one in names],
            prefill=[PrefillOp(one, 0, lengths[one], True, pooling, False) for one in names],
            sampling_seeds=dict.fromkeys(names, 1),
            fingerprint=fingerprint,
        )
        return runner.execute(plan).finish().vectors

    together = vectors("abcdef")
    assert seen == [(4, 5), (1, 12), (1, 24)]
    for name, vector in together.items():
        assert np.frombuffer(vector, "<f4") == pytest.approx(np.frombuffer(vectors(name)[name], "<f4"), rel=1e-4)
    assert together.keys() == texts.keys()


def test_prompts_of_like_length_are_computed_in_one_pass(stage: StageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = {name: [ord(name) + i for i in range(length)] for name, length in {"a": 12, "b": 11, "c": 12, "d": 30}.items()}
    seen, forward = [], stage.forward
    monkeypatch.setattr(stage, "forward", lambda x, caches: (seen.append(x.shape), forward(x, caches))[1])

    def answers(names: str) -> dict[str, list[int]]:
        runner = Runner(stage, micro_batches=1, vocab_size=stage.vocab_size, eos_token_ids=(2,))
        lengths = {one: len(prompts[one]) for one in names}
        for number, (start, ends) in enumerate([(0, dict.fromkeys(names, 8)), (8, lengths)]):
            plan = StepPlan(
                number,
                0,
                inserts=[InsertOp(one, prompts[one], lengths[one], PARAMS) for one in names if not start],
                prefill=[PrefillOp(one, start, end - start, bool(start)) for one, end in ends.items()],
                sampling_seeds=dict.fromkeys(names, 1),
                fingerprint=batch_fingerprint([(one, start) for one in names]),
            )
            first = runner.execute(plan).finish().tokens
        second = StepPlan(2, 0, decode=list(names), fingerprint=batch_fingerprint(lengths.items()))
        found = zip(first, runner.execute(second).finish().tokens, strict=True)
        return dict(zip(names, map(list, found), strict=True))

    together = answers("abcd")
    assert seen == [(4, 8), (3, 4), (1, 22), (4, 1)]
    assert together == {**answers("a"), **answers("b"), **answers("c"), **answers("d")}


class Unsent:
    """A link to a stage that has sent no token yet."""

    def send(self, array: mx.array, step_id: int) -> None:
        pass

    def receive(self, shape: tuple[int, ...], dtype: mx.Dtype, step_id: int) -> mx.array:
        raise AssertionError(f"step {step_id} is waited for")


def test_a_first_stage_waits_for_no_token_that_may_be_on_its_way(tmp_path: Path) -> None:
    part = tiny_stage(tmp_path, part=range(1))
    runner = Runner(part, micro_batches=2, vocab_size=part.vocab_size, eos_token_ids=(2,), link=Unsent(), samples=False)
    runner.execute(step(0, 0, {"a": 0}, **insert("a")))
    runner.execute(step(1, 1, {"b": 0}, **insert("b")))
    runner.execute(step(2, 0, {"a": 4, "c": 0}, pause=True, **insert("c")))
    runner.execute(step(3, 1, {"b": 4, "d": 0}, pause=True, **insert("d")))


def test_a_removed_sequence_leaves_no_bytes(runner: Runner) -> None:
    runner.execute(first()).finish()
    pending = runner.execute(StepPlan(1, 0, removes=["a"], fingerprint=batch_fingerprint([])))
    assert pending.finish().tokens == [] and pending.kv_bytes == 0


@pytest.mark.parametrize(
    "plan",
    [
        decode(1, 5),
        decode(1, 4, decode=["b"]),
        decode(1, 4, decode=[]),
        decode(1, 4, removes=["b"]),
        decode(1, 4, fingerprint=""),
    ],
    ids=["length", "stranger", "left out", "removes a stranger", "no fingerprint"],
)
def test_a_plan_for_another_batch_stops_the_rank(runner: Runner, plan: StepPlan) -> None:
    runner.execute(first()).finish()
    with pytest.raises(BatchDesync, match="BATCH DESYNC DETECTED"):
        runner.execute(plan)


def test_unknown_prefixes_stop_the_rank(runner: Runner) -> None:
    with pytest.raises(BatchDesync):
        runner.execute(first(restores=[SavePrefixOp("a", "p7", 2)]))


def test_evicting_an_unknown_prefix_stops_the_rank(runner: Runner) -> None:
    with pytest.raises(BatchDesync):
        runner.execute(StepPlan(0, 0, evicts=["p0"], fingerprint=batch_fingerprint([])))


def step(number: int, micro_batch: int, lengths: dict[str, int], **changes: object) -> StepPlan:
    return StepPlan(number, micro_batch, fingerprint=batch_fingerprint(lengths.items()), **changes)  # type: ignore[arg-type]


def insert(request_id: str) -> dict[str, object]:
    return {
        "inserts": [InsertOp(request_id, PROMPT, 4, PARAMS)],
        "prefill": [PrefillOp(request_id, 0, 4, True)],
        "sampling_seeds": {request_id: 1},
    }


def test_sequences_that_wait_or_move_between_micro_batches_go_on_as_if_nothing_had_been(stage: StageModel) -> None:
    plain = Runner(stage, micro_batches=1, vocab_size=stage.vocab_size, eos_token_ids=(2,))
    expected = [plain.execute(first()).finish().tokens[0]]
    expected += [plain.execute(decode(i, 3 + i)).finish().tokens[0] for i in (1, 2, 3)]

    runner = Runner(stage, micro_batches=3, vocab_size=stage.vocab_size, eos_token_ids=(2,))
    tokens: dict[str, list[int]] = {"a": [], "b": []}

    def execute(plan: StepPlan) -> None:
        for request_id, token in zip(plan.sampled(), runner.execute(plan).finish().tokens, strict=True):
            tokens[request_id].append(token)

    execute(step(0, 0, {"a": 0}, **insert("a")))
    execute(step(1, 0, {"a": 4, "b": 0}, pause=True, **insert("b")))
    execute(step(2, 0, {"a": 4, "b": 4}, decode=["a", "b"]))
    execute(step(3, 0, {"a": 5}, decode=["a"], moves=[MoveOp("b", 0, 2)]))
    execute(step(4, 1, {"b": 5}, decode=["b"], moves=[MoveOp("b", 2, 1)]))
    execute(step(5, 1, {"b": 6, "a": 6}, decode=["b", "a"], moves=[MoveOp("a", 0, 1)]))
    assert tokens == {"a": expected, "b": expected}
    assert runner.execute(step(6, 1, {}, removes=["a", "b"])).kv_bytes == 0


def test_a_sequence_that_moves_from_where_it_is_not_stops_the_rank(stage: StageModel) -> None:
    runner = Runner(stage, micro_batches=2, vocab_size=stage.vocab_size, eos_token_ids=(2,))
    with pytest.raises(BatchDesync, match="is to move"):
        runner.execute(step(0, 0, {"a": 0}, moves=[MoveOp("a", 1, 0)]))


def test_what_is_not_allowed_is_not_chosen(runner: Runner, stage: StageModel) -> None:
    allowed = np.zeros(stage.vocab_size, dtype=np.bool_)
    allowed[77] = True
    assert runner.execute(first(), {"a": allowed}).finish().tokens == [77]
    assert runner.execute(decode(1, 4), {"b": allowed}).finish().tokens != [77]


def test_a_step_that_waited_while_the_one_before_was_computed_took_what_the_device_took():
    step = PendingStep(StepPlan(0, 0), started=10.0, waits=[(10.0, 13.0)])
    assert step.busy_s(before=12.0, now=15.0) == 2.0, "one second of the wait was the step before's"
    assert step.busy_s(before=14.0, now=15.0) == 1.0
    assert step.busy_s(before=0.0, now=15.0) == 2.0
