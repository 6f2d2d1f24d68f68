"""`tandem serve --journal` killed as a whole, engine and api together, in the middle of requests."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from openai import OpenAI

import served
from served import TLS, api_of, wait_until
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow
BODY = {"prompt": "go on", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


@contextmanager
def serving(model: Path, journal: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A server's address and the process that started the others."""
    with served.serving(model, "-pp", "2", "--journal", journal) as server:
        yield server.url, psutil.Process(server.process.pid)


def kill(server: psutil.Process) -> None:
    """End all of its processes at once."""
    everybody = [*server.children(recursive=True), server]
    for one in everybody:
        one.send_signal(signal.SIGSTOP)  # so that none sees another go
    for one in everybody:
        one.kill()
    psutil.wait_procs(everybody, timeout=240)


def test_what_was_accepted_is_answered_after_everything_was_killed(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    journal = tmp_path / "journal"

    def post(url: str, temperature: float = 0.0, **headers: str) -> httpx.Response:
        body = {**BODY, "temperature": temperature}
        return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=240)

    def drawn(url: str, key: str) -> httpx.Response:
        return post(url, 1.0, **{"idempotency-key": key})

    with serving(model, journal) as (url, server):
        undisturbed = post(url, **{"idempotency-key": "before"})
        unkept, seen = without_room(url, server, drawn)
        waiting = threading.Thread(target=lambda: _maybe_lost(lambda: post(url, **{"idempotency-key": "waiting"})))
        waiting.start()
        name = post(url, prefer="respond-async").json()["id"]
        wait_until(lambda: _status(url, "waiting") is not None)
        with asking(url) as client, client.responses.create(input="hi", background=True, stream=True) as stream:
            begun = [event.model_dump() for event in itertools.islice(stream, 6)]
        kill(server)
        waiting.join(240)
    with open(journal / "journal.db-wal", "ab") as file:
        file.write(os.urandom(100))
    with serving(model, journal) as (url, _):
        assert post(url, **{"idempotency-key": "before"}).content == undisturbed.content
        assert drawn(url, unkept).json()["choices"] == seen.json()["choices"], "though its answer was on no disk"
        again = post(url, **{"idempotency-key": "waiting"})
        assert again.headers["idempotent-replayed"] == "true"
        wait_until(lambda: _status(url, name) == "completed")
        fetched = httpx.get(f"{url}/v1/requests/{name}", timeout=240).json()["response"]
        text = undisturbed.json()["choices"][0]["text"]
        assert again.json()["choices"][0]["text"] == text == fetched["choices"][0]["text"]
        with asking(url) as client:
            events = list(client.responses.retrieve(begun[0]["response"]["id"], stream=True))
        assert [event.model_dump() for event in events[:6]] == begun, "with the same seed, under the same ids"
        assert events[-1].type in ("response.completed", "response.incomplete")


def without_room(url: str, server: psutil.Process, ask: Callable[[str, str], httpx.Response]) -> tuple[str, httpx.Response]:
    """A key and its answer, of a request that was written down while its answer could not be."""
    if not hasattr(psutil, "RLIMIT_FSIZE"):  # macOS cannot limit another process
        return "drawn", ask(url, "drawn")
    api = api_of(server)
    before = api.rlimit(psutil.RLIMIT_FSIZE)
    for key in map("drawn-{}".format, range(10)):  # an answer may be on the disk before the limit is there
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda key=key, answers=answers: answers.append(ask(url, key)))
        thread.start()
        wait_until(lambda key=key: _status(url, key) is not None)
        api.rlimit(psutil.RLIMIT_FSIZE, (10, before[1]))
        thread.join(240)
        api.rlimit(psutil.RLIMIT_FSIZE, before)
        if "tandem_journal_errors_total 0.0" not in httpx.get(f"{url}/metrics", timeout=240).text:
            return key, answers[0]
    raise AssertionError("every answer was written in time")


def asking(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240)


def test_the_death_of_the_api_alone_costs_a_pause(tmp_path: Path) -> None:
    with serving(tiny_model(tmp_path / "model"), tmp_path / "journal") as (url, server):
        no_line_of_a_batch_is_lost_or_answered_twice(url, server)
        accepted = httpx.post(f"{url}/v1/completions", json=BODY, headers={"prefer": "respond-async"}, timeout=240)
        name = accepted.json()["id"]
        api = api_of(server)
        api.kill()
        wait_until(lambda: _status(url, name) == "completed")
        assert not api.is_running()


def no_line_of_a_batch_is_lost_or_answered_twice(url: str, server: psutil.Process) -> None:
    """The api is killed again and again while it works on two batches."""
    body = {"prompt": "go on", "max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    lines = [{"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body} for number in range(60)]
    sent = "\n".join(map(json.dumps, lines)).encode()
    with asking(url) as client:
        file = client.files.create(file=("in.jsonl", sent), purpose="batch")
        begun = [
            client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h") for _ in range(2)
        ]
        kept = client.responses.create(input="hi", store=True, max_output_tokens=4)

    def answered() -> int:
        with asking(url) as client:
            counts = [client.batches.retrieve(batch.id).request_counts for batch in begun]
        return sum(count.completed for count in counts if count is not None)

    before = answered()
    for _ in range(2):
        wait_until(lambda before=before: answered() >= min(before + 10, 120))
        before = answered()
        api_of(server).kill()
        wait_until(lambda: _healthy(url))
    with asking(url) as client:
        for batch in begun:
            wait_until(lambda batch=batch: client.batches.retrieve(batch.id).status == "completed")
            done = client.batches.retrieve(batch.id)
            assert done.request_counts is not None and done.request_counts.completed == 60
            assert done.output_file_id is not None and done.error_file_id is None
            answers = client.files.content(done.output_file_id).text.splitlines()
            ids = [json.loads(line)["custom_id"] for line in answers]
            assert sorted(ids, key=int) == [str(number) for number in range(60)]
        later = client.responses.create(input="and", previous_response_id=kept.id, max_output_tokens=4)
        assert len(list(client.responses.input_items.list(kept.id))) == 1 and later.previous_response_id == kept.id


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready", timeout=240, verify=TLS).status_code == 200
    except httpx.TransportError:
        return False


def _status(url: str, name: str) -> str | None:
    try:
        found = httpx.get(f"{url}/v1/requests/{name}", timeout=240, verify=TLS)
    except httpx.TransportError:
        return None
    return str(found.json()["status"]) if found.status_code == 200 else None


def _maybe_lost(call: Callable[[], object]) -> None:
    """A call that the death of the server may reach before its answer does."""
    with contextlib.suppress(httpx.TransportError):
        call()
