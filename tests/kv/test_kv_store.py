"""A rank's KV on disk: what it reads takes no more memory than what it is."""

from __future__ import annotations

import queue
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from tandem.kv import store
from tandem.kv.files import DiskBlockFiles, Kind
from tandem.kv.parts import KVSlice
from tandem.kv.remote import Lending
from tandem.kv.store import KVDisk, Layers
from tandem.loading.prefix import Prefix, kinds_of
from tandem.loading.stage import CacheMember
from tandem.protocol.keys import ClusterKeys
from tandem.protocol.kv_blocks import (
    DISK_BLOCK_SIZE,
    Fetch,
    Fetched,
    StoreOp,
    Survey,
    Surveyed,
    UseRemoteStores,
    Written,
    checkpoint_name,
)

NAMES = [bytes([i]) * 16 for i in range(8)]
LAYERS, HEADS, WIDTH = 4, 2, 16
KEYS = np.random.default_rng(0).standard_normal((LAYERS, 1, HEADS, len(NAMES) * DISK_BLOCK_SIZE, WIDTH), dtype=np.float32)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[KVDisk, DiskBlockFiles, queue.SimpleQueue[Any]]]:
    reports: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def files(kind: Kind | None = None) -> DiskBlockFiles:
        return DiskBlockFiles(tmp_path, "space", KVSlice(range(LAYERS), range(HEADS)), 1 << 30, 1 << 30, kind)

    other = files()
    caches = [CacheMember(i, KVCache(), [((1, HEADS, 1, WIDTH), mx.float32)] * 2) for i in range(LAYERS)]
    layers = Layers([KVCache] * LAYERS, caches, LAYERS, HEADS, mx.float32, as_bytes=False)
    for i, name in enumerate(NAMES):
        cut = KEYS[:, :, :, i * DISK_BLOCK_SIZE : (i + 1) * DISK_BLOCK_SIZE]
        other.write(name, [(layer, -layer) for layer in cut], "float32")
    one = KVDisk(0, files(layers.kind), layers, reports.put)
    yield one, other, reports
    assert one.close(60)


def test_a_prefix_is_in_memory_once_while_it_is_read(disk) -> None:
    one, _, reports = disk
    tracemalloc.start()
    try:
        one.take_order(Fetch("a", NAMES))
        got = reports.get(timeout=60)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(got, Fetched) and not got.lost
    assert got.nbytes == 2 * KEYS.nbytes
    assert peak < 1.5 * got.nbytes
    assert len(one._arrived["a"].arrays) == LAYERS, "the thread that computes has nothing to copy"
    for cache, expected in zip(one.take("a").revived(len(NAMES) * DISK_BLOCK_SIZE), KEYS, strict=True):
        assert cache.offset == len(NAMES) * DISK_BLOCK_SIZE
        for side, whole in zip(cache.state[:2], (expected, -expected), strict=True):
            assert np.array_equal(np.array(side), whole)


def test_disk_blocks_that_are_not_the_models_are_lost_before_anything_is_made_of_them(disk) -> None:
    """Alone they would be a whole prefix, which the rank takes up."""
    one, other, reports = disk
    disk_block = KEYS[..., :DISK_BLOCK_SIZE, :]
    [path] = other.directory.glob(f"{NAMES[0].hex()}*")
    half = disk_block.astype(np.float16)
    for number, (keys, values, kind) in enumerate(
        (
            (disk_block[..., :1], disk_block[..., :1], "float32"),
            (half, half, "float16"),
            (disk_block[..., :8], np.concatenate([disk_block, disk_block[..., :8]], axis=-1), "float32"),
        )
    ):
        other.write(NAMES[0], list(zip(keys, values, strict=True)), kind)
        one.take_order(Survey(number))
        assert NAMES[0] in reports.get(timeout=60).names
        one.take_order(Fetch(f"wrong {number}", NAMES[:1]))
        assert reports.get(timeout=60).lost == NAMES[:1]
        assert one.take(f"wrong {number}") is None
        assert not path.exists()
    other.write(NAMES[0], [(layer, -layer) for layer in disk_block], "float32")
    next(other.directory.glob(f"{NAMES[3].hex()}*")).unlink()
    one.take_order(Survey(1))
    reports.get(timeout=60)
    one.take_order(Fetch("gap", NAMES))
    assert reports.get(timeout=60).lost == NAMES[3:]


