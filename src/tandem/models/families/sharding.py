"""How the families' layers are divided for tensor parallelism: plain data, no mlx.

Every parameter of a layer is named here: it is cut (by heads, by states or by MLP width), or whole on every rank. A
name that is neither is refused, so that a parameter can never be copied to all ranks by oversight. Every entry of
`SHARDING` is held to the undivided model by `tests/loading/test_loading_shard_parity.py`.
"""

from __future__ import annotations

from dataclasses import replace

from tandem.models.families.axes import channels, delta, grouped_ssm, kimi_delta, latent, lfm2_width, ssm
from tandem.models.families.cuts import Cut, Sharding, Width, attention, columns, first, glu, rows, two

_FUSED_GLU = {"mlp.gate_up_proj": rows("mlp", "mlp"), "mlp.down_proj": columns("mlp")}
_SUMS = ("self_attn", "mlp")
_DENSE = Sharding(cuts=attention() | glu(), sums=_SUMS)
_COHERE = {"self_attn.q_norm": rows("q_heads"), "self_attn.k_norm": rows("kv_heads")}


def _moe(
    *,
    switch: str = "mlp.switch_mlp",
    shared: str = "mlp.shared_experts",
    router: tuple[str, ...] = ("mlp.gate",),
    widths: tuple[Width, Width, Width],
) -> Sharding:
    """Standard attention, and experts; `widths` are those of MLP, expert and shared expert."""
    mlp, experts, own = widths
    cuts = attention() | glu(switch, "experts")
    if mlp:
        cuts |= glu()
    if own:
        cuts |= glu(shared, "shared")
    sums = ("self_attn", switch.partition(".")[0])
    return Sharding(cuts=cuts, sums=sums, whole=frozenset(router), mlp=mlp, experts=experts, shared=own)


_WIDTH: Width = ("intermediate_size",)
_EXPERT: Width = ("moe_intermediate_size",)
_ROUTED = _moe(widths=(_WIDTH, _EXPERT, ("moe_intermediate_size", "n_shared_experts")))
_BLOCK = _moe(switch="block_sparse_moe.switch_mlp", router=("block_sparse_moe.gate",), widths=((), _WIDTH, ()))
_ERNIE_EXPERT: tuple[str | int, ...] = ("moe_intermediate_size|intermediate_size",)
_BAILING_SHARED: Width = ("moe_shared_expert_intermediate_size|moe_intermediate_size", "num_shared_experts")

_NORMED = attention() | {"self_attn.q_norm": Cut("last", ("q",)), "self_attn.k_norm": Cut("last", ("kv",))}
"""Attention with norms over all heads together."""
_NORMS = {"self_attn.q_norm": "q", "self_attn.k_norm": "kv"}
_OLMO = Sharding(cuts=_NORMED | glu(), sums=_SUMS, norms=_NORMS)
_MINIMAX = replace(
    _BLOCK,
    cuts={**_BLOCK.cuts, **_NORMED},
    norms=_NORMS,
    whole=_BLOCK.whole | {"block_sparse_moe.e_score_correction_bias"},
)

_LATENT = {
    "self_attn.q_proj": rows("latent_q"),
    "self_attn.q_b_proj": rows("latent_q"),
    "self_attn.kv_b_proj": rows("latent_kv"),
    "self_attn.embed_q": first("latent_heads"),
    "self_attn.unembed_out": first("latent_heads"),
    "self_attn.o_proj": columns("latent_out"),
}
_LATENT_WHOLE = frozenset({"self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"})
_INDEXER = frozenset(f"self_attn.indexer.{name}" for name in ("wq_b", "wk", "weights_proj"))
_MLA_DENSE = Sharding(cuts=_LATENT | glu(), sums=_SUMS, whole=_LATENT_WHOLE, axes=latent)
_MLA = replace(
    _ROUTED,
    cuts=_LATENT | glu() | glu("mlp.switch_mlp", "experts") | glu("mlp.shared_experts", "shared"),
    whole=_ROUTED.whole | _LATENT_WHOLE | _INDEXER,
    axes=latent,
)

