"""Small but complete settings of every supported family, for tests with random weights. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EOS = 2
"""Id of <|im_end|>, the end-of-sequence token of tiny models."""
_BY_LAYER = {"layer_types", "hybrid_override_pattern", "is_moe_layer"}
WINDOW = 16
"""Attention window in tokens, so that short tests run beyond it."""

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": WINDOW,
}
"""Entries of config.json that all families have; families that do not know one ignore it."""

_HEAD: dict[str, Any] = {"head_dim": 16}
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
_MIXTRAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_KINDS: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
_GRANITE: dict[str, Any] = {
    "logits_scaling": 3.0,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 5.0,
    "residual_multiplier": 0.3,
}
_ROUTED: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "rope_scaling": None,
}
_BAILING: dict[str, Any] = {"num_shared_experts": 1, "first_k_dense_replace": 1, **_MOE}
_ERNIE_MOE: dict[str, Any] = {
    "moe_num_experts": 4,
    "moe_layer_start_index": 1,
    "moe_intermediate_size": 64,
    "moe_k": 2,
    "moe_num_shared_experts": 1,
}
_PHIMOE_ROPE: dict[str, Any] = {
    "type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "short_mscale": 1.1,
    "long_mscale": 1.2,
}
_MLA: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 16,
}
_YARN: dict[str, Any] = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
_DEEPSEEK: dict[str, Any] = {**_ROUTED, **_MLA, "moe_layer_freq": 1, "n_group": 2, "rope_scaling": _YARN}
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_EVERY_SECOND: dict[str, Any] = {"full_attention_interval": 2}
_NEXT: dict[str, Any] = {
    **_HEAD,
    **_DELTA,
    **_MOE,
    **_EVERY_SECOND,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "shared_expert_intermediate_size": 64,
    "partial_rotary_factor": 0.5,
}
_KIMI_LINEAR: dict[str, Any] = {
    **_MLA,
    "head_dim": 16,
    "linear_attn_config": {"num_heads": 4, "head_dim": 32, "kda_layers": [1, 3], "short_conv_kernel_size": 4},
    "model_max_length": 512,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 64,
}
_LFM2: dict[str, Any] = {
    "norm_eps": 1e-5,
    "full_attn_idxs": [1, 3],
    "conv_bias": True,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_ff_dim": 128,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}
_LFM2_MOE: dict[str, Any] = _LFM2 | {
    "moe_intermediate_size": 64,
    "num_dense_layers": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "use_expert_bias": True,
}
_MAMBA2: dict[str, Any] = {
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 32,
    "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4,
    "n_groups": 2,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_limit": [0.01, 10],
    "time_step_rank": "auto",
}
_GRANITE_HYBRID: dict[str, Any] = _GRANITE | {
    "layer_types": ["mamba", "attention"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "position_embedding_type": "rope",
    "time_step_limit": [0.01, 10],
}
_NEMOTRON_H: dict[str, Any] = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_proj_bias": False,
    "ssm_state_size": 32,
    "conv_kernel": 4,
    "n_groups": 2,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_limit": [0.01, 10],
    "head_dim": 16,
    "hybrid_override_pattern": ["M", "*", "-", "M"],
}
_STEP: dict[str, Any] = {
    **_HEAD,
    "num_attention_groups": 2,
    "layer_types": ["full_attention", "sliding_attention"],
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_intermediate_size": 64,
    "share_expert_dim": 64,
    "moe_layers_enum": "1,2,3",
}
_GEMMA3: dict[str, Any] = {
    "query_pre_attn_scalar": 16,
    "rope_local_base_freq": 1000.0,
    "sliding_window_pattern": 2,
    **_HEAD,
}
_LONGCAT: dict[str, Any] = {
    **_MLA,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 64,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 64,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "num_layers": 4,
    "routed_scaling_factor": 1.5,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}

TINY: dict[str, dict[str, Any]] = {
    "llama": _TIED,
    "mistral": _HEAD,
    "qwen2": _TIED,
    "qwen3": _HEAD,
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": [1], **_HEAD, **_MOE},
    "gemma3_text": {
        "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 1000.0,
        "sliding_window_pattern": 2,
        **_HEAD,
    },
    "gpt_oss": {"intermediate_size": 64, **_HEAD, **_MIXTRAL, **_KINDS},
    "phi3": {},
    "apertus": {"post_norm": False, "qk_norm": True},
    "bailing_moe": _BAILING,
    "cohere": {"logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.25, "sliding_window_pattern": 2, **_HEAD},
    "deepseek": {"moe_layer_freq": 1, **_ROUTED},
    "dots1": _ROUTED | {"scoring_func": "noaux_tc"},
    "ernie4_5": {"use_bias": False, **_HEAD, **_TIED},
    "ernie4_5_moe": {"use_bias": False, **_ERNIE_MOE},
    "exaone": {"layer_norm_epsilon": 1e-5},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LG", **_HEAD},
    "gemma": _HEAD,
    "gemma2": {"query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0, **_HEAD},
    "glm": {"attention_bias": True, **_HEAD},
    "glm4": {"partial_rotary_factor": 0.5, "attention_bias": True, **_HEAD},
    "glm4_moe": {"partial_rotary_factor": 0.5, "use_qk_norm": True, **_HEAD, **_ROUTED},
    "gpt_neox": {"num_key_value_heads": 4, "rotary_emb_base": 10000, "rotary_pct": 0.5},
    "granite": _GRANITE | _TIED,
    "granitemoe": _GRANITE | _MIXTRAL,
    "helium": _HEAD,
    "hunyuan_v1_dense": {"rope_scaling": {"alpha": 2.0, "factor": 1.0, "type": "dynamic"}, **_HEAD, **_TIED},
    "internlm2": {"bias": False},
    "internlm3": {},
    "mimo": {"num_nextn_predict_layers": 0},
    "mixtral": _MIXTRAL,
    "nemotron": {"hidden_act": "relu2", "norm_eps": 1e-5},
    "olmo2": {},
    "olmo3": _KINDS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phi": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "phimoe": {"original_max_position_embeddings": 64, "rope_scaling": _PHIMOE_ROPE, **_MIXTRAL},
    "qwen2_moe": {"shared_expert_intermediate_size": 64, **_MOE},
    "seed_oss": {"attention_bias": True, **_HEAD},
    "smollm3": {"no_rope_layer_interval": 2},
    "solar_open": {"partial_rotary_factor": 1.0, **_HEAD, **_ROUTED},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5, "qk_layernorm": True},
    "starcoder2": _TIED,
    "telechat3": _HEAD,
    "deepseek_v2": _DEEPSEEK | {"topk_method": "group_limited_greedy", "n_group": 1},
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK | {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 8},
    "kimi_k2": _DEEPSEEK,
    "joyai_llm_flash": _DEEPSEEK,
    "kimi_k25": {"text_config": _DEEPSEEK},
    "glm4_moe_lite": _ROUTED | _MLA,
    "minimax": _HEAD | _MIXTRAL | {"rotary_dim": 8, "shared_intermediate_size": 64},
    "minimax_m2": _HEAD | _MIXTRAL | {"rotary_dim": 8, "shared_intermediate_size": 64},
    "step3p5": _STEP,
    "Klear": _MOE | {"mlp_only_layers": [0], "decoder_sparse_step": 1, "n_shared_experts": 1},
    "exaone_moe": _HEAD | _MOE | _KINDS | {"num_shared_experts": 1, "is_moe_layer": [False, True, True, True]},
    "afmoe": _HEAD | _MOE | _KINDS | {"mup_enabled": True, "num_dense_layers": 1, "num_shared_experts": 1},
    "nanbeige": _HEAD,
    "qwen3_next": _NEXT,
    "qwen3_5": {"text_config": _HEAD | _DELTA | _EVERY_SECOND},
    "qwen3_5_moe": {"text_config": _NEXT},
    "kimi_linear": _KIMI_LINEAR,
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2_MOE,
    "olmo_hybrid": _DELTA | {"linear_allow_neg_eigval": True, "layer_types": ["linear_attention", "full_attention"]},
    "granitemoehybrid": _GRANITE_HYBRID,
    "mamba2": _MAMBA2,
    "nemotron_h": _NEMOTRON_H,
    "gemma3": {"text_config": _GEMMA3 | {"model_type": "gemma3_text"}},
    "mistral3": {"text_config": _HEAD | {"model_type": "llama"}},
    "longcat_flash": _LONGCAT,
    "glm_moe_dsa": _DEEPSEEK | {
        "index_head_dim": 32, "index_n_heads": 2, "index_topk": 8, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "ministral3": _HEAD | {
        "rope_parameters": {
            "rope_theta": 10000.0, "rope_type": "default", "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16,
        },
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mistral4": _ROUTED | _MLA | {
        "rope_parameters": {
            "rope_theta": 10000.0, "rope_type": "default", "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16,
        },
    },
    "laguna": _HEAD | _MOE | {
        "shared_expert_intermediate_size": 64, "partial_rotary_factor": 0.5, "gating": True,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "youtu_llm": _MLA,
    "qwen3_vl": {"text_config": _HEAD | {"model_type": "qwen3"}},
    "qwen3_vl_moe": {
        "text_config": _HEAD | _MOE | {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": [1]},
    },
    "jamba": _MOE | {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
        "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2,
    },
    "rwkv7": {
        "norm_eps": 1e-5, "head_dim": 32, "a_low_rank_dim": 16, "v_low_rank_dim": 16, "gate_low_rank_dim": 16,
        "decay_low_rank_dim": 16,
    },
    "recurrent_gemma": {
        "conv1d_width": 4, "logits_soft_cap": 30.0, "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention"],
    },
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "llama4": {
        "text_config": _HEAD | _MIXTRAL | {
            "model_type": "llama4_text", "attention_chunk_size": WINDOW, "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 64, "num_experts_per_tok": 1, "rope_scaling": None, "use_qk_norm": True,
        },
    },
}
"""By `model_type`: what a family's config.json has beyond `BASE`; lists of `layer_types` are repeated."""


def tiny_config(
    family: str, *, layers: int = 4, vocab: int = 512, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """config.json of a tiny model."""
    common = {"num_hidden_layers": layers, "vocab_size": vocab, **BASE}
    nested = TINY[family].get("text_config")
    inner = {**common, **(TINY[family] if nested is None else nested), **(overrides or {})}
    if "num_layers" in inner or family == "exaone":
        inner["num_layers"] = layers  # its name for num_hidden_layers
    for kinds in _BY_LAYER & inner.keys():
        inner[kinds] = (inner[kinds] * layers)[:layers]
    outer = {"model_type": family, "eos_token_id": EOS}
    return {**outer, **inner} if nested is None else {**outer, "vocab_size": vocab, "text_config": inner}
