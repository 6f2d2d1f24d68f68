"""Which pieces of prefixes lie on the disks of all ranks: pure bookkeeping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tandem.cache.prefix import BLOCK
from tandem.protocol.pieces import PIECE


def piece_names(hashes: Sequence[bytes]) -> list[bytes]:
    """Names of the whole pieces of a prefix with these blocks (`tandem.cache.prefix.block_hashes`)."""
    return list(hashes[PIECE // BLOCK - 1::PIECE // BLOCK])


class PieceIndex:
    """A piece counts when every rank has its part of it."""

    def __init__(self) -> None:
        self._ranks = 0
        """One bit for each rank."""
        self._have: dict[bytes, int] = {}

    def reset(self, kept: Sequence[Iterable[bytes]]) -> None:
        """Start anew with what each rank found on its disk."""
        self._ranks = (1 << len(kept)) - 1
        self._have = {}
        for rank, names in enumerate(kept):
            self.keep(rank, names)

    def keep(self, rank: int, names: Iterable[bytes]) -> None:
        """A rank has these."""
        for name in names:
            self._have[name] = self._have.get(name, 0) | 1 << rank

    def see(self, rank: int, names: Iterable[bytes], wanted: Iterable[bytes] | None = None) -> None:
        """A rank has these and no others, or no others of those that are `wanted`."""
        others = ~(1 << rank)
        for name in list(self._have) if wanted is None else wanted:
            if left := self._have.get(name, 0) & others:
                self._have[name] = left
            else:
                self._have.pop(name, None)
        self.keep(rank, names)

    def lose(self, names: Iterable[bytes]) -> None:
        """A rank has not got these any more, so they are of no use to the others either."""
        for name in names:
            self._have.pop(name, None)

    def __len__(self) -> int:
        """Pieces that count."""
        return sum(ranks == self._ranks for ranks in self._have.values()) if self._ranks else 0

    def __contains__(self, name: bytes) -> bool:
        return self._ranks > 0 and self._have.get(name) == self._ranks

    def __bool__(self) -> bool:
        return bool(self._have)

    def leading(self, names: Sequence[bytes]) -> list[bytes]:
        """Those of `names` that come before the first that is missing."""
        count = next((i for i, name in enumerate(names) if name not in self), len(names))
        return list(names[:count])
