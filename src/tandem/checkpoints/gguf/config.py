"""config.json of a GGUF file, from its metadata. No mlx."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tandem.errors import BrokenModel, UnsupportedModel

ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "gemma2": "gemma2",
    "gemma3": "gemma3_text", "phi3": "phi3", "gpt-oss": "gpt_oss", "deepseek2": "deepseek_v3",
}  # fmt: skip
"""`general.architecture` to model_type (deepseek2 may also be deepseek_v2)."""
CLASSES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM", "gpt_oss": "GptOssForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
}  # fmt: skip
"""model_type to the class that transformers, and hence vLLM, looks for."""


_WITH_EXPERTS = ("qwen3moe", "gpt-oss", "deepseek2")
_LLAMA3_CONTEXT = 8192


def model_config(
    metadata: dict[str, Any], shapes: dict[str, tuple[int, ...]], factors: dict[str, np.ndarray], source: str
) -> dict[str, Any]:
    """config.json as a dict, without quantisation.

    `factors` are the tensors of rotary factors that there are, by name. Raises `UnsupportedModel` for an architecture
    or rotary scaling that is not supported, `BrokenModel` for metadata that is missing.
    """
    arch = _architecture(metadata, source)

    def need(key: str) -> Any:
        value = metadata.get(f"{arch}.{key}")
        if not isinstance(value, (int, float)) or value <= 0:
            raise BrokenModel(f"{source}: GGUF metadata {arch}.{key} is missing or wrong: {value!r}", param="model")
        return value

    if "token_embd.weight" not in shapes:
        raise BrokenModel(f"{source}: has no tensor token_embd.weight", param="model")
    if need("block_count") > len(shapes):
        raise BrokenModel(f"{source}: GGUF metadata {arch}.block_count is larger than its tensors", param="model")
    heads, hidden = int(need("attention.head_count")), int(need("embedding_length"))
    dim = int(metadata.get(f"{arch}.attention.key_length", hidden // heads))
    rotary = metadata.get(f"{arch}.rope.dimension_count", dim)
    if rotary != dim and arch not in ("phi3", "deepseek2"):
        raise UnsupportedModel(f"{source}: rotary embedding of a part of each head is not supported", param="model")
    config: dict[str, Any] = {
        "architectures": [CLASSES[ARCHITECTURES[arch]]],
        "model_type": ARCHITECTURES[arch],
        "hidden_size": hidden,
        "num_hidden_layers": int(need("block_count")),
        "intermediate_size": int(need("feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(metadata.get(f"{arch}.attention.head_count_kv", heads)),
        "head_dim": dim,
        "rms_norm_eps": float(f"{need('attention.layer_norm_rms_epsilon'):.6g}"),  # stored as float32
        "vocab_size": shapes["token_embd.weight"][0],
        "max_position_embeddings": int(need("context_length")),
        "rope_theta": float(metadata.get(f"{arch}.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    if arch == "llama" and "blk.0.attn_q.bias" in shapes:
        config["attention_bias"] = True
    config |= _rope_scaling(metadata, arch, factors, config["rope_theta"], dim, source)
    if own := _OWN.get(arch):
        config |= own(metadata, config, shapes)
    if rotary != dim and arch == "phi3":
        config["partial_rotary_factor"] = rotary / dim
    return config | _token_ids(metadata)


def _qwen3moe(metadata: dict[str, Any], config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    dense = [i for i in range(config["num_hidden_layers"]) if f"blk.{i}.ffn_gate.weight" in shapes]
    return {
        "num_experts": int(metadata["qwen3moe.expert_count"]),
        "num_experts_per_tok": int(metadata["qwen3moe.expert_used_count"]),
        "moe_intermediate_size": int(metadata["qwen3moe.expert_feed_forward_length"]),
        "decoder_sparse_step": 1, "mlp_only_layers": dense, "norm_topk_prob": True,
    }  # fmt: skip


def _gemma(metadata: dict[str, Any], config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The file does not say what queries are scaled by: a head's width, except in the largest model of each."""
    arch = metadata["general.architecture"]
    largest = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[arch]
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    own = {"query_pre_attn_scalar": scalar, "sliding_window": int(metadata.get(f"{arch}.attention.sliding_window", 0))}
    for key, name in (("attn_logit_softcapping", "attn_logit_softcapping"),
                      ("final_logit_softcapping", "final_logit_softcapping")):  # fmt: skip
        if f"{arch}.{key}" in metadata:
            own[name] = float(metadata[f"{arch}.{key}"])
    return own if arch == "gemma2" else own | {"sliding_window_pattern": 6, "rope_local_base_freq": 10000.0}


