"""Prefixes on disk, as the scheduler sees them: fetched where it pays, and in nobody's way."""

from __future__ import annotations

import random
from collections import deque

import pytest

from scheduler_invariants import check_invariants, make_limits
from tandem.kv.disk import AGAIN, OLD, SLOWER, DiskSpeed
from tandem.kv.index import block_hashes, disk_block_names
from tandem.protocol.control import Refused
from tandem.protocol.kv_blocks import DISK_BLOCK_SIZE, Fetch, Fetched, Survey, Surveyed, UseRemoteStores, Written
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.protocol.step import StepPlan, StepResult
from tandem.scheduler.scheduler import Scheduler

RANKS = 2
LONG = [3 + i % 40 for i in range(2 * DISK_BLOCK_SIZE + 20)]
OTHER = [7 + i % 41 for i in range(2 * DISK_BLOCK_SIZE + 20)]


def make(**changes: object) -> Scheduler:
    values: dict[str, object] = {"micro_batches": 2, "prefill_chunk": 4096, "kv_tokens": 20_000, "max_context": 4096}
    return Scheduler(make_limits(**values | {"prefix_tokens": 4000} | changes))


def names(tokens: list[int]) -> list[bytes]:
    return disk_block_names(block_hashes(tokens[:-1]))


def request(name: str, tokens: list[int]) -> EngineRequest:
    return EngineRequest(request_id=name, prompt=tokens, params=SamplingParams(max_tokens=4))


def begin(scheduler: Scheduler, *kept: list[bytes] | None) -> None:
    scheduler.disk.begin(kept, scheduler.waiting, scheduler.prefixes)


def fetched(scheduler: Scheduler, key: str, lost: tuple[bytes, ...] = (), seconds: float = 0.1) -> None:
    for rank in range(RANKS):
        scheduler.disk.take(Fetched(rank, key, list(lost), seconds), scheduler.prefixes)
        check_invariants(scheduler)


def inserted(scheduler: Scheduler) -> dict[str, int]:
    """Who joins in the next plans, and how much of each is restored."""
    found: dict[str, int] = {}
    while (plan := scheduler.next_plan()) is not None:
        restored = {op.request_id: op.length for op in plan.restores}
        found.update({op.request_id: restored.get(op.request_id, 0) for op in plan.inserts})
        scheduler.update(StepResult(plan.step_id, plan.micro_batch, [5] * len(plan.sampled())))
        check_invariants(scheduler)
    return found


def test_who_waits_for_a_disk_holds_up_nobody() -> None:
    scheduler = make()
    begin(scheduler, names(LONG), names(LONG))
    scheduler.submit(request("long", LONG), seed=1)
    scheduler.submit(request("short", [1, 2, 3]), seed=1)
    [order] = scheduler.disk.orders
    assert order.names == names(LONG)
    assert inserted(scheduler) == {"short": 0}
    fetched(scheduler, order.key)
    assert inserted(scheduler) == {"long": 2 * DISK_BLOCK_SIZE}


@pytest.mark.parametrize("lost", [True, False])
def test_one_rank_without_it_is_enough_to_compute(lost: bool) -> None:
    scheduler = make()
    begin(scheduler, names(LONG), names(LONG)[:1] if not lost else names(LONG))
    scheduler.submit(request("long", LONG), seed=1)
    [order] = scheduler.disk.orders
    fetched(scheduler, order.key, tuple(order.names) if lost else ())
    assert inserted(scheduler) == {"long": 0 if lost else DISK_BLOCK_SIZE}
    assert not scheduler.disk.fetching
    scheduler.submit(request("again", [*LONG[:300], *LONG]), seed=1)
    assert scheduler.disk.counts.failures == lost


