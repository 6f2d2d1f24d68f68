"""Tensor-parallel rules that several families share, and those of unusual attention and experts: plain data, no mlx.

`states.py` has the rules of recurrent layers; `sharding.py` maps each family to its rules.
"""

from __future__ import annotations

from dataclasses import replace

from tandem.models.families.axes import blocks, blocks_width, grouped, indexed, latent, mixed
from tandem.models.families.cuts import Cut, Sharding, Width, attention, columns, each, experts, first, glu, rows

FUSED_GLU = {"mlp.gate_up_proj": rows("mlp", "mlp"), "mlp.down_proj": columns("mlp")}
DENSE = Sharding(cuts=attention() | glu())
COHERE = {"self_attn.q_norm": rows("q_heads"), "self_attn.k_norm": rows("kv_heads")}


def moe(
    *,
    switch: str = "mlp.switch_mlp",
    shared: str = "mlp.shared_experts",
    router: tuple[str, ...] = ("mlp.gate",),
    widths: tuple[Width, Width, Width],
) -> Sharding:
    """Rules for standard attention with routed experts; `widths` are those of the dense MLP, an expert, and the shared
    experts."""
    mlp, experts, own = widths
    cuts = attention() | glu(switch, "experts")
    if mlp:
        cuts |= glu()
    if own:
        cuts |= glu(shared, "shared")
    return Sharding(cuts=cuts, whole=frozenset(router), mlp=mlp, experts=experts, shared=own)


WIDTH: Width = ("intermediate_size",)
EXPERT: Width = ("moe_intermediate_size",)
ROUTED_WIDTHS: tuple[Width, Width, Width] = (WIDTH, EXPERT, ("moe_intermediate_size", "n_shared_experts"))
ROUTED = moe(widths=ROUTED_WIDTHS)
EXPERTS = moe(switch="mlp.experts", widths=ROUTED_WIDTHS)
BLOCK = moe(switch="block_sparse_moe.switch_mlp", router=("block_sparse_moe.gate",), widths=((), WIDTH, ()))
ERNIE_EXPERT: tuple[str | int, ...] = ("moe_intermediate_size|intermediate_size",)

NORMED = attention() | {"self_attn.q_norm": Cut("last", ("q",)), "self_attn.k_norm": Cut("last", ("kv",))}
"""Attention with RMS norms over the queries and keys of all heads together."""
NORMS = {"self_attn.q_norm": "q", "self_attn.k_norm": "kv"}
OLMO = Sharding(cuts=NORMED | glu(), norms=NORMS)
MINIMAX = replace(
    BLOCK, cuts={**BLOCK.cuts, **NORMED}, norms=NORMS, whole=BLOCK.whole | {"block_sparse_moe.e_score_correction_bias"}
)

LATENT = {
    **each(rows("latent_q"), "self_attn", "q_proj", "q_b_proj"),
    "self_attn.kv_b_proj": rows("latent_kv"),
    **each(first("latent_heads"), "self_attn", "embed_q", "unembed_out"),
    "self_attn.o_proj": columns("latent_out"),
}
LATENT_WHOLE = frozenset({"self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"})
INDEXER = frozenset(f"self_attn.indexer.{name}" for name in ("wq_b", "wk", "weights_proj"))
MLA_DENSE = Sharding(cuts=LATENT | glu(), whole=LATENT_WHOLE, axes=latent)
MLA = replace(ROUTED, cuts=LATENT | glu() | experts(), whole=ROUTED.whole | LATENT_WHOLE | INDEXER, axes=latent)

HY_V4 = replace(
    MLA,
    cuts={
        **LATENT,
        **glu(),
        **glu("mlp.shared_experts", "shared"),
        "mlp.switch_mlp.gate_up_proj": rows("experts", "experts"),
        "mlp.switch_mlp.down_proj": columns("experts"),
        "self_attn.linear_gate": rows("latent_out"),
        "self_attn.learnable_sink_param": rows("latent_heads"),
    },
    summed=("self_attn.o_proj", "mlp"),  # attention also returns the selected positions
    whole=MLA.whole | {f"hc_{part}_layer.hc_pre.hc_{name}" for part in ("attn", "mlp") for name in ("fn", "base", "scale")},
)

