from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import LayoutError
from tandem.models.partition import split_layers


@st.composite
def cases(draw):
    layers = draw(st.integers(1, 60))
    stages = draw(st.integers(1, layers))
    sizes = draw(st.none() | st.lists(st.integers(1, 1000), min_size=layers, max_size=layers))
    memory = draw(st.none() | st.lists(st.integers(1, 10**6), min_size=stages, max_size=stages))
    return layers, stages, sizes, memory


@given(cases())
def test_each_layer_exactly_once_in_order(case):
    layers, stages, sizes, memory = case
    ranges = split_layers(layers, stages, layer_bytes=sizes, memory=memory)
    assert len(ranges) == stages
    assert [i for r in ranges for i in r] == list(range(layers))
    assert all(len(r) >= 1 for r in ranges)


@given(st.integers(1, 60), st.integers(1, 60))
def test_equal_stages_differ_by_one_layer_at_most(layers, stages):
    if stages <= layers:
        counts = [len(r) for r in split_layers(layers, stages)]
        assert max(counts) - min(counts) <= 1


def test_shares_follow_memory_and_layer_sizes():
    assert split_layers(36, 2, memory=[20, 16]) == (range(20), range(20, 36))
    assert split_layers(4, 2, layer_bytes=[3, 1, 1, 1]) == (range(1), range(1, 4))


def test_explicit_split_wins():
    assert split_layers(6, 2, explicit=[5, 1], memory=[1, 100]) == (range(5), range(5, 6))


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"stages": 0}, "--pipeline-parallel-size"),
        ({"stages": 7}, "--pipeline-parallel-size 7 is more than the model's 6 layers"),
        ({"stages": 2, "explicit": [3, 4]}, "--layer-split 3,4 adds up to 7"),
        ({"stages": 2, "explicit": [6]}, "--layer-split 6 names 1 stages"),
        ({"stages": 2, "explicit": [6, 0]}, "at least one layer"),
        ({"stages": 2, "memory": [5, 0]}, "stage 1 has no memory"),
    ],
)
def test_errors_name_the_flag(kwargs, words):
    with pytest.raises(LayoutError, match=words):
        split_layers(6, **kwargs)
