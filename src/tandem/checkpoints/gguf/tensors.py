"""GGUF tensor formats and their repacking for MLX (numpy and the gguf package, no mlx).

Block formats: ggml `ggml-common.h`. Blocks of 32 weights with 4, 5 or 8 bits become affine groups of MLX: element i of
a row is at bit i * bits of consecutive uint32 words, and w = scale * q + bias. MXFP4 is the same in both. The gguf
package expands all other formats to 16 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from tandem.json_types import JsonObject

GROUP = 32
"""Weights per MLX group."""
PLAIN = {0: "F32", 1: "F16", 30: "BF16"}
"""ggml type numbers of unquantised types, with safetensors' names."""
_AFFINE = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5}
_CHUNK = 1 << 22
"""Weights to expand at once; the gguf package needs several times their size in memory."""


@dataclass(frozen=True)
class GGMLType:
    """Block format of a ggml type."""

    name: str
    block: int
    """Weights per block."""
    nbytes: int
    """Bytes per block."""
    bits: int = 0
    """Bits per weight for types that stay packed; 0 for other types."""
    mode: str = "affine"


@cache
def kinds() -> dict[int, GGMLType]:
    """Return all supported types by ggml number."""
    import gguf.quants  # takes a sixth of a second, only for GGUF models
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    found = {}
    for kind in GGMLQuantizationType:
        if int(kind) in PLAIN or hasattr(gguf.quants, kind.name):  # gguf.quants has a class for each type that it can expand
            packed = 4 if kind.name == "MXFP4" else _AFFINE.get(kind.name, 0)
            mode = "mxfp4" if kind.name == "MXFP4" else "affine"
            block, nbytes = GGML_QUANT_SIZES[kind]
            found[int(kind)] = GGMLType(kind.name, block, nbytes, packed, mode)
    return found


def kind_name(number: int) -> str:
    """Return ggml's name of a type, for messages."""
    from gguf.constants import GGMLQuantizationType

    try:
        return str(GGMLQuantizationType(number).name)
    except ValueError:
        return f"number {number}"


def stored_bytes(number: int, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor in the file, for a supported type."""
    kind = kinds()[number]
    return math.prod(shape) // kind.block * kind.nbytes


def settings_of(number: int) -> JsonObject:
    """Return MLX's quantisation settings for a type that stays packed."""
    kind = kinds()[number]
    return {"group_size": GROUP, "bits": kind.bits, **({} if kind.mode == "affine" else {"mode": kind.mode})}


def converted(data: np.ndarray, number: int, shape: tuple[int, ...], dtype: str) -> dict[str, np.ndarray]:
    """Convert a tensor's bytes to MLX arrays: `weight`, and for packed types `scales` and, except mxfp4, `biases`
    (float16).

    `weight` is uint32 [..., columns * bits / 32] for packed types. Plain types keep their type (bfloat16 as uint16).
    Others become float16 or bfloat16, by `dtype` (F16 or BF16). Scales and biases are [..., columns / 32].
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
    """Return a tensor of any supported type as an unpacked array: 16 bits by `dtype` if it is quantised."""
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
    """Return float32 values as the bits of bfloat16 (uint16), rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _numbers(blocks: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unpack blocks: return integers [groups, 32], and scale and bias of each group."""
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
    """Unpack K-quant super-blocks of eight groups, whose scales and minima are 6-bit integers."""
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
    """Unpack 4-bit values: byte j holds value j (low half) and value j + 16 (high half)."""
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
