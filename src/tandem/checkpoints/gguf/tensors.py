"""Tensors of GGUF files: names, block formats, and their repacking for MLX (numpy, no mlx).

Block formats: ggml `ggml-common.h`. A block holds 32 weights of a row. MLX's affine format stores element i of a row
at bit i * bits of consecutive uint32 words, and w = scale * q + bias.
"""

from __future__ import annotations

import math
import re

import numpy as np

GROUP = 32  # weights per block

SUPPORTED = {0: "F32", 1: "F16", 30: "BF16", 2: "Q4_0", 3: "Q4_1", 8: "Q8_0"}
"""ggml type number to name; for plain types the name is safetensors' too."""
QUANT_BITS = {2: 4, 3: 4, 8: 8}
_BLOCK_BYTES = {2: 18, 3: 20, 8: 34}
_ITEM_BYTES = {0: 4, 1: 2, 30: 2}
TYPE_NAMES = {
    **SUPPORTED,
    **dict(zip(range(6, 8), ("Q5_0", "Q5_1"), strict=True)),
    **dict(zip(range(9, 24), (
        "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL",
        "IQ3_S", "IQ2_S", "IQ4_XS",
    ), strict=True)),
    **{24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
}  # fmt: skip

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"^blk\.(\d+)\.(\w+)\.(weight|bias)$")


def mlx_name(name: str) -> str | None:
    """MLX's name of a tensor; None for the rotary factors, which become part of the config."""
    if name == "rope_freqs.weight":
        return None
    if (match := _LAYER.match(name)) and (inner := _IN_LAYER.get(match[2])):
        return f"model.layers.{match[1]}.{inner}.{match[3]}"
    return _GLOBAL.get(name, name)  # what is unknown keeps its name and is refused when the model is loaded


def stored_bytes(kind: int, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of a supported type in the file."""
    count = math.prod(shape)
    return count // GROUP * _BLOCK_BYTES[kind] if kind in QUANT_BITS else count * _ITEM_BYTES[kind]


def convert_tensor(data: np.ndarray, kind: int, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Bytes of a tensor as MLX's arrays: `weight`, and for quantised types `scales` and `biases` (float16).

    `weight` is uint32 [rows, columns * bits / 32] for quantised types and the plain array otherwise (bfloat16 as
    uint16). Scales and biases are [rows, columns / 32].
    """
    if kind not in QUANT_BITS:
        plain = {0: np.float32, 1: np.float16, 30: np.uint16}[kind]
        return {"weight": data.view(plain).reshape(shape)}
    rows, groups = shape[:-1], shape[-1] // GROUP
    blocks = data.reshape(-1, _BLOCK_BYTES[kind])
    scales = blocks[:, 0:2].copy().view(np.float16)
    if kind == 8:
        # int8 q to uint8 q + 128
        weight, biases = blocks[:, 2:] ^ np.uint8(0x80), -128 * scales.astype(np.float32)
    else:
        start = 2 if kind == 2 else 4
        nibbles = blocks[:, start:]
        # Byte j holds weight j (low half) and weight j + 16 (high half); MLX wants neighbours in a byte.
        order = np.concatenate([nibbles & 15, nibbles >> 4], axis=1)
        weight = order[:, 0::2] | (order[:, 1::2] << 4)
        biases = blocks[:, 2:4].copy().view(np.float16) if kind == 3 else -8 * scales.astype(np.float32)
    packed = np.ascontiguousarray(weight).reshape(*rows, -1).view("<u4")
    return {
        "weight": packed,
        "scales": scales.reshape(*rows, groups),
        "biases": _float16(biases).reshape(*rows, groups),
    }


def _float16(array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return array.astype(np.float16)
