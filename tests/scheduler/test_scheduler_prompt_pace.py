"""Chunks of prompts by time: on a device whose steps take what we say, streams wait for as long as was asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise

import pytest

from scheduler_invariants import check_invariants, make_limits
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.protocol.step import StepPlan, StepResult
from tandem.scheduler.limits import Limits
from tandem.scheduler.prompt_pace import LEAST, SLACK, STEPS, PromptPace
from tandem.scheduler.scheduler import Scheduler

DECODE_S = 0.05


def limits(**changes: object) -> Limits:
    return make_limits(**{"prefill_chunk": 512, "kv_tokens": 10**6, "max_context": 10**5, "vocab_size": 9} | changes)


class Device:
    """Computes plans one after the other, two of them sent at a time; a micro-batch's steps take their turns."""

    def __init__(self, scheduler: Scheduler, token_s: Callable[[float], float]) -> None:
        self.scheduler, self._token_s, self._sent, self.now = scheduler, token_s, deque[StepPlan](), 0.0
        self.done: list[tuple[StepPlan, float]] = []
        self.embedded = 0

    def submit(self, name: str, tokens: int, answer: int = 10_000, group: str = "") -> None:
        params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
        self.scheduler.submit(EngineRequest(request_id=name, prompt=[3] * tokens, params=params, group=group), 1)

    def embed(self, name: str, tokens: int) -> None:
        self.scheduler.submit(
            EngineRequest(request_id=name, prompt=[3] * tokens, params=SamplingParams(max_tokens=0), pooling="last"), 1
        )

    def flood(self, texts: int, tokens: int) -> None:
        """Embed as many more as are wanted to have so many sequences here, streams among them."""
        while self.scheduler.batches.running + len(self.scheduler.waiting) < texts:
            self.embed(f"e{self.embedded}", tokens)
            self.embedded += 1

    def speed(self, first: int, began: float) -> float:
        """Decode steps a micro-batch since then, in the time that as many would take alone."""
        return sum(len(plan.decode) for plan, _ in self.done[first:]) * DECODE_S / (self.now - began)

    def step(self) -> StepPlan:
        """The next plan, computed."""
        while (plan := self.scheduler.next_plan()) is not None:
            self._sent.append(plan)
        plan = self._sent.popleft()
        tokens = sum(op.count for op in plan.prefill)
        seconds = (DECODE_S if plan.decode or tokens else 0.0) + tokens * self._token_s(self.now)
        self.now += seconds
        self.scheduler.update(
            StepResult(plan.step_id, plan.micro_batch, [3] * len(plan.sampled()), vectors=dict.fromkeys(plan.ended(), b"1234")),
            self.now,
            seconds,
        )
        self.done.append((plan, seconds))
        return plan

    def until(self, condition: Callable[[StepPlan], bool], most: int = 1000) -> StepPlan:
        return next(plan for plan in (self.step() for _ in range(most)) if condition(plan))

    def chunks(self, since: int = 0) -> list[int]:
        """Tokens of the chunks that were computed beside those who decode."""
        return [sum(op.count for op in plan.prefill) for plan, _ in self.done[since:] if plan.prefill and plan.decode]


def streaming(token_s: Callable[[float], float], prompt: int = 40, **changes: object) -> Device:
    """A device on which one sequence decodes."""
    device = Device(Scheduler(limits(**changes)), token_s)
    device.submit("stream", prompt)
    device.until(lambda plan: bool(plan.decode))
    for _ in range(10):
        device.step()
    return device


def ends(name: str) -> Callable[[StepPlan], bool]:
    return lambda plan: any(op.request_id == name and op.last for op in plan.prefill)


@pytest.mark.parametrize(
    ("time_s", "chunk"), [(1.0, 64), (0.4, 32), (0.001, 32), (4.0, 256), (100.0, 512), (0.0, 512), (None, 32)]
)
def test_a_stream_waits_for_as_long_as_was_asked_for(time_s: float | None, chunk: int) -> None:
    """512 tokens take 5.2 s here; by default a chunk may take ten steps of decoding, 0.5 s."""
    device = streaming(lambda now: 0.01, prefill_time_s=time_s)
    device.submit("long", 3000, 1)
    device.until(ends("long"))
    assert set(device.chunks()[2:-1]) == {chunk}
    if time_s:
        longest = max(seconds for plan, seconds in device.done if plan.decode)
        assert longest <= 1.25 * max(time_s, LEAST * 0.01) + DECODE_S + 1e-6
    check_invariants(device.scheduler)


def test_a_fast_device_gets_the_largest_chunks() -> None:
    device = streaming(lambda now: 0.0005)
    device.submit("long", 3000, 1)
    device.until(ends("long"))
    assert set(device.chunks()[:-1]) == {512}


