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

from tandem.protocol.pieces import PIECE, Fetch, Fetched, StoreOp, Written
from tandem.runner import kv_disk
from tandem.runner.kv_disk import KVDisk, Layers
from tandem.runner.piece_files import Part, PieceFiles

NAMES = [bytes([i]) * 16 for i in range(8)]
LAYERS, HEADS, WIDTH = 4, 2, 16
KEYS = np.random.default_rng(0).standard_normal((LAYERS, 1, HEADS, len(NAMES) * PIECE, WIDTH), dtype=np.float32)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[KVDisk, PieceFiles, queue.SimpleQueue[Any]]]:
    reports: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def files() -> PieceFiles:
        return PieceFiles(tmp_path, "space", Part(range(LAYERS), range(HEADS)), 1 << 30, 1 << 30)

    other = files()
    for i, name in enumerate(NAMES):
        cut = KEYS[:, :, :, i * PIECE:(i + 1) * PIECE]
        other.write(name, [(layer, -layer) for layer in cut], "float32")
    one = KVDisk(0, files(), Layers([KVCache() for _ in range(LAYERS)], mx.float32, as_bytes=False), reports.put)
    yield one, other, reports
    assert one.close(60)


def test_a_prefix_is_in_memory_once_while_it_is_read(disk) -> None:
    one, _, reports = disk
    tracemalloc.start()
    try:
        one.fetch(Fetch("a", NAMES))
        got = reports.get(timeout=60)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(got, Fetched) and not got.lost
    assert got.nbytes == 2 * KEYS.nbytes
    assert peak < 1.5 * got.nbytes
    for cache, expected in zip(one.take("a"), KEYS, strict=True):
        assert cache.offset == len(NAMES) * PIECE
        for side, whole in zip(cache.state[:2], (expected, -expected), strict=True):
            assert np.array_equal(np.array(side), whole)


def test_pieces_that_do_not_fit_together_are_lost(disk) -> None:
    one, other, reports = disk
    for wrong, kind in ((KEYS[..., :PIECE, :1], "float32"), (KEYS[..., :PIECE, :].astype(np.float16), "float16")):
        other.write(NAMES[2], [(layer, layer) for layer in wrong], kind)
        one.fetch(Fetch(kind, NAMES))
        assert reports.get(timeout=60).lost == NAMES
        assert one.take(kind) is None
    next(other.directory.glob(f"{NAMES[3].hex()}*")).unlink()
    other.write(NAMES[2], [(layer, layer) for layer in KEYS[..., 2 * PIECE:3 * PIECE, :]], "float32")
    one.fetch(Fetch("gap", NAMES))
    assert reports.get(timeout=60).lost == NAMES[3:]


def test_what_comes_too_slowly_is_left(disk, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _, reports = disk
    one.fetch(Fetch("quick", NAMES, within_s=1e-9))
    got = reports.get(timeout=60)
    assert not got.late and not got.lost and one.take("quick"), "it has not lasted long enough to tell"
    monkeypatch.setattr(kv_disk, "TRIAL_S", 0.0)
    one.fetch(Fetch("slow", NAMES, within_s=1e-9))
    got = reports.get(timeout=60)
    assert got.late and got.lost == NAMES[1:] and one.take("slow") is None
    for order in (Fetch("in time", NAMES, within_s=1e9), Fetch("patient", NAMES), Fetch("one", NAMES[:1], 1e-9)):
        one.fetch(order)
        got = reports.get(timeout=60)
        assert not got.late and not got.lost and one.take(order.key)


def test_what_somebody_waits_for_is_written_without_a_limit(disk, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, reports = disk
    monkeypatch.setattr(kv_disk, "WRITE_BYTES_S", 1.0)
    states = [(mx.array(layer), mx.array(-layer)) for layer in KEYS]
    new = [bytes([100 + i]) * 16 for i in range(3)]
    one.store(StoreOp("a", list(enumerate(new)), awaited=True), states)
    for name in new:
        got = reports.get(timeout=60)
        assert isinstance(got, Written) and got.names == [name] and got.nbytes > 0 < got.seconds
    other.survey()
    assert set(new) <= set(other.names())