def test_what_others_lend_is_brought_where_that_pays_and_is_no_loss_when_they_go() -> None:
    scheduler = make()
    begin(scheduler, names(LONG)[:1], names(LONG)[:1])
    scheduler.disk.use_remote_stores([("far", "tcp://1")])
    use_remote_stores, survey = scheduler.disk.orders
    assert use_remote_stores == UseRemoteStores([("far", "tcp://1")]) and isinstance(survey, Survey)
    assert not scheduler.disk.fetching, "nobody waits for it"
    scheduler.disk.orders.clear()
    for rank in range(RANKS):
        scheduler.disk.take(Surveyed(rank, survey.number, names(LONG), names(LONG)[1:]), scheduler.prefixes)
    assert scheduler.disk.lent_saves < scheduler.disk.saves, "it is dearer as far as is known"
    scheduler.submit(request("a", LONG), seed=1)
    brought = scheduler.disk.orders.pop()
    assert isinstance(brought, Fetch) and brought.names == names(LONG)
    fetched(scheduler, brought.key, lost=tuple(names(LONG)[1:]))  # the lender has gone
    own = scheduler.disk.orders.pop()
    assert isinstance(own, Fetch) and own.names == names(LONG)[:1], "the rest is there still"
    fetched(scheduler, own.key)
    assert inserted(scheduler) == {"a": DISK_BLOCK_SIZE}
    far = make()
    begin(far, names(LONG)[:1], names(LONG)[:1])
    far.disk.take(Surveyed(0, 7, names(LONG), names(LONG)[1:]), far.prefixes)
    far.disk.take(Surveyed(1, 7, names(LONG), []), far.prefixes)
    far.submit(request("a", LONG), seed=1)
    for rank in range(RANKS):
        order = far.disk.orders[0]
        assert isinstance(order, Fetch)
        far.disk.take(Fetched(rank, order.key, [], 9.0, 5000, 2000), far.prefixes)
    far.disk.orders.clear()
    far.disk.computing.measure(1000, 1.0)
    assert far.disk.counts.brought_bytes == 2 * 2000 and far.disk.lent_saves == 0.0 < far.disk.saves
    for rank in range(RANKS):  # another prompt, of which the first rank has but the first disk block here
        far.disk.take(Surveyed(rank, 8, names(OTHER), [] if rank else names(OTHER)[1:]), far.prefixes)
    far.submit(request("b", OTHER), seed=1)
    [order] = far.disk.orders
    assert isinstance(order, Fetch) and order.names == names(OTHER)[:1], "a slow link is left alone, the disk is not"


def test_a_link_that_is_slow_is_noticed_with_the_first_that_comes_over_it() -> None:
    scheduler = make()
    scheduler.disk.computed(1000, 1000, 1.0)
    begin(scheduler, [], [])

    def use_remote_stores(tokens: list[int]) -> None:
        for rank in range(RANKS):
            scheduler.disk.take(Surveyed(rank, 7, names(tokens), names(tokens)), scheduler.prefixes)

    use_remote_stores(LONG)
    scheduler.submit(request("a", LONG), seed=1)
    order = scheduler.disk.orders.pop()
    assert isinstance(order, Fetch) and order.within_s == pytest.approx(2 * DISK_BLOCK_SIZE / 1000)
    for rank in range(RANKS):  # one of them had all in time
        lost, late = ([], False) if rank else (names(LONG)[1:], True)
        scheduler.disk.take(Fetched(rank, order.key, lost, 5.0, 5000, 2000, late), scheduler.prefixes)
    assert scheduler.disk.counts.failures == 0 and scheduler.disk.lent_saves == 0.0
    own = scheduler.disk.orders.pop()
    assert isinstance(own, Fetch) and own.names == names(LONG)[:1], "what came is on the ranks' disks"
    fetched(scheduler, own.key)
    assert inserted(scheduler) == {"a": DISK_BLOCK_SIZE}
    use_remote_stores(OTHER)
    for number in range(1, AGAIN + 1):
        scheduler.submit(request(f"b{number}", OTHER), seed=1)
        assert bool(scheduler.disk.orders) == (number == AGAIN), "it is tried again one day"
    other = make()
    other.disk.computed(1000, 1000, 1.0)
    begin(other, names(LONG), names(LONG))
    other.submit(
        EngineRequest(request_id="c", prompt=LONG, params=SamplingParams(max_tokens=9), produced=[5], kept=2 * DISK_BLOCK_SIZE),
        seed=1,
    )
    assert other.disk.orders == [Fetch(other.disk.fetching or "", names(LONG), SLOWER * 2 * DISK_BLOCK_SIZE / 1000)]


def test_a_pace_follows_what_is_measured_slowly() -> None:
    pace = DiskSpeed()
    for tokens in (1000, 500):
        pace.measure(tokens, 1.0)
    pace.measure(0, 1.0)
    assert (pace.tokens_s, pace.seen) == (pytest.approx(1000 * OLD + 500 * (1 - OLD)), 1500)


def test_ranks_without_a_disk_and_prompts_for_which_it_does_not_pay() -> None:
    scheduler = make()
    begin(scheduler, names(LONG), None)
    scheduler.submit(request("a", LONG), seed=1)
    begin(scheduler, names(LONG), names(LONG))
    scheduler.disk.orders.clear()
    scheduler.submit(request("b", LONG[:DISK_BLOCK_SIZE]), seed=1)  # its last token is computed anyway
    assert not scheduler.disk.orders
    slow = make()
    begin(slow, names(LONG), names(LONG))
    slow.submit(request("c", LONG), seed=1)
    fetched(slow, slow.disk.orders.pop().key, seconds=10.0)
    slow.disk.computing.measure(1000, 1.0)
    slow.prefixes.shrink(10_000)
    slow.submit(request("d", LONG), seed=1)
    assert not slow.disk.orders


