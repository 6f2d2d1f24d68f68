"""The prefix index against a brute-force model of what is kept."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from scheduler_invariants import check_prefixes
from tandem.kv.budget import batch_positions, kv_capacity
from tandem.kv.index import CachedPrefix, Hit, PrefixIndex, block_hashes
from tandem.protocol.kv_blocks import BLOCK_SIZE, checkpoint_name


def lookup(index: PrefixIndex, prompt: list[int]) -> Hit | None:
    return index.lookup(block_hashes(prompt[:-1]))


def save(index: PrefixIndex, prompt: list[int]) -> CachedPrefix | None:
    return index.save(block_hashes(prompt))


def save_points(index: PrefixIndex, prompt: list[int], **known: int) -> list[int]:
    return index.save_points(len(prompt), block_hashes(prompt), **known)


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("seed", range(20))
def test_lookup_finds_the_longest_kept_prefix(seed: int) -> None:
    rng = random.Random(seed)
    index = PrefixIndex(BLOCK_SIZE * 40)
    kept: dict[str, list[int]] = {}
    stems = [[rng.randrange(5) for _ in range(BLOCK_SIZE * 12)] for _ in range(3)]
    for _ in range(200):
        stem = rng.choice(stems)
        tokens = stem[: rng.randint(1, len(stem))] + [rng.randrange(5) for _ in range(rng.randint(0, 3 * BLOCK_SIZE))]
        hit = lookup(index, tokens)
        usable = [common(tokens[:-1], prompt) // BLOCK_SIZE * BLOCK_SIZE for prompt in kept.values()]
        assert (hit.length if hit else 0) == max(usable, default=0)
        if hit:
            assert kept[hit.key][: hit.length] == tokens[: hit.length]
        cached_prefix = save(index, tokens)
        if cached_prefix:
            kept[cached_prefix.key] = tokens[: cached_prefix.length]
        for key in index.take_evicted():
            del kept[key]
        check_prefixes(index)
        assert set(kept) == set(index._cached_prefixes)


@pytest.mark.parametrize("trimmable", [True, False])
def test_a_prompt_that_gave_no_numbers_leaves_nothing_that_begins_as_it_does(trimmable: bool) -> None:
    index = PrefixIndex(10_000, trimmable=trimmable)
    shared, other = [1] * BLOCK_SIZE * 2, [7] * BLOCK_SIZE * 2
    for tokens in (shared, [*shared, *[2] * BLOCK_SIZE], [*shared, *[3] * BLOCK_SIZE], other):
        assert save(index, tokens)
    index.discard(block_hashes([*shared, *[3] * BLOCK_SIZE]))
    assert lookup(index, [*other, 5]) is not None
    assert lookup(index, [*shared, *[3] * BLOCK_SIZE, 5]) is None and lookup(index, [*shared, 5]) is None
    check_prefixes(index)


def test_what_cannot_be_cut_is_found_at_its_exact_length_only() -> None:
    index = PrefixIndex(10_000, trimmable=False)
    tokens = list(range(BLOCK_SIZE * 3))
    assert index.save_point(len(tokens)) == BLOCK_SIZE * 2
    assert save(index, tokens[: BLOCK_SIZE * 2])
    hit = lookup(index, tokens)
    assert hit and hit.length == BLOCK_SIZE * 2
    assert lookup(index, tokens[: BLOCK_SIZE + 5]) is None


def test_one_token_is_always_left_to_compute() -> None:
    index = PrefixIndex(10_000)
    tokens = list(range(BLOCK_SIZE * 2))
    save(index, tokens)
    hit = lookup(index, tokens)
    assert hit and hit.length == BLOCK_SIZE


def test_the_least_recently_used_goes_first_and_pressure_frees_what_is_asked() -> None:
    index = PrefixIndex(BLOCK_SIZE * 4)
    prompts = [[i] * BLOCK_SIZE for i in range(4)]
    keys = [cached_prefix.key for prompt in prompts if (cached_prefix := save(index, prompt))]
    lookup(index, [*prompts[0], 9])
    save(index, [7] * BLOCK_SIZE)
    assert index.take_evicted() == [keys[1]]
    index.shrink(BLOCK_SIZE + 1)
    assert index.positions == BLOCK_SIZE * 2
    index.shrink(-5)
    assert index.positions == BLOCK_SIZE * 2
    index.clear()
    assert not index._cached_prefixes and index.positions == 0


def test_a_prefix_stays_when_there_is_no_room_for_its_longer_one() -> None:
    index = PrefixIndex(1000)
    chat = list(range(BLOCK_SIZE * 10))
    save(index, chat)
    assert index.reserve(block_hashes([7] * BLOCK_SIZE * 20))
    assert save(index, [*chat, *range(5000, 5000 + BLOCK_SIZE * 4)]) is None
    assert index.reserve(block_hashes([8] * BLOCK_SIZE * 20)) is None
    hit = lookup(index, [*chat, 1])
    assert hit and hit.length == BLOCK_SIZE * 10 and index.take_evicted() == []


def test_a_longer_prefix_takes_its_shorter_ones_place_without_a_look_at_others() -> None:
    class Counted(OrderedDict):
        looks = 0

        def __getitem__(self, key):
            Counted.looks += 1
            return super().__getitem__(key)

    index = PrefixIndex(10**6)
    index._cached_prefixes = Counted()
    system = [1] * BLOCK_SIZE * 8
    for other in range(50):
        assert save(index, system + [2 + other] * BLOCK_SIZE)
    Counted.looks = 0
    longer = save(index, system + [2] * BLOCK_SIZE * 2)
    assert longer and index.take_evicted() == ["p0"]
    assert Counted.looks < 10
    check_prefixes(index)


def test_room_is_spared_for_prefixes_once_prompts_share_them() -> None:
    index = PrefixIndex(BLOCK_SIZE * 8)
    for number in range(20):
        lookup(index, [number] * BLOCK_SIZE * 4)
    assert index.spared == 0
    for number in range(20):
        lookup(index, [99] * BLOCK_SIZE * 2 + [number] * BLOCK_SIZE * 2)
    assert index.spared == BLOCK_SIZE * 4
    index.limit(BLOCK_SIZE)
    assert save(index, [5] * BLOCK_SIZE) and save(index, [6] * BLOCK_SIZE * 2) is None
    index.limit(10**6)
    assert save(index, [6] * BLOCK_SIZE * 2)


def test_off_means_off() -> None:
    index = PrefixIndex(0)
    assert not index.enabled and save(index, [1] * 100) is None and lookup(index, [1] * 100) is None


def test_hashes_chain() -> None:
    tokens = list(range(BLOCK_SIZE * 2))
    assert block_hashes(tokens)[0] == block_hashes(tokens[:BLOCK_SIZE])[0]
    assert block_hashes([99, *tokens[1:]])[1] != block_hashes(tokens)[1]


def test_capacity_and_batch_shape() -> None:
    assert kv_capacity(1000, 0.5, [(100, 10), (100, 10)]) == 15
    assert kv_capacity(100, 0.5, [(100, 10)]) == 0
    assert batch_positions([3, 7, 1]) == 21 and batch_positions([]) == 0


def test_cached_prefixes_of_states_cost_more_than_their_positions() -> None:
    index = PrefixIndex(BLOCK_SIZE * 4, trimmable=False, extra=BLOCK_SIZE)
    first, second = ([n] * (BLOCK_SIZE * 2) for n in (1, 2))
    assert save(index, first) is not None and index.positions == BLOCK_SIZE * 3
    assert save(index, second) is not None and index.take_evicted() == ["p0"], "both do not fit"
    assert save(index, [3] * (BLOCK_SIZE * 4)) is None, "longer than the budget with its state"
    check_prefixes(index)
    assert not PrefixIndex(BLOCK_SIZE, extra=1).enabled
    serves = [one.serves for one in (index, PrefixIndex(BLOCK_SIZE), PrefixIndex(0, extra=9), PrefixIndex(BLOCK_SIZE, extra=9))]
    assert serves == ["blocks", "any length", "off", "off: a cached prefix of its states takes as much memory as 9 tokens"]


def test_a_longer_prefix_takes_over_checkpoints_as_far_as_their_bytes_allow() -> None:
    index = PrefixIndex(10**6, trimmable=False, extra=10, checkpoint=100)
    chat = list(range(2000))
    first, second = save(index, chat[:448]), save(index, chat[:640])
    assert first and second and second.takes == [(first.key, 448)] and not second.drops
    assert index.take_evicted() == [first.key]
    hit = lookup(index, chat[:500])
    assert hit and (hit.key, hit.length) == (second.key, 448)
    third = save(index, chat[:704])  # a quarter of 704 is one checkpoint: the one that was used
    assert third and third.takes == [(second.key, 448)]
    assert third.drops == [checkpoint_name(block_hashes(chat[:640])[-1])]
    assert index.positions == 704 + 10 + 100
    assert index.disk_names(third.key)[11:] == [checkpoint_name(block_hashes(chat[:at])[-1]) for at in (704, 448)]
    check_prefixes(index)


def test_a_prompt_has_checkpoints_where_it_ends_forks_and_at_a_distance() -> None:
    index = PrefixIndex(10**6, trimmable=False, checkpoint=1, every=256)
    system, one = list(range(150)), list(range(1000, 1700))
    prompt = system + one
    assert save_points(index, prompt) == [256, 512, 832]
    for point in save_points(index, prompt):
        assert save(index, prompt[:point])
    other = system + list(range(3000, 3100))
    assert lookup(index, other) is None
    assert save_points(index, other) == [128, 192], "the second prompt with this beginning has a checkpoint at its end"
    assert save_points(index, other, on_disk=128 + 64) == [192]
    assert save_points(index, prompt, cached=832) == []
    assert all(save(index, other[:point]) for point in (128, 192))
    third = system + [7] * 100
    hit = lookup(index, third)
    assert hit and hit.length == 128 and save_points(index, third, cached=128) == [192]
    check_prefixes(index)
    assert save_points(PrefixIndex(10**6), prompt) == [len(prompt)]
