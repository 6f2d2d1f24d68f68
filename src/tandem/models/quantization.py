"""Quantisation of a model's weights, from `config.json`: MLX's formats, or foreign ones converted at load. No mlx.

Converted formats: fp8 with block or channel scales (becomes plain weights, as in mlx-lm), and packed integers of
compressed-tensors, AWQ and GPTQ (stay packed). Every other format is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn

from tandem.checkpoints.config import nested_text
from tandem.checkpoints.safetensors import TensorInfo
from tandem.errors import UnsupportedModel
from tandem.json_types import JsonMapping, JsonObject

_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
_MX = {f"mxfp{bits}": {"group_size": 32, "bits": bits, "mode": f"mxfp{bits}"} for bits in (4, 8)}
_PACKED = (2, 4, 8)
"""Bit widths of foreign integers that divide a 32-bit word, as MLX packs them."""
_STREAMED = (2, 3, 4, 8)
"""Bit widths of GPTQ's integers, which may span words, as MLX packs them."""
_GROUPS = (32, 64, 128)
"""Group sizes (columns) of MLX's affine format; larger groups are split."""
_F8 = ("F8_E4M3", "U8")
NGRAM_TABLE = re.compile(r"(?!mtp).*\.(\d+)\.ple\.ple_embedding\.ngram_embedding\.(?:shards?[._])?(\d+\.\w+|weight_scale)$")
"""Stored tensors of n-gram tables, of which only rows are read: number of the layer, and name within its table."""
Method = Literal["fp8", "packed", "packed-mxfp4", "awq", "gptq"]


@dataclass(frozen=True)
class Foreign:
    """A quantisation format that is converted at load."""

    method: Method
    bits: int
    group_size: int
    """Columns per group after conversion; 0 if weights become plain."""
    block: tuple[int, int] = (128, 128)
    """Rows and columns that share a scale, for fp8 in blocks."""
    zero_offset: int = 0
    """Number to add to stored zero points."""


@dataclass(frozen=True)
class Quantization:
    """Quantisation of one model's weights."""

    settings: JsonObject | None = None
    """MLX's settings (group_size, bits, mode, per-layer exceptions) after loading; None for plain weights."""
    foreign: Foreign | None = None


def read_quantization(config: JsonMapping, name: str) -> Quantization:
    """Return the quantisation that a config describes. Raise `UnsupportedModel` naming the method or setting that is
    not supported."""
    settings = config.get("quantization")
    if settings is not None:
        return Quantization(_own(settings, name))
    given = config.get("quantization_config") or nested_text(config).get("quantization_config")
    if not given:
        return Quantization()
    method = given.get("quant_method") if isinstance(given, dict) else given
    if str(method) in _MX:
        return Quantization(_MX[str(method)])
    if not isinstance(given, dict) or str(method) not in _READERS:
        if isinstance(given, dict) and {"group_size", "bits"} <= given.keys() and method is None:
            return Quantization(_own(given, name))  # MLX's settings under the other key
        _refuse(name, f"quantisation {str(method)[:60]!r}")
    foreign = _READERS[str(method)](given, name)
    if foreign is None:
        return Quantization(_MX["mxfp8"])
    if foreign.method == "packed-mxfp4":
        return Quantization(_MX["mxfp4"], foreign)
    if not foreign.group_size:
        return Quantization(None, foreign)
    return Quantization({"group_size": foreign.group_size, "bits": foreign.bits, "mode": "affine"}, foreign)


def _own(settings: object, name: str) -> JsonObject:
    """Return MLX's settings (group_size, bits, mode) for all weights, with exceptions by path. Raise `UnsupportedModel`."""
    if (
        not isinstance(settings, dict)
        or not {"group_size", "bits"} <= settings.keys()
        or not all(
            type(one[key]) is int and one[key] > 0
            for one in (settings, *settings.values())
            if isinstance(one, dict)
            for key in ("group_size", "bits")
            if key in one
        )
        or settings.get("mode", "affine") not in _MODES
    ):
        raise UnsupportedModel(f"{name}: quantization settings {settings!r:.200} are not MLX's")
    for path, one in settings.items():
        if isinstance(one, dict) and (one.keys() - {"group_size", "bits", "mode"} or one.get("mode", "affine") not in _MODES):
            raise UnsupportedModel(f"{name}: quantization settings {one!r:.150} of {path:.100} are not MLX's")
    return dict(settings)


