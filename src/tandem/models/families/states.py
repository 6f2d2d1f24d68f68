"""Tensor-parallel rules of recurrent layers: delta rules, lightning attention, Mamba, convolutions. Plain data, no mlx."""

from __future__ import annotations

from dataclasses import replace

from tandem.models.families import axes, rules
from tandem.models.families.cuts import Cut, Sharding, attention, columns, each, experts, first, fused, glu, rows, two

DELTA_COUNTS = {
    "linear_attn.num_k_heads": ("delta_k_heads",),
    "linear_attn.num_v_heads": ("delta_v_heads",),
    "linear_attn.key_dim": ("delta_k",),
    "linear_attn.value_dim": ("delta_v",),
}
DELTA_HEADS = each(rows("delta_v_heads"), "linear_attn", "A_log", "dt_bias")
DELTA_QKV = ("delta_k", "delta_k", "delta_v")
GATED = attention() | {"self_attn.q_proj": rows("q_gate")}
QWEN_DELTA = Sharding(
    cuts={
        **GATED,
        **glu(),
        **rules.QWEN_MOE,
        **DELTA_HEADS,
        "linear_attn.conv1d": first(*DELTA_QKV),
        "linear_attn.in_proj_qkvz": rows("delta_qkvz"),
        "linear_attn.in_proj_ba": rows("delta_ba"),
        "linear_attn.in_proj_qkv": rows(*DELTA_QKV),
        "linear_attn.in_proj_z": rows("delta_v"),
        **each(rows("delta_v_heads"), "linear_attn", "in_proj_b", "in_proj_a"),
        "linear_attn.out_proj": columns("delta_v"),
    },
    whole=frozenset({"mlp.gate", "mlp.shared_expert_gate"}),
    experts=rules.EXPERT,
    shared=("shared_expert_intermediate_size",),
    axes=axes.delta,
    counts={**DELTA_COUNTS, "linear_attn.conv_dim": DELTA_QKV, "linear_attn.conv1d.groups": DELTA_QKV},
)
_MIXES = ("input_mix_weight_down", "input_mix_weight_up", "block_inject_weight")
_PLE = (f"ple.{name}" for name in ("ple_embedding", "key_proj", "value_proj", "conv1d"))
_STREAMS = (f"{of}_hyper_connection.{name}" for of in ("attn", "mlp") for name in _MIXES)
QWEN4 = replace(QWEN_DELTA, whole=QWEN_DELTA.whole.union(_PLE, _STREAMS, ("self_attn.indexer.index_qk_proj",)))
OLMO_HYBRID = Sharding(
    cuts={
        **rules.NORMED,
        **glu(),
        **DELTA_HEADS,
        **each(rows("delta_k"), "linear_attn", "q_proj", "k_proj"),
        **each(rows("delta_v"), "linear_attn", "v_proj", "g_proj"),
        **each(rows("delta_v_heads"), "linear_attn", "a_proj", "b_proj"),
        **{f"linear_attn.{name}_conv1d": first(kind) for name, kind in zip("qkv", DELTA_QKV, strict=True)},
        "linear_attn.o_proj": columns("delta_v"),
    },
    axes=axes.delta,
    norms=rules.NORMS,
    counts=DELTA_COUNTS | {f"linear_attn.{name}_conv1d.groups": (kind,) for name, kind in zip("qkv", DELTA_QKV, strict=True)},
)
KIMI_MOE = glu() | experts()
KIMI_LATENT = Sharding(
    cuts=rules.LATENT | KIMI_MOE,
    whole=rules.LATENT_WHOLE | {"mlp.gate", "mlp.e_score_correction_bias", "self_attn.f_a_proj", "self_attn.g_a_proj"},
    experts=rules.EXPERT,
    shared=("moe_intermediate_size", "num_shared_experts"),
    axes=axes.kimi_delta,
)


