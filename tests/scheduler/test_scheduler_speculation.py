"""Speculative decoding as the scheduler plans it, on ranks whose KV is the tokens themselves: what they sample depends
on every position that they hold, so that a wrong cut, a stale token or a lost one changes the text."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_invariants import check_invariants, make_limits
from tandem.protocol.control import Output, Refused
from tandem.protocol.request import EngineRequest, SamplingParams, StructuredOutputs
from tandem.protocol.step import SpecDecodePlan, SpecDecodeRow, StepPlan, StepResult, accepted, batch_fingerprint
from tandem.scheduler.limits import Limits
from tandem.scheduler.scheduler import Scheduler
from tandem.speculation.ngram import NgramIndex
from tandem.speculation.proposers import RETRY, Speculation, SpeculationLimits, StepCosts, best_drafts

EOS, VOCAB, DRAFTS = 0, 9, 4


def limits(**changes: object) -> Limits:
    values: dict[str, object] = {"eos_token_ids": frozenset([EOS]), "vocab_size": VOCAB}
    return make_limits(**values | {"speculation": SpeculationLimits(drafts=DRAFTS, shortest=2, longest=4)} | changes)


def next_token(tokens: list[int]) -> int:
    """A text with cycles in it, which changes with every token before."""
    if sum(tokens) % 97 == 0:
        return (tokens[0] + sum(tokens) // 97) % VOCAB
    return tokens[-3] if len(tokens) > 3 else (sum(tokens) * 7 + len(tokens)) % VOCAB


def expected(request: EngineRequest) -> list[int]:
    """What the request gets one token at a time."""
    tokens, params = list(request.prompt), request.params
    while len(tokens) - len(request.prompt) < params.max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS and len(tokens) - len(request.prompt) > params.min_tokens:
            break
    return tokens[len(request.prompt) :]


@dataclass
class FakeRanks:
    """One micro-batch's worth of each: the rows that a rank holds, by micro-batch, and the token that it would feed on."""

    seconds: Callable[[int, int], float] = lambda rows, width: 1.0
    """Of a step, by rows and width."""
    now: float = 0.0
    prompts: dict[str, list[int]] = field(default_factory=dict)
    rows: dict[int, dict[str, list[int]]] = field(default_factory=dict)
    saved: dict[str, list[int]] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    model: random.Random | None = None
    """Where the mistakes of a draft model come from; None without one."""
    right: float = 0.8
    """Share of its drafts that are right, apart from chance."""
    known: dict[str, list[int]] = field(default_factory=dict)
    """What the draft model knows of each sequence."""
    steps: int = 0
    context: int = 10**9
    widths: list[int] = field(default_factory=list)

    def execute(self, plan: StepPlan) -> StepResult:
        """The result that goes with the plan; asserts that it is one that ranks can follow."""
        micro_batch = self.rows.setdefault(plan.micro_batch, {})
        for request_id in plan.removes:
            next(rows for rows in self.rows.values() if request_id in rows).pop(request_id)
            self.held.pop(request_id, None)
        for op in plan.inserts:
            self.prompts[op.request_id], micro_batch[op.request_id] = op.tokens, []
            self.known[op.request_id] = list(op.tokens)
        for restore in plan.restores:
            micro_batch[restore.request_id] = self.saved[restore.key][: restore.length]
        named = {row.request_id: row for row in plan.spec_decode_plan.rows} if plan.spec_decode_plan else {}
        for request_id, row in named.items():
            assert 0 <= len(micro_batch[request_id]) - row.length <= DRAFTS
            del micro_batch[request_id][row.length :]
            self._name(row, micro_batch[request_id])
        assert plan.fingerprint == batch_fingerprint((name, len(tokens)) for name, tokens in micro_batch.items())
        sampled: list[tuple[str, int]] = []
        ask = plan.spec_decode_plan.ask if plan.spec_decode_plan else 0
        for request_id in plan.decode:
            assert len(micro_batch[request_id]) + max(plan.width, ask) <= self.context
            feed = named[request_id].tokens if named else [self.held.pop(request_id)]
            for token in feed:
                micro_batch[request_id].append(token)
                sampled.append((request_id, next_token(micro_batch[request_id])))
        for op in plan.prefill:
            micro_batch[op.request_id] += self.prompts[op.request_id][op.start : op.start + op.count]
            if op.last:
                sampled.append((op.request_id, next_token(micro_batch[op.request_id])))
        for save in plan.saves:
            self.saved[save.key] = micro_batch[save.request_id][: save.length]
        assert [name for name, _ in sampled] == plan.sampled()
        self.held = (
            {**self.held, **dict(sampled)}
            if plan.hands_out
            else {name: token for name, token in self.held.items() if name not in dict(sampled)}
        )
        if plan.decode:
            self.steps += 1
            self.widths.append(plan.width)
            self.now += self.seconds(len(plan.decode), plan.width)
        return StepResult(plan.step_id, plan.micro_batch, [token for _, token in sampled], drafts=self._drafts(plan, sampled))

    def _name(self, row: SpecDecodeRow, kept: list[int]) -> None:
        """As runner/drafter.py learns what the plan knows."""
        if self.model is not None:
            known = self.known[row.request_id]
            missing = row.length + 1 - len(known)
            known[row.length + 1 :] = [*row.past, *row.tokens[:1]][-missing:] if missing > 0 else []
            assert known == [*kept, row.tokens[0]]

    def _drafts(self, plan: StepPlan, sampled: list[tuple[str, int]]) -> dict[str, list[int]]:
        spec = plan.spec_decode_plan
        if spec is None or not spec.ask:
            return {}
        assert self.model is not None and not plan.hands_out
        rows = {row.request_id: row.tokens for row in spec.rows}
        drafts = {}
        for name in dict.fromkeys(plan.sampled()):
            tokens = [token for one, token in sampled if one == name]
            known = self.known[name]
            known += tokens[: accepted(rows.get(name, [0]), tokens) + 1]
            text = list(known)
            for _ in range(spec.ask):
                text.append(next_token(text) if self.model.random() < self.right else self.model.randrange(VOCAB))
            drafts[name] = text[len(known) :]
        return drafts


