"""Who sends to whom in a rank group, for every shape of layout."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.layout import RankPosition

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=5).map(tuple)


def rank_group(sizes: tuple[int, ...]) -> list[RankPosition]:
    return [RankPosition(rank=rank, stage_sizes=sizes) for rank in range(sum(sizes))]


@given(SIZES)
def test_ranks_of_a_stage_stand_side_by_side(sizes):
    assert [(p.stage, p.tp_rank, p.tp_size) for p in rank_group(sizes)] == [
        (stage, part, size) for stage, size in enumerate(sizes) for part in range(size)
    ]


@given(SIZES)
def test_one_rank_samples_and_it_leads_the_last_stage(sizes):
    [sampler] = [p for p in rank_group(sizes) if p.samples]
    assert (sampler.stage, sampler.tp_rank) == (len(sizes) - 1, 0)


@given(SIZES)
def test_each_rank_gets_its_input_once_from_the_stage_before_or_the_sampler(sizes):
    ranks = rank_group(sizes)
    senders = [(target, p) for p in ranks for target in p.downstream]
    assert Counter(target for target, _ in senders) == ({} if len(sizes) == 1 else {p.rank: 1 for p in ranks})
    for target, sender in senders:
        assert sender.stage == (ranks[target].stage - 1) % len(sizes)
        assert sender.samples or ranks[target].stage > 0