def kimi_delta(
    base: Sharding, path: str, gates: tuple[str, ...], convolution: str, width: str, inputs: tuple[str, ...] = ("q", "k", "v")
) -> Sharding:
    """Return `base` with the rules of Kimi Delta Attention at `path`. `inputs`: the letters of each projection; `convolution`:
    name of the one behind it, with `{}` for these; `width`: the attribute with the width of all heads."""
    kinds = {letters: ("delta_width",) * len(letters) for letters in inputs}
    return replace(
        base,
        cuts={
            **KIMI_MOE,
            **{f"{path}.{letters}_proj": rows(*widths) for letters, widths in kinds.items()},
            **{f"{path}.{convolution.format(letters)}": first(*widths) for letters, widths in kinds.items()},
            **each(rows("delta_width"), path, *gates, "dt_bias"),
            **each(rows("delta_heads"), path, "b_proj", "A_log"),
            f"{path}.o_proj": columns("delta_width"),
        },
        attention="",
        counts={
            f"{path}.num_heads": ("delta_heads",),
            f"{path}.{width}": ("delta_width",),
            **{f"{path}.{convolution.format(letters)}.groups": widths for letters, widths in kinds.items()},
        },
    )


_KIMI_DELTA = kimi_delta(KIMI_LATENT, "self_attn", ("f_b_proj", "g_b_proj"), "{}_conv.conv", "projection_dim")
KIMI_LINEAR = replace(
    KIMI_LATENT,
    variants={
        "self_attn.q_conv": replace(_KIMI_DELTA, cuts={**_KIMI_DELTA.cuts, "self_attn.A_log": Cut("heads", ("delta_heads",))})
    },
)


def mamba2(path: str) -> Sharding:
    """Rules for a layer that holds only a Mamba 2 mixer, at `path`."""
    inputs = ("ssm_width", "ssm_b", "ssm_b")
    return Sharding(
        cuts={
            f"{path}.in_proj": rows("ssm_width", *inputs, "ssm_heads"),
            f"{path}.conv1d": first(*inputs),
            f"{path}.norm": Cut("last", ("ssm_width",)),
            f"{path}.out_proj": columns("ssm_width"),
            **each(rows("ssm_heads"), path, "dt_bias", "A_log", "D"),
        },
        axes=axes.ssm,
        norms={f"{path}.norm": "ssm_width"},
        mlp=(),
        counts={
            f"{path}.num_heads": ("ssm_heads",),
            f"{path}.intermediate_size": ("ssm_width",),
            f"{path}.n_groups": ("ssm_groups",),
            **each(inputs, path, "conv_dim", "conv1d.groups"),
        },
    )