def events(rng: random.Random, scheduler: Scheduler, ranks: FakeRanks, plans: deque[StepPlan]) -> Iterator[object]:
    """One move: a plan goes out or a result comes back."""
    plan = scheduler.next_plan() if rng.random() < 0.8 else None
    if plan:
        plans.append(plan)
    elif plans:
        plan = plans.popleft()
        yield from scheduler.update(ranks.execute(plan), ranks.now)
    check_invariants(scheduler)


@settings(deadline=None)
@given(st.integers(0, 10**9))
def test_outputs_are_those_of_plain_decoding_in_random_histories(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(
        limits(
            micro_batches=rng.choice([1, 2, 3]),
            max_batch_size=rng.choice([1, 4, 8]),
            prefill_chunk=rng.choice([3, 5, 64]),
            kv_tokens=rng.choice([150, 400, 100_000]),
            max_context=140,
            prefix_tokens=rng.choice([0, 60]),
        )
    )
    if model := rng.random() < 0.5:
        scheduler = Scheduler(replace(scheduler.limits, speculation=SpeculationLimits(drafts=DRAFTS, model=True)))
    ranks, plans = FakeRanks(model=rng if model else None), deque[StepPlan]()
    requests: dict[str, EngineRequest] = {}
    got: dict[str, list[int]] = {}
    live: set[str] = set()
    for _ in range(4000):
        if len(requests) < 8 and rng.random() < 0.1:
            name = f"r{len(requests)}"
            prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 40))]
            most = rng.randint(1, 90)
            params = SamplingParams(max_tokens=most, min_tokens=rng.choice([0, most // 2]))
            requests[name], got[name] = EngineRequest(request_id=name, prompt=prompt, params=params), []
            scheduler.submit(requests[name], seed=1)
            live.add(name)
        if live and rng.random() < 0.002:
            gone = rng.choice(sorted(live))
            assert scheduler.abort(gone)
            live.remove(gone)
        if rng.random() < 0.002:
            assert not [one for one in scheduler.restart(blame=False) if isinstance(one, Refused)]
            plans.clear()
            ranks = FakeRanks(model=rng if model else None)
        for message in events(rng, scheduler, ranks, plans):
            assert isinstance(message, Output) and message.request_id in live
            got[message.request_id] += message.tokens
            if message.finish_reason:
                live.remove(message.request_id)
                assert got[message.request_id] == expected(requests[message.request_id])
        if len(requests) == 8 and not live and scheduler.idle:
            return
    raise AssertionError(f"never done: {live}")


def run(ranks: FakeRanks, requests: list[EngineRequest], **changes: object) -> Scheduler:
    """All requests to their end, in order; each must get what plain decoding gives."""
    scheduler = Scheduler(limits(**changes))
    got: dict[str, list[int]] = {}
    plans: deque[StepPlan] = deque()
    for request in requests:
        scheduler.submit(request, seed=1)
    while not scheduler.idle:
        while (plan := scheduler.next_plan()) is not None:
            plans.append(plan)
        if (compiled := scheduler.compiling) is not None:
            compiled.awaits_grammar = False
        for message in scheduler.update(ranks.execute(plans.popleft()), ranks.now):
            assert isinstance(message, Output)
            got.setdefault(message.request_id, []).extend(message.tokens)
        check_invariants(scheduler)
    assert got == {request.request_id: expected(request) for request in requests}
    return scheduler


def cyclic(name: str = "a", **params: object) -> EngineRequest:
    return EngineRequest(
        request_id=name, prompt=[1, 2, 3, 1, 2, 3, 1], params=SamplingParams(**{"max_tokens": 400, "ignore_eos": True, **params})
    )  # type: ignore[arg-type]


def test_text_that_repeats_takes_fewer_steps() -> None:
    ranks = FakeRanks()
    scheduler = run(ranks, [cyclic()])
    counts = scheduler.speculation.counts
    assert ranks.steps < 200
    assert 0.5 < counts.accepted_tokens / counts.draft_tokens <= 1
    assert counts.drafts * DRAFTS >= counts.draft_tokens


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"structured_outputs": StructuredOutputs(regex="a*"), "ignore_eos": False},
    ],
)
def test_what_depends_on_every_token_before_is_not_drafted(params: dict[str, object]) -> None:
    ranks = FakeRanks()
    assert run(ranks, [cyclic(**params)]).speculation.counts.drafts == 0
    assert set(ranks.widths) == {1}


