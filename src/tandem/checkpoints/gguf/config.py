"""config.json of a GGUF file, from its metadata. No mlx."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tandem.errors import BrokenModel, UnsupportedModel

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""`general.architecture` to model_type."""
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""model_type to the class that transformers, and hence vLLM, looks for."""


def model_config(
    metadata: dict[str, Any], shapes: dict[str, tuple[int, ...]], rope_factors: np.ndarray | None, source: str
) -> dict[str, Any]:
    """config.json as a dict, without quantisation.

    `rope_factors` is the tensor rope_freqs.weight where there is one. Raises `UnsupportedModel` for an architecture
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
    heads, hidden = int(need("attention.head_count")), int(need("embedding_length"))
    dim = int(metadata.get(f"{arch}.attention.key_length", hidden // heads))
    if metadata.get(f"{arch}.rope.dimension_count", dim) != dim:
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
    config |= _rope_scaling(metadata, arch, rope_factors, config["rope_theta"], dim, source)
    return config | _token_ids(metadata)


def _architecture(metadata: dict[str, Any], source: str) -> str:
    arch = str(metadata.get("general.architecture"))
    if arch in ARCHITECTURES and not metadata.get(f"{arch}.expert_count", 0):
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
    metadata: dict[str, Any], arch: str, factors: np.ndarray | None, base: float, dim: int, source: str
) -> dict[str, Any]:
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    if factors is not None:
        # The file has the factors alone; Llama 3's settings are the ones known to make such factors.
        settings = {"rope_type": "llama3", "factor": (factor := float(np.max(factors))), "low_freq_factor": 1.0}
        settings |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        if factors.shape == (dim // 2,) and np.allclose(factors, _llama3(factor, base, dim), rtol=1e-3):
            return {"rope_scaling": settings}
        raise UnsupportedModel(f"{source}: the rotary factors of rope_freqs.weight are not Llama 3's", param="model")
    if kind == "linear":
        return {"rope_scaling": {"type": "linear", "factor": float(metadata.get(f"{arch}.rope.scaling.factor", 1.0))}}
    if kind != "none":
        raise UnsupportedModel(f"{source}: rotary scaling {kind} is not supported from GGUF", param="model")
    return {}


def _llama3(factor: float, base: float, dim: int, original: int = 8192) -> np.ndarray:
    """Divisors of the rotary frequencies, as llama.cpp's converter computes them for Llama 3."""
    wavelength = 2 * math.pi * base ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    smooth = np.clip((original / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    return 1 / ((1 - smooth) / factor + smooth)
