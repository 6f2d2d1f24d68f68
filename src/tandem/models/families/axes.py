"""Kinds of split axes in families whose layers are not standard attention. Computed from config.json, no mlx.

Each function takes the text model's config with the family's defaults. It returns an `Axis` for each own kind that
`sharding.py` uses. A number that the config lacks counts as 0, and `plan_shards` then refuses the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tandem.checkpoints.config import LARGEST_NUMBER, section
from tandem.json_types import JsonMapping, JsonObject

Base = Literal["heads", "queries", "states", "whole"]
"""Units that are distributed over the ranks. heads: kv heads of attention; queries: query heads; states: heads, groups
of heads, or channels of a recurrent layer; whole: none, every rank has the full axis."""


@dataclass(frozen=True)
class Axis:
    """An axis, or a contiguous part of one, split in whole units."""

    base: Base
    count: int
    """Number of units over all ranks."""
    unit: int
    """Elements per unit."""


Axes = Callable[[JsonMapping], dict[str, Axis]]


def split(base: Base, count: int, **units: int) -> dict[str, Axis]:
    """Return axes that are split into the same `count` of units: elements per unit, by name."""
    return {name: Axis(base, count, unit) for name, unit in units.items()}


def number(config: JsonMapping, *keys: str) -> int:
    """Return the first of `keys` whose value is an integer in [0, LARGEST_NUMBER), or 0."""
    found = (config.get(key) for key in keys)
    return next((value for value in found if type(value) is int and 0 <= value < LARGEST_NUMBER), 0)


def latent(config: JsonMapping) -> dict[str, Axis]:
    """Return the axes of multi-head latent attention: projections from the latent are split by heads, the latent is
    replicated."""
    heads = number(config, "num_attention_heads")
    plain = number(config, "qk_nope_head_dim", "head_dim")
    value = number(config, "v_head_dim", "head_dim") or number(config, "hidden_size") // max(heads, 1)
    turned = plain + number(config, "qk_rope_head_dim")
    return split("heads", heads, latent_q=turned, latent_kv=plain + value, latent_out=value, latent_heads=1)


def grouped(config: JsonMapping) -> dict[str, Axis]:
    """Return the axes of DeepSeek V4's attention, split between the groups of heads that share an output projection."""
    heads, groups, size = (number(config, key) for key in ("num_attention_heads", "o_groups", "head_dim"))
    each = heads // max(groups, 1)
    return split("heads", groups, grouped_q=each * size, grouped_heads=each, groups=1, grouped_out=number(config, "o_lora_rank"))


def _gated(config: JsonMapping) -> dict[str, Axis]:
    """Return the axis of a query projection that also computes an output gate per head."""
    heads = number(config, "num_attention_heads")
    size = number(config, "head_dim") or number(config, "hidden_size") // max(heads, 1)
    return split("queries", heads, q_gate=2 * size)


def mixed(config: JsonMapping) -> dict[str, Axis]:
    """Return the axes of attention whose layers differ in head counts and widths: split into the greatest common
    divisors."""
    heads = {number(config, "num_attention_heads"), number(config, "swa_num_attention_heads")} - {0}
    kv = {number(config, "num_key_value_heads"), number(config, "swa_num_key_value_heads")}
    if config.get("attention_k_eq_v"):
        kv.add(number(config, "num_global_key_value_heads"))
    keys = {number(config, key) for key in ("head_dim", "global_head_dim", "swa_head_dim")} - {0}
    values = {number(config, key) for key in ("v_head_dim", "swa_v_head_dim")} - {0} or keys
    count = max(math.gcd(*(kv - {0} or {1})), 1)
    each = math.gcd(*heads) // count
    query, out = each * math.gcd(*keys), each * math.gcd(*values)
    return split("heads", count, mixed_q=query, mixed_kv=math.gcd(*keys, *values), mixed_out=out, mixed_heads=each)


