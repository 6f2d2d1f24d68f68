"""How layers are divided over the ranks of a stage: every element once, in whole groups, in balance."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import LayoutError
from tandem.models.description import ModelDescription
from tandem.models.families.axes import Axis, blocks, delta, glm_delta, kimi_delta, latent, lightning, ling_delta, mixed
from tandem.models.families.cuts import Cut
from tandem.models.families.sharding import NOT_SHARDED, SHARDING
from tandem.models.families.table import FAMILIES
from tandem.models.shard import held_kv_heads, part_of, plan_shards
from wide import repeats


def description(**changes):
    facts = {
        "family": "llama",
        "num_layers": 2,
        "hidden_size": 576,
        "vocab_size": 49152,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "max_context": 2048,
        "dtype": "bfloat16",
        "quantization": None,
        "tied_head": True,
        "layer_bytes": (1, 1),
        "embed_bytes": 1,
        "head_bytes": 1,
        "eos_token_ids": (2,),
        "mlp_width": 1536,
    }
    return ModelDescription(**(facts | changes))


PACKED = {"group_size": 64, "bits": 4}


def layer_share(shard, d):
    """Share of a dense layer's weights."""
    cuts = SHARDING[d.family].cuts.values()
    own = sum(len(piece) for cut in cuts for piece in part_of(cut, shard, d).pieces)
    return own / sum(part_of(cut, shard, d).total for cut in cuts)


def test_every_family_divides_or_says_why_not():
    assert set(SHARDING) | set(NOT_SHARDED) == set(FAMILIES) and not set(SHARDING) & set(NOT_SHARDED)
    for family in set(FAMILIES) - set(SHARDING):
        with pytest.raises(LayoutError, match=f"{family} does not run tensor-parallel: its .* --pipeline-parallel"):
            plan_shards(description(family=family), 2)
    with pytest.raises(LayoutError, match="new does not run tensor-parallel: its type is not listed"):
        plan_shards(description(family="new"), 2)
    assert plan_shards(description(family="rwkv7"), 1)[0].kv_heads == range(3)


def test_nine_heads_over_two_ranks():
    d = description()
    first, second = plan_shards(d, 2)
    assert (first.kv_heads, second.kv_heads) == (range(2), range(2, 3))
    assert part_of(Cut("rows", ("q",)), first, d).pieces == (range(384),)
    assert part_of(Cut("rows", ("q", "kv", "kv")), second, d).pieces == (
        range(384, 576),
        range(576 + 128, 576 + 192),
        range(768 + 128, 768 + 192),
    )
    # The rank with one kv head gets more of the MLP, so that both have half of the layer.
    assert (first.mlp, second.mlp) == (range(672), range(672, 1536))
    assert layer_share(first, d) == pytest.approx(0.5, abs=0.01)
    assert first.vocab_sizes == (24576, 24576)


def test_weights_of_ranks_are_their_shares_of_a_layer():
    d = description(num_heads=32, num_kv_heads=8, head_dim=128, hidden_size=4096, mlp_width=14336)
    for weights in ((2, 1), (128, 64), (3, 1), (1, 1), (5, 2, 1)):
        shards = plan_shards(d, len(weights), weights=weights)
        for shard, weight in zip(shards, weights, strict=True):
            assert layer_share(shard, d) == pytest.approx(weight / sum(weights), abs=0.01)
    assert [len(s.kv_heads) for s in plan_shards(d, 2, weights=(3, 1))] == [6, 2]
    assert [len(s.vocab) for s in plan_shards(d, 2, weights=(3, 1))] == [36864, 12288]


def test_weights_like_kv_heads_divide_all_alike():
    shards = plan_shards(description(), 2, weights=(2, 1))
    assert [len(s.kv_heads) for s in shards] == [2, 1]
    assert [len(s.mlp) for s in shards] == [1024, 512]


def test_experts_are_divided_within_each():
    d = description(family="qwen3_moe", num_kv_heads=4, num_heads=32, expert_width=768, num_experts=128, mlp_width=6144)
    shards = plan_shards(d, 4)
    assert [len(s.experts) for s in shards] == [192] * 4
    assert [len(s.mlp) for s in shards] == [1536] * 4


