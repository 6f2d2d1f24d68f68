"""Payload from stage to stage, in one array: hidden states and whatever else the model's layers need (mlx)."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

TRACED = (1, 2)
"""Rows and positions of the call from which forms are read."""


@dataclass(frozen=True)
class ArraySpec:
    """An array's axes before those of rows and positions, and behind them."""

    lead: tuple[int, ...]
    tail: tuple[int, ...]

    @staticmethod
    def of(array: mx.array) -> ArraySpec:
        """Return the form of an array of the traced call.

        Raises ValueError where rows and positions are not beside one another.
        """
        shape = tuple(array.shape)
        at = next((i for i in range(len(shape) - 1) if shape[i : i + 2] == TRACED), None)
        if at is None:
            raise ValueError(f"layers hand on an array of shape {shape}, which has no axis of positions")
        return ArraySpec(shape[:at], shape[at + 2 :])

    @property
    def width(self) -> int:
        """Elements of a position."""
        return math.prod(self.lead) * math.prod(self.tail)

    def packed(self, array: mx.array) -> mx.array:
        """[*lead, B, L, *tail] to [B, L, width]."""
        if not self.lead and len(self.tail) == 1:
            return array
        n = len(self.lead)
        turned = array.transpose(n, n + 1, *range(n), *range(n + 2, array.ndim)) if n else array
        return turned.reshape(*turned.shape[:2], -1)

    def unpacked(self, array: mx.array) -> mx.array:
        """Reverse of `packed`: [B, L, width] to [B, L] within `lead` and `tail`."""
        if not self.lead and len(self.tail) == 1:
            return array
        n = len(self.lead)
        wide = array.reshape(*array.shape[:2], *self.lead, *self.tail)
        return wide.transpose(*range(2, n + 2), 0, 1, *range(n + 2, wide.ndim)) if n else wide


@dataclass(frozen=True)
class StagePayload:
    """Forms of all that travels: hidden states, what layers return beside them, and arguments of later layers."""

    hidden: ArraySpec
    carried: tuple[ArraySpec, ...] = ()
    forwarded: tuple[ArraySpec, ...] = ()

    @property
    def width(self) -> int:
        """Elements of a position in all."""
        return sum(form.width for form in (self.hidden, *self.carried, *self.forwarded))

    def packed(self, values: Sequence[mx.array]) -> mx.array:
        """Values in the order of their forms; without the last ones if there are fewer."""
        forms = (self.hidden, *self.carried, *self.forwarded)[: len(values)]
        parts = [form.packed(value) for form, value in zip(forms, values, strict=True)]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    def unpacked(self, array: mx.array) -> tuple[mx.array, ...]:
        """Values in the order of their forms, as many as `array` has room for."""
        found, start = [], 0
        for form in (self.hidden, *self.carried, *self.forwarded):
            if start < array.shape[-1]:
                found.append(form.unpacked(array[..., start : start + form.width]))
                start += form.width
        return tuple(found)


class Residuals:
    """Codec of Kimi K3's growing list of earlier outputs, sent as one array with room for all."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._make = sys.modules[type(layers[0]).__module__].ResidualBlocks
        self._eps: float = layers[0].eps
        self._starts = [layer.is_block_start for layer in layers]

    def filled(self, blocks: Any) -> mx.array:
        """[most blocks, B, L, H], with zeros behind those that are there."""
        room = [(0, sum(self._starts) - blocks.raw.shape[0])] + [(0, 0)] * 3
        return mx.pad(blocks.raw, room)

    def made(self, array: mx.array, layer: int) -> Any:
        """The object that layer `layer` gave on."""
        blocks = self._make(self._eps)
        for i in range(sum(self._starts[: layer + 1])):
            blocks.append(array[i])
        return blocks


def residuals(layers: Sequence[nn.Module], values: Sequence[mx.array]) -> Residuals | None:
    """How the second of the values that a layer returned travels, where it is no array."""
    if len(values) < 2 or not hasattr(values[1], "inv_rms"):
        return None
    return Residuals(layers)


def storage_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """Return the type that carries `dtype` through NumPy, which has no bfloat16: its bits as unsigned integers."""
    return mx.uint16 if dtype == mx.bfloat16 else dtype


def dtype_name(dtype: mx.Dtype) -> str:
    """Return the name of a type as headers and files have it: `bfloat16`."""
    return str(dtype).removeprefix("mlx.core.")