MIXER, MAMBA = mamba2("mixer"), mamba2("mamba")
GRANITE_HYBRID = replace(
    MAMBA,
    cuts={
        **MAMBA.cuts,
        **attention(),
        **glu(),
        **glu("block_sparse_moe.switch_mlp", "experts"),
        "shared_mlp.input_linear": rows("shared", "shared"),
        "shared_mlp.output_linear": columns("shared"),
    },
    whole=frozenset({"block_sparse_moe.router.layer"}),
    mlp=rules.WIDTH,
    experts=rules.WIDTH,
    shared=("shared_intermediate_size",),
)
FALCON = replace(MAMBA, cuts={**MAMBA.cuts, **attention(), **glu("feed_forward")}, mlp=rules.WIDTH)
NEMOTRON_H = Sharding(
    cuts={
        **attention("mixer"),
        **two("up_proj", "down_proj", "mixer"),
        **two("fc1", "fc2", "mixer.switch_mlp", "experts"),
        **two("up_proj", "down_proj", "mixer.shared_experts", "shared"),
    },
    whole=frozenset({"mixer.gate", "mixer.fc1_latent_proj", "mixer.fc2_latent_proj"}),
    experts=rules.EXPERT,
    shared=("moe_shared_expert_intermediate_size",),
    axes=axes.grouped_ssm,
    variants={"mixer.in_proj": replace(MIXER, norms={})},
)
JAMBA = Sharding(
    cuts={
        **attention(),
        **glu("feed_forward"),
        **glu("feed_forward.switch_mlp", "experts"),
        "mamba.in_proj": rows("channels", "channels"),
        "mamba.conv1d": first("channels"),
        **each(rows("channels"), "mamba", "dt_proj", "D"),
        "mamba.A_log": Cut("heads", ("channels",)),
        **each(columns("channels"), "mamba", "x_proj", "out_proj"),
    },
    summed=("self_attn", "mamba.x_proj", "mamba", "feed_forward"),
    whole=frozenset({"feed_forward.router"}),
    experts=rules.WIDTH,
    axes=axes.channels("mamba_expand", "hidden_size"),
    counts={"mamba.intermediate_size": ("channels",), "mamba.conv1d.groups": ("channels",)},
)
PLAMO2 = Sharding(
    cuts={
        **fused("mixer", "qkv_proj", "o_proj"),
        "mixer.q_weight": Cut("heads", ("q_heads",)),
        "mixer.k_weight": Cut("heads", ("kv_heads",)),
        **rules.FUSED_GLU,
    },
    attention="",
    axes=axes.plamo,
    counts={
        "mixer.q_num_heads": ("q_heads",),
        **each(("kv_heads",), "mixer", "k_num_heads", "v_num_heads"),
        "mixer.q_proj_dim": ("q",),
        "mixer.k_proj_dim": ("kv",),
    },
    variants={
        "mixer.in_proj": Sharding(
            cuts={
                "mixer.in_proj": rows("ssm_gated"),
                "mixer.conv1d": first("ssm_width"),
                **each(rows("ssm_heads"), "mixer", "dt_proj", "dt_bias", "A_log", "D"),
                **each(columns("ssm_width"), "mixer", "bcdt_proj", "out_proj"),
                **rules.FUSED_GLU,
            },
            summed=("mixer.bcdt_proj", "mixer", "mlp"),
            counts={"mixer.num_heads": ("ssm_heads",), **each(("ssm_width",), "mixer", "intermediate_size", "conv1d.groups")},
        )
    },
)
PLAMO3 = replace(PLAMO2, axes=None, variants={})
GEAR = Sharding(
    cuts=attention() | glu(),
    variants={
        "local_mixer.q_proj": Sharding(
            cuts=attention("local_mixer") | glu() | each(first("kv"), "local_mixer", "key_conv", "value_conv"),
            counts={f"local_mixer.{name}": ("kv",) for name in ("kv_dim", "key_conv.groups", "value_conv.groups")},
        )
    },
)
_GATES = (f"{gate}_gate_{part}" for gate in ("input", "recurrent") for part in ("weight", "bias"))
RECURRENT_GEMMA = Sharding(
    cuts={
        **attention("temporal_block"),
        **glu("mlp_block"),
        **each(rows("channels"), "temporal_block", "linear_x", "linear_y", "rg_lru.recurrent_param"),
        "temporal_block.conv_1d": first("channels"),
        **each(first("gates"), "temporal_block.rg_lru", *_GATES),
        "temporal_block.linear_out": columns("channels"),
    },
    mlp=axes.half_width,
    axes=axes.gated_channels,
    counts={"temporal_block.rg_lru.num_heads": ("gates",)},
)
K3_LATENT = replace(
    KIMI_LATENT,
    cuts={**KIMI_LATENT.cuts, "self_attn.g_proj": rows("latent_out")},
    whole=KIMI_LATENT.whole
    | {"self_attention_res_proj", "mlp_res_proj", "mlp.routed_expert_down_proj", "mlp.routed_expert_up_proj"},
)
K3_DELTA = kimi_delta(K3_LATENT, "self_attn", ("f_b_proj", "g_b_proj", "g_proj"), "{}_conv.conv", "projection_dim", ("qkv",))

