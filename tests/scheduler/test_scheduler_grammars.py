"""A sequence whose grammar is being compiled: its prompt is computed but for the last chunk, and others go on."""

from __future__ import annotations

from collections import deque

import pytest

from scheduler_invariants import check_invariants, make_limits
from tandem.protocol.control import Output, Refused
from tandem.protocol.request import EngineRequest, SamplingParams, StructuredOutputs
from tandem.protocol.step import NO_GRAMMAR, StepPlan, StepResult
from tandem.scheduler.scheduler import Scheduler

FORM = StructuredOutputs(json_object=True)


class Steps:
    """A scheduler, and ranks that answer each plan with the token 5."""

    def __init__(self, **changes: object) -> None:
        self.scheduler = Scheduler(make_limits(**changes))
        self.produced: dict[str, int] = {}
        self.prompts: list[tuple[str, int]] = []

    def ask(self, name: str, prompt: int = 40, form: StructuredOutputs | None = None, **params: int) -> None:
        """Submit a request."""
        self.scheduler.submit(
            EngineRequest(
                request_id=name,
                prompt=[1] * prompt,
                params=SamplingParams(structured_outputs=form, **{"max_tokens": 20, **params}),
            ),
            seed=1,
        )  # type: ignore[arg-type]

    def run(self) -> None:
        """Go on until there is nothing to plan."""
        plans: deque[StepPlan] = deque()
        while True:
            while (plan := self.scheduler.next_plan()) is not None:
                plans.append(plan)
                self.prompts += [(op.request_id, op.count) for op in plan.prefill]
            if not plans:
                return
            plan = plans.popleft()
            for message in self.scheduler.update(StepResult(plan.step_id, plan.micro_batch, [5] * len(plan.sampled()))):
                assert isinstance(message, Output)
                self.produced[message.request_id] = self.produced.get(message.request_id, 0) + len(message.tokens)
            check_invariants(self.scheduler)

    def compiled(self, name: str) -> None:
        """The rank that samples has compiled a grammar."""
        assert self.scheduler.compiling is self.scheduler.sequences[name]
        self.scheduler.sequences[name].awaits_grammar = False


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_all_of_its_prompt_but_the_last_chunk_is_computed_and_others_go_on(micro_batches: int) -> None:
    steps = Steps(micro_batches=micro_batches)
    steps.ask("slow", form=FORM)
    for name in "abc":
        steps.ask(name, prompt=5)
    steps.run()
    assert steps.produced == dict.fromkeys("abc", 20)
    assert 24 <= steps.scheduler.sequences["slow"].computed < 40
    assert not steps.scheduler.idle
    steps.compiled("slow")
    steps.run()
    assert steps.produced["slow"] == 20 and sum(count for name, count in steps.prompts if name == "slow") == 40
    assert steps.scheduler.idle


def test_one_that_starts_again_waits_again() -> None:
    steps = Steps()
    steps.ask("slow", prompt=5, form=FORM)
    steps.run()
    steps.compiled("slow")
    for _ in range(6):
        plan = steps.scheduler.next_plan()
        assert plan
        steps.scheduler.update(StepResult(plan.step_id, plan.micro_batch, [5] * len(plan.sampled())))
    produced = steps.scheduler.sequences["slow"].produced
    assert produced > 0
    steps.scheduler.restart()
    steps.run()
    assert not steps.produced
    steps.compiled("slow")
    steps.run()
    assert steps.produced["slow"] == 20 - produced


def test_one_that_takes_too_long_or_is_aborted_ends_alone() -> None:
    steps = Steps()
    for name in ("late", "left"):
        steps.ask(name, form=FORM)
    steps.ask("plain")
    steps.run()
    late = steps.scheduler.compiling
    assert late is steps.scheduler.sequences["late"]
    refused = steps.scheduler.fail(late, NO_GRAMMAR)
    assert isinstance(refused, Refused) and (refused.status, refused.code) == (503, "grammar_unavailable")
    assert steps.scheduler.abort("left") and steps.scheduler.compiling is None
    steps.run()
    assert steps.scheduler.idle and steps.produced == {"plain": 20}


def test_a_grammar_under_which_rank_groups_die_ends_its_own_request() -> None:
    steps, refused = Steps(), []
    steps.ask("slow", prompt=5, form=FORM)
    steps.ask("plain", prompt=5)
    for _ in range(6):
        if (suspect := steps.scheduler.suspect) is not None:
            suspect.rested = True
        steps.run()
        refused += steps.scheduler.restart() if steps.scheduler.compiling is not None else []
    assert steps.produced == {"plain": 20} and steps.scheduler.idle
    assert [one.request_id for one in refused if isinstance(one, Refused)] == ["slow"]


def test_one_that_only_scores_its_prompt_does_not_wait() -> None:
    steps = Steps()
    steps.ask("scored", form=FORM, max_tokens=0, prompt_logprobs=0)
    steps.scheduler.next_plan()
    assert steps.scheduler.compiling is None
