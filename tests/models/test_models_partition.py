from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.errors import LayoutError
from tandem.models.partition import split_layers, uncut


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


def test_layers_that_share_keys_and_values_stay_together():
    """Gemma 4 E2B: the last 20 of 35 layers read the caches of layers 13 and 14."""
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    config = {"model_type": "gemma4", "num_kv_shared_layers": 20, "layer_types": kinds}
    fixed = uncut(config, 35)
    assert fixed == frozenset(range(14, 35)) == uncut({"model_type": "gemma4"}, 35)
    assert split_layers(35, 2, uncut=fixed) == (range(13), range(13, 35))
    assert [len(part) for part in split_layers(35, 3, uncut=fixed)] == [12, 1, 22]
    assert split_layers(35, 2, explicit=[10, 25], uncut=fixed)[1] == range(10, 35)
    with pytest.raises(
        LayoutError,
        match=r"--layer-split 18,17: no stage can begin at layer 18, since layers 13 to 34 "
        r"share keys and values and stay in one stage; nearest is --layer-split "
        "13,22",
    ):
        split_layers(35, 2, explicit=[18, 17], uncut=fixed)
    with pytest.raises(LayoutError, match="15: the model has 35 layers, .* it can be cut into 14 stages at most"):
        split_layers(35, 15, uncut=fixed)
    pairs = uncut({"model_type": "hunyuan", "use_cla": True, "cla_share_factor": 2}, 6)
    with pytest.raises(LayoutError, match="layers 0 to 1 share .* stage, as others do; nearest is --layer-split 2,4"):
        split_layers(6, 2, explicit=[3, 3], uncut=pairs)
