"""Disk cache of a rank: disk blocks are read and written in a thread beside the computation."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from tandem.comm.group import dispatch
from tandem.crash_guard import start_thread
from tandem.errors import TransportError
from tandem.kv.files import DiskBlockFiles, Kind, Layer, Unusable
from tandem.kv.remote import DiskBlockServer, Lending, RemoteStores
from tandem.loading.quantized_kv import Cache, GroupedKVCache
from tandem.loading.stage_payload import dtype_name, storage_dtype
from tandem.log import Seldom
from tandem.protocol.kv_blocks import DISK_BLOCK_SIZE, Fetch, Fetched, StoreOp, Survey, Surveyed, UseRemoteStores, Written

log = logging.getLogger(__name__)
seldom = Seldom(log)

WAITING_BYTES = 1 << 30
"""Maximum bytes of disk blocks queued for writing; further ones are not written."""
WRITE_BYTES_S = 400e6
"""Maximum write speed in bytes per second, so that reads are not delayed. Migrations are not limited."""
TRIAL_S = 1.0
"""Seconds before a read can count as too slow."""
FULL_S = 60.0
"""Seconds without writes after a write error, such as a full disk."""
_READ, _WRITE, _END = range(3)

Side = mx.array | Sequence[mx.array]
State = tuple[Side, Side, *tuple[int, ...]]
Job = Fetch | UseRemoteStores | Survey | tuple[int, bytes, "_Span", int, bool]
Report = Callable[[Fetched | Written | Surveyed], None]


def takes_part(caches: Sequence[Cache]) -> bool:
    """Return True if disk blocks of these caches can be stored: each holds keys and values by position only."""
    return bool(caches) and all(type(cache) in (KVCache, GroupedKVCache) for cache in caches)


def kind_of(arrays: Sequence[Sequence[tuple[tuple[int, ...], mx.Dtype]]], *, as_bytes: bool) -> Kind:
    """Return the type and widths of KV in caches with these arrays (`StageModel.cache_arrays`), one entry per layer."""

    def width(side: Sequence[tuple[tuple[int, ...], mx.Dtype]]) -> int:
        return sum(shape[-1] * (dtype.size if as_bytes else 1) for shape, dtype in side)

    sides = [(layer[: len(layer) // 2], layer[len(layer) // 2 :]) for layer in arrays]
    return Kind("uint8" if as_bytes else dtype_name(arrays[0][0][1]), [(width(keys), width(values)) for keys, values in sides])


class Layers:
    """Conversion of caches to the on-disk layout: [1, heads, positions, width], each position's elements contiguous.

    As bytes, a position of a head has codes, scales and biases, or unquantised numbers.
    """

    def __init__(self, caches: Sequence[Cache], dtype: mx.Dtype, *, as_bytes: bool) -> None:
        """Store the layout. `caches`: empty storable caches, one per layer; `dtype`: compute type. `as_bytes`: store bytes,
        so that ranks with and without quantised layers can read each other's files."""
        self._kinds, self._dtype, self._bytes = caches, dtype, as_bytes

    def stored(self, states: Sequence[State], where: slice) -> list[tuple[mx.array, mx.array]]:
        """Return keys and values at positions `where` of caches with these states."""
        return [(self._one(keys, where), self._one(values, where)) for keys, values, *_ in states]

    def revived(self, pairs: Sequence[tuple[mx.array, mx.array]], length: int) -> list[Cache]:
        """Return caches of `length` positions from arrays made by `stored`."""
        caches = []
        for kind, (keys, values) in zip(self._kinds, pairs, strict=True):
            if type(kind) is GroupedKVCache:
                sides = _split(keys, kind, self._dtype), _split(values, kind, self._dtype)
                caches.append(GroupedKVCache.from_state((*sides, length, kind.group_size, kind.bits)))
            else:
                plain = (keys.view(self._dtype), values.view(self._dtype)) if self._bytes else (keys, values)
                caches.append(KVCache.from_state((*plain, length)))
        return caches

    def _one(self, side: Side, where: slice) -> mx.array:
        parts: list[mx.array] = [part[..., where, :] for part in (side if isinstance(side, tuple | list) else (side,))]
        if not self._bytes:
            return parts[0]
        return mx.concatenate([mx.contiguous(part).view(mx.uint8) for part in parts], axis=-1)


