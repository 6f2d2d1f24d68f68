"""Hidden states of prompts, pooled into one vector each: what embeddings are made of."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from tandem.protocol.step import PrefillOp


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
        mx.async_eval(pooled)
        return pooled if op.last else None

    def forget(self, request_id: str) -> None:
        """The sequence is over, or starts again."""
        self._sums.pop(request_id, None)


def vector_bytes(vector: mx.array) -> bytes:
    """float32 [H] as it travels: little-endian; nothing when it is not finite. Waits for it."""
    values = np.array(vector)
    return values.astype("<f4").tobytes() if np.isfinite(values).all() else b""
