"""Which models are in memory, decided by a pure function: by example, and run against a simulated server."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.server.engines.model_slots import PATIENCE_S, ModelSlot, decide

BUDGET = {"here": 10}


def slot(name: str, need: int = 6, **fields) -> ModelSlot:
    return ModelSlot(name=name, needs={"here": need}, **fields)


def names(slots: list[ModelSlot]) -> list[str]:
    return [one.name for one in slots]


def test_what_fits_is_loaded_beside_the_others():
    slots = [slot("a", 6, state="loaded"), slot("b", 4, wanted_at=1.0), slot("c", 1, wanted_at=2.0)]
    decision = decide(slots, BUDGET, None, 3.0)
    assert names(decision.load) == ["b"] and decision.unload == [slots[0]] and not decision.close


def test_the_least_recently_used_goes_and_no_more_than_needed():
    slots = [
        slot("a", 3, state="loaded", used_at=2.0),
        slot("b", 3, state="loaded", used_at=1.0),
        slot("c", 3, state="loaded", used_at=3.0),
        slot("d", 4, wanted_at=5.0),
    ]
    decision = decide(slots, BUDGET, None, 5.0)
    assert names(decision.unload) == ["b"] and not decision.load
    slots[1].state = "unloading"
    assert decide(slots, BUDGET, None, 5.0).unload == []
    slots[1].state = "unloaded"
    assert names(decide(slots, BUDGET, None, 5.0).load) == ["d"]
    small = [slot("a", 2, state="loaded", used_at=1.0), slot("b", 8, state="loaded", used_at=2.0), slot("c", 8, wanted_at=5.0)]
    assert names(decide(small, BUDGET, None, 5.0).unload) == ["b"], "the older one need not go too"


def test_idle_ones_go_before_busy_ones_and_kept_ones_never():
    slots = [
        slot("a", 5, state="loaded", used_at=1.0, users=1),
        slot("b", 5, state="loaded", used_at=2.0),
        slot("c", 5, wanted_at=5.0),
    ]
    assert names(decide(slots, BUDGET, None, 99.0).unload) == ["b"]
    slots[1].keep = True
    assert decide(slots, BUDGET, None, 5.0 + PATIENCE_S / 2).close == []
    assert names(decide(slots, BUDGET, None, 5.0 + PATIENCE_S).close) == ["a"]
    slots[0].keep = True
    decision = decide(slots, BUDGET, None, 99.0)
    assert not (decision.load or decision.unload or decision.close)


def test_nothing_goes_in_vain_while_another_is_being_loaded():
    slots = [slot("a", 4, state="loaded"), slot("b", 6, state="loading"), slot("c", 8, wanted_at=1.0)]
    decision = decide(slots, BUDGET, None, 99.0)
    assert not (decision.load or decision.unload or decision.close)


def test_those_behind_do_not_take_the_room_that_is_made():
    slots = [slot("a", 9, state="loaded", users=1), slot("b", 9, wanted_at=1.0), slot("c", 1, wanted_at=2.0)]
    assert decide(slots, BUDGET, None, 99.0).load == []


def test_a_count_is_a_limit_as_well():
    slots = [slot("a", 1, state="loaded"), slot("b", 1, wanted_at=1.0)]
    assert names(decide(slots, BUDGET, 1, 1.0).unload) == ["a"]
    assert names(decide(slots, {}, 2, 1.0).load) == ["b"]


def test_an_idle_model_goes_after_its_time():
    slots = [slot("a", state="loaded", unload_after=10.0, idle_at=100.0)]
    assert decide(slots, BUDGET, None, 109.0).unload == []
    assert names(decide(slots, BUDGET, None, 110.0).unload) == ["a"]
    for change in ({"users": 1}, {"keep": True}, {"wanted_at": 110.0}, {"state": "loading"}):
        changed = slot("a", **({"state": "loaded"} | change), unload_after=10.0, idle_at=100.0)
        assert decide([changed], BUDGET, None, 999.0).unload == []


@given(
    needs=st.lists(st.integers(1, 10), min_size=2, max_size=5),
    limit=st.none() | st.integers(1, 3),
    events=st.lists(st.tuples(st.sampled_from(["ask", "end"]), st.integers(0, 4)), max_size=40),
)
def test_the_budget_holds_and_every_request_is_served(needs, limit, events):
    """A server in steps: loading and leaving take one step each; requests end when they are told to, or at the end."""
    slots = [slot(str(i), need) for i, need in enumerate(needs)]
    waiting = [0] * len(slots)
    now = 0.0

    def step():
        nonlocal now
        now += 0.6
        decision = decide(slots, BUDGET, limit, now)
        for i, one in enumerate(slots):
            if one.state in ("loading", "unloading"):
                one.state = "loaded" if one.state == "loading" else "unloaded"
            if one.state == "loaded" and one not in decision.close and one not in decision.unload and waiting[i]:
                one.users, waiting[i], one.wanted_at, one.used_at = one.users + waiting[i], 0, None, now
        for one in decision.unload:
            assert one.state == "loaded" and not one.users
            one.state = "unloading"
        for one in decision.load:
            assert one.state == "unloaded"
            one.state = "loading"
        there = [one for one in slots if one.state != "unloaded"]
        assert sum(one.needs["here"] for one in there) <= 10
        assert limit is None or len(there) <= limit

    for event, i in events:
        one = slots[i % len(slots)]
        if event == "ask":
            waiting[i % len(slots)] += 1
            one.wanted_at = now if one.wanted_at is None else one.wanted_at
        elif one.users:
            one.users -= 1
        step()
    for _ in range(12 * len(slots)):
        step()
        for one in slots:
            one.users = 0
    assert waiting == [0] * len(slots)