_DELTA_COUNTS = {
    "linear_attn.num_k_heads": ("delta_k_heads",),
    "linear_attn.num_v_heads": ("delta_v_heads",),
    "linear_attn.key_dim": ("delta_k",),
    "linear_attn.value_dim": ("delta_v",),
}
_DELTA_HEADS = {"linear_attn.A_log": rows("delta_v_heads"), "linear_attn.dt_bias": rows("delta_v_heads")}
_GATED = attention() | {"self_attn.q_proj": rows("q_gate")}
_QWEN_MOE = glu("mlp.switch_mlp", "experts") | glu("mlp.shared_expert", "shared")
_QWEN_DELTA = Sharding(
    cuts={
        **_GATED,
        **glu(),
        **_QWEN_MOE,
        **_DELTA_HEADS,
        "linear_attn.conv1d": first("delta_k", "delta_k", "delta_v"),
        "linear_attn.in_proj_qkvz": rows("delta_qkvz"),
        "linear_attn.in_proj_ba": rows("delta_ba"),
        "linear_attn.in_proj_qkv": rows("delta_k", "delta_k", "delta_v"),
        "linear_attn.in_proj_z": rows("delta_v"),
        "linear_attn.in_proj_b": rows("delta_v_heads"),
        "linear_attn.in_proj_a": rows("delta_v_heads"),
        "linear_attn.out_proj": columns("delta_v"),
    },
    sums=("self_attn", "linear_attn", "mlp"),
    whole=frozenset({"mlp.gate", "mlp.shared_expert_gate"}),
    experts=_EXPERT,
    shared=("shared_expert_intermediate_size",),
    axes=delta,
    counts={
        **_DELTA_COUNTS,
        "linear_attn.conv_dim": ("delta_k", "delta_k", "delta_v"),
        "linear_attn.conv1d.groups": ("delta_k", "delta_k", "delta_v"),
    },
)
_OLMO_HYBRID = Sharding(
    cuts={
        **_NORMED,
        **glu(),
        **_DELTA_HEADS,
        **{f"linear_attn.{name}": rows("delta_k") for name in ("q_proj", "k_proj")},
        **{f"linear_attn.{name}": rows("delta_v") for name in ("v_proj", "g_proj")},
        **{f"linear_attn.{name}": rows("delta_v_heads") for name in ("a_proj", "b_proj")},
        "linear_attn.q_conv1d": first("delta_k"),
        "linear_attn.k_conv1d": first("delta_k"),
        "linear_attn.v_conv1d": first("delta_v"),
        "linear_attn.o_proj": columns("delta_v"),
    },
    sums=("self_attn", "linear_attn", "mlp"),
    axes=delta,
    norms=_NORMS,
    counts={
        **_DELTA_COUNTS,
        "linear_attn.q_conv1d.groups": ("delta_k",),
        "linear_attn.k_conv1d.groups": ("delta_k",),
        "linear_attn.v_conv1d.groups": ("delta_v",),
    },
)
_KIMI_MOE = glu() | glu("mlp.switch_mlp", "experts") | glu("mlp.shared_experts", "shared")
_KIMI_LATENT = Sharding(
    cuts=_LATENT | _KIMI_MOE,
    sums=_SUMS,
    whole=_LATENT_WHOLE | {"mlp.gate", "mlp.e_score_correction_bias"},
    experts=_EXPERT,
    shared=("moe_intermediate_size", "num_shared_experts"),
    axes=kimi_delta,
)
_KIMI_LINEAR = replace(
    _KIMI_LATENT,
    variants={
        "self_attn.q_conv": replace(
            _KIMI_LATENT,
            cuts={
                **_KIMI_MOE,
                **{f"self_attn.{name}_proj": rows("delta_width") for name in ("q", "k", "v", "f_b", "g_b")},
                **{f"self_attn.{name}_conv.conv": first("delta_width") for name in ("q", "k", "v")},
                "self_attn.b_proj": rows("delta_heads"),
                "self_attn.A_log": Cut("heads", ("delta_heads",)),
                "self_attn.dt_bias": rows("delta_width"),
                "self_attn.o_proj": columns("delta_width"),
            },
            whole=_KIMI_LATENT.whole | {"self_attn.f_a_proj", "self_attn.g_a_proj"},
            attention="",
            counts={
                "self_attn.num_heads": ("delta_heads",),
                "self_attn.projection_dim": ("delta_width",),
                **{f"self_attn.{name}_conv.conv.groups": ("delta_width",) for name in ("q", "k", "v")},
            },
        ),
    },
)


