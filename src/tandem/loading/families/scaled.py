"""Families whose config scales the embedding or the logits: Granite and Cohere."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


def multiply_embedding(h: mx.array, args: Any) -> mx.array:
    """Granite: `embedding_multiplier`."""
    return h * args.embedding_multiplier


def divide_logits(logits: mx.array, args: Any) -> mx.array:
    """Granite: `logits_scaling`."""
    return logits / args.logits_scaling


def multiply_logits(logits: mx.array, args: Any) -> mx.array:
    """Cohere: `logit_scale`."""
    return logits * args.logit_scale
