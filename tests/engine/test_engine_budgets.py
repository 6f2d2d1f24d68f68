"""Budgets of thinking in real layouts: each holds, and the tokens are those of one process, sequence by sequence."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from submitted import Killer, ask, check, submitted
from tandem import LLM, SamplingParams, StructuredOutputs
from tandem.engine.engine import Engine
from tandem.protocol.request import EngineRequest
from tandem.protocol.thinking import ThinkingBudget, ThinkingTokens, begin, follow
from tandem.testing import tiny_model

NGRAM = {"speculative_method": "ngram", "num_speculative_tokens": 4}
LAYOUTS = {
    "inline": {},
    "pp2": {"pipeline_parallel_size": 2},
    "tp2": {"tensor_parallel_size": 2},
    "tp2,1": {"parallel": (2, 1)},
    "speculation": NGRAM,
    "pp2 speculation": {"pipeline_parallel_size": 2, **NGRAM},
}
NEW, ANSWERS = 60, 24
FEW = {11: 40.0, 12: 40.0, 13: 38.0}
"""Texts of few different tokens, so that drafts from n-grams are right now and then."""
BEGUN = ThinkingTokens((500,), (501,), begun=True)
OPENS = ThinkingTokens((11,), (501, 502))
CHANNELS = ThinkingTokens((11, 12), (13,), again=True)
BUDGETS = [
    ThinkingBudget(25, BEGUN),
    ThinkingBudget(7, BEGUN, (300, 301, 302)),
    ThinkingBudget(0, BEGUN),
    ThinkingBudget(18, OPENS),
    ThinkingBudget(6, CHANNELS),
    ThinkingBudget(200, BEGUN),
]


def requests() -> list[EngineRequest]:
    rng = random.Random(5)
    made = []
    for number in range(ANSWERS):
        budget = BUDGETS[number % len(BUDGETS)]
        params = SamplingParams(
            max_tokens=NEW,
            temperature=0.0 if number < len(BUDGETS) else 0.8,
            seed=number,
            ignore_eos=True,
            logit_bias=FEW,
            thinking=budget,
        )
        prompt = [rng.randrange(3, 480) for _ in range(rng.choice((3, 18, 40)))]
        made.append(EngineRequest(request_id=str(number), prompt=prompt, params=params))
    return made


def answered(llm: LLM, *seen: Killer) -> list[list[int]]:
    tokens: dict[str, list[int]] = {}
    for message in submitted(llm, requests(), *seen):
        tokens.setdefault(message.request_id, []).extend(message.tokens)
    return [tokens[str(number)] for number in range(ANSWERS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), layers=2)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """Each alone in one process."""
    found = []
    with LLM(str(model)) as llm:
        for request in requests():
            found.append([token for message in submitted(llm, [request]) for token in message.tokens])
    for request, tokens in zip(requests(), found, strict=True):
        budget = request.params.thinking
        assert budget is not None
        thought = follow(budget.tokens, begin(budget.tokens), tokens)
        assert thought.spent <= budget.limit + len(budget.message)
        if budget.limit < NEW and budget.tokens is BEGUN:
            assert tokens[budget.limit :][: len(budget.message) + 1] == [*budget.message, 501]
    return found


@pytest.mark.parametrize(
    "layout", ["inline", "speculation", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tp2,1", "pp2 speculation"))]
)
def test_a_batch_in_a_layout_gives_the_tokens_of_each_alone(
    model: Path, expected: list[list[int]], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.speculation.proposers.StepCosts.ratio", lambda self, rows, width: 1.0)
    with LLM(str(model), prefill_chunk=16, **LAYOUTS[layout]) as llm:
        assert answered(llm) == expected
        if "speculation" in layout:
            assert ask(llm, Engine.status).accepted_tokens > 10


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "tp2", "pp2 speculation"])
def test_a_rank_that_dies_changes_nothing(model: Path, expected: list[list[int]], layout: str) -> None:
    told = 0

    def midway(message: object) -> bool:
        nonlocal told
        told += 1
        return told > 100

    with LLM(str(model), prefill_chunk=16, **LAYOUTS[layout]) as llm:
        assert answered(llm, Killer(llm, midway)) == expected
        assert llm.engine.restarts == 1


@pytest.mark.parametrize("message", [(), (300, 301)], ids=["at once", "after a sentence"])
def test_a_grammar_goes_on_where_the_budget_ends_the_reasoning(model: Path, message: tuple[int, ...]) -> None:
    closing = 1
    form = StructuredOutputs(grammar=f'start: free answer\nfree: /(.|\\n)*/ <[{closing}]>\nanswer: "yes" | "no"')
    budget = ThinkingBudget(10, ThinkingTokens((500,), (closing,), begun=True), message)
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=1, structured_outputs=form)
    with LLM(str(model)) as llm:
        limited = [replace(params, thinking=budget, seed=seed) for seed in range(6)]
        outputs = [llm.generate([prompt.prompt], one)[0] for prompt, one in zip(requests(), limited, strict=False)]
        free = llm.generate([requests()[0].prompt], params)[0].token_ids
    assert closing not in free[:11]
    for output in outputs:
        at = output.token_ids.index(closing)
        assert at <= 10 + len(message) + 3  # a character that has begun takes up to three bytes more
        assert output.text.endswith(("yes", "no"))
    ends = [tuple(output.token_ids[10 : output.token_ids.index(closing)]) for output in outputs]
    assert message in ends and all(end == message or not set(end) & set(message) for end in ends)


def test_a_full_kv_cache_preempts_and_changes_nothing(model: Path, expected: list[list[int]]) -> None:
    with LLM(str(model), kv_tokens=450) as llm:
        assert answered(llm) == expected
        check(llm)
        assert llm.engine.scheduler.batches.preemptions > 0
