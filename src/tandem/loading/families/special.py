"""What some families compute beyond the plain decoder stack: scales, soft-capping, mask form.

Each function repeats the arithmetic of mlx-lm's model of that family, in the same order, so that results stay equal
bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from tandem.loading.families import gemma, scaled


def _same(x: mx.array, args: Any) -> mx.array:
    return x


@dataclass(frozen=True, kw_only=True)
class Special:
    """Departures of a family from the plain stack. `args` is mlx-lm's ModelArgs of the model."""

    embed: Callable[[mx.array, Any], mx.array] = _same
    """Applied to the embedded tokens [B, L, H]."""
    logits: Callable[[mx.array, Any], mx.array] = _same
    """Applied to the head's output [B, L, V]."""
    array_mask: bool = False
    """The family's layers do attention by hand: they need the causal mask as an array that fits their scores."""


PLAIN = Special()

SPECIAL: dict[str, Special] = {
    "gemma": Special(embed=gemma.scale_embedding),
    "gemma2": Special(embed=gemma.scale_embedding, logits=gemma.soft_cap, array_mask=True),
    "gemma3_text": Special(embed=gemma.scale_embedding_bf16),
    "granite": Special(embed=scaled.multiply_embedding, logits=scaled.divide_logits),
    "granitemoe": Special(embed=scaled.multiply_embedding, logits=scaled.divide_logits),
    "cohere": Special(logits=scaled.multiply_logits),
    "cohere2": Special(logits=scaled.multiply_logits),
}
"""By `model_type`; families that are not listed are `PLAIN`."""
