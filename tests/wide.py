"""Figures of tiny models whose layers three ranks can share, and the families whose layers are divided alike."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from tandem.models.families.sharding import SHARDING

WIDE = {  # three kv heads with two query heads each; widths of six and of three groups
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "intermediate_size": 192,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 96,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "shared_intermediate_size": 96,
    "share_expert_dim": 96,
}
STATES = {"n_groups": 3, "mamba_n_groups": 3, "mamba_n_heads": 6, "mamba_num_heads": 6}
OF_FAMILY = {
    "gpt_neox": {"num_key_value_heads": 6},
    "phi": {"num_key_value_heads": 6},
    "mamba2": {**STATES, "num_heads": 6},
    "granitemoehybrid": STATES,
    "nemotron_h": {
        **STATES,
        "hybrid_override_pattern": ["M", "*", "-", "E"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 96,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    },
    "falcon_h1": {**STATES, "mamba_d_ssm": 96},
    "kimi_linear": {"linear_attn_config": {"num_heads": 6, "head_dim": 32, "kda_layers": [1], "short_conv_kernel_size": 4}},
    "kimi_k3": {
        "linear_attn_config": {"num_heads": 6, "head_dim": 32, "kda_layers": [1, 2], "short_conv_kernel_size": 4},
        "routed_expert_hidden_size": 64,
        "latent_moe_use_norm": True,
        "mla_use_output_gate": True,
    },
    **dict.fromkeys(("bailing_hybrid", "bailing_moe_linear"), {"group_norm_size": 3}),
    "bailing_moe_v3": {"moe_shared_expert_intermediate_size": 96, "num_attention_heads": 6},
    **dict.fromkeys(("longcat_flash", "longcat_flash_ngram"), {"ffn_hidden_size": 192, "expert_ffn_hidden_size": 96}),
    "minimax_m3_vl": {
        "dense_intermediate_size": 192,
        "intermediate_size": 96,
        "sparse_attention_config": {
            "sparse_num_index_heads": 3,
            "sparse_index_dim": 32,
            "sparse_block_size": 4,
            "sparse_topk_blocks": 2,
            "sparse_local_block": 1,
            "sparse_attention_freq": [0, 1],
        },
    },
    **dict.fromkeys(
        ("gemma4", "gemma4_unified"),
        {
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
    ),
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 5.0}},
            {"attention": {"n_heads_in_group": 1}, "ffn": {"no_op": True}},
            {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}},
        ]
    },
    "llama4": {"intermediate_size_mlp": 96},
    "glm5_next": {"linear_num_heads": 3, "num_key_value_heads": 6},
    "deepseek_v4": {"num_key_value_heads": 1, "o_groups": 3, "qk_rope_head_dim": 8},
    "plamo2": {"mamba_num_heads": 6, "hidden_size_per_head": 16},
    "gemma4_text": {"num_global_key_value_heads": 3},
    **dict.fromkeys(("mimo_v2", "mimo_v2_flash"), {"swa_num_attention_heads": 6, "swa_num_key_value_heads": 6, "head_dim": 24}),
    "lfm2-vl": {"block_dim": 96, "block_ff_dim": 288, "block_multiple_of": 96},
    "lfm2": {"block_dim": 96, "block_ff_dim": 288, "block_multiple_of": 96},
    "lfm2_moe": {"block_dim": 96},
    **dict.fromkeys(("step3p5", "step3p7"), {"num_attention_groups": 3}),
    **dict.fromkeys(("gpt2", "gptj"), {"n_embd": 96, "n_head": 6, "num_key_value_heads": 6}),
    "gpt_bigcode": {"n_embd": 192, "hidden_size": 192, "n_head": 6, "n_inner": 192},
    "lille-130m": {"n_embd": 96, "n_head": 6, "n_kv_heads": 3},
    **dict.fromkeys(("phixtral", "phi-msft"), {"model_dim": 96, "num_heads": 6, "num_key_value_heads": 6}),
    "qwen": {"kv_channels": 16, "num_key_value_heads": 6, "intermediate_size": 384},
    "recurrent_gemma": {"hidden_size": 192, "head_dim": 32, "num_key_value_heads": 1, "intermediate_size": 384},
    "hunyuan": {"num_experts": 4},
    "dbrx": {
        "d_model": 96,
        "n_heads": 6,
        "attn_config": {"kv_n_heads": 3, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
}
"""What some need besides, so that three ranks can share their layers."""
LAYERS = {
    "llama4": 4,
    "deepseek_v4": 4,
    "qwen4_exp": 4,
    "glm5_next": 4,
    "nemotron_h": 4,
    "gemma4": 3,
    "gemma4_unified": 3,
    "kimi_k3": 3,
    "nemotron-nas": 4,
    "gear": 3,
    "hunyuan": 4,
}


def wide_figures(family: str) -> dict[str, Any]:
    """Entries of config.json with which three ranks can share the family's layers."""
    return {**WIDE, **OF_FAMILY.get(family, {})}


def alike() -> dict[str, list[str]]:
    """Families whose layers are cut along the same axes into the same kinds, under the name of the first of them."""
    groups = defaultdict(list)
    for family, sharding in SHARDING.items():
        groups[frozenset((cut.axis, cut.kinds) for _, cut in sharding.all_cuts), sharding.axes].append(family)
    return {families[0]: families for families in groups.values()}


def repeats(family: str) -> bool:
    """Ranks of this family can have the same kv head."""
    sharding = SHARDING[family]
    kinds = {kind for _, cut in sharding.all_cuts for kind in cut.kinds}
    return (
        "kv" in kinds
        and "qkv_groups" not in kinds
        and "kv" not in sharding.norms.values()
        and not sharding.lists
        and not sharding.loose_heads
    )
