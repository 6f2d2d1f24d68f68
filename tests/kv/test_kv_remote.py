"""Disk blocks of other machines' disks: had by those who hold the rank group's keys, and never believed when damaged."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
import zmq

from tandem.errors import TransportError
from tandem.kv import remote
from tandem.kv.files import DiskBlockFiles, Unusable
from tandem.kv.parts import KVSlice
from tandem.kv.remote import DiskBlockServer, Lending, RemoteStores
from tandem.protocol.blob_messages import BlobFile, BlobRequest, Chunk, FileList, Range, ReadRange
from tandem.protocol.keys import ClusterKeys
from tandem.protocol.kv_blocks import DISK_BLOCK_SIZE
from tandem.transport.blobs import BlobClient, checksum
from tandem.transport.security import Authenticator

NAME, OTHER = bytes(range(16)), bytes(range(1, 17))
KEYS = np.arange(4 * 6 * DISK_BLOCK_SIZE * 200, dtype=np.float32).reshape(4, 1, 6, DISK_BLOCK_SIZE, 200)
"""Of 4 layers with 6 heads: a part of two layers has more bytes than one chunk."""
KEY = ClusterKeys.generate()


def files(directory, layers, heads=(0, 6)):
    return DiskBlockFiles(directory, "space", KVSlice(range(*layers), range(*heads)), 1 << 30, 1 << 30)


def store(directory, layers, heads=(0, 6), name=NAME):
    cut = KEYS[layers[0] : layers[1], :, heads[0] : heads[1]]
    files(directory, layers, heads).write(name, [(layer, -layer) for layer in cut], "float32")


@pytest.fixture
def lent(tmp_path):
    """A machine that has the first two layers, and lends them."""
    store(tmp_path / "there", (0, 2))
    server = DiskBlockServer(tmp_path / "there" / "space", Lending(KEY, "127.0.0.1"))
    yield server
    server.close()


@pytest.fixture
def borrower(tmp_path, lent):
    """One that has the others, in two parts, and needs all."""
    for heads in ((0, 2), (2, 6)):
        store(tmp_path / "here", (2, 4), heads)
    mine = files(tmp_path / "here", (0, 4))
    assert mine.names() == []
    mine.use_remote_stores(RemoteStores(KEY, [lent.endpoint]))
    yield mine
    mine.close()


def test_what_is_missing_is_brought_and_kept(borrower, tmp_path, lent):
    borrower.survey()
    assert borrower.names() == [NAME]
    for _ in range(2):
        found, _, nbytes = borrower.read(NAME)
        assert nbytes == 2 * KEYS.nbytes
        assert np.array_equal(np.stack([keys for keys, _ in found]), KEYS)
        assert np.array_equal(np.stack([values for _, values in found]), -KEYS)
        lent.close()  # the second time nobody is asked
    here = sorted((tmp_path / "here" / "space").glob("*.kv"))
    assert len(here) == 3 and all(path.stat().st_mode & 0o077 == 0 for path in here)
    assert files(tmp_path / "here", (0, 4)).names() == [NAME]


@pytest.mark.parametrize("fault", ["flipped", "torn", "gone", "silent", "longer"])
def test_what_is_damaged_or_gone_there_is_not_used(borrower, tmp_path, lent, fault):
    borrower.survey()
    [path] = (tmp_path / "there" / "space").glob("*.kv")
    data = bytearray(path.read_bytes())
    if fault == "flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif fault == "torn":
        path.write_bytes(data[:-9])
    elif fault == "longer":
        path.write_bytes(data + b"123")
    elif fault == "gone":
        path.unlink()
    else:
        lent.close()
        borrower._remote_stores._clients[lent.endpoint]._patience = 1.0
    if fault == "longer":  # what was lent when it was listed is whole
        assert len(borrower.read(NAME)[0]) == 4
        return
    with pytest.raises(Unusable):
        borrower.read(NAME)
    assert borrower.names() == []
    assert len(list((tmp_path / "here" / "space").glob("*.kv"))) == 2


def test_nobody_without_the_keys_gets_anything(lent, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "PATIENCE_S", 1.0)
    stranger = RemoteStores(ClusterKeys.generate(), [lent.endpoint])
    assert stranger.look() == []
    stranger.close()


@contextmanager
def liar(reply):
    """A lender with the right keys that sends what `reply` makes of each question, again and again."""
    context = zmq.Context()
    guard = Authenticator(context, KEY)
    socket = context.socket(zmq.ROUTER)
    KEY.secure_bind(socket)
    port, stop = socket.bind_to_random_port("tcp://127.0.0.1"), threading.Event()

    def run():
        asked = {}
        while not stop.is_set():
            if socket.poll(10):
                identity, question = socket.recv_multipart()
                asked[identity] = msgspec.msgpack.decode(question, type=BlobRequest)
            for identity, question in asked.items():
                socket.send_multipart([identity, *reply(question)])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        stop.set()
        thread.join()
        socket.close(linger=0)
        guard.stop()
        context.term()


@pytest.mark.parametrize("lie", ["chatter", "garbage", "names", "sizes", "contents"])
def test_a_lender_that_lies_is_a_miss(tmp_path, monkeypatch, lie):
    if lie == "chatter":  # the others are found out by what they say
        monkeypatch.setattr(remote, "PATIENCE_S", 1.0)
    store(tmp_path / "there", (0, 4))
    [real] = (tmp_path / "there" / "space").glob("*.kv")
    size = {"sizes": -5, "contents": 100}.get(lie, 1 << 20)
    name = f"../../{real.name}" if lie == "names" else real.name

    def reply(question):
        if lie == "garbage":
            return [b"\xc1", b"x"]
        if isinstance(question, ReadRange):
            data = b"x" * question.range.length
            return [msgspec.msgpack.encode(Chunk(question.number, checksum(data))), data]
        number = question.number + (1000 if lie == "chatter" else 0)
        return [msgspec.msgpack.encode(FileList(number, [BlobFile(name, size, 0, "")]))]

    with liar(reply) as endpoint:
        mine = files(tmp_path / "here", (0, 4))
        mine.use_remote_stores(RemoteStores(KEY, [endpoint]))
        mine.survey()
        assert mine.names() == mine.lent() == ([NAME] if lie in ("sizes", "contents") else [])
        with pytest.raises(Unusable):
            mine.read(NAME)
        assert mine.names() == []
        mine.close()
    assert not list((tmp_path / "here").rglob("*.kv"))


def test_who_does_not_answer_is_left_alone_and_who_is_named_no_more_is_forgotten(borrower, lent, monkeypatch):
    monkeypatch.setattr(remote, "PATIENCE_S", 2.0)
    silent = socket.create_server(("127.0.0.1", 0))  # accepts, and says nothing
    mute = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
    machines = RemoteStores(KEY, [mute])
    machines.change([mute, lent.endpoint])  # it is asked first
    borrower.close()
    borrower.use_remote_stores(machines)
    borrower.survey()
    assert borrower.names() == borrower.lent() == [NAME]
    silent.close()
    asked = []
    monkeypatch.setattr(BlobClient, "ask", lambda client, stems: asked.append(stems) or 0)
    monkeypatch.setattr(BlobClient, "listed", lambda *_: [])
    machines.change([mute, lent.endpoint])
    borrower.survey(wanted=[OTHER])
    assert asked == [{OTHER.hex()}], "the other one is left alone"
    assert borrower.names() == [NAME], "what was seen before and not looked for now is there still"
    machines.change([])
    borrower.survey(wanted=[NAME])
    assert len(asked) == 1
    with pytest.raises(Unusable):
        borrower.read(NAME)


def test_only_disk_blocks_are_lent(lent, tmp_path):
    space = tmp_path / "there" / "space"
    (space / "0-1.kv").mkdir()
    (tmp_path / "secret.kv").write_bytes(b"secret")
    (space / ".half.kv").write_bytes(b"x")
    (space / "model").write_bytes(b"x")
    os.symlink(tmp_path / "secret.kv", space / "link.kv")
    os.mkfifo(space / "pipe.kv")
    (space / os.fsdecode(b"\xff.kv")).write_bytes(b"x")  # no text: it cannot even be listed
    friend = RemoteStores(KEY, [lent.endpoint])
    for stems in ({OTHER.hex(), "0-1", "link", "pipe"}, {NAME.hex()}, None):
        found = [name for name, _ in friend.look(stems)]
        assert found == ([] if stems and NAME.hex() not in stems else [f"{NAME.hex()}.0-2.0-6.kv"])
    with pytest.raises(TransportError, match="has changed"):
        lent.chunk(Range(f"{NAME.hex()}.0-2.0-6.kv", 2**63, 1))
    assert friend.look({NAME.hex(), *(f"{i:032x}" for i in range(10_000))})  # those of a prompt of 640,000 tokens
    (space / f"{NAME.hex()}.0-2.0-6.kv").unlink()
    assert not friend.look({NAME.hex()})
    friend.close()
    for name in ("../../secret.kv", "link.kv", "pipe.kv", "0-1.kv", ".half.kv", "model", str(tmp_path / "secret.kv"), "a\0.kv"):
        with pytest.raises((TransportError, OSError)):
            lent.chunk(Range(name, 0, 1))


def test_a_disk_that_takes_nothing_serves_all_the_same(borrower, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    borrower.survey()
    monkeypatch.setattr("tandem.kv.files.os.replace", full)
    assert len(borrower.read(NAME)[0]) == 4
