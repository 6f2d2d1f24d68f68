"""Sequences that leave for another replica: what is computed of them is on disk before, or they leave without it."""

from __future__ import annotations

import random

import pytest

from scheduler_invariants import check_invariants, make_limits
from tandem.kv.index import block_hashes, disk_block_names
from tandem.protocol.control import HandedOver, Output
from tandem.protocol.kv_blocks import DISK_BLOCK_SIZE, Survey, Surveyed, UseRemoteStores, Written
from tandem.protocol.quarantine import QuarantineRecord
from tandem.protocol.request import EngineRequest, SamplingParams, StructuredOutputs
from tandem.protocol.step import StepPlan, StepResult
from tandem.scheduler.scheduler import Scheduler
from tandem.speculation.proposers import SpeculationLimits

RANKS = 2
LONG = [3 + i % 40 for i in range(2 * DISK_BLOCK_SIZE + 20)]


def make(**changes: object) -> Scheduler:
    values: dict[str, object] = {"micro_batches": 2, "prefill_chunk": 256, "kv_tokens": 20_000, "max_context": 4096}
    scheduler = Scheduler(make_limits(**values | {"prefix_tokens": 8000} | changes))
    scheduler.disk.begin([[]] * RANKS, (), scheduler.prefixes)
    return scheduler


def request(name: str, tokens: list[int], max_tokens: int = 2000, **more: object) -> EngineRequest:
    return EngineRequest(request_id=name, prompt=tokens, params=SamplingParams(max_tokens=max_tokens), **more)  # type: ignore[arg-type]