def _split(side: mx.array, kind: GroupedKVCache, dtype: mx.Dtype) -> tuple[mx.array, ...]:
    """Split the bytes of keys or values into codes, scales and biases."""
    bits, size = kind.groups
    groups = side.shape[-1] * 8 // (size * bits + 16 * dtype.size)
    codes, scales = groups * size * bits // 8, groups * dtype.size
    parts = side[..., :codes], side[..., codes : codes + scales], side[..., codes + scales :]
    return tuple(mx.contiguous(part).view(kind_of) for part, kind_of in zip(parts, (mx.uint32, dtype, dtype), strict=True))


class _Arrived:
    """Prefix being read: blocks are copied into place as they arrive."""

    def __init__(self, first: list[Layer], dtype: str, disk_blocks: int) -> None:
        """Allocate buffers like `first`, any disk block of the prefix, for `disk_blocks` blocks."""
        self.dtype, self.length = dtype, DISK_BLOCK_SIZE * disk_blocks
        self.layers: list[Layer] = [(self._room(keys), self._room(values)) for keys, values in first]

    def _room(self, side: np.ndarray) -> np.ndarray:
        return np.empty((*side.shape[:2], self.length, side.shape[3]), side.dtype)

    def put(self, number: int, disk_block: list[Layer], dtype: str) -> None:
        """Copy a disk block into its place. Raises ValueError if it does not match the first."""
        where = slice(number * DISK_BLOCK_SIZE, (number + 1) * DISK_BLOCK_SIZE)
        for layer, held in zip(disk_block, self.layers, strict=True):
            for side, whole in zip(layer, held, strict=True):
                place = whole[:, :, where]
                if place.shape != side.shape or dtype != self.dtype:
                    raise ValueError("disk blocks of a prefix are not alike")
                place[:] = side

    def arrays(self) -> list[tuple[mx.array, mx.array]]:
        """Return MLX arrays by layer, and free the buffers one by one."""
        self.layers.reverse()
        made = []
        while self.layers:
            keys, values = self.layers.pop()
            made.append((_array(keys, self.dtype), _array(values, self.dtype)))
        return made


class _Span:
    """Consecutive disk blocks queued for writing, with one copy of keys and of values per layer."""

    def __init__(self, pairs: Sequence[tuple[mx.array, mx.array]], first: int) -> None:
        """Copy `pairs`, (keys, values) of each layer; `first`: number of the first disk block."""
        self.dtype = dtype_name(pairs[0][0].dtype)
        self._first = first
        # Copy the arrays, as MLX arrays must not be shared between threads.
        self._own = [[mx.contiguous(side).view(storage_dtype(side.dtype)) for side in pair] for pair in pairs]
        dispatch(self._own)

    @cached_property
    def _arrays(self) -> list[Layer]:
        arrays = [(np.asarray(keys), np.asarray(values)) for keys, values in self._own]
        self._own = []
        return arrays

    def disk_block(self, number: int) -> list[Layer]:
        """Return the layers of disk block `number`; wait until they are computed. Not thread-safe."""
        where = slice((number - self._first) * DISK_BLOCK_SIZE, (number - self._first + 1) * DISK_BLOCK_SIZE)
        return [(keys[:, :, where], values[:, :, where]) for keys, values in self._arrays]


