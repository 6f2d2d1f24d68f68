"""A client that sends what is costly to read disturbs nobody: the api answers others meanwhile, and streams go on."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from pydantic import ValidationError

from tandem.config.settings import ModelSettings
from tandem.processes.sandbox import MODULE
from tandem.server.anthropic.schemas import MessagesRequest
from tandem.server.chats.prompt import plain_messages
from tandem.server.openai.schemas import ChatRequest, DetokenizeRequest
from tandem.server.responses.schemas import ResponsesRequest
from tandem.server.responses.translate import chat_request

SCHEMAS = {
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/detokenize": DetokenizeRequest,
}
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
COSTLY = """{%- for i in range(40000) %}{% set x = i %}{% endfor -%}
{{ messages[0]['content'] }}"""
"""A template that takes 40,000 steps whatever it is given."""


def workers():
    found = []
    for one in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            found += [one] if MODULE in one.cmdline() else []
    return found


class Watch:
    """Others, while a request is worked on: a running stream, and /health asked again and again."""

    def __init__(self, server):
        self._server = server
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._look), threading.Thread(target=self._read)]
        self.chunks, self.answers, self.first = [], [], threading.Event()

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        assert self.first.wait(240)
        return self

    def __exit__(self, *exc):
        self._over.set()
        for thread in self._threads:
            thread.join(240)

    def _look(self):
        with httpx.Client(base_url=self._server.url, timeout=240, trust_env=False) as client:
            while not self._over.is_set():
                client.get("/health")
                self.answers.append(time.monotonic())
                time.sleep(0.01)

    def _read(self):
        body = {"messages": HELLO, "stream": True, "max_tokens": 20_000, "ignore_eos": True}
        with (
            httpx.Client(base_url=self._server.url, timeout=240, trust_env=False) as client,
            client.stream("POST", CHAT, json=body) as stream,
        ):
            for _ in stream.iter_raw():
                self.chunks.append(time.monotonic())
                if len(self.chunks) > 20:
                    self.first.set()
                if self._over.is_set():
                    return

    def longest_pauses(self, begin, end):
        """Of the stream and of /health between two times."""
        return [
            max(b - a for a, b in zip([begin, *inside], [*inside, end], strict=True))
            for times in (self.chunks, self.answers)
            for inside in [[t for t in times if begin < t < end]]
        ]


@pytest.fixture
def calm(serve, engine):
    engine.delay = 0.02
    engine.set_status(max_context=40_000)
    server = serve()
    post(server, CHAT, json.dumps({"messages": HELLO + [{"role": "user", "content": "x" * 300_000}]}).encode())
    assert len(workers()) == 1, "the worker process is there, so that nobody waits for its start"
    return server


def post(server, path, body):
    """Sent by another process, whose own work holds up nobody here; the answer, and when it was sent and answered."""
    connection = server.raw(
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n" % (path.encode(), len(body))
    )
    with connection:
        connection.settimeout(120)
        connection.sendall(body)
        begin, answer = time.monotonic(), b""
        while data := connection.recv(65536):
            answer += data
    head, _, text = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(text), begin, time.monotonic()


HEAVY = {
    "a million mistakes": (CHAT, b'{"messages":[' + b"[1]," * 2_500_000 + b"1]}", "holds too much"),
    "token ids": ("/v1/completions", b'{"prompt":[' + b"1," * 9_000_000 + b"1]}", "holds too much"),
    "a long prompt": (CHAT, json.dumps({"messages": [{"role": "user", "content": "a b " * 120_000}]}).encode(), "at least"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HEAVY)
def test_a_heavy_body_is_refused_and_holds_up_nobody(calm, name):
    path, body, words = HEAVY[name]
    with Watch(calm) as watch:
        status, answer, begin, end = post(calm, path, body)
        time.sleep(0.1)
    assert status == 400
    assert words in answer["error"]["message"]
    stream, health = watch.longest_pauses(begin, end)
    # On a machine that is loaded all of this takes longer; with the work in the api they would take as long as it.
    assert max(stream, health) < max((end - begin) / 2, 2.0), (stream, health, end - begin)


def pieces(kind, count):
    """A conversation of `count` pieces that stand together, and what makes messages of them."""
    if kind == "system messages":
        fields = ResponsesRequest.model_validate({"input": [{"role": "system", "content": "a" * 9000}] * count})
        return lambda: chat_request(fields)
    if kind == "answers":
        answer = {"role": "assistant", "content": [{"type": "output_text", "text": "a" * 9000}]}
        fields = ResponsesRequest.model_validate({"input": [answer] * count})
        return lambda: chat_request(fields)
    return lambda: plain_messages([{"role": "tool", "tool_call_id": "1", "content": "a" * 9000}] * count, [])


@pytest.mark.parametrize("kind", ["system messages", "answers", "results of tools"])
def test_many_pieces_of_one_message_cost_no_more_than_their_length(kind):
    work = pieces(kind, 4000)
    begin = time.thread_time()
    work()
    spent = time.thread_time() - begin
    assert spent < 2.5, "36 MB once take 0.05 s of the processor; joined to all before again and again, 72 GB"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a " * 100_000}]}, "messages"),
        ("/v1/completions", {"prompt": "a " * 100_000}, "prompt"),
        ("/v1/embeddings", {"input": ["x", "a " * 100_000]}, "input"),
        ("/v1/responses", {"input": "a " * 100_000}, "input"),
        ("/tokenize", {"prompt": "a " * 100_000}, "prompt"),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": "a " * 100_000}]}, None),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(server, monkeypatch, path, body, param):
    monkeypatch.setattr("tandem.text.fast.FastBackend.encode", lambda *_: pytest.fail("it was tokenised"))
    response = server.http.post(path, json=body)
    assert response.status_code == 400
    if param is None:
        assert response.json()["error"]["message"] == "prompt is too long: 257 tokens > 256 maximum"
    else:
        assert "more than 256 tokens" in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == param
        assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.slow
def test_a_large_request_that_fits_is_answered_as_ever(calm, engine):
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": "b" * 300})}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "e t " * 4000},
    ]
    small = calm.chat(messages=messages, user="x")
    engine_prompt = engine.last.prompt
    large = calm.chat(messages=messages, user="x" * 300_000)
    assert (small.status_code, large.status_code) == (200, 200)
    assert engine.last.prompt == engine_prompt
    number = {"type": "integer", "maximum": 10**30, "description": "x" * 9000}
    large_schema = {"type": "object", "properties": {"a": number}}
    assert calm.chat(guided_json=large_schema).status_code == 200
    tool = {"type": "function", "function": {"name": "f", "parameters": large_schema}}
    assert calm.chat(tools=[tool], tool_choice="required", user="x" * 300_000).status_code == 200


@pytest.mark.slow
def test_work_for_a_client_who_leaves_ends_with_its_process(calm, wait_until, monkeypatch):
    [before] = workers()
    before.suspend()  # it works on, as far as the api can tell
    body = b'{"messages":[' + b"[1]," * 200_000 + b"1]}"
    connection = calm.raw(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body)))
    connection.sendall(body)
    wait_until(lambda: calm.api.workers._busy)
    assert before.is_running()
    connection.close()
    wait_until(lambda: not before.is_running())
    assert post(calm, CHAT, body)[0] == 400


@pytest.mark.slow
def test_a_costly_template_is_rendered_elsewhere(serve, engine, tmp_path: Path):
    (tmp_path / "costly.jinja").write_text(COSTLY)
    server = serve(model=ModelSettings(model="org/tiny", served_name=("tiny",), chat_template=str(tmp_path / "costly.jinja")))
    assert server.chat().status_code == 200
    assert engine.last.prompt == engine.tokenizer.encode("hi", False)
    assert len(workers()) == 1


def test_what_is_refused_counts_as_a_request(serve):
    server = serve(requests_per_minute=6)
    bad = [
        (CHAT, {"messages": 5}),
        (CHAT, {}),
        ("/tokenize", {"prompt": "x"}),
        ("/v1/completions", {"prompt": []}),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": HELLO}),
    ]
    left = [server.http.post(path, json=body).headers["x-ratelimit-remaining-requests"] for path, body in bad]
    assert left == ["5", "4", "3", "2", "1"]
    server.http.get("/v1/plan", params={"hosts": ["a=1GB"] * 9})
    last = server.http.post(CHAT, content=b"{")
    assert last.status_code == 429, "before anything is made of the body"
    assert server.http.get("/v1/plan", params={"hosts": "a=1GB"}).status_code == 429


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {"messages": [[1]] * 20_000}, "messages[0]"),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 8193}, "8192"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 4097}]}, "4096 content parts"),
        (CHAT, {"messages": [{"role": "user", **{f"f{i}": 1 for i in range(5000)}}]}, "64 fields"),
        (CHAT, {"messages": HELLO, **{f"f{i}": 1 for i in range(5000)}}, "Unknown parameter"),
        (CHAT, {"messages": HELLO, "logit_bias": {str(i): "x" for i in range(5000)}}, "1024 entries"),
        (CHAT, {"messages": HELLO, "stop": [1] * 17}, "16 stop strings"),
        (CHAT, {"messages": HELLO, "stop_token_ids": [1.5] * 5000}, "stop_token_ids[0]"),
        (CHAT, {"messages": HELLO, "tools": [1] * 5000}, "tools[0]"),
        (CHAT, {"messages": HELLO, "guided_choice": [1] * 5000}, "guided_choice[0]"),
        ("/v1/responses", {"input": [1] * 5000}, "input[0]"),
        ("/v1/responses", {"input": "x", "metadata": {str(i): 1 for i in range(5000)}}, "64 entries"),
        ("/v1/messages", {"model": "tiny", "max_tokens": 1, "messages": [1] * 5000}, "messages[0]"),
        ("/detokenize", {"tokens": ["x"] * 5000}, "tokens[0]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_thousands_of_mistakes_are_told_as_one(shared, path, body, words):
    response = shared.http.post(path, json=body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"], response.text
    with pytest.raises(ValidationError) as caught:
        SCHEMAS[path].model_validate(body)
    assert caught.value.error_count() < 100, "each of them would be built"
