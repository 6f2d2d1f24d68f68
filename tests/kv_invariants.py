"""Invariants of a KV store: its tables agree, and each layer holds rows of its lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from tandem.runner.kv_buffer import KVBufferLayer
from tandem.runner.kv_layers import ListLayer
from tandem.runner.kv_store import KVStore, Rows


def check_store(store: Rows) -> None:
    assert {one: row for row, one in enumerate(store._ids) if one} == store._rows
    assert [length > 0 for length in store._lengths] == [bool(one) for one in store._ids]
    for layer in store._layers if isinstance(store, KVStore) else ():
        _check_layer(layer, store._lengths)


def _check_layer(layer: Any, lengths: Sequence[int]) -> None:
    if isinstance(layer, ListLayer):
        for one in layer._stores:
            _check_layer(one, lengths)
    elif isinstance(layer, KVBufferLayer):
        assert layer._rows == len(lengths)
        assert layer._capacity.holds(layer._rows, max(lengths)) if lengths else not layer._parts
    elif isinstance(offset := getattr(layer._batch, "offset", None), mx.array):
        assert offset.tolist() == list(lengths)