def _phi3(metadata: dict[str, Any], config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    window = metadata.get("phi3.attention.sliding_window")
    return {"sliding_window": int(window)} if window else {}


def _gpt_oss(metadata: dict[str, Any], config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    count = config["num_hidden_layers"]
    return {
        "num_local_experts": int(metadata["gpt-oss.expert_count"]),
        "num_experts_per_tok": int(metadata["gpt-oss.expert_used_count"]),
        "intermediate_size": int(metadata.get("gpt-oss.expert_feed_forward_length", config["intermediate_size"])),
        "sliding_window": int(metadata["gpt-oss.attention.sliding_window"]),
        "layer_types": (["sliding_attention", "full_attention"] * count)[:count],
    }


def _deepseek2(metadata: dict[str, Any], config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """DeepSeek V2, and V3 with its sigmoid gates: latent attention, cut into heads in the file or not."""

    def get(key: str, default: Any = None) -> Any:
        return metadata[f"deepseek2.{key}"] if default is None else metadata.get(f"deepseek2.{key}", default)

    sigmoid = get("expert_gating_func", 1) == 2
    if not sigmoid and "blk.0.attn_k_b.weight" in shapes:
        raise UnsupportedModel("GGUF: DeepSeek V2 with attn_k_b and attn_v_b is not supported; use a file with "
                               "attn_kv_b, or a model in MLX format", param="model")  # fmt: skip
    rope = int(get("rope.dimension_count"))
    groups = int(get("expert_group_count", 1))
    kind = "deepseek_v3" if sigmoid else "deepseek_v2"
    return {
        "architectures": [CLASSES[kind]], "model_type": kind, "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": int(get("attention.q_lora_rank", 0)) or None, "kv_lora_rank": int(get("attention.kv_lora_rank")),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": int(get("attention.key_length_mla", get("attention.key_length"))) - rope,
        "v_head_dim": int(get("attention.value_length_mla", get("attention.value_length"))),
        "n_routed_experts": int(get("expert_count")), "num_experts_per_tok": int(get("expert_used_count")),
        "n_shared_experts": int(get("expert_shared_count", 0)) or None,
        "moe_intermediate_size": int(get("expert_feed_forward_length")),
        "first_k_dense_replace": int(get("leading_dense_block_count", 0)), "moe_layer_freq": 1,
        "routed_scaling_factor": float(get("expert_weights_scale", 1.0)),
        "norm_topk_prob": bool(get("expert_weights_norm", False)),
        "n_group": groups, "topk_group": int(get("expert_group_used_count", 1)),
        "topk_method": "noaux_tc" if sigmoid else "group_limited_greedy" if groups > 1 else "greedy",
    }  # fmt: skip


_OWN = {
    "deepseek2": _deepseek2, "qwen3moe": _qwen3moe, "gemma2": _gemma, "gemma3": _gemma, "phi3": _phi3,
    "gpt-oss": _gpt_oss,
}  # fmt: skip


def _architecture(metadata: dict[str, Any], source: str) -> str:
    arch = str(metadata.get("general.architecture"))
    if arch in ARCHITECTURES and (arch in _WITH_EXPERTS or not metadata.get(f"{arch}.expert_count", 0)):
        return arch
    kind = f"{arch} with experts" if arch in ARCHITECTURES else arch
    raise UnsupportedModel(
        f"{source}: GGUF architecture {kind} is not supported; supported are {', '.join(ARCHITECTURES)}", param="model"
    )


def _token_ids(metadata: dict[str, Any]) -> dict[str, Any]:
    eos = sorted({metadata[k] for k in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if k in metadata})
    ids: dict[str, Any] = {"eos_token_id": eos[0] if len(eos) == 1 else eos} if eos else {}
    if "tokenizer.ggml.bos_token_id" in metadata:
        ids["bos_token_id"] = metadata["tokenizer.ggml.bos_token_id"]
    return ids


def _rope_scaling(
    metadata: dict[str, Any], arch: str, factors: dict[str, np.ndarray], base: float, dim: int, source: str
) -> dict[str, Any]:
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    original = metadata.get(f"{arch}.rope.scaling.original_context_length")
    if "rope_freqs.weight" in factors:
        return _llama3_scaling(factors["rope_freqs.weight"], base, dim, source)
    if "rope_factors_long.weight" in factors and arch == "phi3":
        long, short = (factors.get(f"rope_factors_{which}.weight", np.ones(0)).tolist() for which in ("long", "short"))
        scaling = {"type": "longrope", "long_factor": long, "short_factor": short}
        return {"rope_scaling": scaling, "original_max_position_embeddings": int(original or 4096)}
    factor = float(metadata.get(f"{arch}.rope.scaling.factor", 1.0))
    if kind == "linear":
        return {"rope_scaling": {"type": "linear", "factor": factor}}
    if kind == "yarn" and arch == "deepseek2" and original:
        mscale = 10 * float(metadata.get("deepseek2.rope.scaling.yarn_log_multiplier", 0.1))
        scaling = {"type": "yarn", "factor": factor, "original_max_position_embeddings": int(original),
                   "beta_fast": 32, "beta_slow": 1, "mscale": mscale, "mscale_all_dim": mscale}  # fmt: skip
        return {"rope_scaling": scaling}
    if kind == "yarn" and arch == "gpt-oss" and original:
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": int(original),
                   "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}  # fmt: skip
        return {"rope_scaling": scaling}
    if kind != "none":
        raise UnsupportedModel(f"{source}: rotary scaling {kind} is not supported from GGUF", param="model")
    return {}


def _llama3_scaling(factors: np.ndarray, base: float, dim: int, source: str) -> dict[str, Any]:
    """The file has the factors alone; Llama 3's settings are the ones known to make such factors."""
    settings = {"rope_type": "llama3", "factor": (factor := float(np.max(factors))), "low_freq_factor": 1.0}
    settings |= {"high_freq_factor": 4.0, "original_max_position_embeddings": _LLAMA3_CONTEXT}
    if factors.shape == (dim // 2,) and np.allclose(factors, _llama3(factor, base, dim), rtol=1e-3):
        return {"rope_scaling": settings}
    raise UnsupportedModel(f"{source}: the rotary factors of rope_freqs.weight are not Llama 3's", param="model")


def _llama3(factor: float, base: float, dim: int) -> np.ndarray:
    """Divisors of the rotary frequencies, as llama.cpp's converter computes them for Llama 3."""
    wavelength = 2 * math.pi * base ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    smooth = np.clip((_LLAMA3_CONTEXT / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    return 1 / ((1 - smooth) / factor + smooth)