def _mamba2(path: str) -> Sharding:
    """A Mamba 2 mixer alone."""
    inputs = ("ssm_width", "ssm_b", "ssm_b")
    return Sharding(
        cuts={
            f"{path}.in_proj": rows("ssm_width", *inputs, "ssm_heads"),
            f"{path}.conv1d": first(*inputs),
            f"{path}.norm": Cut("last", ("ssm_width",)),
            f"{path}.out_proj": columns("ssm_width"),
            **{f"{path}.{name}": rows("ssm_heads") for name in ("dt_bias", "A_log", "D")},
        },
        sums=(path,),
        attention="",
        axes=ssm,
        norms={f"{path}.norm": "ssm_width"},
        mlp=(),
        counts={
            f"{path}.num_heads": ("ssm_heads",),
            f"{path}.intermediate_size": ("ssm_width",),
            f"{path}.n_groups": ("ssm_groups",),
            f"{path}.conv_dim": inputs,
            f"{path}.conv1d.groups": inputs,
        },
    )


_MIXER, _MAMBA = _mamba2("mixer"), _mamba2("mamba")
_GRANITE_HYBRID = replace(
    _MAMBA,
    cuts={
        **_MAMBA.cuts,
        **attention(),
        **glu(),
        **glu("block_sparse_moe.switch_mlp", "experts"),
        "shared_mlp.input_linear": rows("shared", "shared"),
        "shared_mlp.output_linear": columns("shared"),
    },
    sums=("self_attn", "mamba", "mlp", "block_sparse_moe", "shared_mlp"),
    attention="self_attn",
    whole=frozenset({"block_sparse_moe.router.layer"}),
    mlp=_WIDTH,
    experts=_WIDTH,
    shared=("shared_intermediate_size",),
)
_FALCON = replace(
    _MAMBA,
    cuts={**_MAMBA.cuts, **attention(), **glu("feed_forward")},
    sums=("self_attn", "mamba", "feed_forward"),
    attention="self_attn",
    mlp=_WIDTH,
)
_NEMOTRON_H = Sharding(
    cuts={
        **attention("mixer"),
        **two("up_proj", "down_proj", "mixer"),
        "mixer.switch_mlp.fc1": rows("experts"),
        "mixer.switch_mlp.fc2": columns("experts"),
        "mixer.shared_experts.up_proj": rows("shared"),
        "mixer.shared_experts.down_proj": columns("shared"),
    },
    sums=("mixer",),
    attention="mixer",
    whole=frozenset({"mixer.gate", "mixer.fc1_latent_proj", "mixer.fc2_latent_proj"}),
    experts=_EXPERT,
    shared=("moe_shared_expert_intermediate_size",),
    axes=grouped_ssm,
    variants={"mixer.in_proj": replace(_MIXER, norms={}, axes=grouped_ssm)},
)
_JAMBA = Sharding(
    cuts={
        **attention(),
        **glu("feed_forward"),
        **glu("feed_forward.switch_mlp", "experts"),
        "mamba.in_proj": rows("channels", "channels"),
        "mamba.conv1d": first("channels"),
        "mamba.x_proj": columns("channels"),
        "mamba.dt_proj": rows("channels"),
        "mamba.A_log": Cut("heads", ("channels",)),
        "mamba.D": rows("channels"),
        "mamba.out_proj": columns("channels"),
    },
    sums=("self_attn", "mamba.x_proj", "mamba", "feed_forward"),
    whole=frozenset({"feed_forward.router"}),
    experts=_WIDTH,
    axes=channels("mamba_expand", "hidden_size"),
    counts={"mamba.intermediate_size": ("channels",), "mamba.conv1d.groups": ("channels",)},
)
_CONV = {
    "conv.conv": first("channels"),
    "conv.in_proj": rows("channels", "channels", "channels"),
    "conv.out_proj": columns("channels"),
}
_LFM2 = Sharding(
    cuts={
        **attention(out="out_proj"),
        **_CONV,
        "feed_forward.w1": rows("mlp"),
        "feed_forward.w3": rows("mlp"),
        "feed_forward.w2": columns("mlp"),
    },
    sums=("self_attn", "conv", "feed_forward"),
    mlp=lfm2_width,
    axes=channels("hidden_size"),
    counts={"conv.conv.groups": ("channels",), "conv.args.hidden_size": ("channels",)},
)
_LFM2_MOE = replace(
    _LFM2,
    cuts={
        **attention(out="out_proj"), **_CONV, **glu("feed_forward"), **glu("feed_forward.switch_mlp", "experts"),
    },
    whole=frozenset({"feed_forward.gate", "feed_forward.expert_bias"}),
    mlp=_WIDTH,
    experts=_EXPERT,
)
_GATE = {"self_attn.g_proj": rows("q_heads")}
_MOE_SHARED: Width = ("moe_intermediate_size", "num_shared_experts")

