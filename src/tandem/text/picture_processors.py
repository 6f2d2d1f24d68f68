"""Processors of pictures on Pillow and numpy, for types where mlx-vlm's computes with MLX and transformers' needs torchvision."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any, NamedTuple

from tandem.checkpoints.config import read_json


class Prepared(NamedTuple):
    """One picture after the processor."""

    text: str
    """Text that replaces the placeholder in the prompt."""
    tokens: int
    """Number of its placeholder tokens."""
    key: str
    inputs: bytes
    size: int
    """Bytes of its inputs, which are left out (`b""`) where the api has them."""


class PictureProcessor:
    """A checkpoint's processor."""

    settings: str
    placeholder: str
    token: int
    """Id of the token that a feature replaces; others are marks of rows."""
    words: frozenset[str]
    """Texts that mean pictures, which messages may not contain."""

    def arrays(self, image: Any) -> tuple[str, int, dict[str, Any]]:
        """Return text and number of a picture's tokens, and its arrays for the encoder."""
        raise NotImplementedError

    def prepare(self, image: Any) -> Prepared:
        """Return the picture for the model. Raises what the processor raises."""
        import numpy as np
        from safetensors.numpy import save

        text, tokens, arrays = self.arrays(image)
        inputs = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
        return Prepared(text, tokens, hashlib.sha256(self.settings.encode() + inputs).hexdigest(), inputs, len(inputs))


class KimiProcessor(PictureProcessor):
    """Processor of `kimi_vl` and `kimi_k25`: pictures are shrunk to a number of patches, and padded or cropped to whole ones."""

    placeholder, words = "<|media_pad|>", frozenset({"<|media_pad|>"})

    def __init__(self, source: str) -> None:
        """Read the settings in the directory `source`. Raises KeyError for those that are missing."""
        stored: Any = read_json(Path(source) / "preprocessor_config.json")
        config: Any = read_json(Path(source) / "config.json")
        self._given = stored.get("media_proc_cfg", stored)
        self.settings, self.token = f"Kimi {self._given}", config["media_placeholder_token_id"]

    def arrays(self, image: Any) -> tuple[str, int, dict[str, Any]]:
        """Return text and number of a picture's tokens, and its patches and grid."""
        import numpy as np

        given, size = self._given, np.array(image.size)
        patch, merge = given["patch_size"], np.max(given.get("merge_kernel_size", 2))
        most, side = given.get("in_patch_limit") or given["in_token_limit"], given.get("patch_limit_on_one_side", 512) * patch
        scale = min(1.0, math.sqrt(most / np.maximum(1, size // patch).prod()), *(side / size))
        size, block = np.maximum(1, (size * scale).astype(int)), merge * patch
        counts = -(-size // block) if given.get("pad_input", "in_patch_limit" in given) else np.maximum(1, size // block)
        start = np.maximum(0, (size - counts * block) // 2)
        cropped = image.resize(tuple(size), 3).crop((*start, *(start + counts * block)))  # 3: bicubic
        pixels = np.asarray(cropped, np.float32) / np.float32(255) - np.float32(given["image_mean"])
        (columns, rows), tokens = counts * merge, int(counts.prod())
        patches = (pixels / np.float32(given["image_std"])).reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
        found = {"pixel_values": patches.reshape(-1, 3, patch, patch), "image_grid_hws": np.array([[rows, columns]])}
        return self.placeholder * tokens, tokens, found
