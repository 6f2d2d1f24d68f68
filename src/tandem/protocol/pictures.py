"""Pictures of a prompt on their way from the api to the engine and the ranks."""

from __future__ import annotations

from msgspec import Struct

MAX_BYTES = 256 * 2**20
"""Most bytes of the `inputs` of all pictures of a request."""


class Picture(Struct, frozen=True, kw_only=True):
    """One picture of a prompt, as the model's processor prepared it."""

    key: str
    """SHA-256 of the processed arrays and of the processor's settings, 64 hex digits. Equal keys mean equal features."""
    start: int
    """Position of its first placeholder token in the prompt."""
    length: int
    """Positions from its first placeholder token to its last one. Separators between them (tokens of rows, of tiles) are
    counted too: only tokens of the model's image token id take features, in order."""
    inputs: bytes
    """safetensors of the processor's arrays for this picture: `pixel_values` and what the model takes beside it
    (`image_grid_thw`, `image_sizes` ...), under the names of the processor."""