def test_alone_a_prompt_is_not_divided_further() -> None:
    device = Device(Scheduler(limits(prefill_time_s=0.1)), lambda now: 0.01)
    device.submit("long", 3000, 1)
    device.until(ends("long"))
    assert [plan.prefill[0].count for plan, _ in device.done] == [512] * 5 + [440]


def test_chunks_follow_a_device_that_becomes_slower_and_faster_again() -> None:
    slow = [False]
    device = streaming(lambda now: 0.02 if slow[0] else 0.0005)
    device.submit("long", 90_000, 1)
    for slow[0], chunk in ((False, 512), (True, 32), (False, 512)):
        since = len(device.done)
        for _ in range(60):
            device.step()
        assert device.chunks(since)[-1] == chunk
    device.until(ends("long"))


def test_one_step_that_was_held_up_changes_nothing() -> None:
    hiccup = [0.0]
    device = streaming(lambda now: 0.0004 + hiccup[0])
    device.submit("long", 20_000, 1)
    for _ in range(5):
        device.step()
    hiccup[0] = 0.1
    device.step()
    hiccup[0] = 0.0
    since = len(device.done)
    device.until(ends("long"))
    assert set(device.chunks(since)[:-1]) == {512}


def test_short_prompts_overtake_with_small_chunks_too() -> None:
    device = streaming(lambda now: 0.01)
    device.submit("long", 3000, 1)
    for _ in range(5):
        device.step()
    device.submit("short", 30, 1)
    began = len(device.done)
    device.until(ends("short"))
    assert len(device.done) - began <= 4
    assert not any(ends("long")(plan) for plan, _ in device.done)
    device.until(ends("long"))


def test_prompts_of_another_micro_batch_do_not_count_as_steps_of_decoding() -> None:
    """A micro-batch that only decodes waits for the other one's chunks: they must not grow by that."""
    device = streaming(lambda now: 0.01, micro_batches=2, max_batch_size=8)
    device.submit("other", 40)
    device.until(lambda plan: len(plan.decode) == 1 and plan.micro_batch == 1)
    for _ in range(10):
        device.step()
    limit = device.scheduler.prompts.limit_s
    device.submit("long", 20_000, 1)
    device.until(ends("long"))
    assert device.scheduler.prompts.limit_s == pytest.approx(limit, rel=0.1)
    assert set(device.chunks()[20:-1]) == {64}


@pytest.mark.parametrize("several", [1, 4, 16, 64])
def test_a_short_prompt_waits_a_few_steps_behind_any_number_of_long_ones(several: int) -> None:
    """All of the long ones have a place in the batch already, and have been passed over often."""
    device, sent = Device(Scheduler(limits(max_batch_size=66)), lambda now: 0.003), 0
    for step in range(60):
        if step == 40:
            device.submit("short", 10, 1, group="another")
        while sum(name.startswith("long") for name in device.scheduler.sequences) < several:
            device.submit(f"long{sent}", 1000, 1, group="one")
            sent += 1
        plan = device.step()
        if ends("short")(plan):
            break
    assert step < 46


def test_a_step_that_was_held_up_shuts_out_embeddings_for_a_few_steps_alone() -> None:
    slow = [0.0]
    device = streaming(lambda now: 0.0005 + slow[0])
    device.embed("held up", 64)
    slow[0] = 1.0
    device.until(ends("held up"))
    slow[0], began = 0.0, len(device.done)
    device.embed("next", 64)
    device.until(ends("next"))
    assert len(device.done) - began < 30


def test_embeddings_beside_a_stream_of_another_micro_batch_leave_it_half_of_its_speed() -> None:
    device, sent = streaming(lambda now: 0.002, micro_batches=2), 0
    device.until(lambda plan: device.now > 100 * DECODE_S)
    began, first = device.now, len(device.done)
    while len(device.done) < first + 400:
        while len(device.scheduler.batches.micro_batches[1].members) + len(device.scheduler.waiting) < 4:
            device.embed(f"e{sent}", 50)
            sent += 1
        device.step()
    assert device.speed(first, began) > 0.45


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_stream_that_begins_amid_embeddings_has_half_of_its_speed_too(micro_batches: int) -> None:
    """No step of decoding alone has been seen before."""
    device = Device(Scheduler(limits(micro_batches=micro_batches)), lambda now: 0.002)
    for step in range(420):
        if step == 20:
            device.submit("stream", 40)
            began, first = device.now, len(device.done)
        device.flood(16 + micro_batches, 100)
        device.step()
    assert device.speed(first, began) > 0.4
    assert device.embedded > 60


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_embeddings_take_no_more_time_than_the_streams_beside_them(micro_batches: int) -> None:
    """Sixteen texts always wait; a stream keeps half of its speed, and the texts are embedded all the same."""
    device = Device(Scheduler(limits(micro_batches=micro_batches)), lambda now: 0.0005)
    for micro_batch in range(micro_batches):
        device.submit(f"s{micro_batch}", 40)
    device.until(lambda plan: device.now > 100 * DECODE_S)
    began, first = device.now, len(device.done)
    while len(device.done) < first + 400:
        device.flood(16 + micro_batches, 100)
        device.step()
    assert device.speed(first, began) > 0.45
    assert device.embedded > 60