class Ranks:
    """They compute what plans say, and write what they are to when they are told so."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.outputs, self.writes = scheduler, dict[str, list[int]](), list[bytes]()

    def step(self) -> StepPlan | None:
        plan = self.scheduler.next_plan()
        if plan is None:
            return None
        for keep in plan.keeps:
            computed = self.scheduler.batches.micro_batches[plan.micro_batch].members[keep.key].computed
            assert all((number + 1) * DISK_BLOCK_SIZE <= computed for number, _ in keep.disk_blocks)
        self.writes += [name for op in (*plan.stores, *plan.keeps) for _, name in op.disk_blocks]
        for message in self.scheduler.update(StepResult(plan.step_id, plan.micro_batch, [5] * len(plan.sampled()))):
            assert isinstance(message, Output)
            self.outputs.setdefault(message.request_id, []).extend(message.tokens)
        check_invariants(self.scheduler)
        return plan

    def write(self, count: int = 1000) -> None:
        done, self.writes = self.writes[:count], self.writes[count:]
        for rank in range(RANKS):
            self.scheduler.disk.take(Written(rank, done, 7), self.scheduler.prefixes)

    def leave(self, *names: str) -> None:
        for name in names:
            self.scheduler.migrations.ask(self.scheduler.sequences[name])

    def until_gone(self, name: str) -> HandedOver:
        for _ in range(100):
            self.step()
            self.write(1)
            for one in self.scheduler.migrations.depart():
                check_invariants(self.scheduler)
                if one.request_id == name:
                    return one
        raise AssertionError("it does not leave")


def test_what_decodes_leaves_when_all_of_its_disk_blocks_are_written() -> None:
    scheduler = make()
    ranks = Ranks(scheduler)
    scheduler.submit(request("a", LONG), seed=1)
    while len(ranks.outputs.get("a", [])) < DISK_BLOCK_SIZE:
        ranks.step()
    ranks.write()
    assert not scheduler.migrations.depart()
    ranks.leave("a")
    ranks.step()
    tokens = [*LONG, *ranks.outputs["a"]]
    assert ranks.writes == disk_block_names(block_hashes(tokens))[2:] and len(ranks.writes) == 1
    assert not scheduler.migrations.depart(), "it goes on until that is written"
    before = len(ranks.outputs["a"])
    ranks.step()
    assert len(ranks.outputs["a"]) == before + 1
    ranks.write()
    assert scheduler.migrations.depart() == [HandedOver("a", 3 * DISK_BLOCK_SIZE)]
    while ranks.step() is not None:
        scheduler.migrations.depart()
    assert scheduler.idle and scheduler.migrations.progress is None


def test_what_has_states_drafts_nothing_until_it_leaves_at_the_end_of_a_block() -> None:
    scheduler = make(prefix_trimmable=False, speculation=SpeculationLimits(drafts=4))
    ranks = Ranks(scheduler)
    scheduler.submit(request("a", LONG), seed=1)
    while not ranks.outputs.get("a"):
        ranks.step()
    sequence = scheduler.sequences["a"]
    assert sequence.room > 0
    ranks.leave("a")
    assert sequence.room == 0
    assert ranks.until_gone("a") == HandedOver("a", 3 * DISK_BLOCK_SIZE)


def test_prompts_that_wait_to_leave_cost_a_step_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(max_batch_size=1)
    ranks = Ranks(scheduler)
    scheduler.submit(request("runs", LONG), seed=1)
    for number in range(20):
        scheduler.submit(request(f"q{number}", [3 + number] * 30 * DISK_BLOCK_SIZE, 10, leaves=True), seed=1)
    ranks.step()
    looks, holds = [], scheduler.disk.holds
    monkeypatch.setattr(scheduler.disk, "holds", lambda name: looks.append(name) or holds(name))
    ranks.step()
    assert scheduler.migrations._leaving and len(looks) < 10


def test_a_prompt_half_computed_leaves_with_what_it_has() -> None:
    scheduler = make(prefill_chunk=DISK_BLOCK_SIZE)
    ranks = Ranks(scheduler)
    scheduler.submit(request("a", [7 + i % 31 for i in range(6 * DISK_BLOCK_SIZE)]), seed=1)
    ranks.step()
    ranks.step()
    assert "a" not in ranks.outputs
    ranks.leave("a")
    assert ranks.until_gone("a").positions == 2 * DISK_BLOCK_SIZE


def test_who_waits_leaves_at_once_and_one_after_another_writes() -> None:
    scheduler = make(max_batch_size=2, micro_batches=1)
    ranks = Ranks(scheduler)
    for name in "abc":
        scheduler.submit(request(name, [ord(name) % 50, *LONG]), seed=1)
    while len(ranks.outputs) != 2:
        ranks.step()
    ranks.leave("c", "a", "b")
    [first, *others] = scheduler.migrations.depart()
    assert first == HandedOver("c", 0) and not others
    assert ranks.until_gone("a").positions == 2 * DISK_BLOCK_SIZE
    assert ranks.until_gone("b").positions == 2 * DISK_BLOCK_SIZE


def test_a_prompt_that_leaves_is_written_while_it_is_computed() -> None:
    scheduler = make(micro_batches=1, prefill_chunk=DISK_BLOCK_SIZE // 2)
    ranks = Ranks(scheduler)
    prompt = [7 + i % 31 for i in range(4 * DISK_BLOCK_SIZE + 50)]
    names = disk_block_names(block_hashes(prompt))
    scheduler.submit(request("a", prompt, leaves=True), seed=1)
    written = list[bytes]()
    while "a" not in ranks.outputs:
        assert not scheduler.migrations.depart() and scheduler.migrations.progress is None, "only disks are waited for"
        ranks.step()
        written += ranks.writes
        ranks.write()
        if 3 * DISK_BLOCK_SIZE > scheduler.sequences["a"].computed >= 2 * DISK_BLOCK_SIZE + DISK_BLOCK_SIZE // 2:
            assert written == names[:2], "what is there is on its way"
    assert written == names, "each once, though the prefix is kept in memory too"
    assert scheduler.migrations.depart() == [HandedOver("a", 4 * DISK_BLOCK_SIZE)]
    while ranks.step() is not None:
        pass
    assert scheduler.idle and ranks.outputs["a"] == [5]


@pytest.mark.parametrize("lost_when", ["before it is looked at", "once the next is ordered"])
def test_what_disks_lose_meanwhile_is_written_again(lost_when: str) -> None:
    scheduler = make(micro_batches=1, prefill_chunk=DISK_BLOCK_SIZE, prefix_tokens=0)
    ranks = Ranks(scheduler)
    prompt = [7 + i % 31 for i in range(4 * DISK_BLOCK_SIZE + 50)]
    names = disk_block_names(block_hashes(prompt))
    scheduler.disk.begin([names[1:3]] * RANKS, (), scheduler.prefixes)
    scheduler.submit(request("a", prompt, leaves=True), seed=1)
    if lost_when == "once the next is ordered":
        while names[3] not in ranks.writes:
            ranks.step()
        assert names[2] not in ranks.writes
    scheduler.disk.take(Written(0, [], 0, gone=[names[2]]), scheduler.prefixes)
    written = list[bytes]()
    while "a" not in ranks.outputs or ranks.writes:
        ranks.step()
        written += ranks.writes
        ranks.write()
    assert sorted(written) == sorted([names[0], names[2], names[3]]), "each once"
    assert scheduler.migrations.depart() == [HandedOver("a", 4 * DISK_BLOCK_SIZE)]


def test_who_only_waits_for_its_grammar_leaves() -> None:
    scheduler = make(micro_batches=1, prefill_chunk=DISK_BLOCK_SIZE, prefix_tokens=0)
    ranks = Ranks(scheduler)
    params = SamplingParams(max_tokens=60, structured_outputs=StructuredOutputs(json_object=True))
    for name, prompt in (("long", LONG), ("brief", [8, 9, 8])):
        scheduler.submit(EngineRequest(request_id=name, prompt=prompt, params=params), seed=1)
    while ranks.step() is not None:
        pass
    assert len(scheduler.batches.micro_batches[0].members) == 2 and not ranks.outputs and not scheduler.migrations.depart()
    ranks.leave("long", "brief")
    plan = ranks.step()
    assert plan is not None and not (plan.prefill or plan.decode)
    assert ranks.writes == disk_block_names(block_hashes(LONG)), "to write it is what the plan is made for"
    assert scheduler.migrations.depart() == [HandedOver("brief", 0)]
    assert scheduler.migrations.progress is not None, "disks that say nothing do not hold it up for ever"
    ranks.step()
    assert not ranks.writes[2:], "each once"
    ranks.write()
    assert scheduler.migrations.depart() == [HandedOver("long", 2 * DISK_BLOCK_SIZE)]
    while ranks.step() is not None:
        pass
    assert scheduler.idle


def test_of_many_that_leave_none_waits_for_the_prompt_of_another() -> None:
    scheduler = make(micro_batches=1, prefill_chunk=256)
    ranks = Ranks(scheduler)
    scheduler.submit(request("long", [9 + i % 31 for i in range(2000)], leaves=True), seed=1)
    scheduler.submit(request("short", LONG, leaves=True), seed=1)
    scheduler.submit(request("stays", [4, *LONG], 40), seed=1)
    assert ranks.until_gone("short").positions == 2 * DISK_BLOCK_SIZE
    assert "long" not in ranks.outputs
    assert ranks.until_gone("long").positions == 2000 // DISK_BLOCK_SIZE * DISK_BLOCK_SIZE
    while ranks.step() is not None:
        assert not scheduler.migrations.depart()
    assert len(ranks.outputs["stays"]) == 40


def test_what_disks_do_not_take_is_finished_where_it_is() -> None:
    scheduler = make(micro_batches=1)
    ranks = Ranks(scheduler)
    scheduler.submit(request("a", LONG, 60, leaves=True), seed=1)
    while not ranks.outputs:
        ranks.step()
    assert scheduler.migrations.progress is not None
    scheduler.migrations.lose_patience()
    scheduler.submit(request("whole", [8, *LONG], 60, leaves=True, on_disk=False), seed=1)
    scheduler.submit(request("brief", [7, *LONG], 1, leaves=True), seed=1)
    while ranks.step() is not None:
        assert not scheduler.migrations.depart()
        assert scheduler.migrations.progress is None or "brief" in scheduler.sequences
    assert {name: len(tokens) for name, tokens in ranks.outputs.items()} == {"a": 60, "whole": 60, "brief": 1}
    ranks.writes.clear()
    scheduler.submit(request("b", [6, *LONG], 60, leaves=True), seed=1)
    assert ranks.until_gone("b").positions == 2 * DISK_BLOCK_SIZE, "disks that write again are used again"
    scheduler.disk.reset()
    scheduler.submit(request("off", LONG, 20, leaves=True), seed=1)
    while ranks.step() is not None:
        assert not scheduler.migrations.depart()
    assert len(ranks.outputs["off"]) == 20


def test_a_prompt_that_leaves_when_its_ranks_die_or_its_replica_drains() -> None:
    scheduler = make(micro_batches=1, prefill_chunk=DISK_BLOCK_SIZE // 2)
    ranks = Ranks(scheduler)
    scheduler.submit(request("a", [7 + i % 31 for i in range(4 * DISK_BLOCK_SIZE + 20)], leaves=True), seed=1)
    for _ in range(5):
        ranks.step()
    scheduler.restart()
    scheduler.disk.begin([[]] * RANKS, scheduler.waiting, scheduler.prefixes)
    ranks.writes.clear()
    assert not scheduler.migrations.depart(), "it begins again here"
    for _ in range(5):
        ranks.step()
    ranks.leave("a")
    assert ranks.until_gone("a").positions == 2 * DISK_BLOCK_SIZE, "now it leaves with what there is"
    assert scheduler.migrations.progress is None


def test_disks_that_say_nothing_hold_up_nobody_and_no_prefix_cache_is_needed() -> None:
    scheduler = make()
    ranks = Ranks(scheduler)
    for name in "ab":
        scheduler.submit(request(name, [ord(name) % 50, *LONG]), seed=1)
    while len(ranks.outputs) != 2:
        ranks.step()
    ranks.leave("a", "b")
    ranks.step()
    ranks.step()
    assert not scheduler.migrations.depart() and scheduler.migrations.progress is not None
    scheduler.migrations.lose_patience()
    assert [one.positions for one in scheduler.migrations.depart()] == [0, 0]
    small = make(prefix_tokens=0)
    ranks = Ranks(small)
    small.submit(request("a", LONG), seed=1)
    while not ranks.outputs:
        ranks.step()
    ranks.leave("a")
    assert ranks.until_gone("a").positions == 2 * DISK_BLOCK_SIZE


def test_some_are_finished_where_they_are() -> None:
    scheduler = make()
    ranks = Ranks(scheduler)
    scheduler.submit(request("private", LONG, 30, on_disk=False), seed=1)
    ranks.leave("private")
    for _ in range(40):
        ranks.step()
        assert not scheduler.migrations.depart()
    assert len(ranks.outputs["private"]) == 30
    alone = make()
    alone.submit(request("suspect", LONG, quarantine_record=QuarantineRecord(company=2)), seed=1)
    alone.submit(EngineRequest(request_id="scores", prompt=LONG, params=SamplingParams(prompt_logprobs=1)), seed=1)
    for name in ("suspect", "scores"):
        alone.migrations.ask(alone.sequences[name])
    assert not alone.migrations.depart()
    off = make()
    off.disk.begin([[], None], (), off.prefixes)
    off.submit(request("a", LONG), seed=1)
    off.migrations.ask(off.sequences["a"])
    assert not off.migrations.depart(), "nothing is kept on disk: it is finished here"


def test_ranks_that_die_and_sequences_that_end_while_they_leave() -> None:
    scheduler = make()
    ranks = Ranks(scheduler)
    scheduler.submit(request("a", LONG), seed=1)
    scheduler.submit(request("b", [9, *LONG], 20), seed=1)
    while len(ranks.outputs) < 2:
        ranks.step()
    ranks.leave("a", "b")
    ranks.step()
    ranks.step()
    scheduler.abort("a")
    while len(ranks.outputs["b"]) < 20:
        ranks.step()
    assert not scheduler.migrations.depart()
    scheduler.submit(request("c", LONG), seed=1)
    ranks.leave("c")
    ranks.step()
    scheduler.restart()
    scheduler.disk.begin([[]] * RANKS, scheduler.waiting, scheduler.prefixes)
    [gone] = scheduler.migrations.depart()
    assert gone == HandedOver("c", 0)


def test_what_another_has_written_is_looked_for_once() -> None:
    scheduler = make()
    names = disk_block_names(block_hashes(LONG))
    scheduler.submit(request("told", LONG, kept=2 * DISK_BLOCK_SIZE), seed=1)
    scheduler.submit(request("other", [8, 9]), seed=1)
    [order] = scheduler.disk.orders
    assert isinstance(order, Survey) and order.soon and not order.drop and scheduler.disk.fetching
    assert order.wanted == names, "those who lend are asked for no more"
    scheduler.disk.orders.clear()
    plan = scheduler.next_plan()
    assert plan is not None and [op.request_id for op in plan.inserts] == ["other"]
    for rank in range(RANKS):
        assert not scheduler.disk.orders
        scheduler.disk.take(Surveyed(rank, order.number, names), scheduler.prefixes)
    [fetch] = scheduler.disk.orders
    assert fetch.names == names  # type: ignore[union-attr]
    empty = make()
    empty.submit(request("told", LONG, kept=2 * DISK_BLOCK_SIZE), seed=1)
    [order] = empty.disk.orders
    empty.disk.orders.clear()
    for rank in range(RANKS):
        empty.disk.take(Surveyed(rank, order.number, names[:1] if rank else []), empty.prefixes)  # type: ignore[union-attr]
    assert not empty.disk.orders and not empty.disk.fetching
    assert empty.next_plan() is not None
    silent = make()
    silent.submit(request("told", LONG, kept=2 * DISK_BLOCK_SIZE), seed=1)
    silent.disk.lose_patience()
    assert silent.next_plan() is not None


def test_ranks_that_borrow_from_one_another_look_before_anybody_is_computed() -> None:
    scheduler = make()
    names = disk_block_names(block_hashes(LONG))
    scheduler.submit(request("a", LONG), seed=1)
    scheduler.disk.begin([names[:1], []], scheduler.waiting, scheduler.prefixes, [("d1", "tcp://1"), ("d2", "tcp://2")])
    borrow, survey = scheduler.disk.orders
    assert borrow == UseRemoteStores([("d1", "tcp://1"), ("d2", "tcp://2")]) and isinstance(survey, Survey)
    scheduler.disk.orders.clear()
    assert scheduler.next_plan() is None and scheduler.disk.fetching
    scheduler.submit(request("b", LONG), seed=1)
    assert scheduler.next_plan() is None and not scheduler.disk.orders, "who comes meanwhile waits too"
    for rank in range(RANKS):
        scheduler.disk.take(Surveyed(rank, survey.number, names), scheduler.prefixes)
    [fetch] = scheduler.disk.orders
    assert fetch.names == names  # type: ignore[union-attr]
    scheduler.disk.orders.clear()
    for remote_stores in ([("d1", "tcp://1"), ("d1", "tcp://2")], []):  # all have one directory, or lend nothing
        scheduler.disk.begin([names, names], (), scheduler.prefixes, remote_stores)
        assert not scheduler.disk.orders


@pytest.mark.parametrize("seed", range(10))
def test_random_histories(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make(kv_tokens=4000, prefix_tokens=2000)
    ranks = Ranks(scheduler)
    live: set[str] = set()
    for step in range(1200):
        if step < 700 and rng.random() < 0.08:
            live.add(name := f"r{step}")
            scheduler.submit(
                request(name, [rng.randrange(3, 50), *LONG[: rng.randrange(10, 532)]], 60, leaves=rng.random() < 0.3), seed=1
            )
        if rng.random() < 0.05 and scheduler.sequences:
            ranks.leave(rng.choice(list(scheduler.sequences)))
        if rng.random() < 0.3:
            ranks.write(rng.randrange(4))
        if rng.random() < 0.02 and scheduler.sequences:
            scheduler.abort(rng.choice(list(scheduler.sequences)))
        ranks.step()
        scheduler.migrations.depart()
        check_invariants(scheduler)
    scheduler.migrations.lose_patience()
    while ranks.step() is not None:
        scheduler.migrations.depart()
    assert scheduler.idle
