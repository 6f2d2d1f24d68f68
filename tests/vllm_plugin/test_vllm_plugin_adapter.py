"""Whatever vLLM's scheduler picks, the plans that follow produce each sequence's own greedy tokens. Without vLLM."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from stages import tiny_stage
from tandem.errors import BatchDesync
from tandem.loading.stage import StageModel
from tandem.protocol.step import StepPlan, accepted, batch_fingerprint
from tandem.runner.runner import Runner
from tandem.vllm_plugin.adapter import PlanBuilder

OUTPUT = 12


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> StageModel:
    return tiny_stage(tmp_path_factory.mktemp("model"))


def params(**changes: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "max_tokens": OUTPUT,
        "min_tokens": 0,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "logit_bias": None,
        "seed": None,
        "all_stop_token_ids": set(),
        "ignore_eos": True,
        "logprobs": None,
    }
    return SimpleNamespace(**{**values, **changes})


@dataclass
class Request:
    """One request as vLLM's scheduler has it."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    state: str = "new"
    tried: int = 0
    """Drafts in the step that is under way."""

    @property
    def produced(self) -> list[int]:
        return self.tokens[len(self.prompt) :]


class FakeScheduler:
    """Random decisions of the kinds that vLLM's makes, in the form in which it announces them."""

    def __init__(
        self, seed: int, requests: dict[str, Request], *, second_contract: bool, answers: dict[str, list[int]] | None = None
    ) -> None:
        """With `answers` it drafts what is in them, and often something else."""
        self.random = random.Random(seed)
        self.answers = answers
        self.accepted = 0
        self.requests = requests
        self.second = second_contract
        self.finished: set[str] = set()

    def output(self) -> SimpleNamespace:
        """The next step: some of the requests, chunks of any size, preemptions."""
        preempted = set()
        for request_id, request in self.requests.items():
            if request.state == "running" and self.random.random() < 0.04:
                request.state, request.computed = "preempted", 0
                preempted.add(request_id)
        picked = [one for one in self.requests if one not in preempted and self.random.random() < 0.6]
        new, ids, resumed, tokens_of, computed, counts, drafts = [], [], set(), {}, [], {}, {}
        for request_id in picked:
            request = self.requests[request_id]
            if request.state != "running":
                claimed = self.random.choice((0, 0, 32, 64))
                request.computed = claimed if claimed < len(request.tokens) else 0
            left = len(request.tokens) - request.computed
            counts[request_id] = left if left == 1 or self.random.random() < 0.5 else self.random.randint(1, left)
            if self.answers and (more := self._drafts(request_id, request)):
                drafts[request_id] = more
                counts[request_id] += len(more)
            if request.state == "new" or (request.state == "preempted" and self.second):
                new.append(
                    SimpleNamespace(
                        req_id=request_id,
                        prompt_token_ids=request.prompt,
                        sampling_params=params(),
                        prefill_token_ids=list(request.tokens) if self.second else None,
                        num_computed_tokens=request.computed,
                    )
                )
            else:
                ids.append(request_id)
                computed.append(request.computed)
                if request.state == "preempted":
                    resumed.add(request_id)
                    tokens_of[request_id] = list(request.tokens)
            request.state = "running"
            request.computed += counts[request_id]
            request.tried = len(drafts.get(request_id, ()))
        finished, self.finished = self.finished, set()
        cached = SimpleNamespace(req_ids=ids, resumed_req_ids=resumed, all_token_ids=tokens_of, num_computed_tokens=computed)
        return SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=counts,
            finished_req_ids=finished,
            preempted_req_ids=preempted,
            scheduled_spec_decode_tokens=drafts,
        )

    def _drafts(self, request_id: str, request: Request) -> list[int]:
        """Drafts for a request that decodes; -1 as vLLM fills up one that joins with one token left."""
        room = OUTPUT - len(request.produced) - 1
        if request.computed + 1 != len(request.tokens) or room < 1:
            return []
        if request.state != "running":
            return [-1] * min(room, 3) if request.computed else []
        if not request.produced:
            return []
        right = self.answers[request_id][len(request.produced) :][: self.random.randint(0, min(room, 3))]
        return [token if self.random.random() < 0.7 else 7 for token in right]

    def update(self, tokens: dict[str, list[int]]) -> None:
        """What was sampled, as far as drafts were right."""
        for request_id, given in tokens.items():
            request = self.requests[request_id]
            request.computed -= request.tried - (len(given) - 1)
            request.tokens += given
            self.accepted += len(given) - 1
            if len(request.produced) == OUTPUT:
                self.finished.add(request_id)
                del self.requests[request_id]


def greedy(stage: StageModel, prompt: list[int]) -> list[int]:
    caches, feed, found = stage.make_caches(), prompt, []
    for _ in range(OUTPUT):
        logits = stage.head(stage.forward(mx.array([feed]), caches)[:, -1:])
        feed = [int(mx.argmax(logits[0, -1]))]
        found += feed
    return found


