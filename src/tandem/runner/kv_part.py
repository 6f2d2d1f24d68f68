"""Which layers and heads a file of KV has, or a rank needs. No mlx."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Part:
    """Which layers and heads a file has, or a rank needs."""

    layers: range
    heads: range

    @property
    def label(self) -> str:
        """In a file's name."""
        return f"{self.layers.start}-{self.layers.stop}.{self.heads.start}-{self.heads.stop}"

    @staticmethod
    @lru_cache(1024)
    def read(label: str) -> Part:
        """The part with this label. Raises ValueError."""
        layers, _, heads = label.partition(".")
        return Part(_range(layers), _range(heads))


def _range(text: str) -> range:
    start, _, stop = text.partition("-")
    return range(int(start), int(stop))
