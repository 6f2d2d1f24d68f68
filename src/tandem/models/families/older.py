"""Tensor-parallel rules of mostly older families, whose modules have unusual names. Plain data, no mlx."""

from __future__ import annotations

from dataclasses import replace

from tandem.checkpoints.config import section
from tandem.models.families.axes import half_width, number, one_width
from tandem.models.families.cuts import Sharding, attention, experts, fused, glu, two

_HEADS = ("q", "q", "q")
"""Kinds of multi-head attention (as many kv heads as query heads)."""

GPT2 = Sharding(
    cuts=fused("attn", "c_attn", "c_proj", *_HEADS) | two("c_fc", "c_proj"), whole=frozenset({"ln_1", "ln_2"}), mlp=(4, "n_embd")
)
BIGCODE = replace(
    GPT2,
    cuts=fused("attn", "c_attn", "c_proj") | two("c_fc", "c_proj"),
    mlp=("n_inner",),
    counts={"attn.dim": ("q",), "attn.kv_dim": ("kv",)},
)
GPTJ = replace(GPT2, cuts=attention("attn", "out_proj", _HEADS) | two("fc_in", "fc_out"), whole=frozenset({"ln_1"}))
QWEN1 = replace(
    GPT2, cuts=fused("attn", "c_attn", "c_proj", *_HEADS) | glu("mlp", gate="w1", up="w2", down="c_proj"), mlp=half_width
)
PHIXTRAL = Sharding(
    cuts=fused("mixer", "Wqkv", "out_proj", *_HEADS) | two("fc1", "fc2", "moe.switch_mlp", "experts"),
    whole=frozenset({"ln", "moe.gate"}),
    mlp=(),
    experts=(4, "model_dim"),
)
LILLE = Sharding(
    cuts=fused("attention", "qkv_proj", "out_proj") | glu("feed_forward"),
    mlp=lambda config: 256 * round(int(8 * number(config, "n_embd") / 3) / 256),
)
DBRX = Sharding(
    cuts=fused("norm_attn_norm.attn", "Wqkv", "out_proj") | glu("ffn.experts.*", gate="w1", up="v1", down="w2"),
    summed=("norm_attn_norm.attn", "ffn"),
    whole=frozenset({"ffn.router.layer"}),
    mlp=lambda config: number(section(config, "ffn_config"), "ffn_hidden_size"),
    counts={"norm_attn_norm.attn.d_model": ("q",)},
)
HUNYUAN = Sharding(
    cuts=attention() | glu() | experts(shared="shared_mlp"),
    summed=("self_attn.o_proj", "mlp"),
    whole=frozenset({"mlp.gate.wg"}),
    experts=lambda config: one_width(config, "moe_intermediate_size", "intermediate_size"),
    shared=lambda config: number(config, "intermediate_size") * one_width(config, "num_shared_expert"),
)
"""Rules of Hunyuan. Only `o_proj` is summed, since its attention also returns keys and values for the next layer."""
EXAONE = Sharding(
    cuts=attention("attn.attention", out="out_proj") | glu(gate="c_fc_0", up="c_fc_1", down="c_proj"),
    summed=("attn.attention", "mlp"),
    whole=frozenset({"ln_1", "ln_2"}),
    wide=("attn.attention",),
)
