"""Where long and short prompts go when replicas have roles: a pure choice."""

from __future__ import annotations

import random

import pytest

from doubles import NamedRouter
from tandem.config.settings import Role
from tandem.protocol.kv_blocks import DISK_BLOCK_SIZE
from tandem.server.engines.router import AGAIN, EXPECTED_OUTPUT, LATER, LONG, SLOWER

PREFILL, DECODE = 0, 1


WRITTEN = 6000 // DISK_BLOCK_SIZE * DISK_BLOCK_SIZE


def engine_pool(*roles: Role, pace: float = 1000.0) -> NamedRouter:
    router = NamedRouter()
    for index, role in enumerate(roles):
        router.join(index)
        router.set_state(index, "ready")
        router.set_disk(index, "disk", 0.8)
        router.set_role(index, role, pace, 50_000)
    return router


def prompt(count: int, seed: int = 1) -> list[int]:
    return [seed * 1_000_000 + i for i in range(count)]


def choose(router: NamedRouter, name: str, tokens: list[int], output: int = 100, **more: object) -> tuple[int | None, bool]:
    """Who gets it, and whether it leaves again."""
    where = router.placed(name, tokens, output, **{"may_leave": True, **more})
    router.check()
    return where, router.leaves(name)


def test_long_prompts_are_computed_apart_and_all_else_where_answers_are():
    router = engine_pool("prefill", "decode")
    assert choose(router, "short", prompt(LONG - 1, 9)) == (DECODE, False)
    assert choose(router, "long", prompt(6000)) == (PREFILL, True)
    assert router.outstanding(PREFILL) == 6000, "its answer is work for the other"
    router.advance("long", 1)
    assert router.outstanding(PREFILL) == 99, "until it has left"
    router.end("long")
    assert choose(router, "long+1", [*prompt(6000), 5], done=1, written={"disk": WRITTEN}) == (DECODE, False)
    assert router.kept("long+1") == WRITTEN
    router.end("long+1")
    assert choose(router, "again", [*prompt(6000), 8]) == (DECODE, False), "it has all of it in memory"


def test_what_is_on_the_disk_need_not_be_computed_apart():
    router = engine_pool("prefill", "decode", "decode")
    assert choose(router, "long", prompt(6000)) == (PREFILL, True)
    assert choose(router, "like", [*prompt(6000), 5]) == (PREFILL, True), "not written yet: it is no hit for others"
    for name in ("long", "like"):
        router.end(name)
    moved = choose(router, "long+1", [*prompt(6000), 5], done=1, written={"disk": WRITTEN}, may_leave=False)
    assert moved == (1, False)
    assert choose(router, "like it", [*prompt(6000), 6]) == (2, False), "it reads that"
    assert router.kept("like it") == WRITTEN
    assert choose(router, "more", [*prompt(6000), *prompt(LONG + DISK_BLOCK_SIZE, seed=2)]) == (PREFILL, True)


@pytest.mark.parametrize("state", ["recovering", "starting", "silent", "draining", "failed"])
def test_one_does_both_when_the_other_is_not_there(state):
    for gone, left in ((PREFILL, DECODE), (DECODE, PREFILL)):
        router = engine_pool("prefill", "decode")
        router.set_state(gone, state)
        assert choose(router, "long", prompt(6000)) == (left, False)
        assert choose(router, "short", prompt(10, 3)) == (left, False)
    router = engine_pool("prefill", "decode")
    assert choose(router, "full", prompt(6000), avoid={DECODE}) == (PREFILL, False)


def test_some_are_computed_where_they_go_on():
    router = engine_pool("prefill", "decode")
    assert choose(router, "stays", prompt(6000), may_leave=False) == (DECODE, False)
    assert choose(router, "ends", prompt(6000, 2), 0, may_leave=False) == (PREFILL, False), "nothing comes after it"
    assert choose(router, "one token", prompt(6000, 3), 1) == (PREFILL, False)
    for store, reach, room, apart in (
        ("other", [], 50_000, False),
        ("", [], 50_000, False),
        ("disk", [], 5000, False),
        ("other", ["other", "disk"], 50_000, True),
    ):
        router = engine_pool("prefill", "decode")
        router.set_disk(DECODE, store, 0.8, reach, 0.5)
        router.set_role(DECODE, "decode", 1000.0, room)
        assert choose(router, "long", prompt(6000)) == ((PREFILL, True) if apart else (DECODE, False))


