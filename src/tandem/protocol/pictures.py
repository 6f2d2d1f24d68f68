"""Pictures of a prompt on their way from the api to the engine and the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

Detail = Literal["auto", "low", "high", "original"]
"""How finely a picture is to be read, in OpenAI's words. All but "low" are the same."""


class PictureSpan(Struct, frozen=True, array_like=True):
    """Where a picture stands in a prompt. Its features are on the ranks of the first stage."""

    key: str
    """SHA-256 of the picture's text in the prompt and of its processed arrays, 64 hex digits. Equal keys mean equal features."""
    start: int
    """Position of its first placeholder token in the prompt."""
    length: int
    """Positions from its first placeholder token to its last one. Separators between them (tokens of rows, of tiles) are
    counted too: only tokens of the model's image token id take features, in order."""
    rows: int = 0
    columns: int = 0
    """Grid of its features, for models whose positions have three axes."""

    @property
    def stop(self) -> int:
        """Position in the prompt of the first token after it."""
        return self.start + self.length

    @property
    def shift(self) -> int:
        """Shift of the rotary positions of all later tokens: a picture takes as many as its longer side."""
        return max(self.rows, self.columns) - self.length


class Picture(PictureSpan, frozen=True, kw_only=True, array_like=False):
    """One picture of a prompt, as the model's processor prepared it."""

    inputs: bytes
    """safetensors of the processor's arrays for this picture: `pixel_values` and what the model takes beside it
    (`image_grid_thw`, `image_sizes` ...), under the names of the processor."""
    size: int = 0
    """Bytes of the inputs, also where they are left out (`b""`). The engine asks its api for those (`NeedPicture`)."""

    @property
    def span(self) -> PictureSpan:
        """Where it stands, without its inputs."""
        return PictureSpan(self.key, self.start, self.length, self.rows, self.columns)


class EncodePicture(Struct, frozen=True, tag=True):
    """Encode a picture between two steps; each rank of the first stage answers with `PictureEncoded`. From engine to rank."""

    key: str
    tokens: list[int]
    """Tokens of its span in the prompt."""
    inputs: bytes
    """Inputs of the `Picture`; empty on the bus, beside which ranks read them from `endpoint`."""
    evicts: list[str] = []
    """Keys of pictures whose features are dropped first."""
    endpoint: str = ""
    size: int = 0
    """Bytes of the inputs there."""


class PictureEncoded(Struct, frozen=True, tag=True):
    """Report that a rank holds a picture's features, or why it could not encode it."""

    rank: int
    key: str
    error: str = ""
    died: bool = False
    """True if the encoder's own process ended each time, or its inputs did not arrive."""
    pid: int = 0
    """Id of that process; 0 without one."""


def hashed(tokens: Sequence[int], pictures: Iterable[Picture], start: int = 0) -> list[int]:
    """Return `tokens`, which stand at position `start` of a prompt, as the prefix cache hashes them: placeholders are alike in
    all pictures, so each position of a picture becomes a number below 0 made of its key, its place in the picture and its
    token."""
    found = list(tokens)
    for picture in pictures:
        content = int(picture.key[:32], 16)
        for at in range(max(picture.start, start), min(picture.stop, start + len(found))):
            found[at - start] = ~(((content << 32) | (at - picture.start)) << 32 | found[at - start])
    return found
