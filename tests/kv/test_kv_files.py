"""Disk blocks of prefixes as files: put together from any layers and heads, and never believed when damaged."""

from __future__ import annotations

import os
import shutil
import stat
import struct
import time
from collections import namedtuple
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tandem.errors import UsageError
from tandem.kv.files import MARK, DiskBlockFiles, Unusable
from tandem.kv.parts import KVSlice
from tandem.protocol.kv_blocks import DISK_BLOCK_SIZE

Usage = namedtuple("Usage", "total used free")
NAME = bytes(range(16))
KEYS = np.arange(4 * 6 * DISK_BLOCK_SIZE, dtype=np.float32).reshape(4, 1, 6, DISK_BLOCK_SIZE, 1)
"""Of 4 layers with 6 heads, one number for each position."""


def part(layers, heads):
    return KVSlice(range(*layers), range(*heads))


def store(directory, layers, heads, limit=1 << 30, name=NAME, space="space"):
    files = DiskBlockFiles(directory, space, part(layers, heads), limit, 1 << 30)
    cut = KEYS[layers[0] : layers[1], :, heads[0] : heads[1]]
    files.write(name, [(layer, -layer) for layer in cut], "float32")
    return files


@pytest.mark.parametrize(("layers", "heads"), [((0, 4), (0, 6)), ((1, 3), (0, 6)), ((0, 4), (1, 5)), ((3, 4), (5, 6))])
def test_a_part_is_put_together_from_others(tmp_path, layers, heads):
    for one in ((0, 2), (2, 4)):
        for other in ((0, 2), (2, 6)):
            store(tmp_path, one, other)
    files = DiskBlockFiles(tmp_path, "space", part(layers, heads), 1 << 30, 1 << 30)
    assert files.names() == [NAME]
    found, dtype, nbytes = files.read(NAME)
    expected = KEYS[layers[0] : layers[1], :, heads[0] : heads[1]]
    assert dtype == "float32"
    assert nbytes >= 2 * expected.nbytes
    assert np.array_equal(np.stack([keys for keys, _ in found]), expected)
    assert np.array_equal(np.stack([values for _, values in found]), -expected)


def test_a_disk_block_with_a_gap_is_none(tmp_path):
    store(tmp_path, (0, 2), (0, 6))
    store(tmp_path, (2, 4), (0, 3))
    files = DiskBlockFiles(tmp_path, "space", part((0, 4), (0, 6)), 1 << 30, 1 << 30)
    assert files.names() == []
    with pytest.raises(Unusable, match="not there"):
        files.read(NAME)
    assert DiskBlockFiles(tmp_path, "another", part((0, 2), (0, 6)), 1 << 30, 1 << 30).names() == []


def test_no_bit_of_a_file_can_change_unseen(tmp_path):
    files = store(tmp_path, (0, 1), (0, 1))
    [path] = tmp_path.glob("space/*.kv")
    data = path.read_bytes()
    arrays = len(data) - 2 * 4 * DISK_BLOCK_SIZE
    for position in (*range(arrays), *range(arrays, len(data), 16)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(Unusable):
            files.read(NAME)
        assert not path.exists()
        files = store(tmp_path, (0, 1), (0, 1))
    for size in range(0, len(data), 67):
        path.write_bytes(data[:size])
        with pytest.raises(Unusable):
            files.read(NAME)
        files = store(tmp_path, (0, 1), (0, 1))
    path.write_bytes(data + b"\0")
    with pytest.raises(Unusable):
        files.read(NAME)


def test_what_was_used_least_recently_goes_first(tmp_path):
    names = [bytes([i]) * 16 for i in range(6)]
    store(tmp_path, (0, 4), (0, 6), name=names[0], space="old")
    [size] = [path.stat().st_size for path in tmp_path.glob("*/*.kv")]
    for i, name in enumerate(names[1:5]):
        store(tmp_path, (0, 4), (0, 6), name=name)
        os.utime(next(tmp_path.glob(f"space/{name.hex()}*")), (time.time() - 50 + i,) * 2)
    for path in tmp_path.glob("old/*.kv"):
        os.utime(path, (1, 1))
    store(tmp_path, (0, 4), (0, 6), name=names[5], limit=int(5.5 * size))
    left = {bytes.fromhex(path.name.split(".")[0]) for path in tmp_path.glob("*/*.kv")}
    assert left == set(names[2:])


def test_half_a_file_is_left_by_nobody(tmp_path, monkeypatch):
    files = store(tmp_path, (0, 4), (0, 6))
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        files.write(b"x" * 16, [(layer, layer) for layer in KEYS], "float32")
    assert len([one for one in tmp_path.glob("space/*") if one.is_file()]) == 1
    stale = tmp_path / "space" / ".dead.tmp"
    stale.write_bytes(b"half")
    os.utime(stale, (1, 1))
    DiskBlockFiles(tmp_path, "space", part((0, 4), (0, 6)), 1 << 30, 1 << 30)
    assert not stale.exists()


def test_a_full_disk_loses_what_was_used_least_recently(tmp_path, monkeypatch):
    names = [bytes([i]) * 16 for i in range(20)]
    for i, name in enumerate(names):
        files = store(tmp_path, (0, 4), (0, 6), name=name)
        os.utime(next(tmp_path.glob(f"space/{name.hex()}*")), (time.time() - 50 + i,) * 2)
    [size] = {path.stat().st_size for path in tmp_path.glob("*/*.kv")}
    files.take_gone()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    free = [0]
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(100 * size, 0, free[0]))
    for others, left in ((3 * size, 20), (0, 18), (size, 17)):
        free[0] = others
        with pytest.raises(OSError, match="No space"):
            files.write(b"x" * 16, [(layer, layer) for layer in KEYS], "float32")
        assert {path.name.split(".")[0] for path in tmp_path.glob("space/*.kv")} == {one.hex() for one in names[-left:]}
    assert set(files.take_gone()) == set(names[:3])