_V4_WHOLE = ("attn.wq_a", "attn.wkv", "attn.indexer.wq_b", "attn.indexer.weights_proj", "attn_hc", "ffn_hc", "ffn.gate")
_COMPRESSORS = (f"attn.{of}compressor{name}" for of in ("", "indexer.") for name in ("", ".wkv", ".wgate"))
DEEPSEEK_V4 = replace(
    ROUTED,
    cuts={
        "attn.wq_b": rows("grouped_q"),
        "attn.attn_sink": rows("grouped_heads"),
        "attn.wo_a": first("groups"),
        "attn.wo_b": columns("grouped_out"),
        **experts("ffn"),
    },
    attention="attn",
    whole=frozenset((*_V4_WHOLE, *_COMPRESSORS)),
    mlp=(),
    axes=grouped,
    counts={"attn.o_groups": ("groups",)},
)

QWEN_MOE = experts(shared="shared_expert")
LONGCAT = Sharding(
    cuts={
        **{path.replace("self_attn", f"self_attn.{i}"): cut for path, cut in LATENT.items() for i in range(2)},
        **glu("mlps.0"),
        **glu("mlps.1"),
        **glu("mlp.switch_mlp", "experts"),
    },
    summed=("self_attn.0", "self_attn.1", "mlps.0", "mlps.1", "mlp"),
    attention="",
    whole=frozenset(
        {
            *(path.replace("self_attn", f"self_attn.{i}") for path in LATENT_WHOLE for i in range(2)),
            *(f"{norm}_layernorm.{i}" for norm in ("input", "post_attention") for i in range(2)),
            "mlp.router.classifier",
            "mlp.router.e_score_correction_bias",
        }
    ),
    mlp=("ffn_hidden_size",),
    experts=("expert_ffn_hidden_size",),
    axes=latent,
    counts={f"self_attn.{i}.num_attention_heads": ("latent_heads",) for i in range(2)},
    passing="mlp.router",
)
M3_DENSE = Sharding(
    cuts={
        **attention(kinds=("indexed_q", "indexed_kv", "indexed_q")),
        "self_attn.index_q_proj": rows("index"),
        **glu(),
        **experts("block_sparse_moe"),
    },
    whole=frozenset({"self_attn.index_k_proj", "block_sparse_moe.gate", "block_sparse_moe.e_score_correction_bias"}),
    mlp=("dense_intermediate_size",),
    experts=WIDTH,
    shared=("shared_intermediate_size",),
    axes=indexed,
)
MINIMAX_M3 = replace(
    M3_DENSE, variants={"self_attn.index_q_proj": replace(M3_DENSE, counts={"self_attn.index_n_heads": ("index_heads",)})}
)
MIXED = attention(kinds=("mixed_q", "mixed_kv", "mixed_out"))
GEMMA4 = Sharding(
    cuts={**MIXED, **glu(), **glu("experts.switch_glu", "experts")},
    summed=("self_attn.o_proj", "mlp", "experts"),
    whole=frozenset(
        {"layer_scalar", "router.proj", "router.scale", "router.per_expert_scale", "per_layer_input_gate", "per_layer_projection"}
    ),
    experts=EXPERT,
    axes=mixed,
    loose_heads=True,
    loose_mlp=True,
)
NEMOTRON_NAS = Sharding(
    cuts=MIXED | glu(),
    summed=("self_attn.o_proj", "mlp.down_proj"),
    whole=frozenset({"self_attn.linear", "mlp.linear"}),
    mlp=blocks_width,
    axes=blocks,
    loose_heads=True,
    loose_mlp=True,
)
"""Rules of Nemotron's layers. Attention or MLP may be missing, or be one replicated linear layer."""
MIMO_V2 = Sharding(
    cuts={**MIXED, "self_attn.attention_sink_bias": rows("mixed_heads"), **glu(), **glu("mlp.switch_mlp", "experts")},
    whole=frozenset({"mlp.gate"}),
    experts=EXPERT,
    axes=mixed,
    loose_heads=True,
)
GATE = {"self_attn.g_proj": rows("q_heads")}
MOE_SHARED: Width = ("moe_intermediate_size", "num_shared_experts")
