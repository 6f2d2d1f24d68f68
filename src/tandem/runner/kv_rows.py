"""Which sequence has which row of a lane's KV, and how many tokens that holds."""

from __future__ import annotations

from tandem.protocol.step import KVShape


class Rows:
    """Request ids in row order, their rows and their lengths; stores keep them true as rows join, move and leave."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._rows: dict[str, int] = {}
        self._lengths: list[int] = []

    def allot(self, shape: KVShape) -> None:
        """Hold the capacity that the engine gives this lane from now on; rows with caches of their own need none."""

    @property
    def ids(self) -> list[str]:
        """Request ids in row order: row i of the decode batch is ids[i]. A copy."""
        return list(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    def length(self, request_id: str) -> int:
        """Tokens whose KV the sequence's row holds (counting the step that `batch` last began). KeyError if unknown."""
        return self._lengths[self._rows[request_id]]
