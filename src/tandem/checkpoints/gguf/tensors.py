"""Tensors of GGUF files: block formats, and their repacking for MLX (numpy and the gguf package, no mlx).

Block formats: ggml `ggml-common.h`. What MLX can hold stays packed: blocks of 32 weights of 4, 5 or 8 bits become
affine groups, element i of a row at bit i * bits of consecutive uint32 words and w = scale * q + bias; MXFP4 is the
same in both. Other formats are expanded to 16 bits by the gguf package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from tandem.json_types import JsonObject

GROUP = 32
"""Weights of a group in MLX."""
PLAIN = {0: "F32", 1: "F16", 30: "BF16"}
"""ggml type number to safetensors' name."""
_AFFINE = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5}
_CHUNK = 1 << 22
"""Weights that are expanded at once: the gguf package needs several times their size."""


@dataclass(frozen=True)
class GGMLType:
    """A ggml type."""

    name: str
    block: int
    """Weights of a block."""
    nbytes: int
    """Bytes of a block."""
    bits: int = 0
    """Bits of a weight that stays packed; 0 for others."""
    mode: str = "affine"


@cache
def kinds() -> dict[int, GGMLType]:
    """All types that can be read, by number."""
    import gguf.quants  # a sixth of a second, which other models need not wait for
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    found = {}
    for kind in GGMLQuantizationType:
        if int(kind) in PLAIN or hasattr(gguf.quants, kind.name):  # a class for each type that it can expand
            packed = 4 if kind.name == "MXFP4" else _AFFINE.get(kind.name, 0)
            mode = "mxfp4" if kind.name == "MXFP4" else "affine"
            block, nbytes = GGML_QUANT_SIZES[kind]
            found[int(kind)] = GGMLType(kind.name, block, nbytes, packed, mode)
    return found


def kind_name(number: int) -> str:
    """ggml's name of the type, for messages."""
    from gguf.constants import GGMLQuantizationType

    try:
        return str(GGMLQuantizationType(number).name)
    except ValueError:
        return f"number {number}"


def stored_bytes(number: int, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of a type that can be read, in the file."""
    kind = kinds()[number]
    return math.prod(shape) // kind.block * kind.nbytes


def settings_of(number: int) -> JsonObject:
    """MLX's quantisation settings of a type that stays packed."""
    kind = kinds()[number]
    return {"group_size": GROUP, "bits": kind.bits, **({} if kind.mode == "affine" else {"mode": kind.mode})}


def converted(data: np.ndarray, number: int, shape: tuple[int, ...], dtype: str) -> dict[str, np.ndarray]:
    """Bytes of a tensor as MLX's arrays: `weight`, and for packed types `scales` and, unless mxfp4, `biases` (float16).

    `weight` is uint32 [..., columns * bits / 32] for packed types, the array as stored for plain ones (bfloat16 as
    uint16), else float16 or bfloat16 as `dtype` (F16 or BF16) says. Scales and biases are [..., columns / 32].
    """
    kind = kinds()[number]
    if number in PLAIN:
        return {"weight": data.view({0: np.float32, 1: np.float16, 30: np.uint16}[number]).reshape(shape)}
    blocks = data.reshape(-1, kind.nbytes)
    if not kind.bits:
        return {"weight": _expanded(blocks, number, kind, dtype).reshape(shape)}
    rows, groups = shape[:-1], shape[-1] // GROUP
    if kind.mode == "mxfp4":
        scales, weight = blocks[:, :1], _nibbles(_halves(blocks[:, 1:]))
        return {"weight": weight.view("<u4").reshape(*rows, -1), "scales": scales.reshape(*rows, groups).copy()}
    numbers, scales, biases = _numbers(blocks, kind.name)
    return {
        "weight": _words(numbers, kind.bits).reshape(*rows, -1),
        "scales": _float16(scales).reshape(*rows, groups),
        "biases": _float16(biases).reshape(*rows, groups),
    }


def expanded(data: np.ndarray, number: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """A tensor of any type that can be read, in 16 bits if it is quantised."""
    if number in PLAIN:
        return converted(data, number, shape, dtype)["weight"]
    kind = kinds()[number]
    return _expanded(data.reshape(-1, kind.nbytes), number, kind, dtype).reshape(shape)


def _expanded(blocks: np.ndarray, number: int, kind: GGMLType, dtype: str) -> np.ndarray:
    import gguf.quants

    result = np.empty((len(blocks), kind.block), np.float16 if dtype == "F16" else np.uint16)
    step = max(1, _CHUNK // kind.block)
    for start in range(0, len(blocks), step):
        with np.errstate(all="ignore"):  # damaged scales may be infinite
            plain = gguf.quants.dequantize(blocks[start : start + step], gguf.GGMLQuantizationType(number))
        result[start : start + step] = _float16(plain) if dtype == "F16" else bfloat16(plain)
    return result


def bfloat16(array: np.ndarray) -> np.ndarray:
    """float32 as the bits of bfloat16, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _numbers(blocks: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whole numbers [groups, 32], and scale and bias of each group."""
    if name.endswith("_K"):
        return _k_numbers(blocks, name)
    scales = blocks[:, 0:2].copy().view(np.float16)
    if name == "Q8_0":  # int8 q to uint8 q + 128
        return blocks[:, 2:] ^ np.uint8(0x80), scales, -128 * scales.astype(np.float32)
    start = 4 if name.endswith("_1") else 2
    if name.startswith("Q5"):
        high = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little")
        numbers, middle = _halves(blocks[:, start + 4 :]) | (high << 4), 16
    else:
        numbers, middle = _halves(blocks[:, start:]), 8
    biases = blocks[:, 2:4].copy().view(np.float16) if start == 4 else -middle * scales.astype(np.float32)
    return numbers, scales, biases


def _k_numbers(blocks: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Super-blocks of eight groups, whose scales and minima are whole numbers of 6 bits."""
    from gguf.quants import Q4_K

    count = len(blocks)
    scale, least = (blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32) for at in (0, 2))
    scales, least_of = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    low = blocks[:, 48 if name == "Q5_K" else 16 :].reshape(count, 4, 32)
    numbers = np.stack([low & 15, low >> 4], axis=2).reshape(count, 8, 32)
    if name == "Q5_K":
        high = blocks[:, 16:48].reshape(count, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
        numbers = numbers | ((high & 1) << 4)
    with np.errstate(all="ignore"):  # damaged scales may be infinite
        return numbers.reshape(-1, GROUP), scale * scales, -(least * least_of)


def _halves(data: np.ndarray) -> np.ndarray:
    """Byte j holds number j (low half) and number j + 16 (high half)."""
    return np.concatenate([data & 15, data >> 4], axis=1)


def _nibbles(numbers: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(numbers[:, 0::2] | (numbers[:, 1::2] << 4))


def _words(numbers: np.ndarray, bits: int) -> np.ndarray:
    if bits == 8:
        return np.ascontiguousarray(numbers).view("<u4")
    if bits == 4:
        return _nibbles(numbers).view("<u4")
    spread = np.unpackbits(numbers[..., None], axis=-1, count=bits, bitorder="little")
    return np.packbits(spread.reshape(len(numbers), -1), axis=-1, bitorder="little").view("<u4")


def _float16(array: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return array.astype(np.float16)
