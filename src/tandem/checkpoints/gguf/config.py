"""Derivation of config.json from a GGUF file's metadata. No mlx."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tandem.errors import BrokenModel, UnsupportedModel
from tandem.json_types import JsonObject

Shapes = dict[str, tuple[int, ...]]
MODELS = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "qwen3next": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    "qwen35": ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    "qwen35moe": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "gemma4": ("gemma4_text", "Gemma4ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM"),
    "deepseek2": ("deepseek_v3", "DeepseekV3ForCausalLM"),
    "mistral3": ("mistral", "MistralForCausalLM"),
    "glm4moe": ("glm4_moe", "Glm4MoeForCausalLM"),
    "lfm2": ("lfm2", "Lfm2ForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
}
"""`general.architecture` to model_type, and the class name in transformers, which vLLM looks for. deepseek2 may also be
deepseek_v2, and mistral3 ministral3. Qwen3-Next maps to Qwen3.5, whose parameters the file stores separately too."""
_WITH_EXPERTS = ("qwen3moe", "qwen3next", "qwen35moe", "gemma4", "gpt-oss", "deepseek2", "glm4moe")
_PARTLY_ROTATED = ("phi3", "deepseek2", "qwen3next", "qwen35", "qwen35moe", "glm4moe")
_LLAMA3_CONTEXT = 8192


class _Metadata:
    """Metadata of the file's architecture, and the shapes of its tensors."""

    def __init__(self, metadata: JsonObject, shapes: Shapes, factors: dict[str, np.ndarray], source: str) -> None:
        self.arch = str(metadata.get("general.architecture"))
        self.shapes, self.factors, self._metadata, self._source = shapes, factors, metadata, source

    def get(self, key: str, default: Any = None) -> Any:
        """Return the entry, or `default`. Raise KeyError without either."""
        name = f"{self.arch}.{key}"
        return self._metadata[name] if default is None else self._metadata.get(name, default)

    def need(self, key: str) -> Any:
        """Return a positive number; for an entry with one value per layer the largest. Raise `BrokenModel`."""
        value = self._metadata.get(f"{self.arch}.{key}")
        largest = max(value, default=0) if isinstance(value, list) else value
        if not isinstance(largest, (int, float)) or largest <= 0:
            raise BrokenModel(f"{self._source}: GGUF metadata {self.arch}.{key} is missing or wrong: {value!r:.200}")
        return largest

    def unsupported(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self._source}: {what}")