def test_packed_weights_are_cut_between_groups():
    shards = plan_shards(description(quantization=PACKED), 2, weights=(1, 1))
    assert all(s.mlp.start % 64 == 0 for s in shards)
    narrow = description(quantization=PACKED, num_heads=8, num_kv_heads=8, head_dim=16)  # four heads to a group
    assert [len(s.kv_heads) for s in plan_shards(narrow, 2, weights=(3, 1))] == [4, 4]
    assert [len(s.kv_heads) for s in plan_shards(narrow, 2, weights=(3, 1), dequantize=True)] == [6, 2]
    with pytest.raises(LayoutError, match="after every 4 of the 8 kv heads only; use at most 2, or --dequantize yes"):
        plan_shards(narrow, 3)
    wider = dataclasses.replace(narrow, head_dim=32)  # two heads to a group: more than a third of them on one rank
    assert [held_kv_heads(wider, s) for s in plan_shards(wider, 3)] == [4, 2, 2]


def test_kv_heads_are_counted_as_the_config_counts_them():
    """Layers with four kv heads of a size and two of another are cut in two: each part has two of the four."""
    axes = mixed(
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "head_dim": 16,
            "global_head_dim": 32,
        }
    )
    d = description(family="gemma4_text", num_heads=8, num_kv_heads=4, head_dim=16, axes=axes)
    assert [held_kv_heads(d, s) for s in plan_shards(d, 2)] == [2, 2]
    shared = description(num_heads=8, num_kv_heads=2)
    assert [held_kv_heads(shared, s) for s in plan_shards(shared, 4)] == [1, 1, 1, 1]


def test_exceptions_of_single_modules_count_where_they_are_cut():
    settings = {"group_size": 32, "bits": 4, "model.layers.0.mlp.gate": {"group_size": 64, "bits": 8}}
    d = description(quantization=settings, mlp_width=32 * 6)
    assert [len(s.mlp) for s in plan_shards(d, 2, weights=(2, 1))] == [128, 64]
    assert [len(s.mlp) % 64 for s in plan_shards(dataclasses.replace(d, mlp_width=32 * 5 * 3), 3)] == [32, 32, 32]
    settings["model.layers.1.mlp.down_proj"] = {"group_size": 64, "bits": 4}
    with pytest.raises(LayoutError, match="the mlp width 480 is not a multiple of the quantisation group 64"):
        plan_shards(dataclasses.replace(d, mlp_width=32 * 5 * 3), 3)


@pytest.mark.parametrize(
    ("changes", "size", "weights", "message"),
    [
        ({}, 4, None, "--tensor-parallel-size 4 is more than the model's 3 kv heads; use at most 3"),
        ({}, 0, None, "--tensor-parallel-size must be at least 1, is 0"),
        ({}, 2, (1, 2, 3), "3 weights of ranks do not fit --tensor-parallel-size 2"),
        ({}, 2, (1, 0), "must be positive numbers, are 1, 0"),
        ({}, 2, (1, math.nan), "must be positive numbers"),
        ({"num_heads": 10}, 2, None, "10 heads are not a multiple of 3 kv heads"),
        ({"mlp_width": 0}, 2, None, "names no MLP width"),
        ({"mlp_width": 2}, 3, None, "the mlp width 2 has 2 parts of 1; use at most 2"),
        ({"mlp_width": 64, "quantization": PACKED}, 2, None, "has 1 parts of 64; use at most 1, or --dequantize yes"),
        ({"mlp_width": 100, "quantization": PACKED}, 2, None, "width 100 is not a multiple of the quantisation group"),
    ],
)
def test_what_is_refused(changes, size, weights, message):
    with pytest.raises(LayoutError, match=message):
        plan_shards(description(**changes), size, weights=weights)


