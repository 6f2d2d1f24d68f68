"""Payload from stage to stage, in one array: hidden states and other values that later layers need (mlx)."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

TRACED = (1, 2)
"""Rows and positions of the traced call that array layouts are derived from."""
_DIGITS = (1, 256, 65536)


@dataclass(frozen=True)
class ArraySpec:
    """Layout of an array: the axes before rows and positions, and those after them."""

    lead: tuple[int, ...]
    tail: tuple[int, ...]
    whole: bool = False
    """Whether the numbers are whole, from 0 below 2**24 (token ids). Each is sent as three digits below 256, which every
    type of activations holds exactly."""

    @staticmethod
    def of(array: mx.array) -> ArraySpec:
        """Return the layout of an array of the traced call.

        Raise ValueError if its shape has no adjacent axes of rows and positions.
        """
        shape = tuple(array.shape)
        at = next((i for i in range(len(shape) - 1) if shape[i : i + 2] == TRACED), None)
        if at is None:
            raise ValueError(f"layers hand on an array of shape {shape}, which has no axis of positions")
        return ArraySpec(shape[:at], shape[at + 2 :], not mx.issubdtype(array.dtype, mx.floating))

    @property
    def width(self) -> int:
        """Elements per position."""
        return math.prod(self.lead) * math.prod(self.tail) * (len(_DIGITS) if self.whole else 1)

    def packed(self, array: mx.array) -> mx.array:
        """Reshape [*lead, B, L, *tail] to [B, L, width]."""
        if self.whole:
            return replace(self, tail=(*self.tail, len(_DIGITS)), whole=False).packed(array[..., None] // mx.array(_DIGITS) % 256)
        if not self.lead and len(self.tail) == 1:
            return array
        n = len(self.lead)
        turned = array.transpose(n, n + 1, *range(n), *range(n + 2, array.ndim)) if n else array
        return turned.reshape(*turned.shape[:2], -1)

    def unpacked(self, array: mx.array) -> mx.array:
        """Reverse `packed`: reshape [B, L, width] to [*lead, B, L, *tail]."""
        if self.whole:
            digits = replace(self, tail=(*self.tail, len(_DIGITS)), whole=False).unpacked(array)
            return (digits.astype(mx.int32) * mx.array(_DIGITS)).sum(axis=-1)
        if not self.lead and len(self.tail) == 1:
            return array
        n = len(self.lead)
        wide = array.reshape(*array.shape[:2], *self.lead, *self.tail)
        return wide.transpose(*range(2, n + 2), 0, 1, *range(n + 2, wide.ndim)) if n else wide


@dataclass(frozen=True)
class StagePayload:
    """Layout of the payload: hidden states, other outputs of layers (`carried`), and arguments of later layers
    (`forwarded`)."""

    hidden: ArraySpec
    carried: tuple[ArraySpec, ...] = ()
    forwarded: tuple[ArraySpec, ...] = ()

    @property
    def width(self) -> int:
        """Elements per position in all."""
        return sum(form.width for form in (self.hidden, *self.carried, *self.forwarded))

    def packed(self, values: Sequence[mx.array]) -> mx.array:
        """Concatenate values, in the order of their layouts, into [B, L, width]; trailing values may be missing."""
        forms = (self.hidden, *self.carried, *self.forwarded)[: len(values)]
        parts = [form.packed(value).astype(values[0].dtype) for form, value in zip(forms, values, strict=True)]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    def unpacked(self, array: mx.array) -> tuple[mx.array, ...]:
        """Split [B, L, width] into values in the order of their layouts, as many as the width holds."""
        found, start = [], 0
        for form in (self.hidden, *self.carried, *self.forwarded):
            if start < array.shape[-1]:
                found.append(form.unpacked(array[..., start : start + form.width]))
                start += form.width
        return tuple(found)


class Residuals:
    """Codec for Kimi K3's growing list of earlier outputs, sent as one array of maximal length."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._make = sys.modules[type(layers[0]).__module__].ResidualBlocks
        self._eps: float = layers[0].eps
        self._starts = [layer.is_block_start for layer in layers]

    def filled(self, blocks: Any) -> mx.array:
        """Return the list as an array [most blocks, B, L, H], padded with zeros."""
        room = [(0, sum(self._starts) - blocks.raw.shape[0])] + [(0, 0)] * 3
        return mx.pad(blocks.raw, room)

    def made(self, array: mx.array, layer: int) -> Any:
        """Return the list object, as layer `layer` returned it, from the padded array."""
        blocks = self._make(self._eps)
        for i in range(sum(self._starts[: layer + 1])):
            blocks.append(array[i])
        return blocks


def residuals(layers: Sequence[nn.Module], values: Sequence[mx.array]) -> Residuals | None:
    """Return the codec for the second output of a layer if it is Kimi K3's list; None for arrays."""
    if len(values) < 2 or not hasattr(values[1], "inv_rms"):
        return None
    return Residuals(layers)


def storage_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """Return the type that carries `dtype` through NumPy, which has no bfloat16: its bits as unsigned integers."""
    return mx.uint16 if dtype == mx.bfloat16 else dtype


def dtype_name(dtype: mx.Dtype) -> str:
    """Return the name of a type in headers and files, such as `bfloat16`."""
    return str(dtype).removeprefix("mlx.core.")
