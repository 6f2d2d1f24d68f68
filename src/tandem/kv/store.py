"""Disk cache of a rank: disk blocks are read and written in a thread beside the computation."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache

from tandem.comm.group import dispatch
from tandem.crash_guard import start_thread
from tandem.errors import TransportError
from tandem.kv.files import Absent, DiskBlockFiles, FilePart, Kind, Layer, Unusable
from tandem.kv.remote import DiskBlockServer, Lending, RemoteStores
from tandem.loading.prefix import BY_POSITION, LAST_POSITIONS, STORABLE, Prefix, last_positions, with_arrays
from tandem.loading.quantized_kv import Cache, GroupedKVCache
from tandem.loading.stage import CacheMember
from tandem.loading.stage_payload import dtype_name, storage_dtype
from tandem.log import Seldom
from tandem.protocol.kv_blocks import (
    DISK_BLOCK_SIZE,
    Fetch,
    Fetched,
    StoreOp,
    Survey,
    Surveyed,
    UseRemoteStores,
    Written,
    is_checkpoint,
)

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
Job = Fetch | UseRemoteStores | Survey | tuple[int, bytes, "_Span", int, bool]
Report = Callable[[Fetched | Written | Surveyed], None]


def unsupported(caches: Sequence[CacheMember], dtype: mx.Dtype) -> str:
    """Return the class names of caches that cannot be written to disk; empty if all can. `dtype`: compute type."""

    def storable(one: CacheMember) -> bool:
        if one.layer < 0:
            return False
        if type(one.cache) is ArraysCache:
            return len(one.arrays) == len(one.cache.cache)
        plain = type(one.cache) is not KVCache or all(kind == dtype for _, kind in one.arrays)
        return plain and type(one.cache) in STORABLE

    return ", ".join(sorted({type(one.cache).__name__ for one in caches if not storable(one)}))


class Layers:
    """Conversion of caches to the on-disk layout: arrays by layer.

    Disk blocks have keys and values as [1, heads, positions, width], each position's elements contiguous. As bytes, a position
    of a head has codes, scales and biases, or unquantised numbers. Arrays of checkpoints are always bytes.
    """

    def __init__(
        self, kinds: list[Any], caches: Sequence[CacheMember], count: int, heads: int, dtype: mx.Dtype, *, as_bytes: bool
    ) -> None:
        """Store the layout. `kinds`: of the rank's caches, as in `Prefix`; `caches`: their members, in `count` layers;
        `heads`: kv heads of the rank; `dtype`: compute type. `as_bytes`: store disk blocks as bytes, so that ranks with and
        without quantised layers can read each other's files."""
        self._kinds, self._caches, self._count, self._dtype, self._bytes = kinds, caches, count, dtype, as_bytes
        blocks: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        for layer, cache, arrays in caches:
            for side in (arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]) if type(cache) in BY_POSITION else ():
                width = sum(shape[-1] * (dtype.size if as_bytes else 1) for shape, dtype in side)
                blocks[layer].append((side[0][0][1], width))
        whole = frozenset(
            layer
            for layer, cache, arrays in caches
            if type(cache) not in (*BY_POSITION, *LAST_POSITIONS) or any(shape[1] != heads for shape, _ in arrays)
        )
        self.kind = Kind("uint8" if as_bytes else dtype_name(dtype), blocks, self._checkpoint_shapes(), whole)
        """Shapes of the files' arrays."""

    def stored(self, prefix: Prefix, where: slice) -> list[list[mx.array]]:
        """Return the keys and values at positions `where` of a prefix, by layer."""
        layers: list[list[mx.array]] = [[] for _ in range(self._count)]
        for (layer, *_), state in zip(self._caches, prefix.states, strict=True):
            if state is not None:
                layers[layer] += [self._one(side, where) for side in state[:2]]
        return layers

    def checkpoint(self, prefix: Prefix, position: int) -> list[list[mx.array]] | None:
        """Return the arrays of a prefix's checkpoint, by layer. None if it has none there, or one of unexpected shapes."""
        layers: list[list[mx.array]] = [[] for _ in range(self._count)]
        for (layer, cache, _), state in zip(self._caches, prefix.checkpoints.get(position, ()), strict=False):
            arrays = [array for _, array in tree_flatten(state) if isinstance(array, mx.array)]
            if type(cache) in LAST_POSITIONS:  # a row of a batch has some more, for drafts
                arrays = [array[..., -last_positions(cache) :, :] for array in arrays]
            layers[layer] += [mx.contiguous(array).view(mx.uint8) for array in arrays]
        fits = position in prefix.checkpoints and self.fits(layers, position)
        return layers if fits else None

    def fits(self, layers: Sequence[Sequence[mx.array | np.ndarray]], position: int) -> bool:
        """Return True if a checkpoint at `position` has arrays of these shapes."""
        return [[tuple(array.shape) for array in layer] for layer in layers] == self._checkpoint_shapes(position)

    def _checkpoint_shapes(self, position: int = -1) -> list[list[tuple[int, ...]]]:
        """Return the shapes in bytes of the arrays of a checkpoint at `position`, by layer. Without it windows and chunks have -1
        positions, for any number."""
        shapes: list[list[tuple[int, ...]]] = [[] for _ in range(self._count)]
        for layer, cache, arrays in self._caches:
            last = (min(position, last_positions(cache)),) if type(cache) in LAST_POSITIONS else None
            if type(cache) not in BY_POSITION:
                shapes[layer] += [(*(shape[:2] + last if last else shape[:-1]), shape[-1] * kind.size) for shape, kind in arrays]
        return shapes

    def has_nan(self, layers: Sequence[Layer]) -> bool:
        """Return True if a checkpoint of fitting shapes, as bytes, contains a NaN."""
        sides = [iter(layer) for layer in layers]
        for layer, cache, arrays in self._caches:
            for _, kind in arrays if type(cache) not in BY_POSITION else ():
                numbers = np.ascontiguousarray(next(sides[layer]))
                if kind == mx.bfloat16:  # NumPy has none: exponent of ones and a mantissa
                    found = (numbers.view(np.uint16) & 0x7FFF) > 0x7F80
                elif mx.issubdtype(kind, mx.floating):
                    found = np.isnan(numbers.view(f"f{kind.size}"))
                else:
                    continue
                if found.any():
                    return True
        return False

    def revived(self, blocks: Sequence[Sequence[mx.array]], checkpoint: Sequence[Sequence[mx.array]], length: int) -> Prefix:
        """Return the prefix of `length` positions from arrays made by `stored` and `checkpoint`."""
        sides, others = [iter(layer) for layer in blocks], [iter(layer) for layer in checkpoint]
        states: list[Any] = [None] * len(self._caches)
        last: list[Any] = [None] * len(self._caches)
        for i, (layer, cache, arrays) in enumerate(self._caches):
            if type(cache) in BY_POSITION:
                states[i] = self._state(cache, next(sides[layer]), next(sides[layer]), length)
            else:
                last[i] = with_arrays(cache, [next(others[layer]).view(kind) for _, kind in arrays], length)
        return Prefix(length, self._kinds, states, {length: last})

    def _state(self, cache: Cache, keys: mx.array, values: mx.array, length: int) -> Any:
        if type(cache) is GroupedKVCache:
            sides = _split(keys, cache, self._dtype), _split(values, cache, self._dtype)
            return *sides, length, cache.group_size, cache.bits
        return (keys.view(self._dtype), values.view(self._dtype), length) if self._bytes else (keys, values, length)

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
    """Prefix being read: blocks are copied into place as they arrive, and made MLX arrays by the thread that reads them."""

    def __init__(self, first: list[Layer], dtype: str, disk_blocks: int) -> None:
        """Allocate buffers like `first`, any disk block of the prefix, for `disk_blocks` blocks."""
        self.dtype, self.length = dtype, DISK_BLOCK_SIZE * disk_blocks
        self.layers: list[Layer] = [
            [np.empty((*side.shape[:2], self.length, side.shape[3]), side.dtype) for side in layer] for layer in first
        ]
        self.checkpoint: list[Layer] = [[] for _ in first]

    def put(self, number: int, disk_block: list[Layer], dtype: str) -> None:
        """Copy a disk block into its place. Raises ValueError if it does not match the first."""
        where = slice(number * DISK_BLOCK_SIZE, (number + 1) * DISK_BLOCK_SIZE)
        for layer, held in zip(disk_block, self.layers, strict=True):
            for side, whole in zip(layer, held, strict=True):
                place = whole[:, :, where]
                if place.shape != side.shape or dtype != self.dtype:
                    raise ValueError("disk blocks of a prefix are not alike")
                place[:] = side

    def finish(self) -> None:
        """Copy everything into MLX arrays by layer, and free the buffers one by one. The arrays hold their data and depend on
        no stream, so another thread may take them over."""
        self.layers.reverse()
        self.arrays: list[list[mx.array]] = []
        while self.layers:
            self.arrays.append([mx.array(side) for side in self.layers.pop()])
        self.states: list[list[mx.array]] = [[mx.array(part) for part in layer] for layer in self.checkpoint]
        self.checkpoint = []