def drive(stage: StageModel, adapter: PlanBuilder, scheduler: FakeScheduler) -> dict[str, list[int]]:
    runner = Runner(stage, micro_batches=adapter.micro_batches, vocab_size=stage.vocab_size, eos_token_ids=(), drafts=3)
    everybody = dict(scheduler.requests)
    for _ in range(3000):
        plan = adapter.plan(scheduler.output())  # type: ignore[arg-type]
        if plan is not None:
            result = runner.execute(plan).finish()
            tokens: dict[str, list[int]] = {}
            for request_id, token in zip(plan.sampled(), result.tokens, strict=True):
                tokens.setdefault(request_id, []).append(token)
            for row in plan.spec_decode_plan.rows if plan.spec_decode_plan else ():
                del tokens[row.request_id][accepted(row.tokens, tokens[row.request_id]) + 1 :]
            for request_id, given in tokens.items():
                adapter.sampled(request_id, given)
            scheduler.update(tokens)
        if not (scheduler.requests or scheduler.finished):
            pending = runner.execute(StepPlan(plan.step_id + 1 if plan else 0, 0, fingerprint=batch_fingerprint([])))
            assert pending.kv_bytes == 0
            return {one: request.produced for one, request in everybody.items()}
    raise AssertionError(f"not finished: {list(scheduler.requests)}")


@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_gives_each_sequence_its_own_tokens(stage: StageModel, seed: int) -> None:
    rng = random.Random(seed)
    shared = [rng.randrange(3, 500) for _ in range(64)]
    prompts = {
        f"r{i}": shared[: rng.choice((0, 40, 64))] + [rng.randrange(3, 500) for _ in range(rng.randint(1, 50))] for i in range(8)
    }
    requests = {one: Request(prompt, list(prompt)) for one, prompt in prompts.items()}
    adapter = PlanBuilder(stages=2, kv_tokens=2000, chunk=48, prefix_tokens=2000 if seed % 2 else 0, trimmable=True)
    scheduler = FakeScheduler(seed, requests, second_contract=seed % 3 == 0)
    found = drive(stage, adapter, scheduler)
    assert found == {one: greedy(stage, prompt) for one, prompt in prompts.items()}


@pytest.mark.parametrize("seed", range(4))
def test_drafts_change_nothing(stage: StageModel, seed: int) -> None:
    rng = random.Random(seed)
    prompts = {f"r{i}": [rng.randrange(3, 500) for _ in range(rng.randint(1, 50))] for i in range(6)}
    answers = {one: greedy(stage, prompt) for one, prompt in prompts.items()}
    requests = {one: Request(prompt, list(prompt)) for one, prompt in prompts.items()}
    adapter = PlanBuilder(stages=1, kv_tokens=2000, chunk=48, prefix_tokens=2000, trimmable=True, drafts=True)
    scheduler = FakeScheduler(seed, requests, second_contract=True, answers=answers)
    assert drive(stage, adapter, scheduler) == answers
    assert scheduler.accepted > 0


def first_step(request_id: str, prompt: list[int], computed: int = 0) -> SimpleNamespace:
    new = SimpleNamespace(
        req_id=request_id, prompt_token_ids=prompt, sampling_params=params(), prefill_token_ids=None, num_computed_tokens=computed
    )
    cached = SimpleNamespace(req_ids=[], resumed_req_ids=set(), all_token_ids={}, num_computed_tokens=[])
    return SimpleNamespace(
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=cached,
        preempted_req_ids=None,
        num_scheduled_tokens={request_id: len(prompt) - computed},
        finished_req_ids=set(),
        scheduled_spec_decode_tokens={},
    )


def adapter(**changes: Any) -> PlanBuilder:
    values: dict[str, Any] = {"stages": 1, "kv_tokens": 1000, "chunk": 100, "prefix_tokens": 1000, "trimmable": True}
    return PlanBuilder(**{**values, **changes})


def test_a_prefix_that_vllm_takes_for_cached_is_restored_and_not_computed_again() -> None:
    one = adapter()
    one.plan(first_step("a", list(range(70))))  # type: ignore[arg-type]
    plan = one.plan(first_step("b", list(range(64)) + [9] * 10, computed=64))  # type: ignore[arg-type]
    assert plan is not None
    assert [op.length for op in plan.restores] == [64]
    assert [(op.start, op.count) for op in plan.prefill] == [(64, 10)]
    assert one.recomputed == 0


def test_a_cached_prefix_costs_what_its_states_take() -> None:
    for extra, kept in ((0, 3), (400, 2), (1000, 0)):
        one = adapter(kv_tokens=5000, prefix_extra=extra, trimmable=False)
        plans = [
            one.plan(first_step(str(number), [500 * number + i for i in range(65)]))  # type: ignore[arg-type]
            for number in range(3)
        ]
        assert sum(len(plan.saves) - len(plan.evicts) for plan in plans if plan is not None) == kept


def test_a_prefix_that_no_cached_prefix_holds_is_computed_again_in_bounded_parts() -> None:
    one = adapter()
    plan = one.plan(first_step("b", list(range(230)), computed=128))  # type: ignore[arg-type]
    assert plan is not None and not plan.restores
    assert [(op.start, op.count, op.last) for op in plan.prefill] == [(0, 100, False), (100, 100, False), (200, 30, True)]
    assert one.recomputed == 128


def test_cached_prefixes_give_way_to_what_runs() -> None:
    one = adapter(kv_tokens=150)
    one.plan(first_step("a", list(range(64))))  # type: ignore[arg-type]
    plan = one.plan(first_step("b", list(range(300, 400))))  # type: ignore[arg-type]
    assert plan is not None and plan.evicts


def test_a_scheduler_with_another_view_of_a_sequence_is_stopped() -> None:
    one = adapter()
    one.plan(first_step("a", list(range(8))))  # type: ignore[arg-type]
    step = first_step("b", [5])
    step.scheduled_cached_reqs.req_ids, step.scheduled_cached_reqs.num_computed_tokens = ["a"], [11]
    with pytest.raises(BatchDesync, match="vLLM has 11 positions of a"):
        one.plan(step)  # type: ignore[arg-type]