def model_config(metadata: JsonObject, shapes: Shapes, factors: dict[str, np.ndarray], source: str) -> JsonObject:
    """Return config.json as a dict, without quantisation.

    `factors` are the file's tensors of rotary factors, by name. Raise `UnsupportedModel` for an architecture or rotary
    scaling that is not supported, `BrokenModel` for missing metadata.
    """
    file = _Metadata(metadata, shapes, factors, source)
    arch, experts = file.arch, bool(metadata.get(f"{file.arch}.expert_count", 0))
    if arch not in MODELS or (experts and arch not in _WITH_EXPERTS):
        kind = f"{arch} with experts" if arch in MODELS else arch
        raise file.unsupported(f"GGUF architecture {kind} is not supported; supported are {', '.join(MODELS)}")
    if "token_embd.weight" not in shapes:
        raise BrokenModel(f"{source}: has no tensor token_embd.weight")
    if file.need("block_count") > len(shapes):
        raise BrokenModel(f"{source}: GGUF metadata {arch}.block_count is larger than its tensors")
    heads, hidden = int(file.need("attention.head_count")), int(file.need("embedding_length"))
    dim = int(file.get("attention.key_length", hidden // heads))
    rotary = file.get("rope.dimension_count", dim)
    if rotary != dim and arch not in _PARTLY_ROTATED:
        raise file.unsupported("rotary embedding of a part of each head is not supported")
    width = "expert_feed_forward_length" if arch == "qwen35moe" else "feed_forward_length"
    model_type, name = MODELS[arch]
    config: JsonObject = {
        "architectures": [name],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": int(file.need("block_count")) - int(file.get("nextn_predict_layers", 0)),
        "intermediate_size": int(file.need(width)),
        "num_attention_heads": heads,
        "num_key_value_heads": int(np.max(file.get("attention.head_count_kv", heads))),
        "head_dim": dim,
        "rms_norm_eps": float(f"{file.need('attention.layer_norm_rms_epsilon'):.6g}"),  # stored as float32
        "vocab_size": shapes["token_embd.weight"][0],
        "max_position_embeddings": int(file.need("context_length")),
        "rope_theta": float(file.get("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
    }
    if "blk.0.ffn_up.bias" in shapes:
        config["mlp_bias"] = True
    if rotary != dim:
        config["partial_rotary_factor"] = rotary / dim
    config |= _rope_scaling(file, config["rope_theta"], dim)
    if own := _OWN.get(arch):
        config |= own(file, config)
    config |= _token_ids(metadata)
    if config["model_type"].startswith("qwen3_5"):
        return {"architectures": [name], "model_type": model_type, "text_config": config}
    return config


def _qwen3moe(file: _Metadata, config: JsonObject) -> JsonObject:
    dense = [i for i in range(config["num_hidden_layers"]) if f"blk.{i}.ffn_gate.weight" in file.shapes]
    return {
        "num_experts": int(file.get("expert_count")), "num_experts_per_tok": int(file.get("expert_used_count")),
        "moe_intermediate_size": int(file.get("expert_feed_forward_length")),
        "decoder_sparse_step": 1, "mlp_only_layers": dense, "norm_topk_prob": True,
    }  # fmt: skip


def _qwen35(file: _Metadata, config: JsonObject) -> JsonObject:
    """Return the entries for linear attention with full attention every n layers, and for experts."""
    values = int(file.get("ssm.time_step_rank"))
    own = {
        "linear_num_value_heads": values, "linear_num_key_heads": int(file.get("ssm.group_count")),
        "linear_key_head_dim": int(file.get("ssm.state_size")),
        "linear_value_head_dim": int(file.get("ssm.inner_size")) // values,
        "linear_conv_kernel_dim": int(file.get("ssm.conv_kernel")),
        "full_attention_interval": int(file.get("full_attention_interval", 4)),
        "rope_parameters": {"type": "default", "rope_theta": config["rope_theta"],
                            "partial_rotary_factor": config.get("partial_rotary_factor", 1.0)},
    }  # fmt: skip
    if file.get("expert_count", 0):
        shared = int(file.get("expert_shared_feed_forward_length"))
        own |= {**_qwen3moe(file, config), "shared_expert_intermediate_size": shared}
    return own


def _gemma(file: _Metadata, config: JsonObject) -> JsonObject:
    """Return windows, soft caps, and the query scale. The file lacks the scale: it is the head width, or for the
    largest model of a generation the hidden size per head."""
    largest = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[file.arch]
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    own = {"query_pre_attn_scalar": scalar, "sliding_window": int(file.get("attention.sliding_window", 0))}
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if cap := file.get(name, 0.0):
            own[name] = float(cap)
    if file.arch == "gemma2":
        return own
    pattern = file.get("attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        period = pattern.index(False) + 1 if False in pattern else len(pattern) + 1
        if pattern != [(i + 1) % period != 0 for i in range(len(pattern))]:
            raise file.unsupported("windows in layers that are not all but every so many are not supported")
        pattern = period
    return own | {"sliding_window_pattern": pattern, "rope_local_base_freq": float(file.get("rope.freq_base_swa", 1e4))}


def _gemma4(file: _Metadata, config: JsonObject) -> JsonObject:
    """Return the entries for windowed layers, and for full-attention layers with wider, partly rotated heads."""
    windows = [bool(window) for window in file.get("attention.sliding_window_pattern")]
    count = config["num_hidden_layers"]
    kv_heads = np.broadcast_to(file.get("attention.head_count_kv"), count).tolist()
    widths = np.broadcast_to(file.get("feed_forward_length"), count).tolist()
    full = windows.index(False)
    factors = file.factors.get("rope_freqs.weight", np.ones(1))
    own = {
        "head_dim": int(file.get("attention.key_length_swa")), "global_head_dim": config["head_dim"],
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "sliding_window": int(file.get("attention.sliding_window")),
        "num_key_value_heads": kv_heads[windows.index(True)] if True in windows else kv_heads[0],
        "num_global_key_value_heads": kv_heads[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.shapes,
        "num_kv_shared_layers": int(file.get("attention.shared_kv_layers", 0)),
        "intermediate_size": widths[0], "use_double_wide_mlp": widths[-1] != widths[0],
        "hidden_size_per_layer_input": int(file.get("embedding_length_per_layer_input", 0)),
        "vocab_size_per_layer_input": file.shapes.get("per_layer_token_embd.weight", (config["vocab_size"],))[0],
        "final_logit_softcapping": float(file.get("final_logit_softcapping", 0.0)) or None,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": config["rope_theta"],
                               "partial_rotary_factor": float(np.mean(factors < 1e20))},
            "sliding_attention": {"rope_type": "default", "rope_theta": float(file.get("rope.freq_base_swa", 1e4))},
        },
    }  # fmt: skip
    if experts := file.get("expert_count", 0):
        own |= {"enable_moe_block": True, "num_experts": int(experts),
                "top_k_experts": int(file.get("expert_used_count")),
                "moe_intermediate_size": int(file.get("expert_feed_forward_length"))}  # fmt: skip
    return own


def _phi3(file: _Metadata, config: JsonObject) -> JsonObject:
    window = file.get("attention.sliding_window", 0)
    return {"sliding_window": int(window)} if window else {}


def _gpt_oss(file: _Metadata, config: JsonObject) -> JsonObject:
    count = config["num_hidden_layers"]
    return {
        "num_local_experts": int(file.get("expert_count")),
        "num_experts_per_tok": int(file.get("expert_used_count")),
        "intermediate_size": int(file.get("expert_feed_forward_length", config["intermediate_size"])),
        "sliding_window": int(file.get("attention.sliding_window")),
        "layer_types": (["sliding_attention", "full_attention"] * count)[:count],
    }


def _routed(file: _Metadata) -> JsonObject:
    """Return the entries for experts as in DeepSeek."""
    return {
        "n_routed_experts": int(file.get("expert_count")), "num_experts_per_tok": int(file.get("expert_used_count")),
        "n_shared_experts": int(file.get("expert_shared_count", 0)) or None,
        "moe_intermediate_size": int(file.get("expert_feed_forward_length")),
        "first_k_dense_replace": int(file.get("leading_dense_block_count", 0)), "moe_layer_freq": 1,
        "routed_scaling_factor": float(file.get("expert_weights_scale", 1.0)),
        "norm_topk_prob": bool(file.get("expert_weights_norm", False)),
        "n_group": int(file.get("expert_group_count", 1)), "topk_group": int(file.get("expert_group_used_count", 1)),
    }  # fmt: skip


def _deepseek2(file: _Metadata, config: JsonObject) -> JsonObject:
    """Return the entries of DeepSeek V2, or V3 with sigmoid gates; the file stores latent attention whole or per head."""
    own = _routed(file)
    if file.get("expert_gating_func", 1) == 2:
        own["topk_method"] = "noaux_tc"
    elif "blk.0.attn_k_b.weight" in file.shapes:
        raise file.unsupported(
            "DeepSeek V2 with attn_k_b and attn_v_b is not supported from GGUF; "
            "use a file with attn_kv_b, or a model in MLX format"
        )
    else:
        own |= {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
                "topk_method": "group_limited_greedy" if own["n_group"] > 1 else "greedy"}  # fmt: skip
    rope = int(file.get("rope.dimension_count"))
    return own | {
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": int(file.get("attention.q_lora_rank", 0)) or None,
        "kv_lora_rank": int(file.get("attention.kv_lora_rank")), "qk_rope_head_dim": rope,
        "qk_nope_head_dim": int(file.get("attention.key_length_mla", file.get("attention.key_length"))) - rope,
        "v_head_dim": int(file.get("attention.value_length_mla", file.get("attention.value_length"))),
    }  # fmt: skip


def _glm4moe(file: _Metadata, config: JsonObject) -> JsonObject:
    return _routed(file) | {"use_qk_norm": "blk.0.attn_q_norm.weight" in file.shapes, "rope_scaling": None}


def _mistral3(file: _Metadata, config: JsonObject) -> JsonObject:
    """Return the entries of Ministral 3, which scales queries by position; none for Mistral Small 3."""
    if not (growth := file.get("attention.temperature_scale", 0.0)):
        return {}
    scale = float(file.get("rope.scaling.yarn_log_multiplier", 1.0))
    rope = {
        "rope_type": "yarn", "rope_theta": config["rope_theta"], "factor": float(file.get("rope.scaling.factor")),
        "original_max_position_embeddings": int(file.get("rope.scaling.original_context_length")),
        "beta_fast": float(file.get("rope.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": float(file.get("rope.scaling.yarn_beta_slow", 1.0)),
        "mscale": scale, "mscale_all_dim": scale, "llama_4_scaling_beta": float(growth),
    }  # fmt: skip
    return {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "rope_parameters": rope}


def _lfm2(file: _Metadata, config: JsonObject) -> JsonObject:
    full = [i for i in range(config["num_hidden_layers"]) if f"blk.{i}.attn_q.weight" in file.shapes]
    return {
        "norm_eps": config["rms_norm_eps"], "full_attn_idxs": full, "conv_L_cache": int(file.get("shortconv.l_cache")),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in file.shapes),
        "block_dim": config["hidden_size"], "block_ff_dim": config["intermediate_size"], "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
    }  # fmt: skip


def _granite(file: _Metadata, config: JsonObject) -> JsonObject:
    if not file.get("rope.scaling.finetuned", True):
        raise file.unsupported("granite without rotary embedding is not supported")
    return {
        "attention_multiplier": float(file.get("attention.scale", 0.0)) or config["head_dim"] ** -0.5,
        "embedding_multiplier": float(file.get("embedding_scale", 1.0)),
        "residual_multiplier": float(file.get("residual_scale", 1.0)),
        "logits_scaling": float(file.get("logit_scale", 1.0)), "mlp_bias": config.get("mlp_bias", False),
    }  # fmt: skip


_OWN: dict[str, Callable[[_Metadata, JsonObject], JsonObject]] = {
    "deepseek2": _deepseek2, "qwen3moe": _qwen3moe, "gemma2": _gemma, "gemma3": _gemma, "phi3": _phi3,
    "gpt-oss": _gpt_oss, "qwen35": _qwen35, "qwen35moe": _qwen35, "qwen3next": _qwen35, "gemma4": _gemma4,
    "mistral3": _mistral3, "glm4moe": _glm4moe, "lfm2": _lfm2, "granite": _granite,
}  # fmt: skip


def _token_ids(metadata: JsonObject) -> JsonObject:
    eos = sorted({metadata[k] for k in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if k in metadata})
    ids: JsonObject = {"eos_token_id": eos[0] if len(eos) == 1 else eos} if eos else {}
    if "tokenizer.ggml.bos_token_id" in metadata:
        ids["bos_token_id"] = metadata["tokenizer.ggml.bos_token_id"]
    return ids


def _rope_scaling(file: _Metadata, base: float, dim: int) -> JsonObject:
    kind = file.get("rope.scaling.type", "none")
    original = file.get("rope.scaling.original_context_length", 0)
    if "rope_freqs.weight" in file.factors and file.arch != "gemma4":
        return _llama3_scaling(file, base, dim)
    if "rope_factors_long.weight" in file.factors and file.arch == "phi3":
        long, short = (file.factors.get(f"rope_factors_{which}.weight", np.ones(0)).tolist() for which in ("long", "short"))
        scaling = {"type": "longrope", "long_factor": long, "short_factor": short}
        return {"rope_scaling": scaling, "original_max_position_embeddings": int(original or 4096)}
    factor = float(file.get("rope.scaling.factor", 1.0))
    if kind == "linear":
        return {"rope_scaling": {"type": "linear", "factor": factor}}
    yarn = {"factor": factor, "original_max_position_embeddings": int(original), "beta_fast": 32.0, "beta_slow": 1.0}
    if kind == "yarn" and file.arch == "deepseek2" and original:
        mscale = 10 * float(file.get("rope.scaling.yarn_log_multiplier", 0.1))
        return {"rope_scaling": {"type": "yarn", **yarn, "mscale": mscale, "mscale_all_dim": mscale}}
    if kind == "yarn" and file.arch == "gpt-oss" and original:
        return {"rope_scaling": {"rope_type": "yarn", **yarn, "truncate": False}}
    if kind != "none" and not (kind == "yarn" and file.get("attention.temperature_scale", 0.0)):
        raise file.unsupported(f"rotary scaling {kind} is not supported from GGUF")
    return {}


def _llama3_scaling(file: _Metadata, base: float, dim: int) -> JsonObject:
    """Return Llama 3's scaling settings if they yield the factors stored in the file. Raise `UnsupportedModel`."""
    factors = file.factors["rope_freqs.weight"]
    settings = {"rope_type": "llama3", "factor": (factor := float(np.max(factors))), "low_freq_factor": 1.0}
    settings |= {"high_freq_factor": 4.0, "original_max_position_embeddings": _LLAMA3_CONTEXT}
    if factors.shape == (dim // 2,) and np.allclose(factors, _llama3(factor, base, dim), rtol=1e-3):
        return {"rope_scaling": settings}
    raise file.unsupported("the rotary factors of rope_freqs.weight are not Llama 3's")


def _llama3(factor: float, base: float, dim: int) -> np.ndarray:
    """Return the divisors of the rotary frequencies, as llama.cpp's converter computes them for Llama 3."""
    wavelength = 2 * math.pi * base ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    smooth = np.clip((_LLAMA3_CONTEXT / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    return 1 / ((1 - smooth) / factor + smooth)
