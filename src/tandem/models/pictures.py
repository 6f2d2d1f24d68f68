"""Model types whose pictures are read. Plain data; the arithmetic is mlx-vlm's (runner/pictures.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.models.description import ModelDescription

FEATURE_BYTES = 256 * 2**20
"""Most bytes of features on each rank of the first stage, counted as float32."""
INPUT_BYTES = 64 * 2**20
"""Most bytes of one picture's inputs."""
ENCODERS = {"gemma3": "gemma3", "mistral3": "mistral3", "pixtral": "pixtral"}
"""Modules of mlx-vlm that have the encoder, by model type. Their layers need nothing of a picture but its embeddings."""


def why_unread(model_type: str) -> str:
    """Return why pictures of a type that sees are not read; empty if they are."""
    if model_type in ENCODERS:
        return ""
    return f"pictures are read by models of type {', '.join(ENCODERS)}, and this one's is {model_type!r}"


def why_blind(description: ModelDescription) -> str:
    """Return why a model takes no pictures; empty if it takes them."""
    if "vision" not in description.left_out:
        return f"it is a text model (model_type {description.family})"
    return why_unread(description.family)