class _Span:
    """Consecutive disk blocks queued for writing, or a checkpoint, with one copy of each array."""

    def __init__(
        self, layers: Sequence[Sequence[mx.array]], dtype: str, first: int | None = None, part: FilePart | None = None
    ) -> None:
        """Copy the arrays of each layer. `dtype`: name of their type; `first`: number of the first disk block, None for a
        checkpoint; `part`: what they are, None for the rank's own layers."""
        self.dtype, self.part = dtype, part
        self._first = first
        # Copy the arrays, as MLX arrays must not be shared between threads.
        self._own = [[mx.contiguous(side).view(storage_dtype(side.dtype)) for side in layer] for layer in layers]
        dispatch(self._own)

    @cached_property
    def _arrays(self) -> list[Layer]:
        arrays: list[Layer] = [[np.asarray(side) for side in layer] for layer in self._own]
        self._own = []
        return arrays

    def disk_block(self, number: int) -> list[Layer]:
        """Return the layers of disk block `number`, or of the checkpoint; wait until they are computed. Not thread-safe."""
        if self._first is None:
            return self._arrays
        where = slice((number - self._first) * DISK_BLOCK_SIZE, (number - self._first + 1) * DISK_BLOCK_SIZE)
        return [[side[:, :, where] for side in layer] for layer in self._arrays]


