"""Small but complete settings of every supported family, for tests with random weights. Plain data."""

from __future__ import annotations

from typing import Any

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
}
"""By `model_type`: what a family's config.json has beyond `BASE`; lists of `layer_types` are repeated."""