def test_what_is_in_memory_is_not_fetched_and_what_is_kept_is_written_once() -> None:
    scheduler = make()
    begin(scheduler, [], [])
    scheduler.submit(request("a", LONG), seed=1)
    plan = scheduler.next_plan()
    assert plan is not None
    [store] = plan.stores
    assert [name for _, name in store.disk_blocks] == names(LONG)
    scheduler.update(StepResult(plan.step_id, plan.micro_batch, [5]))
    for rank in range(RANKS):
        scheduler.disk.take(Written(rank, names(LONG), 7), scheduler.prefixes)
    scheduler.submit(request("b", LONG), seed=1)
    assert not scheduler.disk.orders
    scheduler.prefixes.shrink(10_000)
    scheduler.submit(request("c", LONG), seed=1)
    assert len(scheduler.disk.orders) == 1


def test_from_memory_only_a_warmed_prompt_that_may_be_on_disk_is_written() -> None:
    scheduler = make()
    begin(scheduler, [], [])

    def written(name: str, **given: bool) -> bool:
        params = SamplingParams(max_tokens=0 if given.get("warms") else 1)
        scheduler.submit(EngineRequest(request_id=name, prompt=LONG, params=params, **given), seed=1)
        stores = 0
        while (plan := scheduler.next_plan()) is not None:
            stores += len(plan.stores)
            scheduler.update(StepResult(plan.step_id, plan.micro_batch, [5] * len(plan.sampled())))
        return stores > 0

    assert not written("private", on_disk=False)
    assert not written("read from memory")
    assert not written("warmed, private", warms=True, on_disk=False)
    assert written("warmed", warms=True)