class HeadKV(NamedTuple):
    """A draft head's KV, in files of its own. `stored` is called with the key of a prefix or sequence that is written, `fetched`
    with that of a prefix that is taken, where the disk has the head's part."""

    layers: Layers
    part: FilePart
    stored: Callable[[str], Prefix | None]
    fetched: Callable[[str, Prefix], None]


def _revived(layers: Layers, arrived: _Arrived) -> Prefix:
    whole = arrived.arrays
    if arrived.dtype == "bfloat16":
        whole = [[side.view(mx.bfloat16) for side in layer] for layer in whole]
    return layers.revived(whole, arrived.states, arrived.length)


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
        self.head: HeadKV | None = None
        """A draft head's KV, which is kept too; set before any order."""
        self._head_arrived: dict[str, _Arrived] = {}
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

    def store(self, op: StoreOp, prefix: Prefix) -> None:
        """Queue disk blocks and checkpoints of a prefix for writing."""
        if self.head is not None and (own := self.head.stored(op.key)) is not None:  # first, as the others are reported
            self._store_blocks(op, own, self.head.layers, self.head.part)
        self._store_blocks(op, prefix, self._layers)
        for number, name in op.disk_blocks:
            if not is_checkpoint(name):
                continue
            if (layers := self._layers.checkpoint(prefix, (number + 1) * DISK_BLOCK_SIZE)) is None:
                seldom.warning("Checkpoint of %s has unexpected arrays; it is not written", op.key)
                continue
            taken, nbytes = self._accepted([(number, name)], layers)
            self._queue(taken, _Span(layers, "uint8"), nbytes, op.awaited)

    def _store_blocks(self, op: StoreOp, prefix: Prefix, layers: Layers, part: FilePart | None = None) -> None:
        blocks = [one for one in op.disk_blocks if one[0] < prefix.length // DISK_BLOCK_SIZE and not is_checkpoint(one[1])]
        # Consecutive numbers have a constant distance to their list index.
        for _, run in itertools.groupby(enumerate(blocks), lambda one: one[1][0] - one[0]):
            disk_blocks = [disk_block for _, disk_block in run]
            first = disk_blocks[0][0]
            where = slice(first * DISK_BLOCK_SIZE, (first + 1) * DISK_BLOCK_SIZE)
            taken, nbytes = self._accepted(disk_blocks, layers.stored(prefix, where))  # lazy, for its shapes
            where = slice(first * DISK_BLOCK_SIZE, (first + len(taken)) * DISK_BLOCK_SIZE)
            if taken:
                self._queue(taken, _Span(layers.stored(prefix, where), layers.kind.dtype, first, part), nbytes, op.awaited)

    def _accepted(
        self, disk_blocks: list[tuple[int, bytes]], layers: Sequence[Sequence[mx.array]]
    ) -> tuple[list[tuple[int, bytes]], int]:
        """Return the first of these disk blocks, as many as `WAITING_BYTES` allows, and the bytes of one with arrays like
        `layers`."""
        nbytes = max(sum(array.nbytes for layer in layers for array in layer), 1)
        with self._lock:
            taken = disk_blocks[: max(WAITING_BYTES - self._waiting, 0) // nbytes]
            self._waiting += len(taken) * nbytes
        if len(taken) < len(disk_blocks):
            seldom.warning("KV disk too slow: not writing some blocks")
        return taken, nbytes

    def _queue(self, disk_blocks: list[tuple[int, bytes]], span: _Span, nbytes: int, awaited: bool) -> None:
        for number, name in disk_blocks:
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

    def take(self, key: str) -> Prefix | None:
        """Return and forget a fetched prefix; None if it could not be read."""
        arrived = self._arrived.pop(key)
        if arrived is None:
            return None
        if self.head is not None and (own := self._head_arrived.pop(key, None)) is not None:
            self.head.fetched(key, _revived(self.head.layers, own))
        return _revived(self._layers, arrived)

    def drop(self, key: str) -> None:
        """Drop the prefix fetched under this key."""
        self._arrived.pop(key)
        self._head_arrived.pop(key, None)

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
                    if self._remote_stores is not None:
                        self._remote_stores.change(endpoint for store, endpoint in job.remote_stores if store != self.store_id)
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
                arrived = arrived or _Arrived(layers, dtype, sum(not is_checkpoint(one) for one in order.names))
                if not is_checkpoint(name):
                    arrived.put(number, layers, dtype)
                elif not self._layers.fits(layers, arrived.length) or self._layers.has_nan(layers):
                    self._files.survey(drop=True, wanted=[name])  # else it would be found again
                    raise Unusable("a checkpoint has a NaN or is not of its position")
                else:
                    arrived.checkpoint = layers
                nbytes += size
                took, count = time.monotonic() - started, len(order.names)
                late = number + 1 < count and took > TRIAL_S and took * count > order.within_s * (number + 1) > 0
                if late:
                    seldom.warning("KV disk slower than computing: computing the rest")
                    lost, arrived = order.names[number + 1 :], None
                    break
            if arrived is not None:
                arrived.finish()
        except (Unusable, MemoryError, ValueError) as error:
            seldom.warning("KV on disk cannot be used: %s; computing it again", str(error) or "no memory is left")
            # Later blocks are useless without this one and are stored again with it; so are blocks that do not match.
            lost = order.names[number:] if isinstance(error, Unusable) else order.names
            arrived = None
        if arrived is not None and self.head is not None:
            self._read_head(order, self.head.part)
        self._arrived[order.key] = arrived
        self._report(Fetched(self._rank, order.key, lost, time.monotonic() - started, nbytes, self._files.brought - before, late))

    def _read_head(self, order: Fetch, part: FilePart) -> None:
        """Read a draft head's part of a prefix. Where some is missing or damaged, the head starts anew."""
        names, arrived = [name for name in order.names if not is_checkpoint(name)], None
        try:
            for number, name in enumerate(names):
                layers, dtype, _ = self._files.read(name, part)
                arrived = arrived or _Arrived(layers, dtype, len(names))
                arrived.put(number, layers, dtype)
            assert arrived is not None
            arrived.finish()
            self._head_arrived[order.key] = arrived
        except Absent:
            pass  # written without a head
        except (Unusable, MemoryError, ValueError) as error:
            seldom.warning("KV of the draft head on disk cannot be used: %s; it starts anew", str(error) or "no memory is left")

    def _survey(self, order: Survey) -> None:
        try:
            nbytes, total = self._files.survey(drop=order.drop, wanted=order.wanted)
        except OSError as error:
            seldom.warning("KV directory cannot be read: %s; computing its prefixes", error.strerror or error)
            nbytes = total = 0
        if order.wanted is None:
            self._files.take_gone()  # the survey reports the remaining blocks anyway
        names, lent = self._files.names(order.wanted), self._files.lent(order.wanted)
        self._report(Surveyed(self._rank, order.number, names, lent, nbytes, total, order.wanted))

    def _write(self, number: int, name: bytes, span: _Span, nbytes: int, awaited: bool) -> None:
        try:
            if time.monotonic() < self._quiet_until:
                return
            layers = span.disk_block(number)  # waits for its computation
            started = time.monotonic()
            size = self._files.write(name, layers, span.dtype, span.part)
            took = time.monotonic() - started
            written = [name] if span.part is None else []
            self._report(Written(self._rank, written, size, took, self._files.take_gone()))
            time.sleep(0.0 if awaited else max(size / WRITE_BYTES_S - took, 0.0))
        except OSError as error:
            self._quiet_until = time.monotonic() + FULL_S
            self._report(Written(self._rank, [], gone=self._files.take_gone()))
            why, place = f"{error.strerror or error}; if full, free space or lower --kv-disk-gb", self._files.directory.parent
            seldom.warning("KV cannot be written to disk (--kv-disk %s): %s; pausing for %.0f s", place, why, FULL_S)
        finally:
            with self._lock:
                self._waiting -= nbytes