def test_a_slow_or_busy_replica_for_prompts_is_passed_over():
    for pace, where in ((1000 / SLOWER, PREFILL), (999 / SLOWER, DECODE), (0.0, PREFILL)):
        router = engine_pool("prefill", "decode")
        router.set_role(PREFILL, "prefill", pace, 50_000)
        assert choose(router, "long", prompt(6000))[0] == where
    router = engine_pool("prefill", "decode")
    placed = [choose(router, f"long {i}", prompt(6000, i))[0] for i in range(10)]
    assert placed == [PREFILL] * int(LATER) + [DECODE] + placed[int(LATER) + 1 :] and placed.count(PREFILL) > LATER
    quick = engine_pool("prefill", "decode")
    quick.set_role(PREFILL, "prefill", 10_000.0, 50_000)
    assert [choose(quick, f"long {i}", prompt(6000, i))[0] for i in range(30)] == [PREFILL] * 30


def test_more_waits_there_while_others_are_answered_where_it_goes_on():
    router = engine_pool("prefill", "decode")
    for i in range(3):
        assert choose(router, f"short {i}", prompt(20, 100 + i))[0] == DECODE
        router.advance(f"short {i}", 100)
    placed = [choose(router, f"long {i}", prompt(6000, i))[0] for i in range(3 * int(LATER) + 1)]
    assert placed == [PREFILL] * 3 * int(LATER) + [DECODE]


def test_a_slow_replica_for_prompts_is_tried_again():
    router = engine_pool("prefill", "decode")
    router.set_role(PREFILL, "prefill", 100.0, 50_000)
    placed = []
    for i in range(2 * AGAIN):
        placed.append(choose(router, f"long {i}", prompt(6000, i))[0])
        router.end(f"long {i}")
    assert placed == ([DECODE] * (AGAIN - 1) + [PREFILL]) * 2


def test_of_several_the_one_that_is_soonest():
    router = engine_pool("prefill", "prefill", "decode", "decode")
    router.set_role(0, "prefill", 500.0, 50_000)
    assert choose(router, "a", prompt(6000))[0] == 1
    assert choose(router, "b", prompt(6000, 2))[0] == 0, "12 s each"
    assert choose(router, "c", prompt(9000, 3))[0] == 1
    assert choose(router, "short", prompt(9, 4))[0] == 2
    assert choose(router, "another", prompt(9, 5))[0] == 3


def test_one_for_both_gets_long_prompts_before_one_that_only_decodes_and_keeps_them():
    router = engine_pool("both", "decode")
    assert choose(router, "long", prompt(6000)) == (0, False)
    assert router.outstanding(0) == 6000 + 100
    assert choose(router, "short", prompt(9, 2)) == (1, False)
    mixed = engine_pool("prefill", "both")
    assert choose(mixed, "long", prompt(6000)) == (0, True)
    assert choose(mixed, "short", prompt(9, 2)) == (1, False)


def test_a_key_is_at_home_with_those_who_answer():
    router = engine_pool("prefill", "prefill", "decode")
    assert {choose(router, f"r{i}", prompt(9, i), key=str(i))[0] for i in range(20)} == {2}


def test_random_histories():
    rng = random.Random(5)
    router = engine_pool("prefill", "decode", "both")
    live: list[str] = []
    for step in range(1500):
        router.set_state(rng.randrange(3), rng.choice(["ready", "ready", "ready", "recovering", "silent"]))
        where, leaves = choose(
            router,
            f"r{step}",
            prompt(rng.randrange(1, 4000), rng.randrange(9)),
            rng.randrange(1, 900),
            may_leave=rng.random() < 0.8,
        )
        if where is not None:
            live.append(f"r{step}")
            assert not leaves or where == 0
        if live and rng.random() < 0.7:
            name = live.pop(rng.randrange(len(live)))
            router.advance(name, rng.randrange(1, EXPECTED_OUTPUT))
            if rng.random() < 0.8:
                router.end(name)
        router.check()
