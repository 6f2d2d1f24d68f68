"""Tensor-parallel rules of mostly older families, whose modules have unusual names. Plain data, no mlx."""

from __future__ import annotations

from tandem.json_types import JsonMapping
from tandem.models.families.axes import half_width, number, one_width
from tandem.models.families.cuts import Sharding, attention, columns, glu, rows, two

_HEADS = ("q", "q", "q")
"""Fused query, key and value projection of multi-head attention (as many kv heads as query heads)."""


def _lille_width(config: JsonMapping) -> int:
    return 256 * round(int(8 * number(config, "n_embd") / 3) / 256)


def _dbrx_width(config: JsonMapping) -> int:
    own = config.get("ffn_config")
    return number(own, "ffn_hidden_size") if isinstance(own, dict) else 0


def _hunyuan_experts(config: JsonMapping) -> int:
    return one_width(config, "moe_intermediate_size", "intermediate_size")


def _hunyuan_shared(config: JsonMapping) -> int:
    return number(config, "intermediate_size") * one_width(config, "num_shared_expert")


GPT2 = Sharding(
    cuts={"attn.c_attn": rows(*_HEADS), "attn.c_proj": columns("q"), **two("c_fc", "c_proj")},
    sums=("attn", "mlp"),
    attention="attn",
    whole=frozenset({"ln_1", "ln_2"}),
    mlp=(4, "n_embd"),
)
BIGCODE = Sharding(
    cuts={**GPT2.cuts, "attn.c_attn": rows("q", "kv", "kv")},
    sums=GPT2.sums,
    attention="attn",
    whole=GPT2.whole,
    mlp=("n_inner",),
    counts={"attn.dim": ("q",), "attn.kv_dim": ("kv",)},
)
GPTJ = Sharding(
    cuts={
        **{f"attn.{name}_proj": rows("q") for name in ("q", "k", "v")},
        "attn.out_proj": columns("q"),
        **two("fc_in", "fc_out"),
    },
    sums=("attn", "mlp"),
    attention="attn",
    whole=frozenset({"ln_1"}),
    mlp=(4, "n_embd"),
)
QWEN1 = Sharding(
    cuts={
        "attn.c_attn": rows(*_HEADS),
        "attn.c_proj": columns("q"),
        "mlp.w1": rows("mlp"),
        "mlp.w2": rows("mlp"),
        "mlp.c_proj": columns("mlp"),
    },
    sums=("attn", "mlp"),
    attention="attn",
    whole=frozenset({"ln_1", "ln_2"}),
    mlp=half_width,
)
PHIXTRAL = Sharding(
    cuts={
        "mixer.Wqkv": rows(*_HEADS),
        "mixer.out_proj": columns("q"),
        "moe.switch_mlp.fc1": rows("experts"),
        "moe.switch_mlp.fc2": columns("experts"),
    },
    sums=("mixer", "moe"),
    attention="mixer",
    whole=frozenset({"ln", "moe.gate"}),
    mlp=(),
    experts=(4, "model_dim"),
)
LILLE = Sharding(
    cuts={"attention.qkv_proj": rows("q", "kv", "kv"), "attention.out_proj": columns("q"), **glu("feed_forward")},
    sums=("attention", "feed_forward"),
    attention="attention",
    mlp=_lille_width,
)
DBRX = Sharding(
    cuts={
        "norm_attn_norm.attn.Wqkv": rows("q", "kv", "kv"),
        "norm_attn_norm.attn.out_proj": columns("q"),
        "ffn.experts.*.w1": rows("mlp"),
        "ffn.experts.*.v1": rows("mlp"),
        "ffn.experts.*.w2": columns("mlp"),
    },
    sums=("norm_attn_norm.attn", "ffn"),
    attention="norm_attn_norm.attn",
    whole=frozenset({"ffn.router.layer"}),
    mlp=_dbrx_width,
    counts={"norm_attn_norm.attn.d_model": ("q",)},
)
HUNYUAN = Sharding(
    cuts=attention() | glu() | glu("mlp.switch_mlp", "experts") | glu("mlp.shared_mlp", "shared"),
    sums=("self_attn.o_proj", "mlp"),
    whole=frozenset({"mlp.gate.wg"}),
    experts=_hunyuan_experts,
    shared=_hunyuan_shared,
)
"""Rules of Hunyuan. Only `o_proj` is summed, since its attention also returns keys and values for the next layer."""
EXAONE = Sharding(
    cuts={
        **attention("attn.attention", out="out_proj"),
        "mlp.c_fc_0": rows("mlp"),
        "mlp.c_fc_1": rows("mlp"),
        "mlp.c_proj": columns("mlp"),
    },
    sums=("attn.attention", "mlp"),
    attention="attn.attention",
    whole=frozenset({"ln_1", "ln_2"}),
    wide=("attn.attention",),
)
