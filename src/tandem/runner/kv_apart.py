"""Rows that each keep caches of their own, for models that cannot compute sequences of unequal length together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from tandem.errors import UnsupportedModel
from tandem.loading.stage import Apart
from tandem.runner.kv_rows import Rows


class RowsApart(Rows):
    """As `KVStore`: rows join after their prefill, take a token a step, and leave; the last row takes a gap.

    A decode step is as many forward passes as there are rows, so a batch is no faster than its sequences in turn.
    """

    def __init__(self, make_caches: Callable[[], list[Any]], drafts: int, reason: str) -> None:
        """`reason`: why the model needs this. Raises UnsupportedModel where there are drafts to take back."""
        if drafts:
            raise UnsupportedModel(f"the model decodes its sequences one by one, as {reason}: serve it without "
                                   "speculative decoding", param="speculative_method")
        super().__init__()
        self._caches: list[list[Any]] = []
        self._layers = len(make_caches())

    @property
    def nbytes(self) -> int:
        """As `KVStore.nbytes`."""
        return sum(int(cache.nbytes) for caches in self._caches for cache in caches)

    def join(self, request_id: str, caches: Sequence[Any], length: int) -> None:
        """As `KVStore.join`; the caches are taken over."""
        if request_id in self._rows or len(caches) != self._layers or length < 1:
            raise ValueError(f"sequence {request_id} of {length} tokens with {len(caches)} caches cannot join")
        self._rows[request_id] = len(self._ids)
        self._ids.append(request_id)
        self._caches.append(list(caches))
        self._lengths.append(length)

    def leave(self, request_id: str) -> None:
        """As `KVStore.leave`."""
        row = self._rows.pop(request_id)
        last_id, last_caches, last_length = self._ids.pop(), self._caches.pop(), self._lengths.pop()
        if row < len(self._ids):
            self._ids[row], self._caches[row], self._lengths[row] = last_id, last_caches, last_length
            self._rows[last_id] = row

    def batch(self, counts: Sequence[int] | None = None) -> Apart:
        """As `KVStore.batch`: the rows' caches."""
        if not self._ids or set(counts or (1,)) != {1}:
            raise ValueError(f"a decode step of {counts} tokens over {len(self._ids)} rows")
        self._lengths = [length + 1 for length in self._lengths]
        return Apart(self._caches)

    def cut(self, request_id: str, length: int) -> None:
        """As `KVStore.cut`: there are never drafts."""
        if length != self.length(request_id):
            raise ValueError(f"a row of {self.length(request_id)} tokens cannot be cut to {length}")

    def extract(self, request_id: str) -> list[Any]:
        """As `KVStore.extract`: the row's own caches, evaluated."""
        caches = self._caches[self._rows[request_id]]
        mx.eval([cache.state for cache in caches])
        return caches

    def check(self) -> None:
        """As `KVStore.check`."""
        if [self._rows[one] for one in self._ids] != list(range(len(self._rows))):
            raise AssertionError(f"rows {self._rows} do not match ids {self._ids}")