@pytest.mark.parametrize("other", [((2, 4), (0, 2)), ((0, 2), (2, 4))])
def test_the_file_of_other_layers_or_heads_of_the_same_block_is_not_believed(tmp_path, other):
    files = store(tmp_path, (0, 2), (0, 2))
    [path] = tmp_path.glob("space/*.kv")
    store(tmp_path, *other)
    [foreign] = set(tmp_path.glob("space/*.kv")) - {path}
    path.write_bytes(foreign.read_bytes())
    with pytest.raises(Unusable, match="is damaged"):
        files.read(NAME)


@pytest.mark.parametrize("size", [0, 5])
def test_a_file_that_ends_in_its_header_is_damaged_in_plain_words(tmp_path, size):
    files = store(tmp_path, (0, 2), (0, 2))
    [path] = tmp_path.glob("space/*.kv")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(Unusable, match="is damaged: Input data was truncated"):
        files.read(NAME)


def test_what_says_that_it_is_a_disk_block_is_not_believed(tmp_path):
    files = store(tmp_path, (0, 2), (0, 2))
    [path] = tmp_path.glob("space/*.kv")
    data = path.read_bytes()
    magic, length = struct.unpack_from("<8sI", data)
    header = msgspec.msgpack.decode(data[12 : 12 + length])
    right = [1, 2, DISK_BLOCK_SIZE, 1]
    assert header["shapes"] == [[right, right]] * 2
    for shapes in (
        [[[1, 2, DISK_BLOCK_SIZE, 2**60], right], [right, right]],
        [[[1, 1, 2 * DISK_BLOCK_SIZE, 1], right], [right, right]],
        [[[2**63, 2**63], right]] * 2,
        [[[1, 2, DISK_BLOCK_SIZE, -1], [1, 2, DISK_BLOCK_SIZE, 3]], [right, right]],
        [[[1, 2, DISK_BLOCK_SIZE, 0], [1, 2, DISK_BLOCK_SIZE, 2]], [right, right]],
        [[right, right]] * 3,
    ):
        packed = msgspec.msgpack.encode({**header, "shapes": shapes})
        path.write_bytes(struct.pack("<8sI", magic, len(packed)) + packed + data[12 + length :])
        with pytest.raises(Unusable, match="is damaged"):
            files.read(NAME)
        files = store(tmp_path, (0, 2), (0, 2))
    path.unlink()
    path.mkdir()
    assert DiskBlockFiles(tmp_path, "space", part((0, 2), (0, 2)), 1 << 30, 1 << 30).names() == []
    path.rmdir()
    os.mkfifo(path)  # whoever opens it would wait for a writer
    with pytest.raises(Unusable, match="it is no disk block"):
        files.read(NAME)
    with path.open("wb") as file:
        file.truncate(2 << 30)
    with pytest.raises(Unusable, match="it is no disk block"):
        DiskBlockFiles(tmp_path, "space", part((0, 2), (0, 2)), 4 << 30, 1 << 30).read(NAME)
    for label in ("0-99999999999999999999.0-9", "00-2.0-2", "0-2.0-0", "all.kv"):
        (path.parent / f"{NAME.hex()}.{label}.kv").write_bytes(data)
    assert DiskBlockFiles(tmp_path, "space", part((0, 2), (0, 2)), 1 << 30, 1 << 30).names() == []