def test_a_full_prefix_cache_of_what_is_on_its_way_takes_no_more() -> None:
    scheduler = make(prefix_tokens=2 * DISK_BLOCK_SIZE + 64)
    other = [4 + i % 37 for i in range(2 * DISK_BLOCK_SIZE + 20)]
    begin(scheduler, names(LONG) + names(other), names(LONG) + names(other))
    scheduler.submit(request("a", LONG), seed=1)
    scheduler.submit(request("b", other), seed=1)
    [order] = scheduler.disk.orders
    assert inserted(scheduler) == {"b": 0}
    fetched(scheduler, order.key)
    assert inserted(scheduler) == {"a": 2 * DISK_BLOCK_SIZE}


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_with_disks_that_fail_and_ranks_that_die(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = make(kv_tokens=3000, prefix_tokens=1500, prefill_chunk=200)
    texts = [[3 + (i * k) % 41 for i in range(rng.randrange(DISK_BLOCK_SIZE, 4 * DISK_BLOCK_SIZE))] for k in range(1, 6)]
    kept: list[list[bytes]] = [[], []]
    begin(scheduler, *kept)
    live: set[str] = set()
    plans: deque[StepPlan] = deque()
    for step in range(3000):
        if step < 1500 and rng.random() < 0.1:
            live.add(f"r{step}")
            scheduler.submit(request(f"r{step}", rng.choice(texts)[: rng.randrange(40, 4 * DISK_BLOCK_SIZE)]), seed=1)
        if live and rng.random() < 0.02:
            scheduler.abort(name := rng.choice(sorted(live)))
            live.discard(name)
        if rng.random() < 0.005:
            live -= {one.request_id for one in scheduler.restart() if isinstance(one, Refused)}
            plans.clear()
            begin(scheduler, *kept)
        for order in list(scheduler.disk.orders):
            if rng.random() < 0.5:
                scheduler.disk.orders.remove(order)
                for rank in rng.sample(range(RANKS), RANKS):
                    lost = order.names[-1:] if rng.random() < 0.2 else []
                    scheduler.disk.take(Fetched(rank, order.key, lost, 0.01), scheduler.prefixes)
        if rng.random() < 0.02:
            scheduler.disk.lose_patience()
        if (plan := scheduler.next_plan()) is not None:
            plans.append(plan)
            for store in plan.stores:
                for rank in range(RANKS):
                    if rng.random() < 0.9:
                        kept[rank] += [name for _, name in store.disk_blocks]
                        scheduler.disk.take(Written(rank, [name for _, name in store.disk_blocks]), scheduler.prefixes)
        elif plans:
            plan = plans.popleft()
            for message in scheduler.update(StepResult(plan.step_id, plan.micro_batch, [5] * len(plan.sampled()))):
                if getattr(message, "finish_reason", None):
                    live.discard(message.request_id)  # type: ignore[union-attr]
        check_invariants(scheduler)
    scheduler.disk.lose_patience()
    for _ in range(5000):
        while (plan := scheduler.next_plan()) is not None:
            plans.append(plan)
        if not plans:
            break
        plan = plans.popleft()
        for message in scheduler.update(StepResult(plan.step_id, plan.micro_batch, [5] * len(plan.sampled()))):
            if getattr(message, "finish_reason", None):
                live.discard(message.request_id)  # type: ignore[union-attr]
    assert not live


def test_a_disk_that_says_nothing_is_asked_for_nothing_more_until_it_answers() -> None:
    scheduler = make()
    other = [4 + i % 37 for i in range(2 * DISK_BLOCK_SIZE + 20)]
    kept = names(LONG) + names(other)
    begin(scheduler, kept, kept)
    scheduler.submit(request("a", LONG), seed=1)
    [order] = scheduler.disk.orders
    scheduler.disk.orders.clear()
    assert scheduler.disk.fetching == order.key
    scheduler.disk.take(Fetched(0, order.key), scheduler.prefixes)
    scheduler.disk.take(Written(0, [b"x"]), scheduler.prefixes)
    assert scheduler.disk.fetching == order.key
    scheduler.disk.lose_patience()
    for name, tokens in (("b", other), ("c", LONG)):
        scheduler.submit(request(name, tokens), seed=1)
    assert not scheduler.disk.orders
    assert set(inserted(scheduler)) == {"a", "b", "c"}
    scheduler.disk.take(Fetched(1, order.key), scheduler.prefixes)
    scheduler.prefixes.shrink(10_000)
    scheduler.submit(request("d", other), seed=1)
    assert [order.names for order in scheduler.disk.orders] == [names(other)]


def test_disk_blocks_that_a_rank_has_no_more_are_written_again() -> None:
    scheduler = make()
    begin(scheduler, names(LONG), names(LONG))
    scheduler.disk.take(Written(1, [b"x"], 7, gone=names(LONG)), scheduler.prefixes)
    scheduler.submit(request("a", LONG), seed=1)
    assert not scheduler.disk.orders
    plan = scheduler.next_plan()
    assert plan is not None
    assert [[name for _, name in store.disk_blocks] for store in plan.stores] == [names(LONG)]


def test_what_each_rank_sees_is_all_that_it_has() -> None:
    scheduler = make()
    begin(scheduler, names(LONG), names(LONG))
    for seen in (names(LONG)[:1], names(LONG)):
        for rank in range(RANKS):
            scheduler.disk.take(Surveyed(rank, 1, seen), scheduler.prefixes)
        assert scheduler.disk.has(block_hashes(LONG)) == len(seen) * DISK_BLOCK_SIZE
    scheduler.disk.take(Surveyed(1, 2, []), scheduler.prefixes)
    assert scheduler.disk.has(block_hashes(LONG)) == 0


def test_a_look_for_some_disk_blocks_says_nothing_of_others() -> None:
    """Neither of what the ranks have, nor to whoever needs another prompt's."""
    scheduler = make()
    begin(scheduler, names(OTHER), names(OTHER))
    told = EngineRequest(request_id="told", prompt=LONG, params=SamplingParams(max_tokens=4), kept=2 * DISK_BLOCK_SIZE)
    scheduler.submit(told, seed=1)
    [look] = scheduler.disk.orders
    assert isinstance(look, Survey) and look.wanted == names(LONG)
    scheduler.submit(request("elsewhere", [9] * (2 * DISK_BLOCK_SIZE)), seed=1)
    assert inserted(scheduler) == {"elsewhere": 0}, "what is looked for is not its"
    scheduler.disk.orders.clear()
    scheduler.submit(request("same", LONG), seed=1)
    assert inserted(scheduler) == {} and not scheduler.disk.orders
    for rank in range(RANKS):
        scheduler.disk.take(Surveyed(rank, look.number, names(LONG)[:1], wanted=look.wanted), scheduler.prefixes)
    assert scheduler.disk.has(block_hashes(OTHER[:-1])) == 2 * DISK_BLOCK_SIZE
    [order] = scheduler.disk.orders
    fetched(scheduler, order.key)
    assert inserted(scheduler).keys() == {"told", "same"}
