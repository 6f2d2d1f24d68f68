"""The router as a pure state machine."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from doubles import NamedRouter
from tandem.protocol.kv_blocks import BLOCK_SIZE
from tandem.server.engines.router import EXPECTED_OUTPUT, KEY_TOKENS, MOST_BLOCKS, TAIL, SentPrefixes, prompt_hashes

STATES = ("ready", "starting", "recovering", "draining", "failed", "silent")
TAKING = ("ready", "recovering")


def ready(count: int, **options: bool) -> NamedRouter:
    router = NamedRouter(**options)
    for index in range(count):
        router.join(index)
        router.set_state(index, "ready")
    return router


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def test_requests_go_round_while_nothing_is_under_way():
    router = ready(3)
    placed = []
    for i in range(6):
        placed.append(router.placed(f"r{i}", [i], 10))
        router.end(f"r{i}")
    assert placed == [0, 1, 2, 0, 1, 2]


def test_the_least_work_wins():
    router = ready(2)
    assert router.placed("long", tokens(1000), 10) == 0
    assert [router.placed(f"s{i}", [7000 + i], 100) for i in range(10)] == [1] * 10
    assert router.placed("last", [1], 10) == 0, "101 tokens each: ten are as much as the long one"
    assert router.requests(1) == 10


def test_work_goes_down_as_tokens_come():
    router = ready(1)
    router.placed("a", tokens(100), 1000)
    assert router.outstanding(0) == 100 + EXPECTED_OUTPUT
    router.advance("a", 1)
    assert router.outstanding(0) == EXPECTED_OUTPUT - 1, "the prompt is done"
    router.advance("a", 600)
    assert router.outstanding(0) == TAIL
    router.advance("a", 390)
    assert router.outstanding(0) == 9
    router.end("a")
    router.end("a")
    router.advance("a", 1)
    assert router.outstanding(0) == 0


def test_a_prefix_draws_its_like_until_the_saving_is_used_up():
    router = ready(2)
    prompt = tokens(20 * BLOCK_SIZE)
    first = router.placed("a", prompt, 100)
    router.end("a")
    placed = [router.placed(f"b{i}", [*prompt, i], 100) for i in range(8)]
    # Each is 101 tokens of work there, and 741 elsewhere: the seventh finds 606 waiting, the eighth 707.
    assert placed == [first] * 7 + [1 - first]
    assert router.placed("other", tokens(40, 5000), 100) == first, "now the other one has 741 to do, this one 707"


def test_a_prompt_on_a_common_disk_is_worth_what_reading_it_saves():
    router = ready(3)
    prompt = tokens(17 * BLOCK_SIZE)  # eight disk blocks, and a block more
    for index, store in enumerate(("disk", "disk", "")):
        router.set_disk(index, store, 0.5)
    assert router.placed("a", prompt, 100) == 0
    assert router.kept("a") == 0 == router.kept("nobody")
    assert router.placed("b", [*prompt, 1], 100) == 1, "644 wait at the first; here it reads 512 tokens, at no wait"
    assert router.kept("b") == 512
    assert router.outstanding(1) == 17 * BLOCK_SIZE + 1 - 256 + 100
    router.end("a")
    assert router.placed("c", [*prompt, 2], 100) == 0, "nothing waits there now, and it has all in memory"
    assert router.kept("c") == 0
    router.end("b")
    router.end("c")
    router.set_state(0, "recovering")
    router.set_state(1, "recovering")
    assert router.placed("d", [*prompt, 3], 100) == 2, "what is only in memory, or on another's disk, is not there"
    router.end("d")
    router.set_state(0, "ready")
    assert router.placed("e", [*prompt, 4], 100) == 2
    router.set_state(2, "failed")
    assert router.placed("f", [*prompt, 4], 100) == 0
    assert router.kept("f") == 512, "its ranks are new, the disk is not"
    secret = tokens(20 * BLOCK_SIZE, 9000)
    assert router.placed("g", secret, 100, on_disk=False) == 0
    router.set_state(1, "ready")
    router.set_state(0, "failed")
    assert router.placed("h", secret, 100) == 1
    assert router.kept("h") == 0
    router.check()


def test_who_is_left_alone_is_told_what_a_replica_that_has_gone_wrote():
    router = ready(2)
    prompt = tokens(17 * BLOCK_SIZE)
    for index in range(2):
        router.set_disk(index, "disk", 0.5)
    assert router.placed("a", prompt, 100) == 0
    router.leave(0)
    assert router.placed("b", [*prompt, 1], 100) == 1 and router.kept("b") == 512


def test_a_prompt_that_another_lends_is_worth_less_than_one_on_its_own_disk():
    router = ready(3)
    prompt = tokens(17 * BLOCK_SIZE)  # eight disk blocks, and a block more
    for index, store in enumerate(("a/x", "b/x c/x", "d/x")):
        router.set_disk(index, store, 0.5, ["a/x", "b/x", "c/x"] if index < 2 else ["d/x", "b/x"], 0.25)
    assert router.reads(0, "b/x c/x") and not router.reads(2, "b/x c/x"), "it needs all parts"
    assert not router.reads(0, "")
    assert router.placed("a", prompt, 100) == 0
    assert router.placed("b", [*prompt, 1], 100) == 1 and router.kept("b") == 512
    assert router.outstanding(1) == 17 * BLOCK_SIZE + 1 - 128 + 100
    router.set_disk(1, "b/x c/x", 0.5, ["b/x", "c/x"], 0.25)  # who lent it has gone
    router.end("b")
    router.set_state(1, "recovering")
    router.set_state(1, "ready")
    other = tokens(20 * BLOCK_SIZE, 9000)
    router.placed("c", other, 100)
    router.check()


def test_requests_with_one_key_go_together_until_that_is_dear():
    router = ready(3)
    homes = {key: router.placed(f"first {key}", tokens(40), 100, key=key) for key in map(str, range(30))}
    assert set(homes.values()) == {0, 1, 2}, "keys are spread"
    for key in homes:
        router.end(f"first {key}")
    again = ready(3)  # another api, or the same one later, knows nothing of these
    assert [again.placed(f"r{i}", tokens(40, 100 * i), 100, key="7") for i in range(9)] == [homes["7"]] * 9
    again.placed("long", tokens(KEY_TOKENS), 10, key="7")
    assert again.placed("late", tokens(40, 9000), 100, key="7") != homes["7"], "it has more to do than that is worth"
    for i in range(9):
        again.end(f"r{i}")
    again.end("long")
    again.set_state(homes["7"], "draining")
    other = {again.placed(f"o{i}", tokens(40, 100 * i), 100, key="7") for i in range(4)}
    assert len(other - {homes["7"]}) == len(other) == 1, "they go together elsewhere"
    again.check()


def test_short_common_beginnings_hardly_matter():
    router = ready(2)
    system = tokens(BLOCK_SIZE)
    placed = [router.placed(f"r{i}", [*system, *tokens(30, 1000 * i)], 100) for i in range(8)]
    assert sorted(placed.count(index) for index in (0, 1)) == [4, 4]


def test_without_prefix_caches_the_beginning_does_not_matter():
    router = ready(2, affinity=False)
    prompt = tokens(20 * BLOCK_SIZE)
    placed = []
    for i in range(4):
        placed.append(router.placed(f"r{i}", prompt, 10))
        router.end(f"r{i}")
    assert placed == [0, 1, 0, 1]


def test_a_replica_that_was_lost_has_no_prefixes():
    router = ready(2)
    prompt = tokens(20 * BLOCK_SIZE)
    assert router.placed("a", prompt, 10) == 0
    router.end("a")
    router.set_state(0, "silent")
    assert router.placed("b", prompt, 10) == 1
    router.end("b")
    router.set_state(0, "ready")
    assert router.placed("c", prompt, 10) == 1


def test_one_that_loads_for_the_first_time_gets_nothing():
    router = ready(2)
    router.set_state(0, "starting")
    router.set_state(1, "draining")
    assert router.placed("x", [1], 10) is None


def test_those_that_cannot_work_at_once_wait_until_nobody_else_can():
    router = ready(2)
    router.set_state(0, "recovering")
    assert [router.placed(f"r{i}", [i], 1000) for i in range(3)] == [1] * 3
    router.set_state(1, "draining")
    assert router.placed("x", [1], 10) == 0
    assert router.placed("y", [1], 10, avoid={0}) is None
    router.set_state(0, "failed")
    assert router.placed("z", [1], 10) is None


def test_leaving_takes_its_requests_along():
    router = ready(2)
    router.placed("a", [1], 10)
    router.leave(0)
    router.leave(7)
    router.end("a")
    router.check()
    assert router.placed("b", [1], 10) == 1


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 6))
def test_sent_prefixes_are_found_and_bounded(starts, capacity):
    sent = SentPrefixes(capacity)
    for start in starts:
        hashes = prompt_hashes(tokens(start * BLOCK_SIZE + 5, start))
        sent.note(hashes)
        assert len(sent) <= capacity
        assert sent.matched(hashes) == min(start, capacity) * BLOCK_SIZE


def test_the_first_blocks_of_a_prompt_are_kept_longest():
    sent = SentPrefixes(4)
    hashes = prompt_hashes(tokens(3 * BLOCK_SIZE))
    sent.note(hashes)
    sent.note(prompt_hashes(tokens(2 * BLOCK_SIZE, 999)))
    assert sent.matched(hashes) == 2 * BLOCK_SIZE


def test_very_long_prompts_are_looked_at_in_part():
    assert len(prompt_hashes(tokens((MOST_BLOCKS + 9) * BLOCK_SIZE))) == MOST_BLOCKS


class History(RuleBasedStateMachine):
    """Random histories."""

    def __init__(self) -> None:
        super().__init__()
        self.router = NamedRouter()
        self.states: dict[int, str] = {}
        self.live: dict[str, int] = {}
        self.joined = self.sent = 0
        self.rng = random.Random(0)

    @rule(state=st.sampled_from(STATES))
    def join(self, state):
        self.router.join(self.joined)
        self.router.set_state(self.joined, state)
        self.states[self.joined] = state
        self.joined += 1

    @precondition(lambda self: self.states)
    @rule(data=st.data(), state=st.sampled_from(STATES))
    def change(self, data, state):
        replica = data.draw(st.sampled_from(sorted(self.states)))
        self.router.set_state(replica, state)
        self.states[replica] = state

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def leave(self, data):
        replica = data.draw(st.sampled_from(sorted(self.states)))
        self.router.leave(replica)
        del self.states[replica]
        self.live = {request: where for request, where in self.live.items() if where != replica}

    @rule(
        length=st.integers(1, 200),
        start=st.integers(0, 2),
        limit=st.integers(1, 600),
        done=st.integers(0, 50),
        avoid=st.sets(st.integers(0, 3)),
    )
    def place(self, length, start, limit, done, avoid):
        loads = {replica: self.router.outstanding(replica) for replica in self.states}
        name = f"r{self.sent}"
        self.sent += 1
        chosen = self.router.placed(name, tokens(length, start), limit, done=min(done, limit - 1), avoid=avoid)
        able = {replica for replica, state in self.states.items() if state in TAKING and replica not in avoid}
        best = {replica for replica in able if self.states[replica] == "ready"} or able
        if not best:
            assert chosen is None
            return
        assert chosen in best
        saved = length // BLOCK_SIZE * BLOCK_SIZE
        assert loads[chosen] <= min(loads[replica] for replica in best) + saved
        self.live[name] = chosen

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 300))
    def advance(self, data, count):
        name = data.draw(st.sampled_from(sorted(self.live)))
        before = self.router.outstanding(self.live[name])
        self.router.advance(name, count)
        assert self.router.outstanding(self.live[name]) <= before

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data):
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.router.end(name)
        del self.live[name]

    @invariant()
    def agrees(self):
        self.router.check()
        for replica in self.states:
            assert self.router.requests(replica) == sum(where == replica for where in self.live.values())
        if not self.live:
            assert all(self.router.outstanding(replica) == 0 for replica in self.states)


TestHistory = History.TestCase