def test_a_directory_has_one_name_and_what_stands_in_its_place_is_none(tmp_path):
    name = store(tmp_path, (0, 2), (0, 2)).store_id
    assert len(name) > 32 and store(tmp_path, (2, 4), (0, 2)).store_id == name
    path = tmp_path / "identity"
    for make in (os.mkfifo, Path.mkdir, lambda it: it.write_bytes(b"\xff"), lambda it: it.write_bytes(bytes(65))):
        path.unlink()
        make(path)
        assert store(tmp_path, (0, 2), (0, 2)).store_id == ""
        if path.is_dir():
            path.rmdir()
            path.touch()


def test_a_file_of_the_future_and_one_that_is_too_large_go_first(tmp_path):
    files = store(tmp_path, (0, 4), (0, 6))
    [path] = tmp_path.glob("space/*.kv")
    size = path.stat().st_size
    (tmp_path / "old").mkdir()
    later, huge, half = (tmp_path / "old" / name for name in ("later.kv", "huge.kv", ".half.tmp"))
    for other in (later, half):
        other.write_bytes(bytes(size))
        os.utime(other, (time.time() + 1e6,) * 2)
    with huge.open("wb") as file:
        file.truncate(1 << 40)
    store(tmp_path, (0, 4), (0, 6), name=b"x" * 16, limit=int(2.5 * size))
    assert not any(other.exists() for other in (later, huge, half))
    assert len(list(tmp_path.glob("space/*.kv"))) == 2
    assert files.read(NAME)


def test_nothing_is_deleted_beyond_the_directory(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("mine.kv", ".mine.tmp"):
        (elsewhere / name).write_bytes(bytes(100))
        os.utime(elsewhere / name, (1, 1))
    store(tmp_path / "kv", (0, 4), (0, 6))
    (tmp_path / "kv" / "link").symlink_to(elsewhere)
    store(tmp_path / "kv", (0, 4), (0, 6), limit=1, name=b"x" * 16)
    assert not list((tmp_path / "kv").glob("space/*.kv"))
    assert len(list(elsewhere.iterdir())) == 2


def test_what_others_write_and_delete_is_seen_in_time(tmp_path):
    """Several ranks and servers share the room, and one that no longer has a disk block says so."""
    size = next(iter([path.stat().st_size for _ in [store(tmp_path, (0, 4), (0, 6))] for path in tmp_path.glob("space/*.kv")]))
    first, second = (DiskBlockFiles(tmp_path, "space", part((0, 4), (0, 6)), 20 * size, 1 << 30) for _ in range(2))
    layers = [(layer, -layer) for layer in KEYS]
    for i in range(1, 30):
        (first if i % 2 else second).write(bytes([i]) * 16, layers, "float32")
        os.utime(next(tmp_path.glob(f"space/{(bytes([i]) * 16).hex()}*")), (time.time() - 100 + i,) * 2)
        assert len(list(tmp_path.glob("space/*.kv"))) <= 21
    left = {bytes.fromhex(path.name.split(".")[0]) for path in tmp_path.glob("space/*.kv")}
    gone = set(first.take_gone())
    assert gone
    assert not gone & left
    assert not first.take_gone()
    assert set(first.names()) - left <= {bytes([29]) * 16}


def test_a_directory_that_was_emptied_is_filled_again(tmp_path):
    files = store(tmp_path / "kv", (0, 4), (0, 6))
    for path in sorted((tmp_path / "kv").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    layers = [(layer, -layer) for layer in KEYS]
    files.write(NAME, layers, "float32")
    other = DiskBlockFiles(tmp_path / "kv", "space", part((0, 4), (0, 6)), 1 << 30, 1 << 30)
    assert other.names() == [NAME]
    assert other.store_id == files.store_id  # a replica that comes later still shares it
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "kv").rglob("*") if path.is_file()} == {0o600}
    (tmp_path / "kv").rename(tmp_path / "away")  # the disk is not there any more: nothing is kept on the one below it
    with pytest.raises(FileNotFoundError):
        files.write(NAME, layers, "float32")
    assert not (tmp_path / "kv").exists()