def _blocks(config: JsonMapping, part: str, figure: str) -> list[float]:
    """Return the positive values of `figure` in section `part` of Nemotron's `block_configs`, for the layers that have
    it."""
    listed = config.get("block_configs")
    blocks = [block.get(part) for block in listed if isinstance(block, dict)] if isinstance(listed, list) else []
    found = [block.get(figure) for block in blocks if isinstance(block, dict)]
    return [one for one in found if isinstance(one, int | float) and one > 0]


def blocks(config: JsonMapping) -> dict[str, Axis]:
    """Return the axes of Nemotron's attention, where each layer has its own number of query heads per kv head."""
    heads = number(config, "num_attention_heads")
    size = number(config, "hidden_size") // max(heads, 1)
    count = math.gcd(*(heads // int(one) for one in _blocks(config, "attention", "n_heads_in_group"))) or 1
    whole = heads // count * size
    return split("heads", count, mixed_q=whole, mixed_kv=size, mixed_out=whole)


def blocks_width(config: JsonMapping) -> int:
    """Return the greatest common divisor of the widths of Nemotron's MLPs, which differ by layer and are multiples of
    256."""
    width = number(config, "hidden_size")
    return math.gcd(*(-(-int(2 * one * width / 3) // 256) * 256 for one in _blocks(config, "ffn", "ffn_mult")))


def indexed(config: JsonMapping) -> dict[str, Axis]:
    """Return the axes of MiniMax M3's sparse attention. Index heads choose blocks of keys for kv heads, so both are
    split together."""
    own = section(config, "sparse_attention_config")
    heads, kv, size = (number(config, key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    index = number(own, "sparse_num_index_heads") or number(config, "index_n_heads") or kv
    count, width = max(math.gcd(kv, index), 1), number(own, "sparse_index_dim") or number(config, "index_head_dim")
    query, each = heads // count * size, index // count
    return split("heads", count, indexed_q=query, indexed_kv=kv // count * size, index=each * width, index_heads=each)


def plamo(config: JsonMapping) -> dict[str, Axis]:
    """Return the axes of PLaMo 2's Mamba 2, whose heads share one B and one C, computed after the convolution."""
    heads, size = number(config, "mamba_num_heads"), number(config, "hidden_size_per_head")
    return split("states", heads, ssm_gated=2 * size, ssm_width=size, ssm_heads=1)


def delta(config: JsonMapping) -> dict[str, Axis]:
    """Return the axes of the gated delta rule (Yang, Kautz, Hatamizadeh: Gated Delta Networks, 2024). Split between key
    heads, each with the value heads that read it."""
    keys, values = number(config, "linear_num_key_heads"), number(config, "linear_num_value_heads")
    k = number(config, "linear_key_head_dim")
    each = values // max(keys, 1)
    v = each * number(config, "linear_value_head_dim")
    plain = split("states", keys, delta_k=k, delta_v=v, delta_k_heads=1, delta_v_heads=each)
    return plain | split("states", keys, delta_qkvz=2 * k + 2 * v, delta_ba=2 * each) | _gated(config)


def kimi_delta(config: JsonMapping) -> dict[str, Axis]:
    """Return the axes of Kimi Delta Attention, whose keys and values have equal heads, and of latent attention."""
    own = section(config, "linear_attn_config")
    return latent(config) | split("states", number(own, "num_heads"), delta_heads=1, delta_width=number(own, "head_dim"))


def glm_linear(config: JsonMapping) -> JsonObject:
    """Return the figures of GLM-5-Next's linear layers: those of `linear_attn_config`, else `linear_...` or defaults."""
    heads, width = config.get("linear_num_heads", 64), config.get("linear_head_dim", 128)
    own = {"num_heads": heads, "head_dim": width, "short_conv_kernel_size": config.get("linear_conv_kernel_dim", 4)}
    return own | section(config, "linear_attn_config")


def glm_delta(config: JsonMapping) -> dict[str, Axis]:
    """Return the axes of `kimi_delta` for GLM-5-Next, with that of a low-rank projection, which is whole on each rank."""
    own = glm_linear(config)
    return kimi_delta({**config, "linear_attn_config": own}) | split("whole", 1, delta_low=number(own, "head_dim"))


def ling_delta(config: JsonMapping) -> dict[str, Axis]:
    """Return the axes of `kimi_delta` for Ling, where both kinds of layers have `num_attention_heads` heads."""
    heads = number(config, "num_attention_heads")
    return latent(config) | split("states", heads, delta_heads=1, delta_width=number(config, "head_dim"))


def lightning(config: JsonMapping) -> dict[str, Axis]:
    """Return the axes of lightning attention, split between the groups of its group norm, and of latent attention if
    present."""
    heads, groups = number(config, "num_attention_heads"), number(config, "group_norm_size") or 1
    plain, beside = number(config, "hidden_size") // max(heads, 1), number(config, "kv_lora_rank") > 0
    size = number(config, "head_dim") or plain if beside else plain
    each = heads // groups
    own = split("states", groups, lightning=each * size, lightning_heads=each, lightning_groups=1)
    return latent(config) | own if beside else own


def ssm(config: JsonMapping) -> dict[str, Axis]:
    """Return the axes of Mamba 2 (Dao and Gu: Transformers are SSMs, 2024), split between groups of heads with one B
    and one C.

    A single group is split between its heads, and its B and C are replicated.
    """
    heads = number(config, "mamba_n_heads", "mamba_num_heads", "num_heads")
    groups = number(config, "mamba_n_groups", "n_groups")
    size = number(config, "mamba_d_head", "mamba_head_dim", "head_dim")
    state = number(config, "mamba_d_state", "ssm_state_size", "state_size")
    if groups == 1:
        return split("states", heads, ssm_width=size, ssm_heads=1) | split("whole", 1, ssm_b=state, ssm_groups=1)
    each = heads // max(groups, 1)
    return split("states", groups, ssm_width=each * size, ssm_heads=each, ssm_b=state, ssm_groups=1)


def grouped_ssm(config: JsonMapping) -> dict[str, Axis]:
    """Return the axes of `ssm` for norms within groups: a single group cannot be split, so it is one unit."""
    found = ssm(config)
    if found["ssm_groups"].base == "states":
        return found
    return {name: Axis("states", 1, axis.count * axis.unit) for name, axis in found.items()}


def channels(*width: str) -> Axes:
    """Return a function for layers with one state per channel (Mamba, short convolutions). `width` names the config keys
    whose product is the number of channels."""
    return lambda config: split("states", math.prod(number(config, key) for key in width), channels=1)


def gated_channels(config: JsonMapping) -> dict[str, Axis]:
    """Return the axes of Recurrent Gemma, whose channels share gates by head; heads are as many as in attention."""
    heads = number(config, "num_attention_heads")
    return split("states", heads, channels=number(config, "hidden_size") // max(heads, 1), gates=1)


def half_width(config: JsonMapping) -> int:
    """Return the MLP width where `intermediate_size` in the config counts gate and up together."""
    return number(config, "intermediate_size") // 2


def one_width(config: JsonMapping, *keys: str) -> int:
    """Return the value of the first of `keys` present: a number, or equal numbers by layer; 0 if they differ."""
    value = next((config[key] for key in keys if config.get(key) is not None), 0)
    found = set(value) if isinstance(value, list) else {value}
    return number({"width": found.pop()}, "width") if len(found) == 1 else 0


def lfm2_width(config: JsonMapping) -> int:
    """Return the width of LFM2's MLP, derived from `block_ff_dim` and its multiplier as mlx-lm does."""
    width = number(config, "block_ff_dim", "intermediate_size")
    if config.get("block_auto_adjust_ff_dim"):
        multiplier, step = config.get("block_ffn_dim_multiplier"), number(config, "block_multiple_of") or 1
        width = int((multiplier if isinstance(multiplier, int | float) else 1) * int(2 * width / 3))
        width = step * -(-width // step)
    return width