SHARDING: dict[str, Sharding] = {
    **dict.fromkeys(
        (
            "llama", "mistral", "qwen2", "qwen3", "gemma3_text", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2",
            "granite", "helium", "hunyuan_v1_dense", "internlm3", "mimo", "seed_oss", "smollm3", "telechat3",
            "gemma3", "ministral3", "mistral3", "nanbeige", "qwen3_vl",
        ),
        _DENSE,
    ),
    "qwen3_moe": _moe(widths=(_WIDTH, _EXPERT, ())),
    "gpt_oss": Sharding(
        cuts={**attention(), "self_attn.sinks": rows("q_heads"), **glu("mlp.experts", "experts")},
        sums=_SUMS,
        whole=frozenset({"mlp.router"}),
        mlp=(),
        experts=_WIDTH,
    ),
    "phi3": Sharding(
        cuts={"self_attn.qkv_proj": rows("q", "kv", "kv"), "self_attn.o_proj": columns("q"), **_FUSED_GLU},
        sums=_SUMS,
    ),
    "apertus": Sharding(cuts=attention() | two("up_proj", "down_proj"), sums=_SUMS, whole=frozenset({"mlp.act_fn"})),
    "bailing_moe": Sharding(
        cuts={
            "attention.query_key_value": rows("q", "kv", "kv"),
            "attention.dense": columns("q"),
            **glu(),
            **glu("mlp.switch_mlp", "experts"),
            **glu("mlp.shared_experts", "shared"),
        },
        sums=("attention", "mlp"),
        attention="attention",
        whole=frozenset({"mlp.gate", "mlp.gate.gate_proj"}),
        experts=_EXPERT,
        shared=_BAILING_SHARED,
    ),
    "cohere": Sharding(cuts=attention() | glu() | _COHERE, sums=_SUMS),
    "deepseek": _ROUTED,
    "dots1": _moe(switch="mlp.experts", widths=(_WIDTH, _EXPERT, ("moe_intermediate_size", "n_shared_experts"))),
    "ernie4_5_moe": _moe(widths=(_WIDTH, _ERNIE_EXPERT, (*_ERNIE_EXPERT, "moe_num_shared_experts"))),
    "glm": Sharding(cuts=attention() | _FUSED_GLU, sums=_SUMS),
    "glm4": Sharding(cuts=attention() | _FUSED_GLU, sums=_SUMS),
    "glm4_moe": _ROUTED,
    "gpt_neox": Sharding(
        cuts={
            "attention.query_key_value": rows("qkv_groups"),
            "attention.dense": columns("q"),
            **two("dense_h_to_4h", "dense_4h_to_h"),
        },
        sums=("attention", "mlp"),
        attention="attention",
        mlp=(4, "hidden_size"),
    ),
    "granitemoe": _moe(
        switch="block_sparse_moe.switch_mlp", router=("block_sparse_moe.router.layer",), widths=((), _WIDTH, ())
    ),
    "internlm2": Sharding(
        cuts={
            "attention.wqkv": rows("qkv_groups"),
            "attention.wo": columns("q"),
            "feed_forward.w1": rows("mlp"),
            "feed_forward.w3": rows("mlp"),
            "feed_forward.w2": columns("mlp"),
        },
        sums=("attention", "feed_forward"),
        attention="attention",
    ),
    "mixtral": _BLOCK,
    "nemotron": Sharding(cuts=attention() | two("up_proj", "down_proj"), sums=_SUMS),
    "phi": Sharding(cuts=attention(out="dense") | two("fc1", "fc2"), sums=_SUMS),
    "phimoe": _BLOCK,
    "qwen2_moe": _moe(
        shared="mlp.shared_expert",
        router=("mlp.gate", "mlp.shared_expert_gate"),
        widths=((), _EXPERT, ("shared_expert_intermediate_size",)),
    ),
    "solar_open": _ROUTED,
    "starcoder2": Sharding(cuts=attention() | two("c_fc", "c_proj"), sums=_SUMS),
    **dict.fromkeys(("olmo2", "olmo3"), _OLMO),
    "olmoe": replace(
        _moe(widths=((), _WIDTH, ())), cuts=_NORMED | glu("mlp.switch_mlp", "experts"), norms=_NORMS
    ),
    **dict.fromkeys(("minimax", "minimax_m2"), _MINIMAX),
    "stablelm": replace(
        _DENSE, lists={"self_attn.q_layernorm.norms": "q_heads", "self_attn.k_layernorm.norms": "kv_heads"}
    ),
    **dict.fromkeys(
        (
            "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "joyai_llm_flash", "kimi_k2",
            "kimi_k25", "mistral4",
        ),
        _MLA,
    ),
    "youtu_llm": _MLA_DENSE,
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), _QWEN_DELTA),
    "olmo_hybrid": _OLMO_HYBRID,
    "kimi_linear": _KIMI_LINEAR,
    "mamba2": _MIXER,
    "granitemoehybrid": _GRANITE_HYBRID,
    "nemotron_h": _NEMOTRON_H,
    "jamba": _JAMBA,
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2_MOE,
    "qwen3_vl_moe": _moe(widths=(_WIDTH, _EXPERT, ())),
    "llama4": Sharding(
        cuts={
            **attention(), **glu("feed_forward"), **glu("feed_forward.experts", "experts"),
            **glu("feed_forward.shared_expert", "shared"),
        },
        sums=("self_attn", "feed_forward"),
        whole=frozenset({"feed_forward.router"}),
        mlp=("intermediate_size_mlp",),
        experts=_WIDTH,
        shared=_WIDTH,
    ),
    "Klear": replace(
        _moe(switch="mlp.experts", widths=(_WIDTH, _EXPERT, ("moe_intermediate_size", "n_shared_experts"))),
        whole=frozenset({"mlp.gate", "mlp.coefficient", "mlp.expert_bias"}),
    ),
    "afmoe": replace(
        _moe(switch="mlp.experts", widths=(_WIDTH, _EXPERT, _MOE_SHARED)),
        cuts={
            **attention(), **glu(), **glu("mlp.experts", "experts"), **glu("mlp.shared_experts", "shared"),
            "self_attn.gate_proj": rows("q"),
        },
        whole=frozenset({"mlp.router.gate", "mlp.expert_bias"}),
    ),
    "exaone_moe": _moe(widths=(_WIDTH, _EXPERT, _MOE_SHARED)),
    "laguna": replace(
        _moe(widths=(_WIDTH, _EXPERT, ())),
        cuts={**attention(), **glu(), **_QWEN_MOE, **_GATE},
        whole=frozenset({"mlp.gate", "mlp.gate.proj"}),
        shared=("shared_expert_intermediate_size",),
        loose_heads=True,
    ),
    "step3p5": replace(
        _moe(widths=(_WIDTH, _EXPERT, ())),
        cuts={**attention(), **glu(), **glu("mlp.switch_mlp", "experts"), **glu("mlp.share_expert", "shared"), **_GATE},
        whole=frozenset({"mlp.gate", "mlp.gate.gate"}),
        shared=("share_expert_dim",),
        loose_heads=True,
    ),
}
"""By `model_type`."""

_RESHAPES = "its attention reshapes by the model's hidden size"
NOT_SHARDED: dict[str, str] = {
    "baichuan_m1": _RESHAPES,
    "exaone": _RESHAPES,
    "longcat_flash": "its experts that pass on what they get would count once for each rank",
    "recurrent_gemma": "its heads all share one key and value head",
    "rwkv7": _RESHAPES,
}
"""Why a family cannot be divided. By `model_type`."""
