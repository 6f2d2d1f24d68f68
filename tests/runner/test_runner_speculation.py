"""Plans with drafts on a rank: whatever the drafts are, what is accepted is what one token at a time gives."""

from __future__ import annotations

import random
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

from stages import tiny_stage
from tandem.errors import BatchDesync
from tandem.loading.stage import StageModel
from tandem.protocol.logprobs import TokenLogprob
from tandem.protocol.request import SamplingParams
from tandem.protocol.step import (
    InsertOp,
    PrefillOp,
    SpecDecodePlan,
    SpecDecodeRow,
    StepPlan,
    StepResult,
    accepted,
    batch_fingerprint,
)
from tandem.runner.drafter import Drafter
from tandem.runner.runner import Runner
from tandem.runner.sampler import Sampler

DRAFTS, NEW = 3, 40
FAMILIES = {
    "llama": {},
    "gemma3_text": {"sliding_window": 8},
    "gpt_oss": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8},
    "qwen3_moe": {},
    "qwen3_next": {"full_attention_interval": 2},
    "mamba2": {},
    "deepseek_v32": {},
    "llama4": {"attention_chunk_size": 8},
    "gemma3n": {"sliding_window": 8},
}
PARAMS = {
    "greedy": SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True, logprobs=2),
    "drawn": SamplingParams(max_tokens=NEW, temperature=1.2, top_p=0.95, min_tokens=20, logit_bias={7: 2.0}, logprobs=0),
    "penalised": SamplingParams(max_tokens=NEW, temperature=0.8, repetition_penalty=1.3, ignore_eos=True),
}


@pytest.fixture(scope="module", params=FAMILIES)
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StageModel:
    layers = 4 if request.param in ("llama4", "gemma3n") else 2
    return tiny_stage(
        tmp_path_factory.mktemp("model"), request.param, layers=layers, config=FAMILIES[request.param], loaded_as="float32"
    )


class MicroBatch:
    """Follows one micro-batch's sequences as an engine does, with drafts of its own."""

    def __init__(self, stage: StageModel, prompts: dict[str, list[int]], drafts: int) -> None:
        self.runner = Runner(stage, micro_batches=1, vocab_size=stage.vocab_size, eos_token_ids=(2,), drafts=drafts)
        self.tokens = {name: list(prompt) for name, prompt in prompts.items()}
        self.logprobs: dict[str, list[TokenLogprob]] = {name: [] for name in prompts}
        self.prompts, self.step = prompts, 0
        plan = StepPlan(
            0,
            0,
            inserts=[InsertOp(name, prompt, len(prompt), PARAMS[name]) for name, prompt in prompts.items()],
            prefill=[PrefillOp(name, 0, len(prompt), True) for name, prompt in prompts.items()],
            sampling_seeds=dict.fromkeys(prompts, 11),
            fingerprint=batch_fingerprint((name, 0) for name in prompts),
        )
        self.run(plan)

    def run(self, plan: StepPlan) -> StepResult:
        result = self.runner.execute(plan).finish()
        rows = {row.request_id: row.tokens for row in plan.spec_decode_plan.rows} if plan.spec_decode_plan else {}
        given: dict[str, list[int]] = {}
        for name, token in zip(plan.sampled(), result.tokens, strict=True):
            given.setdefault(name, []).append(token)
        for name, sampled in given.items():
            taken = accepted(rows.get(name, [0]), sampled) + 1
            self.tokens[name] += sampled[:taken]
            self.logprobs[name] += result.logprobs.get(name, [])[:taken]
        self.step += 1
        return result

    def decode(self, drafts: dict[str, list[int]] | None = None) -> StepResult:
        """One step of all sequences; None: from the tokens that the rank holds."""
        lengths = [(name, len(tokens) - 1) for name, tokens in self.tokens.items()]
        spec = (
            None
            if drafts is None
            else SpecDecodePlan(
                [SpecDecodeRow(name, length, [self.tokens[name][-1], *drafts.get(name, [])]) for name, length in lengths]
            )
        )
        return self.run(
            StepPlan(self.step, 0, decode=list(self.tokens), fingerprint=batch_fingerprint(lengths), spec_decode_plan=spec)
        )

    def outputs(self) -> dict[str, list[int]]:
        return {name: tokens[len(self.prompts[name]) :][:NEW] for name, tokens in self.tokens.items()}


def prompts(vocab: int) -> dict[str, list[int]]:
    rng = random.Random(3)
    return {
        name: [rng.randrange(3, vocab) for _ in range(length)]
        for name, length in (("greedy", 5), ("drawn", 11), ("penalised", 2))
    }