class KVDisk:
    """Disk cache of one rank. Call `store` and `take` in the thread that owns MLX, `take_order` in any."""

    def __init__(self, rank: int, files: DiskBlockFiles, layers: Layers, report: Report, lending: Lending | None = None) -> None:
        """Start the thread. `report` is called from it with results. `lending`: serve the files and fetch remote ones; None
        without other disks."""
        self._rank, self._files, self._layers, self._report = rank, files, layers, report
        self._jobs: queue.PriorityQueue[tuple[int, int, Job | None]] = queue.PriorityQueue()
        self._number = itertools.count()
        self._lock = threading.Lock()
        self._waiting = 0
        """Bytes queued for writing."""
        self._arrived: dict[str, _Arrived | None] = {}
        """Fetched prefixes by key; None for one that could not be read."""
        self._quiet_until = 0.0
        self.names = files.names()
        """Names of the disk blocks present at the start."""
        self.store_id = files.store_id
        """Identity of directory, model and KV type (`Ready.store`)."""
        self._remote_stores = None if lending is None else RemoteStores(lending.keys)
        if self._remote_stores is not None:
            files.use_remote_stores(self._remote_stores)
        self._server: DiskBlockServer | None = None
        try:
            self._server = None if lending is None else DiskBlockServer(files.directory, lending)
        except TransportError as error:  # the address is not local, as behind NAT
            log.warning("KV disk not served to other machines: %s", error)
        self.lends = self._server.endpoint if self._server is not None else ""
        """Endpoint that serves these files to other ranks; empty if not served."""
        self._thread = start_thread(self._work, name="kv disk", on_failure=lambda error: None)

    def store(self, op: StoreOp, states: Sequence[State]) -> None:
        """Queue disk blocks of a prefix for writing, from the states of its layers' caches."""
        # Consecutive numbers have a constant distance to their list index.
        for _, run in itertools.groupby(enumerate(op.disk_blocks), lambda one: one[1][0] - one[0]):
            self._store([disk_block for _, disk_block in run], states, op.awaited)

    def _store(self, disk_blocks: list[tuple[int, bytes]], states: Sequence[State], awaited: bool) -> None:
        """Queue as many of these consecutive disk blocks for writing as `WAITING_BYTES` allows."""
        first = disk_blocks[0][0]
        one = self._layers.stored(states, slice(first * DISK_BLOCK_SIZE, (first + 1) * DISK_BLOCK_SIZE))  # lazy, for its shapes
        if any(keys.shape[1] != len(self._files.need.heads) for keys, _ in one):
            seldom.warning("KV disk not used: this model's KV is not divided as its description says")
            return
        nbytes = sum(array.nbytes for pair in one for array in pair)
        with self._lock:
            taken = disk_blocks[: max(WAITING_BYTES - self._waiting, 0) // nbytes]
            self._waiting += len(taken) * nbytes
        if len(taken) < len(disk_blocks):
            seldom.warning("KV disk too slow: not writing some blocks")
        if taken:
            span = _Span(
                self._layers.stored(states, slice(first * DISK_BLOCK_SIZE, (first + len(taken)) * DISK_BLOCK_SIZE)), first
            )
            for number, name in taken:
                self._jobs.put((_WRITE, next(self._number), (number, name, span, nbytes, awaited)))

    def take_order(self, order: Fetch | UseRemoteStores | Survey) -> None:
        """Queue an order: read a prefix, use these remote stores, or list disk blocks.

        A survey runs after queued writes, unless `soon`. `Fetched` and `Surveyed` report the results.
        """
        waits = isinstance(order, Survey) and not order.soon
        self._jobs.put((_WRITE if waits else _READ, next(self._number), order))

    def has(self, key: str) -> bool:
        """Return True if the fetch under this key has ended, with or without success."""
        return key in self._arrived

    def take(self, key: str) -> list[Cache] | None:
        """Return and forget the caches, one per layer, of a fetched prefix; None if it could not be read."""
        arrived = self._arrived.pop(key)
        if arrived is None:
            return None
        return self._layers.revived(arrived.arrays(), arrived.length)

    def drop(self, key: str) -> None:
        """Drop the prefix fetched under this key."""
        self._arrived.pop(key)

    def close(self, timeout_s: float) -> bool:
        """End the thread after all queued reads and writes. Return False after `timeout_s` seconds."""
        if self._server is not None:
            self._server.close()
        self._jobs.put((_END, next(self._number), None))
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            _, _, job = self._jobs.get()
            if job is None:
                self._files.close()
                return
            try:
                if isinstance(job, Survey):
                    self._survey(job)
                elif isinstance(job, UseRemoteStores):
                    self._use_remote_stores(job)
                elif isinstance(job, Fetch):
                    self._read(job)
                else:
                    self._write(*job)
            except Exception as error:  # noqa: BLE001 - one job must not end the thread: others wait for the next ones
                self._failed(job, error)

    def _failed(self, job: Job | None, error: Exception) -> None:
        """Report an unexpected error of a job as its failure, so that nothing waits for it."""
        seldom.error("KV disk: %s: %s; computing instead", type(error).__name__, error)
        if isinstance(job, Fetch):
            self._arrived[job.key] = None
            self._report(Fetched(self._rank, job.key, job.names))
        elif isinstance(job, Survey):
            self._report(Surveyed(self._rank, job.number, [], wanted=job.wanted))
        elif not isinstance(job, UseRemoteStores):
            self._report(Written(self._rank, []))

    def _read(self, order: Fetch) -> None:
        started, nbytes, before, late = time.monotonic(), 0, self._files.brought, False
        lost: list[bytes] = []
        arrived: _Arrived | None = None
        try:
            for number, name in enumerate(order.names):
                layers, dtype, size = self._files.read(name)
                arrived = arrived or _Arrived(layers, dtype, len(order.names))
                arrived.put(number, layers, dtype)
                nbytes += size
                took, count = time.monotonic() - started, len(order.names)
                late = number + 1 < count and took > TRIAL_S and took * count > order.within_s * (number + 1) > 0
                if late:
                    seldom.warning("KV disk slower than computing: computing the rest")
                    lost, arrived = order.names[number + 1 :], None
                    break
        except (Unusable, MemoryError, ValueError) as error:
            seldom.warning("KV on disk cannot be used: %s; computing it again", str(error) or "no memory is left")
            # Later blocks are useless without this one and are stored again with it; so are blocks that do not match.
            lost = order.names[number:] if isinstance(error, Unusable) else order.names
            arrived = None
        self._arrived[order.key] = arrived
        self._report(Fetched(self._rank, order.key, lost, time.monotonic() - started, nbytes, self._files.brought - before, late))

    def _use_remote_stores(self, order: UseRemoteStores) -> None:
        if self._remote_stores is not None:
            self._remote_stores.change(endpoint for store, endpoint in order.remote_stores if store != self.store_id)

    def _survey(self, order: Survey) -> None:
        try:
            nbytes, total = self._files.survey(drop=order.drop, wanted=order.wanted)
        except OSError as error:
            seldom.warning("KV directory cannot be read: %s; computing its prefixes", error.strerror or error)
            nbytes = total = 0
        if order.wanted is None:
            self._files.take_gone()  # the survey reports the remaining blocks anyway
        self._report(
            Surveyed(
                self._rank,
                order.number,
                self._files.names(order.wanted),
                self._files.lent(order.wanted),
                nbytes,
                total,
                order.wanted,
            )
        )

    def _write(self, number: int, name: bytes, span: _Span, nbytes: int, awaited: bool) -> None:
        try:
            if time.monotonic() < self._quiet_until:
                return
            layers = span.disk_block(number)  # waits for its computation
            started = time.monotonic()
            size = self._files.write(name, layers, span.dtype)
            took = time.monotonic() - started
            self._report(Written(self._rank, [name], size, took, self._files.take_gone()))
            time.sleep(0.0 if awaited else max(size / WRITE_BYTES_S - took, 0.0))
        except OSError as error:
            self._quiet_until = time.monotonic() + FULL_S
            self._report(Written(self._rank, [], gone=self._files.take_gone()))
            seldom.warning("KV cannot be written to disk: %s; pausing for %.0f s", error.strerror or error, FULL_S)
        finally:
            with self._lock:
                self._waiting -= nbytes


def _array(data: np.ndarray, dtype: str) -> mx.array:
    array = mx.array(data)
    return array.view(mx.bfloat16) if dtype == "bfloat16" else array
