"""Configs of tiny models of every supported family, for tests with random weights. Plain data."""

from __future__ import annotations

from tandem.json_types import JsonMapping, JsonObject

EOS = 2
"""Id of <|im_end|>, the end-of-sequence token of tiny models."""
_BY_LAYER = {"layer_types", "indexer_types", "hybrid_override_pattern", "is_moe_layer", "no_rope_layers", "hybrid_layer_pattern"}
_OWN_NAMES = {"n_embd", "d_model", "model_dim"}
"""Keys for the hidden width in families that share no key with `BASE`."""
_LAYERS = {"num_layers", "n_layer", "n_layers", "num_transformer_layers"}
WINDOW = 16
"""Attention window in tokens, small enough for short tests to exceed it."""

BASE: JsonObject = {
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
"""Entries of config.json in all families; a family ignores those that it does not read."""

# fmt: off
_HEAD: JsonObject = {"head_dim": 16}
_SIGLIP: JsonObject = {"model_type": "siglip_vision_model", "hidden_size": 32, "num_attention_heads": 2, "patch_size": 4}
_TIED: JsonObject = {"tie_word_embeddings": True}
_MOE: JsonObject = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
_MIXTRAL: JsonObject = {"num_local_experts": 4, "num_experts_per_tok": 2}
_KINDS: JsonObject = {"layer_types": ["sliding_attention", "full_attention"]}
_GRANITE: JsonObject = {
    "logits_scaling": 3.0, "attention_multiplier": 0.2, "embedding_multiplier": 5.0, "residual_multiplier": 0.3,
}
_ROUTED: JsonObject = {
    "moe_intermediate_size": 64, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1,
    "rope_scaling": None,
}
_BAILING: JsonObject = {"num_shared_experts": 1, "first_k_dense_replace": 1, **_MOE}
_MLA: JsonObject = {
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 16,
}
_YARN: JsonObject = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn",
}
_DEEPSEEK: JsonObject = {**_ROUTED, **_MLA, "moe_layer_freq": 1, "n_group": 2, "rope_scaling": _YARN}
_DELTA: JsonObject = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_EVERY_SECOND: JsonObject = {"full_attention_interval": 2}
_NEXT: JsonObject = {
    **_HEAD, **_DELTA, **_MOE, **_EVERY_SECOND, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "shared_expert_intermediate_size": 64, "partial_rotary_factor": 0.5,
}
_KIMI_LINEAR: JsonObject = {
    **_MLA, "head_dim": 16,
    "linear_attn_config": {"num_heads": 4, "head_dim": 32, "kda_layers": [1, 3], "short_conv_kernel_size": 4},
    "model_max_length": 512, "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 64,
}
_LFM2: JsonObject = {
    "norm_eps": 1e-5, "full_attn_idxs": [1, 3], "conv_bias": True, "conv_L_cache": 3, "block_dim": 64,
    "block_ff_dim": 128, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
}
_STEP: JsonObject = {
    **_HEAD, "num_attention_groups": 2, "layer_types": ["full_attention", "sliding_attention"], "moe_num_experts": 4,
    "moe_top_k": 2, "moe_intermediate_size": 64, "share_expert_dim": 64, "moe_layers_enum": "1,2,3",
}
_GEMMA3: JsonObject = {
    "query_pre_attn_scalar": 16, "rope_local_base_freq": 1000.0, "sliding_window_pattern": 2, **_HEAD,
}
_LONGCAT: JsonObject = {
    **_MLA, "attention_method": "MLA", "zero_expert_type": "identity", "ffn_hidden_size": 64, "moe_topk": 2,
    "expert_ffn_hidden_size": 64, "n_routed_experts": 4, "zero_expert_num": 2, "num_layers": 4,
    "routed_scaling_factor": 1.5, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
}
_GPT2: JsonObject = {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 512, "layer_norm_epsilon": 1e-5}
_LING: JsonObject = _BAILING | {
    "layer_group_size": 2, "group_norm_size": 2, "head_dim": 16, "use_qk_norm": True, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
_PER_LAYER: JsonObject = {
    "num_kv_shared_layers": 1, "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 32,
    "final_logit_softcapping": 5.0,
}
_PHIXTRAL: JsonObject = {"num_vocab": 512, "model_dim": 64, "num_heads": 4, "num_layers": 4, "rotary_dim": 8}
_MUP: JsonObject = {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 12}
_LLAMA_4_ROPE: JsonObject = {
    "rope_parameters": {
        "rope_theta": 10000.0, "rope_type": "default", "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 16,
    },
}
_INDEX: JsonObject = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 8}
_ROPES: JsonObject = {kind: {"rope_theta": 10000.0, "rope_type": "default"} for kind in ("sliding_attention", "full_attention")}

