"""Requests that outlive their connection: with an Idempotency-Key, answered later, in the background, and batches."""

from __future__ import annotations

import json
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
from soak_requests import PATIENCE_S, Outcome, Request, outcome_of, read_whole
from soak_tally import Tally

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
"""Those that take an Idempotency-Key."""
AGAIN_S = 0.5
"""Pause before a request that was refused or broken is sent again, and between looks at one that runs."""
ASKED_AGAIN = 40
"""Answers that are asked for again in the end, at most."""
BATCH_LINES = 24


@dataclass(frozen=True)
class Answer:
    """An answer that must come again with the same bytes."""

    request: Request
    key: str
    body: bytes


class Durable:
    """Ways to ask of a server with a journal, and what must hold of the answers in the end."""

    def __init__(self, url: str, work: Sequence[Request], expected: Sequence[dict[str, Any]], tally: Tally) -> None:
        whole = [(one, answer) for one, answer in zip(work, expected, strict=True) if not one.body.get("stream")]
        self._url, self._tally = url, tally
        self._keyed = [(one, answer) for one, answer in whole if one.path in ENDPOINTS]
        self._responses = [(one, answer) for one, answer in whole if one.path == "/v1/responses"]
        self._answers: list[Answer] = []
        self._batches: list[threading.Thread] = []

    # --- ways to ask ---

    def keyed(self, rng: random.Random) -> None:
        """One key until there is an answer, however often the connection breaks; at times without a seed."""
        (request, expected), key = rng.choice(self._keyed), str(uuid.uuid4())
        if unseeded := rng.random() < 0.2 and "temperature" in request.body:
            body = {name: value for name, value in request.body.items() if name != "seed"}
            request = replace(request, body={**body, "temperature": 1.0})
        got = self._insist(request, lambda: self._post(request, {"Idempotency-Key": key}))
        if got is None:
            return
        self._tally.note(Outcome("answered", answer=read_whole(request, got.json())), request, None if unseeded else expected)
        self._answers.append(Answer(request, key, got.content))

    def later(self, rng: random.Random) -> None:
        """Answered 202, and looked for until the answer is there."""
        (request, expected), key = rng.choice(self._keyed), str(uuid.uuid4())
        headers = {"Idempotency-Key": key, "Prefer": "respond-async"}
        accepted = self._insist(request, lambda: self._post(request, headers))
        if accepted is not None:
            stored = self._look(request, f"/v1/requests/{key}", "response") if accepted.status_code == 202 else accepted.json()
            self._compare(request, expected, stored)

    def background(self, rng: random.Random) -> None:
        """A response in the background."""
        request, expected = rng.choice(self._responses)
        body = {name: value for name, value in request.body.items() if name != "store"}
        request = replace(request, body={**body, "background": True})
        accepted = self._insist(request, lambda: self._post(request, {}))
        if accepted is not None:
            self._compare(request, expected, self._look(request, f"/v1/responses/{accepted.json()['id']}", None))

    def begin_batch(self, rng: random.Random) -> None:
        """Have a batch run beside all else, until `settle`."""
        lines = [rng.choice([one for one in self._keyed if one[0].path == "/v1/completions"]) for _ in range(BATCH_LINES)]
        self._batches.append(threading.Thread(target=self._batch, args=(lines,), daemon=True))
        self._batches[-1].start()

    # --- the end ---

    def settle(self) -> None:
        """Wait for batches, and ask again for what was answered: it must come with the same bytes."""
        for thread in self._batches:
            thread.join(2 * PATIENCE_S)
            if thread.is_alive():
                self._tally.blame("hung", request="a batch")
        for answer in self._answers[:ASKED_AGAIN]:
            request, key = answer.request, answer.key
            got = self._insist(request, lambda request=request, key=key: self._post(request, {"Idempotency-Key": key}))
            if got is None:
                continue
            if got.content != answer.body or got.headers.get("idempotent-replayed") != "true":
                self._tally.blame(
                    "twice", request=request.name, key=key, first=answer.body, again=got.content, headers=dict(got.headers)
                )
            else:
                self._tally.confirm()

    # --- how ---

    def _post(self, request: Request, headers: dict[str, str]) -> httpx.Response:
        return httpx.post(self._url + request.path, json=request.body, headers=headers, timeout=PATIENCE_S)

    def _insist(self, request: Request, send: Callable[[], httpx.Response]) -> httpx.Response | None:
        """Send until it is accepted; None, and counted, where it is not refused but fails, or takes too long."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self._tally.begin()
            try:
                got = send()
                if got.status_code in (200, 202):
                    return got
                outcome = outcome_of(got)
            except httpx.TimeoutException:
                outcome = Outcome("hung", request.name)
            except httpx.TransportError as error:
                outcome = Outcome("broken", type(error).__name__)
            self._tally.note(outcome, request, None)
            if outcome.kind in ("failed", "hung"):
                return None
            time.sleep(AGAIN_S)
        self._tally.blame("hung", request=request.name, detail="not accepted")
        return None

    def _look(self, request: Request, path: str, part: str | None) -> Any:
        """Its answer when it is there; None, and counted, where it failed or is not known any more."""
        deadline, seen = time.monotonic() + PATIENCE_S, "nothing"
        while time.monotonic() < deadline:
            time.sleep(AGAIN_S)
            try:
                got = httpx.get(self._url + path, timeout=PATIENCE_S)
            except httpx.TransportError:
                continue
            seen = got.text[:500]
            if got.status_code in (429, 503):
                continue
            status = got.json().get("status") if got.status_code == 200 else str(got.status_code)
            if status in ("completed", "incomplete"):
                return got.json()[part] if part else got.json()
            if status not in ("queued", "in_progress"):
                self._tally.blame("lost", request=request.name, path=path, seen=seen)
                return None
        self._tally.blame("hung", request=request.name, path=path, seen=seen)
        return None

    def _compare(self, request: Request, expected: dict[str, Any], stored: Any) -> None:
        if stored is not None:
            self._tally.note(Outcome("answered", answer=read_whole(request, stored)), request, expected)

    def _batch(self, lines: list[tuple[Request, dict[str, Any]]]) -> None:
        """Upload, run, wait, compare: each line once, with its own answer."""
        text = "".join(
            json.dumps({"custom_id": str(number), "method": "POST", "url": request.path, "body": request.body}) + "\n"
            for number, (request, _) in enumerate(lines)
        )
        upload, create = Request("/v1/files", {}), Request("/v1/batches", {})
        file = self._insist(
            upload,
            lambda: httpx.post(
                f"{self._url}/v1/files",
                data={"purpose": "batch"},
                files={"file": ("in.jsonl", text.encode())},
                timeout=PATIENCE_S,
            ),
        )
        made = file and self._insist(
            create,
            lambda: httpx.post(
                f"{self._url}/v1/batches",
                timeout=PATIENCE_S,
                json={"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"},
            ),
        )
        if not made:
            return
        batch = self._run_of(made.json()["id"])
        content = batch and self._insist(
            create, lambda: httpx.get(f"{self._url}/v1/files/{batch['output_file_id']}/content", timeout=PATIENCE_S)
        )
        if not content:
            return
        found: dict[str, list[Any]] = {}
        for line in content.text.splitlines():
            found.setdefault(json.loads(line)["custom_id"], []).append(json.loads(line)["response"]["body"])
        for number, (request, expected) in enumerate(lines):
            bodies = found.get(str(number), [])
            if len(bodies) != 1:
                self._tally.blame("twice" if bodies else "lost", request=request.name, batch=batch, line=number)
            else:
                self._compare(request, expected, bodies[0])

    def _run_of(self, number: str) -> Any:
        """The batch when it is over."""
        deadline = time.monotonic() + 2 * PATIENCE_S
        batch = None
        while time.monotonic() < deadline:
            time.sleep(1.0)
            try:
                got = httpx.get(f"{self._url}/v1/batches/{number}", timeout=PATIENCE_S)
            except httpx.TransportError:
                continue
            batch = got.json()
            if got.status_code == 200 and batch["status"] == "completed":
                return batch
            if got.status_code not in (200, 429, 503) or batch.get("status") in ("failed", "expired", "cancelled"):
                self._tally.blame("lost", batch=batch)
                return None
        self._tally.blame("hung", batch=batch)
        return None
