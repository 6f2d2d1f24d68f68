"""Log probabilities of prompt tokens, computed for a few positions at a time to bound memory (mlx)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tandem.comm.group import dispatch
from tandem.loading.stage import StageModel
from tandem.protocol.logprobs import PromptLogprobs
from tandem.runner.filters import largest

LOGITS_BYTES = 32 * 2**20
"""Maximum bytes of float32 logits computed at once; peak memory is about three times that."""


@dataclass
class Scores:
    """Log probabilities of one chunk. `values` is thread-safe."""

    k: int
    parts: list[tuple[mx.array, ...]] = field(default_factory=list)
    """Parts of r rows: log probabilities float32 [r], ranks int32 [r], and the most likely float32 [r, k] with ids int32 [r,
    k]."""

    def values(self) -> PromptLogprobs:
        """Return the log probabilities of all parts; wait for the device."""
        if not self.parts:
            return PromptLogprobs(self.k)
        own, ranks, *best = (np.concatenate([np.array(array) for array in column]) for column in zip(*self.parts, strict=True))
        packed = PromptLogprobs(self.k, _packed(own, "<f4"), _packed(ranks, "<i4"))
        if not best:
            return packed
        values, tokens = best
        order = np.lexsort((tokens, -values))
        values, tokens = (np.take_along_axis(column, order, axis=1) for column in best)
        return PromptLogprobs(self.k, packed.logprobs, packed.ranks, _packed(values, "<f4"), _packed(tokens, "<i4"))


def score(stage: StageModel, hidden: mx.array, tokens: Sequence[int], k: int, *, samples: bool) -> Scores:
    """Score `tokens` given the hidden states [1, L, H] of the positions before each; L may exceed their number.

    Only the rank with `samples` gets results; other ranks of the stage only take part in the computation.
    """
    rows = max(LOGITS_BYTES // (4 * stage.vocab_size), 1)
    scores = Scores(min(k, stage.vocab_size))
    for start in range(0, len(tokens), rows):
        stop = min(start + rows, len(tokens))
        logits = stage.head(hidden[:, start:stop])[0]
        found = _columns(logits, tokens[start:stop], scores.k) if samples else (mx.depends(mx.zeros(1), logits),)
        dispatch(found)
        if scores.parts:
            mx.eval(scores.parts[-1])
        scores.parts.append(found)
    return scores


def _columns(logits: mx.array, tokens: Sequence[int], k: int) -> tuple[mx.array, ...]:
    """Return the arrays of one entry of `Scores.parts` from logits [r, V]."""
    logits = logits.astype(mx.float32)
    norm = mx.logsumexp(logits, axis=-1, keepdims=True)
    norm = mx.where(mx.isfinite(norm), norm, mx.nan)
    own = mx.take_along_axis(logits, mx.array(list(tokens), dtype=mx.int32)[:, None], axis=-1)
    ranks = (logits > own).sum(axis=-1).astype(mx.int32) + 1
    if not k:
        return (own - norm)[:, 0], ranks
    best, places = largest(logits, k)
    return (own - norm)[:, 0], ranks, best - norm, places


def _packed(values: npt.NDArray[np.generic], kind: str) -> bytes:
    return np.ascontiguousarray(values).astype(kind).tobytes()
