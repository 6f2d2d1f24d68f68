"""A rank's KV on disk: what it reads takes no more memory than what it is."""

from __future__ import annotations

import queue
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from tandem.kv import store
from tandem.kv.files import DiskBlockFiles, Kind
from tandem.kv.parts import KVSlice
from tandem.kv.store import KVDisk, Layers
from tandem.loading.prefix import Prefix
from tandem.loading.stage import CacheMember
from tandem.protocol.kv_blocks import DISK_BLOCK_SIZE, Fetch, Fetched, StoreOp, Survey, Surveyed, Written

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
