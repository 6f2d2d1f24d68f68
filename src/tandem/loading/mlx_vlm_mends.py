"""Mends of mlx-vlm's model modules, each with the versions that need it (mlx).

*hy_v4*: its indexer selects with `argpartition` inside a shapeless `mx.compile`, which keeps the place of the length it
was traced with first. At other lengths most of the selected positions are wrong, and logits depend on how a prompt is cut
into chunks. The mend compiles for each shape. `tests/loading/test_loading_mlx_vlm.py` fails once upstream's is right.

*glm5_next*: it keeps the projected keys and values of all heads for the first 32,768 tokens beside the latent, 64 times as
much memory. The mend projects them anew for each chunk of a prompt, as upstream does beyond that length.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx

VERSIONS = ("0.7.10", "0.8")
"""Versions of mlx-vlm for which the mends are: from the first, below the last."""


@functools.cache
def partition(top_k: int, masked: bool) -> Callable[..., mx.array]:
    """Return the function that orders positions so that the best `top_k` of each query come last."""

    @mx.compile
    def best_last(q: mx.array, k: mx.array, weights: mx.array, mask: mx.array | None = None) -> mx.array:
        scores = mx.maximum(q @ k.swapaxes(-1, -2), 0) * weights.swapaxes(-1, -2)[..., None]
        scores = scores.sum(axis=1, keepdims=True)
        if masked:
            assert mask is not None
            scores = mx.where(mask, scores, -float("inf"))
        return mx.argpartition(scores, kth=-top_k, axis=-1)

    return best_last


def mend(name: str) -> None:
    """Mend the imported modules of one of mlx-vlm's model packages. Idempotent."""
    places: dict[str, tuple[str, str, Any]] = {
        "hy_v4": ("indexer", "_partition_scores", partition),
        "glm5_next": ("language", "_MAX_PROJECTED_PREFILL_TOKENS", 0),
    }
    if name in places:
        module, attribute, ours = places[name]
        setattr(sys.modules[f"mlx_vlm.models.{name}.{module}"], attribute, ours)