def test_a_directory_of_others_is_left_alone(tmp_path):
    (tmp_path / "letters").write_text("mine")
    with pytest.raises(UsageError, match="--kv-disk .*has other things than Tandem's KV in it"):
        DiskBlockFiles(tmp_path, "space", part((0, 1), (0, 1)), 1, 1 << 30)
    assert not (tmp_path / MARK).exists()
    with pytest.raises(UsageError, match="cannot keep KV there"):
        DiskBlockFiles(tmp_path / "letters", "space", part((0, 1), (0, 1)), 1, 1 << 30)
    files = store(tmp_path / "kv", (0, 4), (0, 6))
    (tmp_path / "kv").rename(tmp_path / "away")
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "letters").write_text("of somebody who came while it was away")
    with pytest.raises(OSError, match="other things"):
        files.write(NAME, [(layer, layer) for layer in KEYS], "float32")
    assert len(list((tmp_path / "kv").iterdir())) == 1
    (tmp_path / "kv" / "letters").unlink()
    assert files.write(NAME, [(layer, layer) for layer in KEYS], "float32")
    (tmp_path / "kv" / "space").rename(tmp_path / "moved")
    (tmp_path / "kv" / "space").symlink_to(tmp_path / "moved")  # what is written there would not be counted
    with pytest.raises(OSError, match="is a link"):
        files.write(NAME, [(layer, layer) for layer in KEYS], "float32")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / MARK).touch()
    (tmp_path / "linked" / "space").symlink_to(tmp_path / "away" / "space")
    with pytest.raises(UsageError, match="is a link"):
        store(tmp_path / "linked", (0, 4), (0, 6))


def test_a_directory_that_was_deleted_while_ranks_wrote_is_still_ours(tmp_path):
    files = store(tmp_path, (0, 4), (0, 6))
    assert files.write(NAME, [(layer, layer) for layer in KEYS], "float32")
    (tmp_path / MARK).unlink()
    again = store(tmp_path, (0, 4), (0, 6))
    assert (tmp_path / MARK).exists() and again.store_id == files.store_id
    (tmp_path / MARK).unlink()
    (tmp_path / "space" / "letters").write_text("mine")
    with pytest.raises(UsageError, match="other things"):
        store(tmp_path, (0, 4), (0, 6))


def test_a_look_for_some_disk_blocks_lists_no_others(tmp_path, monkeypatch):
    """However many lie there; parts of layouts that began later are seen all the same."""
    mine, other = (DiskBlockFiles(tmp_path, "space", part((0, 4), (0, 6)), 1 << 30, 1 << 30) for _ in range(2))
    new, gone, unasked = (bytes([i]) * 16 for i in range(3))
    for name in (gone, unasked):
        other.write(name, [(layer, -layer) for layer in KEYS], "float32")
    mine.survey()
    next(tmp_path.glob(f"space/{gone.hex()}*")).unlink()
    for layers in ((0, 1), (1, 4)):
        store(tmp_path, layers, (0, 6), name=new)

    def listed(*_):
        raise AssertionError("the directory is listed")

    monkeypatch.setattr("os.scandir", listed)
    assert mine.survey(wanted=[new, gone]) == (0, 0)
    assert mine.names([new, gone]) == [new] and mine.lent([new, gone]) == []
    assert set(mine.names()) == {new, unasked}
    assert np.array_equal(np.stack([keys for keys, _ in mine.read(new)[0]]), KEYS)


def test_the_labels_of_parts_are_noted_again_where_the_directory_was_emptied(tmp_path):
    mine, other = (store(tmp_path, (0, 4), heads) for heads in ((0, 6), (0, 3)))
    shutil.rmtree(tmp_path / "space")
    other.write(b"x" * 16, [(layer[:, :3], layer[:, :3]) for layer in KEYS], "float32")
    half = DiskBlockFiles(tmp_path, "space", part((0, 4), (0, 2)), 1 << 30, 1 << 30)
    half.survey(wanted=[b"x" * 16])
    mine.survey(wanted=[b"x" * 16])
    assert half.names() == [b"x" * 16] and b"x" * 16 not in mine.names()