def test_output_is_that_of_plain_decoding_whatever_the_drafts(stage: StageModel) -> None:
    plain = MicroBatch(stage, prompts(stage.vocab_size), 0)
    while min(map(len, plain.outputs().values())) < NEW:
        plain.decode()
    truth, rng = plain.outputs(), random.Random(8)
    micro_batch = MicroBatch(stage, prompts(stage.vocab_size), DRAFTS)
    wider = 0
    while min(map(len, micro_batch.outputs().values())) < NEW:
        drafts = {}
        for name, output in micro_batch.outputs().items():
            if name != "penalised":
                right = truth[name][len(output) :][: rng.randint(0, DRAFTS)]
                drafts[name] = [token if rng.random() < 0.8 else rng.randrange(stage.vocab_size) for token in right]
        micro_batch.decode(drafts)
        wider += any(drafts.values())
        if rng.random() < 0.2:  # back to plain steps: a plan without drafts hands its tokens out
            micro_batch.decode({})
            micro_batch.decode()
            micro_batch.decode()
    assert micro_batch.outputs() == truth
    assert 5 < wider < NEW / 1.5
    for name in ("greedy", "drawn"):
        for one, other in zip(micro_batch.logprobs[name][:NEW], plain.logprobs[name], strict=False):
            assert one.token == other.token
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> StageModel:
    return tiny_stage(tmp_path_factory.mktemp("model"), layers=1, loaded_as="float32")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (SpecDecodeRow("greedy", 9, [4]), "cannot be cut"),
        (SpecDecodeRow("greedy", 1, [4]), "cannot be cut"),
        (SpecDecodeRow("greedy", 5, []), "does not say"),
        (SpecDecodeRow("b", 5, [4]), "does not decode here"),
    ],
)
def test_a_plan_that_does_not_fit_stops_the_rank(llama: StageModel, row: SpecDecodeRow, words: str) -> None:
    micro_batch = MicroBatch(llama, {"greedy": [5, 6, 7, 8, 9]}, DRAFTS)
    with pytest.raises(BatchDesync, match=words):
        micro_batch.runner.execute(
            StepPlan(
                1, 0, decode=["greedy"], fingerprint=batch_fingerprint([("greedy", 5)]), spec_decode_plan=SpecDecodePlan([row])
            )
        )


def test_masks_may_differ_between_the_positions_of_a_row(llama: StageModel) -> None:
    micro_batch = MicroBatch(llama, {"greedy": [5, 6, 7]}, DRAFTS)
    allowed = np.zeros((3, llama.vocab_size), dtype=np.bool_)
    allowed[[0, 1, 2], [40, 41, 42]] = True
    row = SpecDecodeRow("greedy", 3, [micro_batch.tokens["greedy"][-1], 40, 41])
    plan = StepPlan(
        1, 0, decode=["greedy"], fingerprint=batch_fingerprint([("greedy", 3)]), spec_decode_plan=SpecDecodePlan([row])
    )
    assert micro_batch.runner.execute(plan, {"greedy": allowed}).finish().tokens == [40, 41, 42]


def test_rows_that_wait_are_only_cut(llama: StageModel) -> None:
    micro_batch = MicroBatch(llama, {"greedy": [5, 6, 7]}, DRAFTS)
    micro_batch.decode({"greedy": [1, 1, 1]})
    length = len(micro_batch.tokens["greedy"]) - 1
    plan = StepPlan(
        2,
        0,
        pause=True,
        fingerprint=batch_fingerprint([("greedy", length)]),
        spec_decode_plan=SpecDecodePlan([SpecDecodeRow("greedy", length)]),
    )
    assert micro_batch.runner.execute(plan).finish().tokens == []


def test_a_draft_model_reads_a_prompt_by_the_chunks_of_the_plan(llama: StageModel) -> None:
    drafter = Drafter(llama, micro_batches=1, drafts=3, vocab_size=llama.vocab_size)
    drafter.follow(StepPlan(0, 0, inserts=[InsertOp("a", [5] * 600, 600, SamplingParams())]))
    for chunk in range(2):
        drafter.read_prompt("a", 200 * chunk, mx.zeros((1, 200, 1)), 0, 200)
        known = drafter._known["a"]
        assert known.caches is not None and known.held == 200 * (chunk + 1)
        assert known.caches[0].keys.shape[2] == 600, "made once, at the length that is known"


def test_drafts_leave_the_distribution_of_drawn_tokens_as_it_is() -> None:
    """Chi-square of the accepted tokens of many seeds against the probabilities, drafts being the likeliest."""
    logits = np.random.default_rng(5).normal(size=(3, 8)).astype(np.float32)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    drafts = [int(row.argmax()) for row in logits[:2]]
    sampler, seeds = Sampler(8), 4000
    names = [f"s{seed}" for seed in range(seeds)]
    for seed, name in enumerate(names):
        sampler.add(name, SamplingParams(temperature=1.0), seed, [0], 1)
    sampled = np.array(
        sampler.sample(mx.array(np.tile(logits, (seeds, 1))), [one for one in names for _ in range(3)]).tokens
    ).reshape(seeds, 3)
    reached = [Counter[int](), Counter[int](), Counter[int]()]
    for row in sampled.tolist():
        for position in range(accepted([0, *drafts], row) + 1):
            reached[position][row[position]] += 1
    assert reached[0].total() == seeds > reached[1].total() > reached[2].total() > 100
    for position, counts in enumerate(reached):
        expected = probabilities[position] * counts.total()
        statistic = sum((counts[token] - expected[token]) ** 2 / expected[token] for token in range(8))
        assert statistic < 24.3, "7 degrees of freedom: exceeded once in a thousand sets of seeds"