_GLM_SHARED = {"mlp.shared_experts.gate_up_proj": rows("shared", "shared"), "mlp.shared_experts.down_proj": columns("shared")}
_GLM_MLP = {**rules.FUSED_GLU, **glu("mlp.switch_mlp", "experts"), **_GLM_SHARED}
GLM5_LATENT = replace(
    rules.MLA,
    cuts=rules.LATENT | _GLM_MLP,
    summed=("self_attn.o_proj", "mlp"),  # attention also returns the selected positions
    whole=rules.MLA.whole | {"self_attn.qkv_a_proj", "self_attn.indexer", "attn_hc", "ffn_hc"},
    axes=axes.glm_delta,
)
_GLM_DELTA = {**K3_DELTA.cuts, **_GLM_MLP, "self_attn.fbg_a_proj": rows("delta_low", "delta_heads", "delta_low")}
GLM5_NEXT = replace(GLM5_LATENT, variants={"self_attn.qkv_conv": replace(K3_DELTA, cuts=_GLM_DELTA, whole=GLM5_LATENT.whole)})


def _normed_experts(sharding: Sharding) -> Sharding:
    """Return the rules with a variant for layers that apply an RMS norm to the sum of the routed experts."""
    norm = "mlp.routed_expert_norm"
    return replace(sharding, variants={norm: replace(sharding, summed=("self_attn", "mlp.shared_experts"), takers=(norm,))})


KIMI_K3 = replace(
    _normed_experts(K3_LATENT), variants={"self_attn.qkv_proj": _normed_experts(K3_DELTA), **_normed_experts(K3_LATENT).variants}
)
LING = Sharding(
    cuts=KIMI_MOE,
    attention="attention",
    whole=frozenset({"mlp.gate", "mlp.gate.gate_proj"}),
    experts=rules.EXPERT,
    shared=("moe_shared_expert_intermediate_size|moe_intermediate_size", "num_shared_experts"),
)
BAILING = replace(LING, cuts={**LING.cuts, **fused("attention", "query_key_value", "dense")})
LING_LATENT = replace(
    LING,
    cuts={
        **LING.cuts,
        **{path.replace("self_attn", "attention"): cut for path, cut in rules.LATENT.items() if "o_proj" not in path},
        "attention.dense": columns("latent_out"),
        "attention.g_proj": rows("latent_heads"),
    },
    whole=LING.whole | {path.replace("self_attn", "attention") for path in rules.LATENT_WHOLE},
)
LING_DELTA = replace(
    LING_LATENT,
    axes=axes.ling_delta,
    variants={"attention.q_conv1d": kimi_delta(LING, "attention", ("f_proj", "g_proj"), "{}_conv1d", "projection_size")},
)
LIGHTNING = {
    "attention.g_norm": replace(
        LING,
        cuts={
            **LING.cuts,
            "attention.query_key_value": rows("lightning", "lightning", "lightning"),
            "attention.g_proj": rows("lightning"),
            "attention.g_norm": Cut("last", ("lightning",)),
            "attention.dense": columns("lightning"),
        },
        attention="",
        counts={
            **each(("lightning_heads",), "attention", "num_attention_heads", "num_key_value_heads"),
            "attention.g_norm.groups": ("lightning_groups",),
        },
        lists={"attention._slope": "lightning_heads"},
    )
}
LING_HYBRID = replace(LING_LATENT, axes=axes.lightning, variants=LIGHTNING)
LING_LINEAR = replace(BAILING, axes=axes.lightning, variants=LIGHTNING)
_CHANNELS = ("channels",) * 3
CONV = {"conv.conv": first("channels"), "conv.in_proj": rows(*_CHANNELS), "conv.out_proj": columns("channels")}
LFM2 = Sharding(
    cuts=attention(out="out_proj") | CONV | glu("feed_forward", gate="w1", up="w3", down="w2"),
    mlp=axes.lfm2_width,
    axes=axes.channels("hidden_size"),
    counts=each(("channels",), "conv", "conv.groups", "args.hidden_size"),
)
LFM2_MOE = replace(
    LFM2,
    cuts={**attention(out="out_proj"), **CONV, **glu("feed_forward"), **glu("feed_forward.switch_mlp", "experts")},
    whole=frozenset({"feed_forward.gate", "feed_forward.expert_bias"}),
    mlp=rules.WIDTH,
    experts=rules.EXPERT,
)