TINY: dict[str, JsonObject] = {
    **dict.fromkeys(("llama", "qwen2", "starcoder2"), _TIED),
    **dict.fromkeys(("mistral", "qwen3", "gemma", "helium", "telechat3", "nanbeige"), _HEAD),
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": [1], **_HEAD, **_MOE},
    "gemma3_text": _GEMMA3,
    "gpt_oss": {"intermediate_size": 64, **_HEAD, **_MIXTRAL, **_KINDS},
    **dict.fromkeys(("phi3", "internlm3", "olmo2", "nanochat"), {}),
    "apertus": {"post_norm": False, "qk_norm": True},
    "bailing_moe": _BAILING,
    "cohere": {"logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.25, "sliding_window_pattern": 2, **_HEAD},
    "deepseek": {"moe_layer_freq": 1, **_ROUTED},
    "dots1": _ROUTED | {"scoring_func": "noaux_tc"},
    "ernie4_5": {"use_bias": False, **_HEAD, **_TIED},
    "ernie4_5_moe": {
        "use_bias": False, "moe_num_experts": 4, "moe_layer_start_index": 1, "moe_intermediate_size": 64, "moe_k": 2,
        "moe_num_shared_experts": 1,
    },
    "exaone": {"layer_norm_epsilon": 1e-5, "num_layers": 4},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LG", **_HEAD},
    "gemma2": {"query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0, **_HEAD},
    **dict.fromkeys(("glm", "seed_oss"), {"attention_bias": True, **_HEAD}),
    "glm4": {"partial_rotary_factor": 0.5, "attention_bias": True, **_HEAD},
    "glm4_moe": {"partial_rotary_factor": 0.5, "use_qk_norm": True, **_HEAD, **_ROUTED},
    "glm4v": {"text_config": {"attention_bias": True}},
    "glm4v_moe": {"text_config": _HEAD | _ROUTED | {"use_qk_norm": False, "partial_rotary_factor": 0.5}},
    "gpt_neox": {"num_key_value_heads": 4, "rotary_emb_base": 10000, "rotary_pct": 0.5},
    "granite": _GRANITE | _TIED,
    "granitemoe": _GRANITE | _MIXTRAL,
    "hunyuan_v1_dense": {"rope_scaling": {"alpha": 2.0, "factor": 1.0, "type": "dynamic"}, **_HEAD, **_TIED},
    "internlm2": {"bias": False},
    "mimo": {"num_nextn_predict_layers": 0},
    "mixtral": _MIXTRAL,
    "nemotron": {"hidden_act": "relu2", "norm_eps": 1e-5},
    "olmo3": _KINDS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phi": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "phimoe": _MIXTRAL | {
        "original_max_position_embeddings": 64, "rope_scaling": {
            "type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "short_mscale": 1.1, "long_mscale": 1.2,
        },
    },
    "qwen2_moe": {"shared_expert_intermediate_size": 64, **_MOE},
    "smollm3": {"no_rope_layer_interval": 2},
    "solar_open": {"partial_rotary_factor": 1.0, **_HEAD, **_ROUTED},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5, "qk_layernorm": True},
    "deepseek_v2": _DEEPSEEK | {"topk_method": "group_limited_greedy", "n_group": 1},
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "joyai_llm_flash"), _DEEPSEEK),
    "deepseek_v32": _DEEPSEEK | _INDEX,
    "kimi_k25": {"text_config": _DEEPSEEK},
    "glm4_moe_lite": _ROUTED | _MLA,
    **dict.fromkeys(("minimax", "minimax_m2"), _HEAD | _MIXTRAL | {"rotary_dim": 8, "shared_intermediate_size": 64}),
    "step3p5": _STEP,
    "Klear": _MOE | {"mlp_only_layers": [0], "decoder_sparse_step": 1, "n_shared_experts": 1},
    "exaone_moe": _HEAD | _MOE | _KINDS | {"num_shared_experts": 1, "is_moe_layer": [False, True, True, True]},
    "afmoe": _HEAD | _MOE | _KINDS | {"mup_enabled": True, "num_dense_layers": 1, "num_shared_experts": 1},
    "qwen3_next": _NEXT,
    "qwen3_5": {"text_config": _HEAD | _DELTA | _EVERY_SECOND},
    "qwen3_5_moe": {"text_config": _NEXT},
    "kimi_linear": _KIMI_LINEAR,
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2 | _MOE | {"num_dense_layers": 1, "use_expert_bias": True},
    "olmo_hybrid": _DELTA | {"linear_allow_neg_eigval": True, "layer_types": ["linear_attention", "full_attention"]},
    "granitemoehybrid": _GRANITE | {
        **_MIXTRAL, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 64, "mamba_n_heads": 8,
        "mamba_d_head": 16, "mamba_d_state": 32, "mamba_d_conv": 4, "mamba_n_groups": 2, "mamba_expand": 2,
        "mamba_proj_bias": False, "mamba_conv_bias": True, "position_embedding_type": "rope",
        "time_step_limit": [0.01, 10.0],
    },
    "mamba2": {
        "num_heads": 8, "head_dim": 16, "state_size": 32, "layer_norm_epsilon": 1e-5, "conv_kernel": 4, "n_groups": 2,
        "use_bias": False, "use_conv_bias": True, "time_step_limit": [0.01, 10.0], "time_step_rank": "auto",
    },
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_proj_bias": False, "ssm_state_size": 32, "conv_kernel": 4,
        "n_groups": 2, "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True,
        "time_step_limit": [0.01, 10.0], "head_dim": 16, "hybrid_override_pattern": ["M", "*", "-", "M"],
    },
    "gemma3": {"text_config": _GEMMA3 | {"model_type": "gemma3_text"}},
    **dict.fromkeys(("mistral3", "llava"), {"text_config": _HEAD | {"model_type": "llama"}}),
    "longcat_flash": _LONGCAT,
    "glm_moe_dsa": _DEEPSEEK | _INDEX | {
        "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "ministral3": _HEAD | _KINDS | _LLAMA_4_ROPE,
    "mistral4": _ROUTED | _MLA | _LLAMA_4_ROPE,
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
    "dbrx": {
        "d_model": 64, "n_layers": 4, "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
    },
    "falcon_h1": {
        "head_dim": 16, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 32, "mamba_n_heads": 4,
        "mamba_n_groups": 2, "mamba_d_conv": 4,
    },
    "gpt2": _GPT2 | {"n_ctx": 512},
    "gpt_bigcode": _GPT2 | {"n_inner": 128, "attention_bias": True, "mlp_bias": True},
    "kimi_vl": {"text_config": _DEEPSEEK | {"n_group": 1, "rope_scaling": None}},
    "lille-130m": {
        "block_size": 512, "layer_norm_eps": 1e-5, "rope_theta": 10000.0, "n_embd": 64, "n_head": 4, "n_kv_heads": 2,
        "n_layer": 4,
    },
    "llama4_text": _HEAD | {"intermediate_size_mlp": 128, "no_rope_layers": [1, 0], "use_qk_norm": True},
    "longcat_flash_ngram": _LONGCAT | {"ngram_vocab_size_ratio": 4, "emb_neighbor_num": 3, "emb_split_num": 2},
    **dict.fromkeys(("mamba", "falcon_mamba"), {
        "state_size": 16, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4,
    }),
    "mellum": _HEAD | _MOE | _KINDS | {"rope_parameters": _ROPES},
    **dict.fromkeys(("mimo_v2_flash", "mimo_v2"), _ROUTED | {
        "hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0, 1, 1, 1], "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False, "sliding_window_size": WINDOW, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "layernorm_epsilon": 1e-5, "swa_rope_theta": 5000.0, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4, "head_dim": 24, "v_head_dim": 16, "swa_head_dim": 24, "swa_v_head_dim": 16,
        "partial_rotary_factor": 0.5, "n_shared_experts": None,
    }),
    "minicpm": _MUP,
    "minicpm3": _MLA | _MUP | {
        "rope_scaling": {
            "type": "longrope", "original_max_position_embeddings": 512, "short_factor": [1.0] * 8,
            "long_factor": [1.5] * 8,
        },
    },
    "minimax_m3_vl": {
        "text_config": _HEAD | _MIXTRAL | {
            "dense_intermediate_size": 128, "intermediate_size": 64, "shared_intermediate_size": 64, "rotary_dim": 8,
            "moe_layer_freq": [0, 1, 1, 1],
            "sparse_attention_config": {
                "sparse_num_index_heads": 2, "sparse_index_dim": 32, "sparse_block_size": 4, "sparse_topk_blocks": 2,
                "sparse_local_block": 1, "sparse_attention_freq": [0, 1, 1, 0],
            },
        },
    },
    "muse_glimmer": _HEAD | _KINDS,
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 2.0}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
            {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}},
        ],
    },
    "openelm": {
        "head_dim": 16, "num_transformer_layers": 4, "model_dim": 64, "ffn_dim_divisor": 16,
        "num_query_heads": [4, 4, 8, 8], "num_kv_heads": [2, 2, 4, 4], "ffn_multipliers": [1.0, 2.0, 2.0, 2.5],
    },
    **dict.fromkeys(("phixtral", "phi-msft"), _PHIXTRAL),
    "pixtral": {"text_config": _HEAD | {"model_type": "mistral"}},
    "plamo": {"n_shared_head": 2},
    "plamo2": {
        "hidden_size_per_head": 16, "attention_window_size": WINDOW, "mamba_d_state": 16, "mamba_d_conv": 4,
        "mamba_num_heads": 4, "mamba_step": 2,
    },
    "plamo3": _HEAD | {"window_size": WINDOW, "sliding_window_pattern": 2},
    "qwen": {"kv_channels": 16, "num_key_value_heads": 4, "layer_norm_epsilon": 1e-5},
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), {"text_config": {"model_type": "qwen2"}}),
    "spark2_5": _HEAD | _KINDS | {"rope_parameters": _ROPES, "hidden_act": "gelu"},
    "gear": _HEAD | {"layer_types": ["conv_mixer", "sliding_attention", "full_attention"], "conv_L_cache": 3},
    "gptj": _GPT2 | {"rotary_dim": 8},
    "hunyuan": _MOE | {
        "moe_topk": 2, "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_qk_norm": True, "use_cla": True,
        "cla_share_factor": 2, "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
    "bailing_hybrid": _LING | _MLA,
    "bailing_moe_linear": _LING,
    "kimi_k3": {
        "text_config": _KIMI_LINEAR | {
            "hidden_act": "situ", "activation_situ_beta": 1.0, "attn_res_block_size": 2, "num_shared_experts": 1,
            "first_k_dense_replace": 1, "routed_expert_hidden_size": 32, "model_type": "kimi_linear",
        },
    },
    "gemma3n": {
        "text_config": _HEAD | _PER_LAYER | {
            "model_type": "gemma3n_text", "rope_local_base_freq": 1000.0, "altup_num_inputs": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
            "activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0], "altup_coef_clip": 100.0, "altup_active_idx": 0,
            "altup_correct_scale": True, "laurel_rank": 16,
        },
    },
    **dict.fromkeys(("gemma4", "gemma4_unified"), {
        "text_config": _HEAD | _PER_LAYER | _TIED | {
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
            "global_head_dim": 32,
        },
    }),
    "gemma4_text": _HEAD | _KINDS | _TIED | {
        "global_head_dim": 32, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 5.0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 64, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    },
    "lfm2-vl": {"text_config": _LFM2 | {"model_type": "lfm2"}},
    **dict.fromkeys(("idefics3", "smolvlm"), {"text_config": {"model_type": "llama"}, "vision_config": _SIGLIP}),
    "internvl": {"text_config": _HEAD | {"model_type": "qwen3"}, "vision_config": _SIGLIP},
    "k2_horizon": _HEAD | {"rope_parameters": {"rope_theta": 9000.0, "rope_type": "default"}},
    "kolibri1": _HEAD | _MOE | _KINDS | {"shared_expert_intermediate_size": 64},
    "cohere2_moe": _HEAD | _MOE | _KINDS | {
        "layer_types": ["full_attention", "sliding_attention"], "moe_num_shared_experts": 2, "logit_scale": 0.5,
        "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 96,
    },
    "hy_v4": _ROUTED | _MLA | _INDEX | {
        "num_key_value_heads": 1, "hc_mult": 2, "indexer_types": ["full", "full", "shared", "full"],
    },
    "deepseek_v4": _ROUTED | {
        "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "compress_ratios": [0, 4, 128, 4],
        "index_n_heads": 2, "index_head_dim": 32, "index_topk": 4, "hc_mult": 2, "num_hash_layers": 2, "o_groups": 2,
        "o_lora_rank": 32,
    },
    "qwen4_exp": {
        "text_config": _NEXT | {
            "model_type": "qwen4_exp_text", "layer_types": ["linear_attention", "full_attention"], "hc_count": 2,
            "hc_lowrank": 16, "ple_layer_ids": [1, 3], "ple_embed_dim": 128, "ngram_size": 3, "heads_per_ngram": 2,
            "ngram_vocab_size_base": 500, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4,
            "indexer_n_heads": 2, "indexer_head_dim": 32, "indexer_budget": 16, "indexer_compress_ratio": 4,
            "eos_token_id": 2, "rope_parameters": {
                "type": "default", "mrope_section": [2, 1, 1], "rope_theta": 9000.0, "partial_rotary_factor": 0.5,
            },
        },
    },
    "glm5_next": {
        "text_config": _ROUTED | _MLA | _INDEX | {
            "num_key_value_heads": 4, "qk_rope_head_dim": 0, "index_kpool": 4, "linear_head_dim": 32, "linear_num_heads": 2,
            "linear_conv_kernel_dim": 4, "hc_mult": 2, "index_topk_pattern": "FFSF", "head_dim": 0,
            "layer_types": ["linear_attention", "deepseek_sparse_attention", "deepseek_sparse_attention", "linear_attention"],
        },
    },
    "step3p7": {"text_config": _STEP | {"num_attention_heads": 4}},
    "mistral_large3": {"text_config": _ROUTED | _MLA | {"num_key_value_heads": 4, "model_type": "mistral_large3"}},
    "bailing_moe_v3": _BAILING | _MLA | {
        "layer_group_size": 2, "head_dim": 16, "n_group": 1, "topk_group": 1, "short_conv_kernel_size": 4,
        "moe_shared_expert_intermediate_size": 64,
    },
}
"""Entries of a family's config.json besides `BASE`, by `model_type`; lists of `layer_types` repeat."""
# fmt: on


def tiny_config(family: str, *, layers: int = 4, vocab: int = 512, overrides: JsonMapping | None = None) -> JsonObject:
    """Return the config.json of a tiny model of `family`; `overrides` replace entries of the text model."""
    common = {"num_hidden_layers": layers, "vocab_size": vocab, **BASE}
    if _OWN_NAMES & TINY[family].keys():
        common = {"vocab_size": vocab}
    nested = TINY[family].get("text_config")
    inner = {**common, **(TINY[family] if nested is None else nested), **(overrides or {})}
    for name in _LAYERS & inner.keys():
        inner[name] = layers
    for kinds in _BY_LAYER & inner.keys():
        inner[kinds] = (inner[kinds] * layers)[:layers]
    if "num_vocab" in inner:
        inner["num_vocab"] = vocab
    outer = {"model_type": family, "eos_token_id": EOS}
    return {**outer, **inner} if nested is None else {**outer, "vocab_size": vocab, **TINY[family], "text_config": inner}
