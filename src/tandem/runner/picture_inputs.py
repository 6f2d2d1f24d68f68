"""Inputs that a stage's layers take from pictures (mlx): features in place of embeddings and behind the first layers, and
positions on three axes.

All of it is data of one pass. Later stages get features for their layers beside the payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from tandem.loading.quantized_kv import Cache
from tandem.loading.seams import ChangedLayer
from tandem.loading.stage import Apart, StageModel
from tandem.loading.stage_caches import MaskedCache
from tandem.models.description import ModelDescription
from tandem.models.pictures import rotary_axes
from tandem.protocol.pictures import PictureSpan
from tandem.protocol.step import InsertOp, PrefillOp
from tandem.runner.pictures import PictureFeatures


class PictureInputs:
    """Inputs of a stage's next pass that come from pictures."""

    def __init__(self, stage: StageModel, description: ModelDescription, features: PictureFeatures | None = None) -> None:
        """Make the layers of `stage` take positions and features. `features`: those of the rank, on the first stage."""
        self._stage, self._description, self.features = stage, description, features
        self._deep = range(stage.layers.start, description.deepstack)
        self._found: tuple[mx.array, mx.array] | None = None
        """Features [B, L, H + layers * H], and where they take the place of embeddings: bool [B, L]. None without any."""
        self.positions: mx.array | None = None
        """int32 [B]: what pictures add to each row's positions; or the positions [3, B, L]. None without pictures."""
        self.offset: int | mx.array | None = None
        """Rotary position of each row's first token with those int32 [B]. The first layer adds them for all."""
        self.turns: dict[tuple[float, ...], tuple[mx.array, mx.array]] = {}
        """Cosines and sines [B, 1, L, pairs] of those [3, B, L], by a rotary embedding's width, base and scale."""
        self.added: mx.array | None = None
        """Features [B, L, layers * H] for the stage's first layer and later ones, while the pass runs."""
        self.extra = 0
        """Elements per position that the stage receives beside the payload in the next pass."""
        self._alike: mx.array | None = None
        """bool [B, 1, L, L]: positions of one picture, which attend to each other in both directions. None if none do."""
        if features is not None:
            stage.take_features(lambda: self._found)
        if description.mrope_section:
            stage.replace_layers(self._replaced)

    def _replaced(self, i: int, layer: nn.Module) -> nn.Module:
        for module in layer.modules():
            if type(rope := module.get("rope")) is nn.RoPE:
                module.rope = _Rope(rope, rotary_axes(self._description, rope.dims // 2), self)
        return ChangedLayer(layer, partial(self._with_features, i - self._stage.layers.start)) if i in self._deep else layer

    def _with_features(self, number: int, h: mx.array) -> mx.array:
        """Return the output of the stage's layer `number` with the features that are added behind it."""
        if self.added is None:
            return h
        width = h.shape[-1]
        return h + self.added[..., number * width : (number + 1) * width].astype(h.dtype)

    def choose_rows(self, inserts: Sequence[InsertOp | None]) -> None:
        """Choose the decoding sequences of the next pass, by row; None for idle rows."""
        if self._description.mrope_section and any(one is not None and one.pictures for one in inserts):
            shifts = [sum(span.shift for span in one.pictures) if one is not None else 0 for one in inserts]
            self.positions = mx.array(shifts, mx.int32)

    def choose_chunks(self, ops: Sequence[PrefillOp], inserts: Sequence[InsertOp], width: int) -> None:
        """Choose the chunks of prompts of the next pass, which has `width` positions a row. Raises BatchDesync."""
        chunks = [(op, one.pictures) for op, one in zip(ops, inserts, strict=True)]
        seen = any(span.start < op.start + op.count and op.start < span.stop for op, spans in chunks for span in spans)
        if self._description.mrope_section and any(spans for _, spans in chunks):
            rows = np.stack([_positions(spans, op.start, width) for op, spans in chunks], axis=1)
            shifts = rows[0, :, 0] - [op.start for op, _ in chunks]
            self.positions = mx.array((rows if seen else shifts).astype(np.int32))
        if seen and self._description.whole_pictures and width > 1:
            places = mx.array(np.stack([_numbers(spans, op.start, width) for op, spans in chunks])[:, None])
            self._alike = (places[..., None] == places[:, :, None]) & (places > 0)[..., None]
        if seen and self.features is not None:
            self._found = self.features.of(ops, inserts, width)
        elif seen:
            self.extra = len(self._deep) * self._description.hidden_size

    def forward(self, x: mx.array, caches: Sequence[Cache] | Apart) -> mx.array:
        """Run the stage's layers as `StageModel.forward`, with the chosen inputs."""
        width = self._description.hidden_size
        if self.extra:
            x, self.added = x[..., : -self.extra], x[..., -self.extra :]
        if self._found is not None:
            features, taken = self._found
            self.added = features[..., width:]
            x = mx.where(taken, 0, x)  # gemma4's inputs by layer are those of padding there
        if self._alike is not None and not isinstance(caches, Apart):
            caches = [MaskedCache(cache, partial(_joined, self._alike), return_array=True) for cache in caches]
        h = self._stage.forward(x, caches)
        if self.added is not None and (rest := self._description.deepstack - self._stage.layers.stop) > 0:
            h = mx.concatenate([h, self.added[..., -rest * width :].astype(h.dtype)], axis=-1)
        self._found = self.positions = self.added = self._alike = None
        self.offset, self.turns, self.extra = None, {}, 0
        return h


def _positions(spans: Sequence[PictureSpan], start: int, count: int) -> Any:
    """Return rotary positions [3, count] from position `start` of a prompt: in pictures time stands still, and rows and columns
    count from where the text before ends."""
    places = np.arange(start, start + count)
    found = np.stack([places] * 3)
    for span in spans:
        inside = places - span.start
        grid = np.stack([0 * inside, inside // span.columns, inside % span.columns]) - inside
        found += np.where(inside < 0, 0, np.where(inside < span.length, grid, span.shift))
    return found


def _joined(alike: mx.array, mask: mx.array) -> mx.array:
    """Return a pass's mask [B, 1, L, keys] with `alike` [B, 1, L, L], as its last keys are those of the pass itself."""
    return mask | mx.pad(alike, [(0, 0)] * 3 + [(mask.shape[-1] - alike.shape[-1], 0)])


def _numbers(spans: Sequence[PictureSpan], start: int, count: int) -> Any:
    """Return the number of the picture at each of `count` positions from `start` on, from 1; 0 where there is none."""
    places = np.arange(start, start + count)
    return sum((number * ((one.start <= places) & (places < one.stop)) for number, one in enumerate(spans, 1)), 0 * places)


class _Rope(nn.Module):  # type: ignore[misc]
    """Rotary embedding that takes the pass's positions where there are any."""

    def __init__(self, rope: nn.RoPE, axes: list[int], inputs: PictureInputs) -> None:
        super().__init__()
        self._own, self._inputs, self._axes = rope, inputs, mx.array(axes, mx.int32)
        dims, half = rope.dims, rope.dims // 2
        self._key = (dims, rope.base, rope.scale)
        self._pairs = (slice(0, dims, 2), slice(1, dims, 2)) if rope.traditional else (slice(half), slice(half, dims))
        self._frequencies = rope.scale / rope.base ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        inputs, positions = self._inputs, self._inputs.positions
        if positions is None or positions.ndim == 1:
            if positions is not None and inputs.offset is None:
                inputs.offset = offset + positions
            own: mx.array = self._own(x, offset=offset if inputs.offset is None else inputs.offset)
            return own
        if self._key not in inputs.turns:
            angles = mx.take(positions, self._axes, axis=0).transpose(1, 2, 0)[:, None] * self._frequencies
            inputs.turns[self._key] = mx.cos(angles), mx.sin(angles)
        (cos, sin), (one, two), turned = inputs.turns[self._key], self._pairs, mx.array(x)
        first, second = x[..., one], x[..., two]
        turned[..., one], turned[..., two] = first * cos - second * sin, second * cos + first * sin
        return turned
