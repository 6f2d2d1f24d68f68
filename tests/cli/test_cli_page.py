"""`tandem agent --page` against hostile and unlucky requests; tests/e2e has the page itself."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

from tandem.checkpoints.stored import DEMO, demo_path, hub_dir, in_use_by_us
from tandem.cli.hosts import page


class Page:
    """A page in this process."""

    def __init__(self) -> None:
        address = page.start_page("here", 0)
        self.port, self.key = int(address.split(":")[2].split("/")[0]), address.partition("key=")[2]

    def send(self, first: str, body: str = "", **headers: str) -> str:
        """Return all answers to a request; the connection stays open for others."""
        sent = {"Host": f"127.0.0.1:{self.port}", "X_Page_Key": self.key, "Content_Length": str(len(body)), **headers}
        text, answers = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in sent.items()), b""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(f"{first} HTTP/1.1\r\n{text}\r\n{body}".encode())
            connection.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):  # it was closed before all of the body was read
                while data := connection.recv(2**16):
                    answers += data
        return answers.decode()

    def act(self, action: str, **body: object) -> dict:
        """Return the answer to an action of the page."""
        head, _, text = self.send(f"POST /v1/agent/{action}", json.dumps(body)).partition("\r\n\r\n")
        return {"status": int(head.split()[1]), "body": json.loads(text)}


@pytest.fixture(scope="module")
def there() -> Page:
    return Page()


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"Origin": "http://evil.example"}, 403), ({"Transfer_Encoding": "chunked"}, 413), ({"Content_Length": "99999999999"}, 413)],
)
def test_what_is_left_of_a_refused_body_is_no_request(there, headers, status):
    inner = f"GET /ui HTTP/1.1\r\nHost: 127.0.0.1:{there.port}\r\n\r\n"
    answer = there.send("POST /v1/chat/completions", inner, **headers)
    assert answer.startswith(f"HTTP/1.1 {status} ") and answer.count("HTTP/1.1") == 1 and "connection: close" in answer


@pytest.mark.parametrize("model", ["x" * 200_000, "a\0b", "-rf", ""])
def test_a_name_that_can_be_none_is_refused_in_words(there, model):
    answer = there.act("fetch", model=model)
    assert answer["status"] == 400 and "model" in answer["body"]["error"]["message"]


def test_a_deep_body_and_a_path_that_is_no_ascii_are_answered(there, monkeypatch):
    deep = there.send("POST /v1/agent/cancel", '{"x":' + "[" * 200_000 + "]" * 200_000 + "}")
    assert deep.startswith("HTTP/1.1 400 ")
    server = SimpleNamespace(runs=lambda: True, record=lambda: SimpleNamespace(port=9))
    monkeypatch.setattr(page, "Background", lambda _: server)
    assert there.send("GET /v1/models/ü").startswith("HTTP/1.1 503 ")


def test_a_model_that_is_fetched_by_many_at_once_is_fetched_once(there, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    begun = []

    class Fetch:
        def __init__(self, model: str) -> None:
            begun.append(model)
            time.sleep(0.1)  # as a process takes to start
            self.process = SimpleNamespace(poll=lambda: None, terminate=lambda: None, wait=lambda: None)

    monkeypatch.setattr(page, "_Fetch", Fetch)
    threads = [threading.Thread(target=there.act, args=("fetch",), kwargs={"model": "org/*"}) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert begun == ["org/*"]
    part = hub_dir() / "models--org--other" / "blobs" / "0.incomplete"
    part.parent.mkdir(parents=True)
    part.touch()
    assert there.act("cancel", model="org/*")["status"] == 200 and part.exists(), "parts of another model stay"
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    left, used = (demo_path().with_name(f".{DEMO}-{one}") for one in "ab")
    left.mkdir(parents=True)
    used.mkdir()
    descriptor = in_use_by_us(used)
    there.act("fetch", model="demo")
    assert there.act("cancel", model="demo")["status"] == 200
    os.close(descriptor)
    assert not left.exists() and used.exists(), "what another process makes stays"


def test_a_download_ends_with_the_page():
    script = """if True:
        import atexit
        from tandem.cli.hosts import page
        atexit.register(lambda: print(fetch.process.wait()))  # last
        fetch = page._Fetch("org/none")
    """
    nowhere = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=nowhere)
    assert done.stdout == f"{-signal.SIGKILL}\n", done
