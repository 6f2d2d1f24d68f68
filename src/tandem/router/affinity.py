"""Which prompts a replica was sent lately, and so which prefixes it probably has in its cache. Pure bookkeeping."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tandem.cache.prefix import BLOCK, block_hashes

CAPACITY = 8192
"""Blocks remembered for one replica (262,144 tokens)."""
MOST_BLOCKS = 512
"""Blocks of one prompt that are looked at, so that a very long one does not hold up the others."""


def prompt_hashes(tokens: Sequence[int]) -> list[bytes]:
    """Hashes of the first `MOST_BLOCKS` whole blocks, the same ones as the engine's prefix cache uses."""
    return block_hashes(tokens[:MOST_BLOCKS * BLOCK])


class SentPrefixes:
    """The blocks that one replica was sent; the least recently sent are forgotten first."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        """`capacity` in blocks."""
        self._capacity = capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def note(self, hashes: Sequence[bytes]) -> None:
        """A prompt with these blocks was sent. Of its blocks the last is forgotten first: it needs the others."""
        for digest in reversed(hashes):
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def matched(self, hashes: Sequence[bytes]) -> int:
        """Tokens of the longest prefix that was sent before."""
        count = 0
        for digest in hashes:
            if digest not in self._blocks:
                break
            count += 1
        return count * BLOCK

    def clear(self) -> None:
        """The replica's cache is gone."""
        self._blocks.clear()