def test_a_draft_model_that_is_right_takes_fewer_steps_and_is_asked_no_more_where_it_costs_too_much() -> None:
    limits = SpeculationLimits(drafts=DRAFTS, model=True)
    cheap = FakeRanks(model=random.Random(1))
    counts = run(cheap, [cyclic()], speculation=limits).speculation.counts
    assert cheap.steps < 200 and counts.accepted_tokens > 0.5 * counts.draft_tokens
    dear = FakeRanks(model=random.Random(1), seconds=lambda rows, width: 1.0 if width == 1 else 6.0)
    run(dear, [cyclic()], speculation=limits)
    assert 0 < sum(width > 1 for width in dear.widths) < 20


def test_a_draft_model_that_is_hardly_ever_right_is_tried_ever_more_seldom_and_one_that_pays_goes_on_after_mistakes() -> None:
    def seconds(rows: int, width: int) -> float:
        return 1.0 if width == 1 else 1.5 + 0.1 * width

    def ratio(ranks: FakeRanks, requests: int) -> float:
        """Time of plain decoding / time taken."""
        asked = [cyclic(str(i), max_tokens=128) for i in range(requests)]
        run(ranks, asked, speculation=SpeculationLimits(drafts=DRAFTS, model=True), max_batch_size=1)
        return 127 * requests / ranks.now

    never = FakeRanks(model=(wrong := random.Random(1)), right=0.0, seconds=seconds)
    wrong.randrange = lambda *_: VOCAB  # type: ignore[method-assign]
    assert ratio(never, 20) > 0.98
    tried = [i for i, width in enumerate(never.widths) if width > 1]
    assert set(never.widths) == {1, 2} and 4 < len(tried) < 40 and sum(i > 1200 for i in tried) < 10
    for seed in range(4):
        assert ratio(FakeRanks(model=random.Random(seed), right=0.7, seconds=seconds), 4) > 1.15


def test_a_draft_model_that_pays_is_used_though_steps_wait_for_other_programs_at_times() -> None:
    luck = random.Random(3)

    def seconds(rows: int, width: int) -> float:
        return (1.0 if width == 1 else 1.6 + 0.1 * width) * (4 if luck.random() < 0.1 else 1)

    ranks = FakeRanks(model=random.Random(1), seconds=seconds)
    requests = [cyclic(str(i), max_tokens=128) for i in range(20)]
    run(ranks, requests, speculation=SpeculationLimits(drafts=DRAFTS, model=True), max_batch_size=1)
    assert sum(width > 1 for width in ranks.widths) > 0.8 * len(ranks.widths)


def test_steps_that_cost_too_much_are_tried_and_left() -> None:
    ranks = FakeRanks(seconds=lambda rows, width: 1.0 + 5 * (width - 1))
    run(ranks, [cyclic()])
    assert sum(width > 1 for width in ranks.widths) < 16


