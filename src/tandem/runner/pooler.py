"""Hidden states of prompts, pooled into one vector each: what embeddings are made of."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from tandem.comm.group import dispatch
from tandem.protocol.step import PrefillOp

PADDING = 1.25
"""Positions of a pass, over those of the prompts in it: beyond that prompts are not computed together."""


def passes(prefill: Sequence[PrefillOp], *, together: bool) -> list[list[PrefillOp]]:
    """Divide a step's chunks into forward passes. `together`: the model computes rows of unequal length at once.

    Whole prompts that yield a vector and nothing else share a pass when their lengths are alike; every other chunk has
    its own. The same on all ranks, because it follows from the plan alone.
    """
    divided: list[list[PrefillOp]] = []
    shared = [op for op in prefill if together and _only_pooled(op)]
    positions = 0
    for op in sorted(shared, key=lambda op: (op.pooling or "", op.count)):
        positions += op.count
        row = divided[-1] if divided else []
        if row and row[0].pooling == op.pooling and (len(row) + 1) * op.count <= PADDING * positions:
            row.append(op)
        else:
            divided.append([op])
            positions = op.count
    return [[op] for op in prefill if not (together and _only_pooled(op))] + divided


def _only_pooled(op: PrefillOp) -> bool:
    return op.pooling is not None and op.start == 0 and op.last and op.prompt_logprobs is None


class Pooler:
    """Prompts under way that are pooled over all of their positions. Every rank of the last stage has one."""

    def __init__(self) -> None:
        self._sums: dict[str, mx.array] = {}

    def take(self, op: PrefillOp, hidden: mx.array) -> mx.array | None:
        """Final hidden states [1, L, H] of one chunk; the prompt's vector, float32 [H], once it is the last one.

        Dispatched at once, on all ranks alike, since layers that are spread over ranks compute together.
        """
        states = hidden[0].astype(mx.float32)
        if op.pooling == "mean":
            pooled = states.sum(axis=0) + self._sums.pop(op.request_id, 0.0)
            if op.last:
                pooled = pooled / (op.start + op.count)
            else:
                self._sums[op.request_id] = pooled
        else:
            pooled = states[-1]
        dispatch(pooled)
        return pooled if op.last else None

    def forget(self, request_id: str) -> None:
        """Drop a sequence that ended or restarts."""
        self._sums.pop(request_id, None)


def vector_bytes(vector: mx.array) -> bytes:
    """float32 [H] as it travels: little-endian; nothing when it is not finite. Waits for it."""
    values = np.array(vector)
    return values.astype("<f4").tobytes() if np.isfinite(values).all() else b""
