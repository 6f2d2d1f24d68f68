"""Files over the blob server: members get the ranges that they ask for; nothing else gets out, nothing bad gets in."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from tandem.errors import TransportError
from tandem.executors.weight_source import obtain_inputs
from tandem.protocol.blob_messages import BlobAnswer, ListFiles, Range, ReadRange, Refusal
from tandem.protocol.keys import ClusterKeys
from tandem.protocol.pictures import EncodePicture
from tandem.transport.blobs import ATTEMPTS, CHUNK, WINDOW, BlobClient, BlobServer, checksum

CONTENT = {"config.json": b"{}", "empty.txt": b"", "big.safetensors": random.Random(0).randbytes(CHUNK + 12345)}


class Damaging(BlobServer):
    """Sends `wrong` chunks whose bytes are not those of the checksum."""

    wrong = 0
    asked = 0

    def chunk(self, wanted: Range) -> tuple[bytes, bytes]:
        digest, data = super().chunk(wanted)
        self.asked += 1
        if self.wrong:
            self.wrong -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        return digest, data


@pytest.fixture(scope="module")
def keys() -> ClusterKeys:
    return ClusterKeys.generate()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "secret.txt").write_text("secret")
    model = tmp_path / "model"
    model.mkdir()
    for name, data in CONTENT.items():
        (model / name).write_bytes(data)
    (model / "private.key").write_text("not listed")
    return model


@pytest.fixture
def server(directory: Path, keys: ClusterKeys) -> Iterator[Damaging]:
    one = Damaging([directory / name for name in CONTENT], keys)
    yield one
    one.close()
    one.close()


@pytest.fixture
def client(server: BlobServer, keys: ClusterKeys) -> Iterator[BlobClient]:
    one = BlobClient(server.endpoint, keys, patience_s=240.0)
    yield one
    one.close()


def read(client: BlobClient, *ranges: Range) -> list[bytes]:
    found = {index: (bytes(data), digest) for index, data, digest in client.read(ranges)}
    assert sorted(found) == list(range(len(ranges)))
    assert all(checksum(data) == digest for data, digest in found.values())
    return [found[index][0] for index in range(len(ranges))]


def test_the_list_and_any_ranges(client: BlobClient) -> None:
    assert {file.name: file.size for file in client.files()} == {name: len(data) for name, data in CONTENT.items()}
    big = CONTENT["big.safetensors"]
    rng = random.Random(1)
    ranges = [Range("big.safetensors", 0, CHUNK), Range("big.safetensors", CHUNK, 12345), Range("config.json", 0, 2)]
    for _ in range(40):
        start = rng.randrange(len(big))
        ranges.append(Range("big.safetensors", start, rng.randint(1, min(CHUNK, len(big) - start))))
    expected = [CONTENT[one.name][one.offset : one.offset + one.length] for one in ranges]
    assert read(client, *ranges) == expected


def test_samples_tell_files_of_one_size_and_time_apart(tmp_path: Path, keys: ClusterKeys) -> None:
    samples = set()
    for fill in (b"a", b"b"):
        path = tmp_path / fill.decode() / "model.safetensors"
        path.parent.mkdir()
        path.write_bytes(CONTENT["big.safetensors"][:-1] + fill)
        os.utime(path, ns=(0, 0))
        server = BlobServer([path], keys)
        client = BlobClient(server.endpoint, keys, patience_s=240.0)
        samples.add(client.files()[0].sample)
        client.close()
        server.close()
    assert len(samples) == 2


@pytest.mark.parametrize(
    "wanted",
    [
        Range("../secret.txt", 0, 6),
        Range("private.key", 0, 3),
        Range("/etc/hostname", 0, 1),
        Range("", 0, 1),
        Range("model/config.json", 0, 1),
        Range("./config.json", 0, 1),
        Range("config.json\0", 0, 1),
        Range("config.json", -1, 1),
        Range("config.json", 0, 0),
        Range("config.json", 0, -1),
        Range("config.json", 1, 2),
        Range("config.json", 2**62, 1),
        Range("big.safetensors", 0, CHUNK + 1),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused(client: BlobClient, wanted: Range) -> None:
    with pytest.raises(TransportError, match="refuses"):
        read(client, wanted)
    assert read(client, Range("config.json", 0, 2)) == [b"{}"]


def test_a_file_that_changes_is_refused(client: BlobClient, directory: Path) -> None:
    client.files()
    (directory / "config.json").write_bytes(b"[]")
    os.utime(directory / "config.json", ns=(1, 1))
    with pytest.raises(TransportError, match="has changed"):
        read(client, Range("config.json", 0, 2))
    (directory / "config.json").unlink()
    with pytest.raises(TransportError, match="cannot be read"):
        read(client, Range("config.json", 0, 2))


def test_damaged_chunks_are_asked_for_again(client: BlobClient, server: Damaging) -> None:
    server.wrong = ATTEMPTS - 1
    assert read(client, Range("config.json", 0, 2)) == [b"{}"]
    assert server.asked == ATTEMPTS
    server.wrong = ATTEMPTS
    with pytest.raises(TransportError, match=r"json: 2 bytes from 0 on arrived damaged 4 times \(wrong checksum"):
        read(client, Range("config.json", 0, 2))


def test_a_call_that_was_given_up_does_not_disturb_the_next(client: BlobClient) -> None:
    ranges = [Range("big.safetensors", i, 1) for i in range(10)]
    for _ in client.read(ranges):
        break
    assert read(client, *ranges) == [CONTENT["big.safetensors"][i : i + 1] for i in range(10)]


@pytest.mark.parametrize("stranger", ["no keys", "other keys"])
def test_strangers_get_nothing(server: BlobServer, keys: ClusterKeys, stranger: str) -> None:
    other = ClusterKeys.generate()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    if stranger == "other keys":
        ClusterKeys(keys.bind_public, "", other.connect_public, other.connect_secret).secure_connect(socket)
    socket.connect(server.endpoint)
    socket.send(msgspec.msgpack.encode(ListFiles(1)))
    assert not socket.poll(400)
    socket.close()
    context.term()


def test_a_head_that_is_gone_is_an_error(server: BlobServer, keys: ClusterKeys) -> None:
    client = BlobClient(server.endpoint, keys, patience_s=240.0)
    client.files()
    server.close()
    client._patience = 0.3
    with pytest.raises(TransportError, match="has sent nothing for 0 s"):
        read(client, Range("config.json", 0, 2))
    client.close()


def test_garbage_and_greedy_members_harm_nobody(server: BlobServer, client: BlobClient, keys: ClusterKeys) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger, socket.sndhwm, socket.rcvhwm = 0, 0, 1
    keys.secure_connect(socket)
    socket.connect(server.endpoint)
    for frames in ([b""], [b"\xc1garbage"], [b"a", b"b"], [msgspec.msgpack.encode({"type": "Shutdown"})]):
        socket.send_multipart(frames)
    socket.send(msgspec.msgpack.encode(ReadRange(7, Range("nothing", 0, 1))))
    assert socket.poll(240_000)
    answer = msgspec.msgpack.decode(socket.recv(), type=BlobAnswer)
    assert isinstance(answer, Refusal) and answer.number == 7
    for number in range(8 * WINDOW):  # and never reads: what it asked for does not pile up, nor hold up others
        socket.send(msgspec.msgpack.encode(ReadRange(number, Range("big.safetensors", 0, CHUNK))))
    assert read(client, Range("config.json", 0, 2)) == [b"{}"]
    socket.close()
    context.term()


def test_inputs_of_a_picture_arrive_in_parts_or_not_at_all(keys: ClusterKeys) -> None:
    server, inputs = BlobServer((), keys), random.Random(1).randbytes(2 * CHUNK + 7)
    order = EncodePicture("a" * 64, [1], b"", ["b"], server.endpoint, len(inputs))
    try:
        server.data = {order.key: memoryview(inputs)}
        assert obtain_inputs(order, keys) == EncodePicture(order.key, [1], inputs, ["b"], server.endpoint, len(inputs))
        server.data = {"b": memoryview(inputs)}
        with pytest.raises(TransportError, match="is not one of"):
            obtain_inputs(order, keys)
    finally:
        server.close()