def test_drafts_get_fewer_where_positions_cost_more() -> None:
    ranks = FakeRanks(seconds=lambda rows, width: 1.0 if rows * width <= 8 else rows * width / 4)
    run(ranks, [cyclic(name) for name in "abcd"])
    wide = sum(width > 2 for width in ranks.widths)
    assert ranks.widths.count(2) > 50 and 0 < wide < 12


@pytest.mark.parametrize("model", [False, True])
def test_rows_are_padded_to_no_position_beyond_the_context(model: bool) -> None:
    """A table of learned positions ends there, and what lies behind it may be no number."""
    ranks = FakeRanks(model=random.Random(1) if model else None, context=200)
    params = SamplingParams(max_tokens=164, ignore_eos=True)
    near = EngineRequest(request_id="near", prompt=[1, 2, 3] * 12, params=params)
    scheduler = run(
        ranks, [near, cyclic("b", max_tokens=190)], max_context=200, speculation=SpeculationLimits(drafts=DRAFTS, model=model)
    )
    assert scheduler.speculation.counts.accepted_tokens > 10


def test_without_speculation_no_plan_names_tokens() -> None:
    ranks = FakeRanks()
    run(ranks, [cyclic()], speculation=None)
    assert set(ranks.widths) == {1}


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 3), st.integers(0, 3), st.integers(1, 9))
def test_the_index_finds_what_a_search_finds(tokens: list[int], shortest: int, more: int, most: int) -> None:
    index = NgramIndex(shortest, shortest + more)
    index.extend(tokens)
    drafts = index.drafts(most)
    last = tokens[len(tokens) - shortest :]
    ends = [end for end in range(shortest, len(tokens)) if tokens[end - shortest : end] == last]
    assert bool(drafts) == bool(ends)
    if drafts:
        assert len(drafts) == most
        assert any(drafts == [(tokens + drafts)[end + i] for i in range(most)] for end in ends)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_accepted_drafts_are_those_before_the_first_that_differs(row: list[int], sampled: list[int]) -> None:
    count = accepted(row, sampled[: len(row)])
    assert row[1 : count + 1] == sampled[:count]
    assert count == len(row) - 1 or row[count + 1] != sampled[count]


def test_costs_that_are_not_known_are_those_of_the_next_narrower_step_and_old_ones_are_forgotten() -> None:
    costs = StepCosts()
    assert costs.ratio(1, 5) is None
    for width, seconds in ((1, 0.1), (1, 9.0), (1, 1.0), (5, 0.1), (5, 3.0), (5, 9.0)):
        assert costs.ratio(1, 5) in (None, 1.0), "one step may have waited for another program"
        costs.note(1, width, seconds)
    assert [costs.ratio(1, width) for width in (1, 3, 5, 6)] == [1.0, 1.0, 3.0, 3.0]
    assert costs.ratio(2, 5) is None
    for _ in range(RETRY + 1):
        costs.note(1, 1, 1.0)
    assert costs.ratio(1, 5) == 1.0
    for _ in range(2):
        costs.note(1, 5, 2.0)
    for _ in range(RETRY + 1):
        costs.note(1, 1, 1.0)
    assert costs.ratio(1, 5) == 2.0, "each trial is remembered for longer"


def test_the_number_of_drafts_follows_gain_and_cost() -> None:
    costs = StepCosts()
    for _ in range(3):
        for width, seconds in ((1, 1.0), (2, 1.5), (3, 1.6), (5, 2.0)):
            costs.note(1, width, seconds)
    assert best_drafts([([7, 8, 9, 1], 0.95)], costs) == [[7, 8, 9, 1]]
    assert best_drafts([([7, 8, 9, 1], 0.2)], costs) is None
    assert best_drafts([([], 0.95)], costs) is None


@pytest.mark.parametrize(("runs", "cost"), [(1, 1.9), (50, 1.5)], ids=["drafts in every other step", "drafts in most steps"])
def test_what_the_step_after_drafts_takes_longer_is_part_of_their_cost(runs: int, cost: float) -> None:
    def plan(*tokens: int) -> StepPlan:
        return StepPlan(0, 0, decode=["a"], spec_decode_plan=SpecDecodePlan([SpecDecodeRow("a", 5, list(tokens))]))

    speculation = Speculation(SpeculationLimits(drafts=3))
    for _ in range(4):
        speculation.took(StepPlan(0, 0, decode=["a"]), 1.0, ahead=True)
    for _ in range(4):
        for _ in range(runs):
            speculation.took(plan(1, 2, 3, 4), 1.5, ahead=False)
        speculation.took(plan(1), 1.4, ahead=False)
    assert speculation._costs.ratio(1, 4) == pytest.approx(cost, abs=0.1)