def _fp8(given: JsonMapping, name: str) -> Foreign | None:
    """Return how fp8 weights are converted; None for MLX's own mxfp8 (power-of-two scales, blocks of 32 by 32)."""
    block = given.get("weight_block_size") or (128, 128)
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        _refuse(name, f"fp8 with weight_block_size {str(block)[:60]}")
    if given.get("scale_fmt") == "ue8m0" and tuple(block) == (32, 32):
        return None
    if given.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        _refuse(name, f"fp8 of format {str(given['fmt'])[:60]!r}")
    return Foreign("fp8", 8, 0, block=(block[0], block[1]))


def _compressed(given: JsonMapping, name: str) -> Foreign:
    form = given.get("format")
    if form == "float-quantized":
        return Foreign("fp8", 8, 0)
    if form == "mxfp4-pack-quantized":
        return Foreign("packed-mxfp4", 4, 32)
    if form != "pack-quantized":
        _refuse(name, f"compressed-tensors format {str(form)[:60]!r}")
    groups = given.get("config_groups")
    found = [one.get("weights") for one in groups.values() if isinstance(one, dict)] if isinstance(groups, dict) else []
    kinds: list[tuple[object, ...]] = []
    for one in found:
        if isinstance(one, dict):
            facts = one.get("num_bits"), one.get("group_size"), one.get("type", "int"), one.get("actorder")
            kinds += [facts] if facts not in kinds else []
    if len(kinds) != 1:
        _refuse(name, f"compressed-tensors with {len(kinds)} kinds of weights in config_groups")
    bits, group, kind, order = kinds[0]
    if kind != "int" or order in ("group", "dynamic", True):
        order = " in another order (actorder)" if order else ""
        _refuse(name, f"compressed-tensors with {str(kind)[:60]} weights{order}")
    return Foreign("packed", _bits(bits, name), _group(group, name))


def _awq(given: JsonMapping, name: str) -> Foreign:
    if str(given.get("version", "gemm")).lower() != "gemm":
        _refuse(name, f"AWQ version {str(given['version'])[:60]!r}")
    if given.get("bits", 4) != 4:
        _refuse(name, f"AWQ with {given['bits']} bits")
    return Foreign("awq", 4, _group(given.get("group_size", 128), name))


def _gptq(given: JsonMapping, name: str) -> Foreign:
    if given.get("desc_act"):
        _refuse(name, "GPTQ with desc_act (columns in another order)")
    offset = 0 if given.get("checkpoint_format") == "gptq_v2" else 1
    return Foreign("gptq", _bits(given.get("bits", 4), name, _STREAMED), _group(given.get("group_size", 128), name),
                   zero_offset=offset)  # fmt: skip


_READERS = {"fp8": _fp8, "compressed-tensors": _compressed, "awq": _awq, "gptq": _gptq}


def _bits(bits: object, name: str, known: tuple[int, ...] = _PACKED) -> int:
    if type(bits) is not int or bits not in known:
        _refuse(name, f"quantisation with {str(bits)[:60]} bits")
    return bits


def _group(size: object, name: str) -> int:
    if size in _GROUPS:
        return int(size)
    if size in (None, -1) or (type(size) is int and size > 0 and size % _GROUPS[-1] == 0):
        return _GROUPS[-1]
    _refuse(name, f"quantisation in groups of {str(size)[:60]}")


def _refuse(name: str, what: str) -> NoReturn:
    raise UnsupportedModel(
        f"{name}: {' '.join(what.split())} is not supported; use a model in MLX format, or convert one with `mlx_lm.convert`"
    )


def loaded_bytes(tensors: Mapping[str, TensorInfo], foreign: Foreign | None) -> dict[str, int]:
    """Return the bytes of each stored tensor after loading, before any cast. Expanded weights count expanded; tensors
    needed only for the conversion, and n-gram tables, count 0."""
    found = {name: _loaded(name, info, tensors, foreign) if foreign else info.nbytes for name, info in tensors.items()}
    return found | dict.fromkeys(filter(NGRAM_TABLE.match, found), 0)


def _loaded(name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo], foreign: Foreign) -> int:
    base, _, last = name.rpartition(".")
    if foreign.method == "fp8":
        if name.endswith(("_scale_inv", "weight_scale", "input_scale", "activation_scale")):
            return 0
        scaled = f"{name}_scale_inv" in tensors or f"{name}_scale" in tensors
        return info.nbytes * 2 if scaled and info.dtype in _F8 else info.nbytes
    packed = tensors.get(f"{base}.qweight") or tensors.get(f"{base}.weight_packed")
    if packed is None:
        return info.nbytes
    if last in ("qzeros", "g_idx", "weight_shape", "weight_zero_point", "weight_g_idx"):
        return 0
    if last in ("scales", "weight_scale") and foreign.method != "packed-mxfp4":
        weights = packed.nbytes * 8 // foreign.bits
        return 2 * 2 * weights // foreign.group_size  # scales and biases, two bytes each
    return info.nbytes
