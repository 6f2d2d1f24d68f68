"""Gemma 1, 2 and 3: the embedding is scaled by sqrt(hidden size); Gemma 2 soft-caps its logits."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


def scale_embedding(h: mx.array, args: Any) -> mx.array:
    """Gemma 1 and 2: the factor is a Python float, so it is rounded to h's type."""
    return h * (args.hidden_size**0.5)


def scale_embedding_bf16(h: mx.array, args: Any) -> mx.array:
    """Gemma 3: the factor is rounded to bfloat16 first, whatever h's type, as the model was trained."""
    return h * mx.array(args.hidden_size**0.5, mx.bfloat16).astype(h.dtype)


def soft_cap(logits: mx.array, args: Any) -> mx.array:
    """Gemma 2: squeeze logits into (-cap, cap)."""
    logits = mx.tanh(logits / args.final_logit_softcapping)
    return logits * args.final_logit_softcapping