@st.composite
def models(draw):
    """A random model of any family, ranks, weights, and whether weights are packed."""
    kv, states = draw(st.integers(1, 16)), draw(st.integers(1, 16))
    size = draw(st.integers(1, min(kv, states)))
    group = draw(st.sampled_from([1, 32, 64]))
    family = draw(st.sampled_from(sorted(SHARDING)))
    axes = SHARDING[family].axes
    heads = kv * draw(st.integers(1, 5))
    sharing = [n for n in range(kv + 1, states + 1) if n % kv == 0 and heads % n == 0]  # ranks have the same kv head
    if repeats(family) and sharing and draw(st.booleans()):
        size = draw(st.sampled_from(sharing))
    head_dim, value_dim = draw(st.sampled_from([16, 32, 64, 128])), draw(st.sampled_from([16, 48, 128]))
    width = st.integers(size, 400).map(lambda n: n * group)
    hidden = heads * head_dim if axes in (blocks, lightning) else draw(st.sampled_from([128, 576, 4096]))  # no less than heads
    latents = axes in (latent, kimi_delta, ling_delta, glm_delta) or family == "bailing_hybrid"
    groups = 1 if family != "nemotron_h" and draw(st.booleans()) else states
    each = draw(st.integers(1, 3))
    figures = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "v_head_dim": value_dim,
        "qk_nope_head_dim": head_dim,
        "qk_rope_head_dim": 16,
        "swa_num_attention_heads": each * heads,
        "swa_num_key_value_heads": each * kv,
        "linear_num_key_heads": states,
        "linear_num_value_heads": each * states,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": value_dim,
        "linear_attn_config": {"num_heads": states, "head_dim": value_dim},
        **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "num_heads"), each * states),
        **dict.fromkeys(("mamba_n_groups", "n_groups"), groups),
        "mamba_d_head": value_dim,
        "mamba_d_state": 24,
        "hidden_size_per_head": value_dim,
        "mamba_expand": 2,
        "kv_lora_rank": 32 * latents,
        "index_head_dim": 32,
        "group_norm_size": max(size, kv),
        "o_groups": kv,
        "o_lora_rank": value_dim,
        "block_configs": [{"attention": {"n_heads_in_group": heads // kv}}],
    }
    d = description(
        family=family,
        num_kv_heads=heads if latents else kv,
        num_heads=heads,
        head_dim=head_dim,
        hidden_size=hidden,
        vocab_size=draw(st.integers(300, 200_000)),
        quantization={"group_size": group, "bits": 4} if group > 1 else None,
        mlp_width=draw(width),
        expert_width=draw(width),
        shared_width=draw(st.one_of(st.just(0), width)),
        num_experts=draw(st.integers(1, 128)),
        axes=axes(figures) if axes else {},
    )
    weights = draw(st.none() | st.lists(st.floats(0.01, 100), min_size=size, max_size=size))
    return d, size, weights, group


def places(d, kind, group):
    """Parts of equal width into which the inputs of a projection can be cut."""
    axis = d.axes.get(kind) or Axis("heads", d.num_kv_heads, d.num_heads // d.num_kv_heads * d.head_dim)
    return axis.count * axis.unit // math.lcm(group, axis.unit)


@settings(max_examples=200)
@given(models())
def test_every_element_has_one_owner(drawn):
    d, size, weights, group = drawn
    cuts = {cut for _, cut in SHARDING[d.family].all_cuts} | {Cut("rows", ("vocab",))}
    inputs = {kind for cut in cuts if cut.axis == "columns" for kind in cut.kinds}
    if size > d.num_kv_heads and "q" in inputs and d.num_heads // size * d.head_dim % group:
        with pytest.raises(LayoutError, match=f"in quantisation groups of {group} allow cuts"):
            plan_shards(d, size, weights=weights)
        return
    if size > 1 and any(
        places(d, kind, group) < size for kind in inputs & {"q", *d.axes} if kind != "q" or size <= d.num_kv_heads
    ):
        with pytest.raises(LayoutError, match=f"in quantisation groups of {group} allow cuts"):
            plan_shards(d, size, weights=weights)
        return
    shards = plan_shards(d, size, weights=weights)
    assert [(s.rank, s.size) for s in shards] == [(i, size) for i in range(size)]
    assert all(len(s.kv_heads) > 0 and len(s.mlp) > 0 and len(s.vocab) > 0 for s in shards)
    for cut in cuts:
        parts = [part_of(cut, s, d) for s in shards]
        end = 0
        for kind, pieces in zip(cut.kinds, zip(*(part.pieces for part in parts), strict=True), strict=True):
            if kind in d.axes and d.axes[kind].base == "whole":
                assert set(pieces) == {range(end, end + d.axes[kind].count * d.axes[kind].unit)}
                end = pieces[0].stop
                continue
            if kind in ("kv", "kv_heads") and size > d.num_kv_heads:
                assert pieces == tuple(
                    piece for piece in pieces[:: size // d.num_kv_heads] for _ in range(size // d.num_kv_heads)
                )
                pieces = pieces[:: size // d.num_kv_heads]
            for piece in pieces:
                assert piece.start == end
                end = piece.stop
                assert len(piece) or kind == "shared"
                assert cut.axis != "columns" or piece.start % group == 0
        assert {part.total for part in parts} == {end}


def test_ranks_beyond_the_kv_heads_share_one():
    d = description(num_heads=8, num_kv_heads=2)
    shards = plan_shards(d, 4)
    assert [s.kv_heads for s in shards] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert [s.queries for s in shards] == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    one = plan_shards(description(num_heads=8, num_kv_heads=1), 4)
    assert [s.kv_heads for s in one] == [range(1)] * 4
    assert [s.queries for s in one] == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    with pytest.raises(LayoutError, match=r"3 is more than the model's 2 kv heads; use at most 2 \(or 4\), and"):
        plan_shards(d, 3)
    with pytest.raises(LayoutError, match="4 is more than the model's 2 kv heads; use at most 2, and"):
        plan_shards(dataclasses.replace(d, family="olmo2"), 4)
    with pytest.raises(LayoutError, match="cuts after every 2 heads only, and each rank would have 1"):
        plan_shards(dataclasses.replace(d, head_dim=32, quantization=PACKED), 8)


def test_experts_stay_whole_where_that_is_wanted():
    d = description(family="qwen3_moe", num_kv_heads=4, num_heads=32, expert_width=768, num_experts=10, mlp_width=6144)
    shards = plan_shards(d, 4, expert_parallel=True)
    assert [s.experts for s in shards] == [range(3), range(3, 6), range(6, 8), range(8, 10)]
    assert [len(s.mlp) for s in shards] == [1536] * 4
    packed = dataclasses.replace(d, expert_width=192, quantization=PACKED)
    with pytest.raises(LayoutError, match="the experts width 192 has 3 parts of 64; use at most 3, or --expert-par"):
        plan_shards(packed, 4)
    assert plan_shards(packed, 4, expert_parallel=True)[0].experts == range(3)
    with pytest.raises(LayoutError, match="--expert-parallel: the model's 3 experts are fewer than 4 ranks"):
        plan_shards(dataclasses.replace(d, num_experts=3), 4, expert_parallel=True)
    with pytest.raises(LayoutError, match="--expert-parallel: llama has no experts that ranks"):
        plan_shards(description(), 2, expert_parallel=True)


def test_units_of_recurrent_state_are_divided_like_heads():
    axes = delta(
        {
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 6,
            "linear_num_value_heads": 12,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        }
    )
    d = description(family="qwen3_next", num_heads=16, num_kv_heads=4, head_dim=256, axes=axes)
    shards = plan_shards(d, 4)
    assert [s.states for s in shards] == [range(2), range(2, 4), range(4, 5), range(5, 6)]
    assert part_of(Cut("rows", ("delta_k", "delta_k", "delta_v")), shards[1], d).pieces == (
        range(256, 512),
        range(768 + 256, 768 + 512),
        range(1536 + 512, 1536 + 1024),
    )
    with pytest.raises(LayoutError, match="5 is more than the model's 4 kv heads; use at most 4"):
        plan_shards(d, 5)
    few = {name: dataclasses.replace(axis, count=3) if axis.base == "states" else axis for name, axis in axes.items()}
    with pytest.raises(LayoutError, match="4 is more than the model's 3 units of recurrent state; use at most 3"):
        plan_shards(dataclasses.replace(d, axes=few), 4)
    with pytest.raises(LayoutError, match="figures by which --tensor-parallel-size divides .* are not known"):
        plan_shards(dataclasses.replace(d, axes={}), 2)
