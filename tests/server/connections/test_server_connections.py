from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import socket
import time

import h11
import httpx
import pytest

from tandem.server.connections import acceptor, connection
from tandem.server.connections.acceptor import Acceptor, most_connections
from tandem.server.quotas import group_of

PATIENCE_S = 120.0


@pytest.fixture
def hurried(monkeypatch):
    """Clients get little time."""
    monkeypatch.setattr(connection, "HEAD_S", 0.5)
    monkeypatch.setattr(connection, "LINGER_S", 0.3)
    monkeypatch.setattr(connection, "STALL_S", 0.5)


def everything(client):
    """What the server still says until it closes the connection, which it must do."""
    client.settimeout(PATIENCE_S)
    answer = b""
    with client, contextlib.suppress(ConnectionError):
        while data := client.recv(65536):
            answer += data
    return answer


def answer(client, end=b'{"status":"alive"}'):
    """One answer, which stays open."""
    client.settimeout(PATIENCE_S)
    got = b""
    while not got.endswith(end) and (data := client.recv(65536)):
        got += data
    return got


def drip(client, pieces):
    """Send piece after piece until the server has had enough; True when it has."""
    deadline = time.monotonic() + PATIENCE_S
    client.settimeout(0.1)
    for piece in pieces:
        assert time.monotonic() < deadline, "the server lets it go on for ever"
        try:
            client.sendall(piece)
            said = client.recv(65536, socket.MSG_PEEK)
        except TimeoutError:
            continue
        except ConnectionError:
            return True
        if not said or said.startswith(b"HTTP/1.1 408"):
            return True
    return False


