"""Arrays of the prefix cache: KV and states of past prompts on a rank, saved, restored and evicted by plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tandem.comm.group import dispatch
from tandem.errors import BatchDesync
from tandem.kv.store import KVDisk
from tandem.loading.prefix import Prefix, trimmable
from tandem.loading.quantized_kv import Cache
from tandem.protocol.kv_blocks import StoreOp


class PrefixStore:
    """Cached prefixes by key."""

    def __init__(self, disk: KVDisk | None = None) -> None:
        """Create an empty store. `disk`: disk cache that prefixes are written to and fetched from; None without one."""
        self._saved: dict[str, Prefix] = {}
        self._disk = disk
        self.nbytes = 0
        """Bytes of all cached prefixes, kept as a running total since every step reports it."""

    def save(self, key: str, caches: Sequence[Cache], held: int, length: int, takes: Iterable[tuple[str, int]] = ()) -> None:
        """Copy the first `length` of the `held` positions in `caches`, and add the checkpoints `takes` (key, position) of
        other prefixes.

        Raises BatchDesync if caches are shorter, or longer but not trimmable, and for an unknown key in `takes`.
        """
        if held != length and (held < length or not trimmable(caches)):
            raise BatchDesync(f"a prefix of {length} positions is to be saved, the cache holds {held}")
        saved = Prefix.of(caches, length).copied()
        dispatch(saved.arrays)
        for other, position in takes:
            if (states := self._held(other, "taken over").checkpoints.get(position)) is None:
                raise BatchDesync(f"prefix {other} has no checkpoint at {position}")
            saved.checkpoints[position] = states
        self._hold(key, saved)

    def restore(self, key: str, length: int) -> list[Cache]:
        """Return new caches with the first `length` positions of a cached prefix. Raises BatchDesync for an unknown key."""
        return self._held(key, "restored").revived(length)

    def evict(self, key: str) -> None:
        """Drop a cached or fetched prefix. Raises BatchDesync for an unknown key."""
        if self._disk is not None and self._disk.has(key):
            self._disk.drop(key)
        elif (saved := self._saved.pop(key, None)) is None:
            raise BatchDesync(f"prefix {key} is to be evicted, which is not here")
        else:
            self.nbytes -= _bytes(saved)

    def _held(self, key: str, action: str) -> Prefix:
        if self._disk is not None and self._disk.has(key) and (fetched := self._disk.take(key)) is not None:
            self._hold(key, fetched)
        if key not in self._saved:
            raise BatchDesync(f"prefix {key} is to be {action}, which is not here")
        return self._saved[key]

    def _hold(self, key: str, saved: Prefix) -> None:
        self._saved[key] = saved
        self.nbytes += _bytes(saved)

    def store(self, op: StoreOp) -> None:
        """Queue disk blocks of a cached prefix for writing. Raises BatchDesync for an unknown key."""
        if self._disk is not None and self._disk.has(op.key):
            return  # fetched from disk, and not restored yet
        if self._disk is None or op.key not in self._saved:
            raise BatchDesync(f"prefix {op.key} is to be stored, which is not here")
        self._disk.store(op, self._saved[op.key])


def _bytes(saved: Prefix) -> int:
    return sum(array.nbytes for array in saved.arrays)
