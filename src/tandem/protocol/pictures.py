"""Pictures of a prompt on their way from the api to the engine and the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct


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


class EncodePicture(Struct, frozen=True, tag=True):
    """Encode a picture between two steps; each rank of the first stage answers with `PictureEncoded`. From engine to rank."""

    key: str
    tokens: list[int]
    """Tokens of its span in the prompt."""
    inputs: bytes
    evicts: list[str] = []
    """Keys of pictures whose features are dropped first."""


class PictureEncoded(Struct, frozen=True, tag=True):
    """Report that a rank holds a picture's features, or why it could not encode it."""

    rank: int
    key: str
    error: str = ""


def hashed(prompt: Sequence[int], pictures: Iterable[Picture]) -> list[int]:
    """Return a prompt as the prefix cache hashes it: placeholders are alike in all pictures, so each position of a picture
    becomes a number below 0 made of its key, its place in the picture and its token."""
    tokens = list(prompt)
    for picture in pictures:
        content = int(picture.key[:32], 16)
        for place in range(picture.length):
            at = picture.start + place
            tokens[at] = ~(((content << 32) | place) << 32 | tokens[at])
    return tokens
