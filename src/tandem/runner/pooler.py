"""Pooling of prompts' hidden states into one embedding vector each."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from tandem.comm.group import dispatch
from tandem.protocol.step import PrefillOp


class Pooler:
    """Pooling state of prompts in progress. Every rank of the last stage has one."""

    def __init__(self) -> None:
        self._sums: dict[str, mx.array] = {}

    def take(self, op: PrefillOp, hidden: mx.array) -> mx.array | None:
        """Add final hidden states [1, L, H] of one chunk. Return the prompt's vector, float32 [H], after its last chunk, else
        None.

        Dispatched at once, on all ranks alike, as tensor-parallel layers compute together.
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


def label_logprobs(logits: mx.array, labels: Sequence[Sequence[int]]) -> list[mx.array]:
    """Return the log probabilities of the token ids in each of `labels`, float32 [labels], from logits [rows, V]. Dispatched at
    once."""
    logits = logits.astype(mx.float32)
    each = zip(logits, mx.logsumexp(logits, axis=-1), labels, strict=True)
    dispatch(found := [row[mx.array(list(ids))] - norm for row, norm, ids in each])
    return found


def vector_bytes(vector: mx.array) -> bytes:
    """Return float32 [H] as little-endian bytes; empty if not finite. Waits for the device."""
    values = np.array(vector)
    return values.astype("<f4").tobytes() if np.isfinite(values).all() else b""
