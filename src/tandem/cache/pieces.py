"""Which pieces of prefixes lie on the disks of all ranks: pure bookkeeping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from tandem.cache.prefix import BLOCK
from tandem.protocol.pieces import PIECE


def piece_names(hashes: Sequence[bytes]) -> list[bytes]:
    """Names of the whole pieces of a prefix with these blocks (`tandem.cache.prefix.block_hashes`)."""
    return list(hashes[PIECE // BLOCK - 1::PIECE // BLOCK])


class PieceIndex:
    """Pieces by rank: of its own disk, or that it needs others for. A piece is `in` it when every rank has its part."""

    def __init__(self) -> None:
        self._ranks: list[set[bytes]] = []

    def reset(self, kept: Sequence[Iterable[bytes]]) -> None:
        """Start anew with what each rank has."""
        self._ranks = [set(names) for names in kept]

    def keep(self, rank: int, names: Iterable[bytes]) -> None:
        """A rank has these."""
        self._ranks[rank].update(names)

    def see(self, rank: int, names: Iterable[bytes], wanted: Iterable[bytes] | None = None) -> None:
        """A rank has these and no others, or no others of those that are `wanted`."""
        self._ranks[rank].difference_update(list(self._ranks[rank]) if wanted is None else wanted)
        self.keep(rank, names)

    def lose(self, names: Iterable[bytes]) -> None:
        """A rank has not got these any more, so they are of no use to the others either."""
        gone = set(names)
        for held in self._ranks:
            held -= gone

    def __len__(self) -> int:
        """Pieces that count."""
        return len(set.intersection(*self._ranks)) if self._ranks else 0

    def __contains__(self, name: bytes) -> bool:
        return bool(self._ranks) and all(name in held for held in self._ranks)

    def anywhere(self, name: bytes) -> bool:
        """True if some rank has it."""
        return any(name in held for held in self._ranks)

    def leading(self, names: Sequence[bytes]) -> list[bytes]:
        """Those of `names` that come before the first that is missing."""
        return list(takewhile(self.__contains__, names))