def error_of(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.usefixtures("hurried")
def test_a_client_that_sends_nothing_is_let_go(shared):
    assert everything(shared.raw(b"")) == b""


@pytest.mark.usefixtures("hurried")
def test_a_client_that_sends_half_a_header_hears_that_it_was_too_slow(shared):
    status, error = error_of(everything(shared.raw(b"GET /health HTTP/1.1\r\nHost: ")))
    assert (status, error["code"]) == (408, "request_timeout")


@pytest.mark.usefixtures("hurried")
def test_a_header_that_comes_byte_by_byte_gains_no_time(shared):
    with shared.raw(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: ") as client:
        assert drip(client, iter(lambda: b"a", None))


@pytest.mark.usefixtures("hurried")
def test_the_second_request_of_a_connection_has_its_time_too(shared):
    with shared.raw(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n") as client:
        assert answer(client).startswith(b"HTTP/1.1 200")
        assert drip(client, iter(lambda: b"G", None))


@pytest.mark.usefixtures("hurried")
def test_a_connection_between_two_requests_is_kept(shared):
    with shared.raw(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n") as client:
        assert answer(client).startswith(b"HTTP/1.1 200")
        time.sleep(1.2)  # several looks
        client.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer(client).startswith(b"HTTP/1.1 200")


@pytest.mark.usefixtures("hurried")
def test_a_body_that_nobody_waits_for_cannot_hold_the_connection(shared):
    head = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
    with shared.raw(head) as client:
        assert answer(client, b"}").startswith(b"HTTP/1.1 404")
        assert drip(client, iter(lambda: b"a", None))


@pytest.mark.usefixtures("hurried")
def test_a_client_that_reads_nothing_is_given_up(shared):
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(shared.address)
        client.setblocking(False)
        with contextlib.suppress(BlockingIOError):  # by then it does not read our requests any more either
            while True:
                client.send(b"GET /ui/purify.js HTTP/1.1\r\nHost: x\r\n\r\n" * 50)
        own = client.getsockname()
        deadline = time.monotonic() + PATIENCE_S
        while any(one.client == own for one in list(shared.server.server_state.connections)):
            assert time.monotonic() < deadline, "it is still there"
            time.sleep(0.05)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: " + b"a" * 300_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * 15_000 + b"\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n",
        b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\nzz\r\n",
        b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET http:///health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://me@x/health HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_what_is_not_http_is_told_so_in_the_shape_of_all_errors_and_logged_nowhere(shared, caplog, sent):
    status, error = error_of(everything(shared.raw(sent)))
    assert status in (400, 413, 431)
    assert error["code"] == "invalid_http"
    assert error["message"].startswith("Invalid HTTP request received: ")
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("piece", [1460, 100_000])
@pytest.mark.parametrize("size", [connection.MOST_HEADER, connection.MOST_HEADER + 1])
def test_a_header_of_64_kib_is_taken_and_a_longer_one_refused_however_it_is_cut(shared, size, piece):
    frame = b"GET /health/live HTTP/1.1\r\nHost: x\r\nX-Long: %s\r\n\r\n"
    header = frame % (b"a" * (size - len(frame) + 2))
    assert len(header) == size
    with shared.raw(b"") as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionError):
            for start in range(0, size, piece):
                client.sendall(header[start : start + piece])
        if size > connection.MOST_HEADER:
            assert error_of(everything(client))[0] == 431
        else:
            assert answer(client).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://127.0.0.1/health/live?a=http://b/", b"200"),
        (b"HTTP://localhost:1/health/live", b"200"),
        (b"http://127.0.0.1", b"200"),
        (b"http://localhost?a", b"200"),
        (b"http://foreign.example/v1/models", b"403"),
    ],
)
def test_a_target_in_absolute_form_is_taken_and_its_host_counts(shared, target, status):
    with shared.raw(b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n" % target) as client:
        assert everything(client).split()[1] == status


def test_a_body_in_chunks_of_a_byte_is_read_in_slices(shared, monkeypatch):
    """Bytes of which each costs a lot are not all read before the event loop does anything else."""
    read, lines = h11.Connection.receive_data, []
    monkeypatch.setattr(h11.Connection, "receive_data", lambda self, data: (lines.append(data.count(b"\n")), read(self, data))[1])
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b'{"prompt": "a"' + b" " * 20_000 + b"}"
    with shared.raw(head + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n") as client:
        assert b'"count":' in answer(client, b"}")
    assert sum(lines) >= 2 * len(body)
    assert max(lines) <= connection.MOST_LINES


def test_a_chunk_that_is_broken_after_the_answer_ends_the_connection_without_a_word(shared, caplog):
    with shared.raw(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n") as client:
        assert answer(client, b"}").startswith(b"HTTP/1.1 404")
        client.sendall(b"nonsense\r\n")
        assert b"HTTP" not in everything(client)
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []


BODY = b'{"prompt":"a"}'
ASK = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
LOOK = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def fill(engine, wait_until):
    """Open connections whose requests the engine holds, one after the other."""
    opened = []
    engine.hold = True

    def start(server, count):
        for _ in range(count):
            before = len(engine.submitted)
            opened.append(server.raw(ASK % (len(BODY), BODY)))
            wait_until(lambda before=before: len(engine.submitted) > before)
        return opened

    yield start
    for one in opened:
        one.close()


def test_an_address_gets_so_many_connections_and_hears_why_not_more(serve, engine, fill):
    server = serve(max_connections_per_address=3)
    server.http.close()
    busy = fill(server, 3)
    status, error = error_of(everything(server.raw(LOOK)))
    assert (status, error["code"]) == (429, "too_many_connections")
    assert "--max-connections-per-address" in error["message"]
    engine.hold = False
    assert all(one.recv(12) == b"HTTP/1.1 200" for one in busy)
    with server.raw(LOOK) as client:
        assert answer(client).startswith(b"HTTP/1.1 200"), "those that are idle now make room"


def test_when_all_places_are_taken_idle_connections_make_room_first(serve, engine, fill):
    server = serve(max_connections=4, max_connections_per_address=100)
    server.http.close()
    idle = [server.raw(b"") for _ in range(2)]
    busy = fill(server, 4)
    assert [everything(one) for one in idle] == [b"", b""]
    status, error = error_of(everything(server.raw(LOOK)))
    assert (status, error["code"]) == (503, "too_many_connections")
    engine.hold = False
    assert all(one.recv(12) == b"HTTP/1.1 200" for one in busy)


def test_a_flood_of_idle_connections_shuts_out_nobody(serve, wait_until):
    server = serve(max_connections=20, max_connections_per_address=10)
    server.http.close()
    flood = [server.raw(b"") for _ in range(60)]
    with server.raw(LOOK) as client:
        assert answer(client).startswith(b"HTTP/1.1 200")
    for one in flood:
        one.close()
    [door] = server.server._acceptors
    wait_until(lambda: not door.slots.open.total() and not any(door.slots.idle.values()))


class Starved:
    """A listening socket whose process has no descriptor left, as long as `short` says so."""

    def __init__(self, listener):
        self.listener, self.short, self.tries = listener, True, 0

    def accept(self):
        self.tries += 1
        if self.short:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self.listener.accept()

    def __getattr__(self, name):
        return getattr(self.listener, name)


def test_without_descriptors_accepting_pauses_with_one_line_and_goes_on(caplog, monkeypatch):
    monkeypatch.setattr(acceptor, "PAUSE_S", 0.02)
    admitted = []

    async def scene():
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
            starved = Starved(listener)
            door = Acceptor(starved, None, most=10, most_each=10, tls=lambda: None)
            monkeypatch.setattr(door, "_admit", lambda client, group: admitted.append((client.close(), group)))
            door.start()
            await asyncio.sleep(0.3)
            tries, starved.short = starved.tries, False
            while not admitted:
                await asyncio.sleep(0.01)
            door.stop()
            return tries

    tries = asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))
    assert 1 <= tries <= 16, "one try for each pause"
    assert admitted == [(None, "127.0.0.1")]
    [line] = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert "Too many open files" in line
    assert "ulimit -n" in line


def test_the_limit_of_connections_leaves_descriptors_for_the_server_itself(monkeypatch):
    monkeypatch.setattr(acceptor.resource, "getrlimit", lambda _: (1024, 4096))
    assert most_connections(None) == 1024 - acceptor.RESERVE
    assert most_connections(100) == 100
    assert most_connections(10**6) == 1024 - acceptor.RESERVE
    monkeypatch.setattr(acceptor.resource, "getrlimit", lambda _: (64, 64))
    assert most_connections(None) == 32


def test_a_network_of_ipv6_counts_as_one_client():
    assert group_of("192.0.2.1") != group_of("192.0.2.2")
    assert group_of("2001:db8::1") == group_of("2001:db8::ffff:2") != group_of("2001:db8:0:1::1")
    assert group_of("fe80::1%lo0") == group_of("fe80::2")
    assert group_of("::ffff:192.0.2.1") == group_of("192.0.2.1") != group_of("::ffff:192.0.2.2")
    assert group_of("unix:") == "unix:"


def test_a_lost_connection_gives_its_place_back(serve, wait_until):
    server = serve(max_connections_per_address=8)
    for _ in range(40):
        with httpx.Client(base_url=server.url, trust_env=False) as client:
            assert client.get("/health/live").status_code == 200
    server.http.close()
    [door] = server.server._acceptors
    wait_until(lambda: not door.slots.open.total() and not any(door.slots.idle.values()))


def test_an_api_that_leaves_to_its_successor_serves_what_was_about_to_be_asked(serve, wait_until):
    server = serve()
    server.http.close()
    [door] = server.server._acceptors
    wait_until(lambda: not door.slots.open.total())
    client = server.raw(b"")
    wait_until(door.slots.open.total)
    for idle in door.slots.idle.values():
        idle.update({slot: since - 2 for slot, since in idle.items()})  # it is slow
    server.server.retire(10, None)
    wait_until(lambda: server.server._retired)
    client.sendall(LOOK)
    answered = everything(client)
    assert answered.startswith(b"HTTP/1.1 200") and b"connection: close" in answered.lower()