def test_nothing_is_known_without_a_clock() -> None:
    device = streaming(lambda now: 0.01)
    beside = list(device.scheduler.sequences.values())
    pace, plan = PromptPace(), StepPlan(0, 0, decode=["stream"])
    pace.took(plan, None, None, 0.0, [])
    assert pace.limit_s is None and pace.chunk(512, beside) == 512
    pace.took(plan, 1.0, 0.1, 0.1, [])
    assert pace.limit_s == pytest.approx(STEPS * 0.1) and pace.chunk(512, beside) == 512


@pytest.mark.parametrize("most", [1, 16, 33, 192])
def test_small_chunks_stay_what_they_are(most: int) -> None:
    device = streaming(lambda now: 1.0, prefill_chunk=most, prefill_time_s=0.01)
    device.submit("long", 200, 1)
    device.until(ends("long"))
    assert device.chunks()[-2] == min(most, LEAST)


class Stages(Device):
    """Computes plans over several stages, each in its turn at every stage. Each stage takes its part of a step's time."""

    def __init__(self, scheduler: Scheduler, token_s: Callable[[float], float], stages: int) -> None:
        super().__init__(scheduler, token_s)
        self._free, self._ends = [0.0] * stages, deque[tuple[StepPlan, float, float]]()

    def step(self) -> StepPlan:
        """The next plan, computed."""
        while (plan := self.scheduler.next_plan()) is not None:
            tokens, at, part = sum(op.count for op in plan.prefill), self.now, 0.0
            if plan.decode or tokens:
                part = (DECODE_S + tokens * self._token_s(self.now)) / len(self._free)
            for stage, free in enumerate(self._free):
                at = self._free[stage] = max(at, free) + part
            self._ends.append((plan, at, part))
        plan, self.now, part = self._ends.popleft()
        tokens = [3] * len(plan.sampled())
        self.scheduler.update(StepResult(plan.step_id, plan.micro_batch, tokens), self.now, part)
        check_invariants(self.scheduler)
        self.done.append((plan, self.now))
        return plan


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_stages_are_busy_with_one_prompt_and_streams_wait_no_longer_than_was_asked_for(micro_batches: int) -> None:
    asked_s, token_s, stages, length = 0.6, 0.004, 3, 20_000
    scheduler = Scheduler(limits(micro_batches=micro_batches, stages=stages, prefill_time_s=asked_s))
    device = Stages(scheduler, lambda _: token_s, stages)
    device.submit("stream", 40)
    while device.now < 3:
        device.step()
    begun, first = device.now, len(device.done)
    device.submit("long", length, 1)
    while not any(op.request_id == "long" and op.last for op in device.step().prefill):
        pass
    at = [now for plan, now in device.done[first:] if "stream" in plan.decode]
    gaps = sorted(after - before for before, after in pairwise(at))
    assert gaps[len(gaps) // 2] <= asked_s * SLACK + 2 * DECODE_S
    assert gaps[int(0.99 * len(gaps))] <= asked_s * SLACK + 2 * DECODE_S
    alone_s = length * token_s
    assert alone_s / (device.now - begun) > 1.8, "times as fast as one stage after the other"


def test_chunks_of_one_prompt_over_stages_take_the_same_time() -> None:
    device = Device(Scheduler(limits(stages=3, micro_batches=3, prefill_doubling=1000)), lambda now: 0.001)
    device.submit("long", 4000, 1)
    device.until(ends("long"))
    ops = [op for plan, _ in device.done for op in plan.prefill]
    times = [op.count * (1 + (op.start + op.count / 2) / 1000) for op in ops]
    assert ops[0].count == 512 and len(ops) <= 4000 // 512 + 3
    assert max(times) <= 1.2 * times[len(ops) // 2], "those of one size: 1.7 times"
    device.submit("one", 4000, 1)
    device.submit("another", 4000, 1)
    since = len(device.done)
    device.until(ends("one"))
    assert {plan.prefill[0].count for plan, _ in device.done[since:-1] if plan.prefill} == {512}, "they fill the stages"
