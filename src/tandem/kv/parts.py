"""Slices of KV by layers and heads: contents of files, and the combination of files that a rank needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class KVSlice:
    """Layers and heads that a file contains, or that a rank needs."""

    layers: range
    heads: range

    @property
    def label(self) -> str:
        """Text for file names, such as `0-8.0-4`: layers, then heads."""
        return f"{self.layers.start}-{self.layers.stop}.{self.heads.start}-{self.heads.stop}"

    @staticmethod
    @lru_cache(1024)
    def read(label: str) -> KVSlice:
        """Return the slice with this label. Raises ValueError."""
        layers, _, heads = label.partition(".")
        return KVSlice(_range(layers), _range(heads))


def _range(text: str) -> range:
    start, _, stop = text.partition("-")
    return range(int(start), int(stop))


@lru_cache(1024)
def sources(
    need: KVSlice, own: Sequence[KVSlice], lent: Sequence[KVSlice], whole: frozenset[int] = frozenset()
) -> list[list[tuple[KVSlice, range]]] | None:
    """Return for each layer of `need` the slices to read, and which of their heads; None if some are missing. Layers `whole`,
    numbered from 0, are read from slices with the heads of `need` alone."""
    found = []
    every = own, lent
    for i, layer in enumerate(need.layers):
        own, lent = ([part for part in parts if i not in whole or part.heads == need.heads] for parts in every)
        # Prefer local files, even several smaller ones.
        if not (
            taken := _cover([part for part in own if layer in part.layers], need.heads)
            or _cover([part for part in (*own, *lent) if layer in part.layers], need.heads)
        ):
            return None
        found.append(taken)
    return found


def _cover(parts: Sequence[KVSlice], heads: range) -> list[tuple[KVSlice, range]]:
    """Return slices that together contain `heads`, in order, and which of their heads; empty if some are missing."""
    found: list[tuple[KVSlice, range]] = []
    at = heads.start
    while at < heads.stop:
        best = max((part for part in parts if at in part.heads), key=lambda part: part.heads.stop, default=None)
        if best is None:
            return []
        stop = min(best.heads.stop, heads.stop)
        found.append((best, range(at - best.heads.start, stop - best.heads.start)))
        at = stop
    return found