def test_what_comes_too_slowly_is_left(disk, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _, reports = disk
    one.take_order(Fetch("quick", NAMES, within_s=1e-9))
    got = reports.get(timeout=60)
    assert not got.late and not got.lost and one.take("quick"), "it has not lasted long enough to tell"
    monkeypatch.setattr(store, "TRIAL_S", 0.0)
    one.take_order(Fetch("slow", NAMES, within_s=1e-9))
    got = reports.get(timeout=60)
    assert got.late and got.lost == NAMES[1:] and one.take("slow") is None
    for order in (Fetch("in time", NAMES, within_s=1e9), Fetch("patient", NAMES), Fetch("one", NAMES[:1], 1e-9)):
        one.take_order(order)
        got = reports.get(timeout=60)
        assert not got.late and not got.lost and one.take(order.key)


def test_what_somebody_waits_for_is_written_without_a_limit(disk, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, reports = disk
    monkeypatch.setattr(store, "WRITE_BYTES_S", 1.0)
    states = [(mx.array(layer), mx.array(-layer), 0) for layer in KEYS]
    new = [bytes([100 + i]) * 16 for i in range(3)]
    one.store(StoreOp("a", list(enumerate(new)), awaited=True), Prefix(192, [], states))
    for name in new:
        got = reports.get(timeout=60)
        assert isinstance(got, Written) and got.names == [name] and got.nbytes > 0 < got.seconds
    other.survey()
    assert set(new) <= set(other.names())


def test_a_look_for_some_disk_blocks_names_no_others(disk) -> None:
    one, _, reports = disk
    one.take_order(Survey(1, soon=True, wanted=[NAMES[2], b"x" * 16]))
    got = reports.get(timeout=60)
    assert (got.names, got.lent, got.wanted) == ([NAMES[2]], [], [NAMES[2], b"x" * 16])
    one.take_order(Survey(2))
    got = reports.get(timeout=60)
    assert sorted(got.names) == NAMES and got.wanted is None and got.nbytes > 0


def test_a_job_that_fails_is_answered_and_the_next_one_is_done(disk, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _, reports = disk

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("nobody foresaw it")

    states = [(mx.array(layer), mx.array(-layer), 0) for layer in KEYS]
    for name, order, answer in (
        ("read", lambda: one.take_order(Fetch("a", NAMES)), Fetched(0, "a", NAMES)),
        ("write", lambda: one.store(StoreOp("a", [(0, NAMES[0])]), Prefix(64, [], states)), Written(0, [])),
        ("survey", lambda: one.take_order(Survey(1, wanted=NAMES[:1])), Surveyed(0, 1, [], wanted=NAMES[:1])),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(one._files, name, fail)
            order()
            assert reports.get(timeout=60) == answer
    assert one.take("a") is None and one._waiting == 0
    one.take_order(Fetch("b", NAMES))
    assert not reports.get(timeout=60).lost and one.take("b")


def test_disk_blocks_that_are_to_go_are_gone_once_what_waits_is_written(disk) -> None:
    one, other, reports = disk
    states = [(mx.array(layer), mx.array(-layer), 0) for layer in KEYS]
    new = b"n" * 16
    one.store(StoreOp("a", [(0, new)]), Prefix(64, [], states))
    one.take_order(Survey(1, drop=True, wanted=[new, NAMES[3]]))
    assert reports.get(timeout=60).names == [new]
    assert reports.get(timeout=60).names == []
    other.survey()
    assert sorted(other.names()) == sorted({*NAMES} - {NAMES[3]})


PREFIX = [*NAMES[:2], checkpoint_name(NAMES[1])]
END = 2 * DISK_BLOCK_SIZE


@dataclass
class Machine:
    """A rank with windows and states, and a disk that others can read."""

    disk: KVDisk
    files: DiskBlockFiles
    reports: queue.SimpleQueue[Any]

    def fetched(self, names: list[bytes]) -> tuple[Fetched, Prefix | None]:
        self.disk.take_order(Fetch("prefix", names))
        return self.reports.get(timeout=60), self.disk.take("prefix")


def states(seed: int = 0) -> list[Any]:
    """Attention, a window that is full, and states of two types, after two disk blocks."""
    rng = np.random.default_rng(seed)

    def some(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, dtype=np.float32))

    plain, window, state = KVCache(), RotatingKVCache(48), ArraysCache(2)
    for length in (DISK_BLOCK_SIZE, DISK_BLOCK_SIZE):
        for one in (plain, window):
            one.update_and_fetch(some(1, HEADS, length, WIDTH), some(1, HEADS, length, WIDTH))
    state[0], state[1] = some(1, 3, 8).astype(mx.bfloat16), some(1, 2, 8, 8)
    return [plain, window, state]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    keys, made = ClusterKeys.generate(), []
    sides = [((1, HEADS, 1, WIDTH), mx.float32)] * 2
    arrays: list[Any] = [sides, sides, [((1, 3, 8), mx.bfloat16), ((1, 2, 8, 8), mx.float32)]]
    caches = [CacheMember(i, cache, held) for i, (cache, held) in enumerate(zip(states(), arrays, strict=True))]
    layers = Layers(kinds_of(states()), caches, 3, HEADS, mx.float32, as_bytes=False)
    for name in ("there", "here"):
        files = DiskBlockFiles(tmp_path / name, "space", KVSlice(range(3), range(HEADS)), 1 << 30, 1 << 30, layers.kind)
        reports: queue.SimpleQueue[Any] = queue.SimpleQueue()
        disk = KVDisk(0, files, layers, reports.put, Lending(keys, "127.0.0.1"))
        made.append(Machine(disk, files, reports))
    there, here = made
    here.disk.take_order(UseRemoteStores([(there.disk.store_id, there.disk.lends)]))
    there.disk.store(StoreOp("prefix", list(zip((0, 1, 1), PREFIX, strict=True))), Prefix.of(states(), END))
    for _ in PREFIX:
        assert there.reports.get(timeout=60).nbytes > 0
    yield there, here
    for one in made:
        assert one.disk.close(60)


def test_a_prefix_with_states_and_windows_is_fetched_from_another_machine(machines: tuple[Machine, Machine]) -> None:
    there, here = machines
    for fetches in (True, False):  # then from the own disk
        here.disk.take_order(Survey(1))
        got = here.reports.get(timeout=60)
        assert sorted(got.names) == sorted(PREFIX) and len(got.lent) == len(PREFIX) * fetches
        report, prefix = here.fetched(PREFIX)
        assert not report.lost and (report.brought_bytes > 0) == fetches and prefix is not None
        pairs = zip(*(Prefix.of(caches, END).arrays for caches in (states(), prefix.revived(END))), strict=True)
        assert all(mx.array_equal(*pair).item() for pair in pairs)
        here.disk.take_order(UseRemoteStores([]))


@pytest.mark.parametrize("fault", ["cut", "swapped", "width", "nan", "half nan", "position"])
def test_a_checkpoint_that_is_not_whole_is_computed_again(
    machines: tuple[Machine, Machine], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = machines
    name, lines = PREFIX[-1], list[str]()
    monkeypatch.setattr(store.seldom, "warning", lambda line, *values: lines.append(line % values))
    [path] = there.files.directory.glob(f"{name.hex()}.*")
    found, dtype, _ = there.files.read(name)
    layers: list[Any] = [[np.array(part) for part in layer] for layer in found]
    if fault == "cut":
        path.write_bytes(path.read_bytes()[:-8])
    elif fault == "swapped":
        path.write_bytes(next(there.files.directory.glob(f"{NAMES[0].hex()}.*")).read_bytes())
    else:
        if fault == "width":
            layers[2] = [part[..., :-8] for part in layers[2]]
        elif fault == "position":
            layers[1] = [part[:, :, :-1] for part in layers[1]]
        else:
            layers[2][fault == "nan"][..., -4:] = 0xFF
        there.files.write(name, layers, dtype)
    here.disk.take_order(Survey(1))
    assert name in here.reports.get(timeout=60).names
    report, prefix = here.fetched(PREFIX)
    assert report.lost == [name] and prefix is None
    assert len(lines) == 1 and lines[0].endswith("; computing it again")
    assert not list(here.files.directory.glob(f"{name.hex()}.*"))
