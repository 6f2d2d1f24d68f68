"""Budgets of thinking: the rule of tokens, and the sampler that keeps to it in batches, with drafts, after replays."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest

from tandem.errors import RequestError
from tandem.protocol.ranges import check_params
from tandem.protocol.request import SamplingParams
from tandem.protocol.thinking import Ruling, ThinkingBudget, ThinkingTokens, begin, follow, free_for, ruling
from tandem.runner.sampler import Sampler

OPEN, CLOSE, CALL, EOS = 10, 11, 12, 3
ONE = ThinkingTokens((OPEN,), (CLOSE,), (CALL,), begun=True)
NOT_BEGUN = ThinkingTokens((OPEN,), (CLOSE,), (CALL,))
CHANNELS = ThinkingTokens((20, 21, 22), (23,), (24,), again=True)
LONG = ThinkingTokens((30, 31, 32), (33, 31, 32), (30,), begun=True)


def counted(tags: ThinkingTokens, tokens: list[int]) -> int:
    return follow(tags, begin(tags), tokens).spent


@pytest.mark.parametrize(
    ("tags", "tokens", "count"),
    [
        (ONE, [1, 1, 1], 3),
        (ONE, [1, 1, CLOSE, 1, 1], 2),
        (ONE, [1, CALL, 1, 1], 1),
        (ONE, [CLOSE, 1, OPEN, 1, 1], 0),
        (NOT_BEGUN, [1, 1, 1], 0),
        (NOT_BEGUN, [1, OPEN, 1, 1, CLOSE, 1], 2),
        (NOT_BEGUN, [1] * 8 + [OPEN, 1], 0),
        (CHANNELS, [20, 21, 22, 1, 1, 23, 24, 20, 21, 22, 1, 23, 20, 5, 22, 1], 3),
        (LONG, [1, 33, 1, 33, 31, 32, 1], 3),
        (LONG, [1, 33, 31, 1], 4),
    ],
)
def test_reasoning_tokens_are_those_between_the_tags(tags: ThinkingTokens, tokens: list[int], count: int) -> None:
    assert counted(tags, tokens) == count


def test_the_rule_at_the_limit_near_it_and_after_it() -> None:
    budget = ThinkingBudget(20, ONE, (7, 8))

    def said(tokens: list[int]) -> Ruling | None:
        return ruling(budget, follow(ONE, begin(ONE), tokens))

    assert said([1] * 17) is None
    assert said([1] * 18) == said([1] * 19) == Ruling(CLOSE, "likely")
    assert [said([1] * 20), said([1] * 20 + [7]), said([1] * 20 + [7, 8])] == [
        Ruling(7, "force"),
        Ruling(8, "force"),
        Ruling(CLOSE, "force"),
    ]
    assert said([1] * 20 + [7, 8, 1, 1]) == Ruling(CLOSE, "force")  # where a grammar forbade it
    assert said([1] * 20 + [7, 8, CLOSE]) == Ruling(OPEN, "ban")
    assert said([1] * 5 + [CLOSE, 1, 1]) is None
    long = ThinkingBudget(4, LONG, (7,))
    tokens: list[int] = []
    while (next_one := ruling(long, follow(LONG, begin(LONG), tokens))) is None or next_one.how == "force":
        tokens.append(1 if next_one is None else next_one.token)
        assert len(tokens) < 20
        if tokens[-1] == 32:
            break
    assert tokens == [1, 1, 1, 1, 7, 33, 31, 32]


@pytest.mark.parametrize("tags", [ONE, NOT_BEGUN, CHANNELS, LONG])
def test_nothing_is_said_while_tokens_are_free_whatever_they_are(tags: ThinkingTokens) -> None:
    rng = random.Random(3)
    for _ in range(400):
        budget = ThinkingBudget(rng.randrange(40), tags)
        tokens = rng.choices([1, 2, *tags.opening, *tags.closing, *tags.ends], k=rng.randrange(30))
        thought = follow(tags, begin(tags), tokens)
        now, free = ruling(budget, thought), free_for(budget, thought)
        for count in range(int(min(free, 50))):
            after = follow(tags, thought, rng.choices([1, 2, *tags.opening, *tags.closing, *tags.ends], k=count))
            later = ruling(budget, after)
            assert later is None or (free == float("inf") and later == now)


VOCAB = 48
BUDGETS = {
    "begun": ThinkingBudget(12, ONE),
    "said": ThinkingBudget(9, ONE, (40, 41, 42)),
    "none": ThinkingBudget(0, ONE),
    "opens": ThinkingBudget(6, NOT_BEGUN),
    "channels": ThinkingBudget(5, CHANNELS),
    "long": ThinkingBudget(10, LONG),
}


def logits(name: str, position: int) -> mx.array:
    """A model that thinks for ever, and likes to begin again; what it likes depends on the position alone."""
    seed = sum(map(ord, name)) * 1000 + position
    row = np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32)
    row[[CLOSE, 23, 33, EOS, CALL, 24]] -= 6.0
    if name in ("opens", "channels") and position < 3:
        row[(OPEN,) if name == "opens" else (20, 21, 22)[position]] += 30.0
    row[OPEN] += 3.0 if position > 15 else 0.0
    return mx.array(row)


def params(name: str, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(max_tokens=60, temperature=temperature, seed=4, thinking=BUDGETS[name])


def alone(name: str, steps: int, temperature: float = 1.0) -> list[int]:
    """Tokens of one sequence, each read before the next is drawn."""
    sampler = Sampler(VOCAB, (EOS,))
    sampler.add(name, params(name, temperature), 5, [1], 1)
    return [int(sampler.sample(logits(name, i)[None], [name]).tokens.item()) for i in range(steps)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", BUDGETS)
def test_no_sequence_thinks_for_longer_than_its_budget(name: str, temperature: float) -> None:
    budget, tokens = BUDGETS[name], alone(name, 40, temperature)
    thought = follow(budget.tokens, begin(budget.tokens), tokens)
    assert thought.closed and not thought.thinking
    assert thought.spent <= budget.limit + len(budget.message)
    free = Sampler(VOCAB, (EOS,))
    free.add(name, SamplingParams(temperature=temperature, seed=4), 5, [1], 1)
    unbounded = [int(free.sample(logits(name, i)[None], [name]).tokens.item()) for i in range(40)]
    assert counted(budget.tokens, unbounded) > budget.limit
    if budget.message:
        at = tokens.index(CLOSE)
        assert tuple(tokens[at - 3 : at]) == budget.message


def test_a_likely_closing_token_is_taken_near_the_limit_and_no_sooner() -> None:
    sampler = Sampler(VOCAB)
    for name in ("far", "near", "unlikely"):
        sampler.add(
            name, SamplingParams(temperature=0.0, thinking=ThinkingBudget(20, ONE)), 0, [1] * (11 if name == "far" else 19), 1
        )
    row = np.zeros(VOCAB, dtype=np.float32)
    row[5], row[CLOSE] = 4.0, 2.5
    cold = row.copy()
    cold[CLOSE] = 1.0
    drawn = sampler.sample(mx.array(np.stack([row, row, cold])), ["far", "near", "unlikely"]).tokens.tolist()
    assert drawn == [5, CLOSE, 5]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_batch_sent_ahead_gives_the_tokens_of_each_alone(depth: int) -> None:
    """Tokens are read `depth` steps late, beside a sequence without a budget, and sequences come and go."""
    steps, names = 40, [*BUDGETS, "free"]
    sampler = Sampler(VOCAB, (EOS,))
    got: dict[str, list[int]] = {name: [] for name in names}
    under_way: list[tuple[list[str], mx.array]] = []
    at = dict.fromkeys(names, 0)
    rng = random.Random(depth)

    def read(most: int) -> None:
        while len(under_way) > most:
            ids, tokens = under_way.pop(0)
            for name, token in zip(ids, tokens.tolist(), strict=True):
                got[name].append(token)

    for name in names:
        own = SamplingParams(max_tokens=60, seed=4) if name == "free" else params(name)
        sampler.add(name, own, 5, [1], 1)
    while any(at[name] < steps for name in names):
        ids = [name for name in names if at[name] < steps]
        rows = mx.stack([logits(name, at[name]) for name in ids])
        under_way.append((ids, sampler.sample(rows, ids).tokens + 0))
        for name in ids:
            at[name] += 1
        read(depth)
        if rng.random() < 0.1:  # a replay of one of them
            read(0)
            name = rng.choice([one for one in ids if one != "free"])
            sampler.remove(name)
            sampler.add(name, params(name), 5, [1, *got[name]], 1)
    read(0)
    for name in BUDGETS:
        assert got[name] == alone(name, steps), name


@pytest.mark.parametrize("right", [1.0, 0.7, 0.0])
def test_drafts_change_nothing(right: float) -> None:
    rng = random.Random(int(right * 10))
    for name in BUDGETS:
        expected = alone(name, 40)
        sampler = Sampler(VOCAB, (EOS,))
        sampler.add(name, params(name), 5, [1], 1)
        tokens = [int(sampler.sample(logits(name, 0)[None], [name]).tokens.item())]
        while len(tokens) < 36:
            if rng.random() < 0.3:  # a step without drafts, from the rank's own state
                tokens.append(int(sampler.sample(logits(name, len(tokens))[None], [name]).tokens.item()))
                continue
            drafts = [one if rng.random() < right else 5 for one in expected[len(tokens) : len(tokens) + 3]]
            sampler.place(name, 1 + len(tokens), [tokens[-1], *drafts])
            rows = mx.stack([logits(name, len(tokens) + i) for i in range(len(drafts) + 1)])
            drawn = sampler.sample(rows, [name] * (len(drafts) + 1)).tokens.tolist()
            accepted = next((i for i, (a, b) in enumerate(zip(drafts, drawn, strict=False)) if a != b), len(drafts))
            tokens += drawn[: accepted + 1]
            sampler.place(name, 1 + len(tokens), [tokens[-1]])
            tokens.append(int(sampler.sample(logits(name, len(tokens))[None], [name]).tokens.item()))
        assert tokens == expected[: len(tokens)], name


def test_a_forced_token_that_may_not_come_is_not_forced() -> None:
    sampler = Sampler(VOCAB)
    sampler.add("a", SamplingParams(temperature=0.0, thinking=ThinkingBudget(0, ONE)), 0, [1], 1)
    allowed = {"a": np.arange(VOCAB) != CLOSE}
    row = logits("a", 0)[None]
    assert sampler.sample(row, ["a"], allowed).tokens.item() == int(
        mx.argmax(mx.where(mx.array(allowed["a"]), row[0], -mx.inf)).item()
    )
    assert sampler.sample(row, ["a"]).tokens.item() == CLOSE


@pytest.mark.parametrize(
    "budget",
    [
        ThinkingBudget(-1, ONE),
        ThinkingBudget(1, ThinkingTokens((), (1,))),
        ThinkingBudget(1, ThinkingTokens((1,), ())),
        ThinkingBudget(1, ThinkingTokens((1,), (VOCAB,))),
        ThinkingBudget(1, ONE, (-1,)),
    ],
)
def test_budgets_that_cannot_be_are_refused(budget: ThinkingBudget) -> None:
    with pytest.raises(RequestError, match="thinking"):
        check_params(SamplingParams(thinking=budget), VOCAB)
