from __future__ import annotations

import json
import threading
import time

import httpx
import openai
import pytest

from tandem.config.settings import ModelSettings
from tandem.protocol.adapters import AdapterSpec
from tandem.text.fast import FastBackend

BODY = {"messages": [{"role": "user", "content": "hi"}]}


def post(server, results, **fields):
    """Run a chat request in a thread; the response is appended to `results`."""
    with httpx.Client(base_url=server.url, timeout=240, trust_env=False) as http:
        results.append(http.post("/v1/chat/completions", json={**BODY, **fields}))


def start(server, **fields):
    results = []
    thread = threading.Thread(target=post, args=(server, results), kwargs=fields)
    thread.start()
    return thread, results


def request_bytes(path="/v1/chat/completions", **fields):
    body = json.dumps({**BODY, **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("hold", [True, False])
def test_disconnect_aborts_all_choices(server, engine, wait_until, stream, hold):
    engine.hold, engine.delay = hold, 0.05
    connection = server.raw(request_bytes(stream=stream, n=3, ignore_eos=True))
    wait_until(lambda: len(engine.submitted) == 3)
    if stream and not hold:
        connection.recv(100)
    connection.close()
    wait_until(lambda: engine.aborted == set(engine.submitted))
    wait_until(lambda: not server.api.live)
    engine.hold, engine.delay = False, 0
    assert server.chat().status_code == 200


def test_a_client_that_leaves_after_a_further_request_is_noticed(server, engine, wait_until):
    engine.hold = True
    with server.raw(request_bytes()) as client:
        wait_until(lambda: len(engine.submitted) == 1)
        client.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
    wait_until(lambda: engine.aborted == set(engine.submitted))


def test_heartbeats_while_nothing_comes(serve, engine):
    server = serve(heartbeat_s=0.2)
    engine.hold = True
    with server.http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response:
        seen = ""
        for text in response.iter_text():
            seen += text
            if seen.count(": keep-alive\n\n") >= 3:
                engine.hold = False
            if "[DONE]" in seen:
                break
    assert seen.index('"role":"assistant"') < seen.index(": keep-alive")
    assert '"finish_reason":"stop"' in seen


@pytest.mark.parametrize("stream", [True, False])
def test_refused_with_429(server, engine, stream):
    engine.refusal = (429, "The queue is full.", "queue_full", 7.0)
    response = server.chat(stream=stream)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "7"
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert response.json()["error"]["code"] == "queue_full"
    with server.openai() as client, pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="tiny", messages=BODY["messages"])
    engine.refusal = None
    assert server.chat().status_code == 200


@pytest.mark.parametrize(("status", "code"), [(400, "too_long"), (503, "loading"), (500, "group_killer"), (418, "odd")])
def test_other_refusals_keep_their_status(server, engine, wait_until, status, code):
    engine.refusal = (status, "No.", code, None)
    response = server.chat(n=2)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    wait_until(lambda: not server.api.live)


@pytest.mark.parametrize("stream", [True, False])
def test_timeout(serve, engine, stream, wait_until):
    server = serve(request_timeout=1.5)
    engine.hold = True
    response = server.chat(stream=stream)
    error = {"message": "Request timeout after 1.5s. Server may be overloaded.", "type": "server_error"}
    if stream:
        assert response.status_code == 200
        lines = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        found = json.loads(lines[-2].removeprefix("data: "))["error"]
    else:
        assert response.status_code == 504
        found = response.json()["error"]
    assert found == {**error, "param": None, "code": "request_timeout"}
    wait_until(lambda: engine.aborted == set(engine.submitted))
    assert "after 0.2s" in server.chat(timeout=0.2).json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_engine_dies_and_comes_back(server, engine, stream, wait_until):
    engine.delay = 0.05
    thread, results = start(server, stream=stream, ignore_eos=True)
    wait_until(lambda: any(live.completion_tokens > 3 for live in server.api.live.values()))
    engine.stop()
    thread.join(240)
    assert not thread.is_alive()
    response = results[0]
    if stream:
        assert '"code":"engine_unavailable"' in response.text
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.status_code == 503
    refused = server.chat()
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert server.http.get("/health/ready").status_code == 503
    assert server.http.get("/health/live").status_code == 200
    assert server.http.get("/health").json()["status"] == "unreachable"
    engine.submitted.clear()
    engine.delay = 0
    engine.start()
    server.wait_ready()
    assert engine.submitted == {}
    assert server.chat().status_code == 200


def test_an_adapter_of_the_settings_that_was_unloaded_stays_so_when_the_engine_starts_again(serve, engine, wait_until):
    def call(verb, name, **path):
        assert server.http.post(f"/v1/{verb}_lora_adapter", json={"lora_name": name, **path}).status_code == 200

    def models():
        return {one["id"] for one in server.http.get("/v1/models").json()["data"]}

    def start_again():
        engine.stop()
        wait_until(lambda: server.http.get("/health/ready").status_code == 503)
        engine.set_status(adapters=[AdapterSpec(1, "sql", "/sql")])  # as the settings say
        engine.start()
        server.wait_ready()

    engine.set_status(adapters=[AdapterSpec(1, "sql", "/sql")])
    server = serve(model=ModelSettings(model="org/tiny", served_name=("tiny",), lora_modules=("sql=/sql",)))
    call("load", "chat", lora_path="/chat")
    assert {one["name"] for one in server.http.get("/api/tags").json()["models"]} == models()
    call("unload", "sql")
    start_again()
    assert models() == {"tiny", "chat"} and server.chat(model="sql").status_code == 404
    wait_until(lambda: [one.name for one in engine.status.adapters] == ["chat"])
    call("load", "sql", lora_path="/sql")
    start_again()
    assert models() == {"tiny", "chat", "sql"} and server.chat(model="sql").status_code == 200


def test_engine_comes_later(serve, engine):
    engine.stop()
    server = serve(ready=False)
    response = server.chat()
    assert response.status_code == 503
    assert "retry-after" in response.headers
    assert server.http.get("/health/ready").status_code == 503
    assert server.http.get("/health").status_code == 503
    assert server.http.get("/v1/models").status_code == 200
    assert server.http.get("/metrics").status_code == 200
    engine.start()
    server.wait_ready()
    assert server.chat().status_code == 200


def test_loading_engine_without_limits_yet(serve, engine, wait_until):
    engine.set_status(state="starting", max_context=0, source="")
    server = serve(ready=False)
    wait_until(lambda: server.http.get("/health").json()["status"] == "starting")
    assert server.chat().json()["error"]["code"] == "model_loading"


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_has_never_served_takes_nothing_and_no_stream_begins(server, engine, wait_until, stream):
    """It knows its limits already, and holds what it is sent until it has loaded; that may never be."""
    engine.hold = True
    engine.set_status(state="starting")
    wait_until(lambda: server.http.get("/health").json()["status"] == "starting")
    response = server.chat(stream=stream)
    assert response.status_code == 503 and response.json()["error"]["code"] == "model_loading"
    assert int(response.headers["retry-after"]) >= 1
    assert not engine.submitted


def test_requests_wait_while_the_engine_recovers(server, engine, wait_until):
    engine.set_status(state="recovering")
    engine.hold = True
    wait_until(lambda: server.http.get("/health/ready").status_code == 503)
    assert server.http.get("/health").json()["status"] == "recovering"
    thread, results = start(server)
    wait_until(lambda: engine.submitted)
    time.sleep(0.2)
    assert not results
    engine.hold = False
    engine.set_status(state="ready")
    thread.join(240)
    assert results[0].status_code == 200


def test_failed_engine(server, engine, wait_until):
    engine.set_status(state="failed", detail="rank 1 keeps dying")
    wait_until(lambda: server.api.client.status.state == "failed")
    response = server.chat()
    assert response.status_code == 503
    assert "rank 1 keeps dying" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_cancel(server, engine, stream, wait_until):
    engine.hold = True
    with server.raw(request_bytes(stream=stream)) as client:
        wait_until(lambda: server.api.live)
        listed = server.http.get("/v1/status").json()["requests"]
        assert [(r["stream"], r["route"]) for r in listed] == [(stream, "/v1/chat/completions")]
        request_id = listed[0]["request_id"]
        said = client.recv(100) if stream else b""  # the stream's status line is out
        assert server.http.post(f"/v1/requests/{request_id}/cancel").json()["cancelled"] is True
        while b"request_cancelled" not in said and (more := client.recv(65536)):
            said += more
    assert said.startswith(b"HTTP/1.1 200" if stream else b"HTTP/1.1 409")
    assert b"request_cancelled" in said
    wait_until(lambda: engine.aborted == set(engine.submitted))
    again = server.http.post(f"/v1/requests/{request_id}/cancel")
    assert again.status_code == 404
    assert again.json()["error"]["code"] == "request_not_found"


@pytest.mark.parametrize(
    ("path", "fields", "end"),
    [("/v1/chat/completions", {}, b"data: [DONE]\n\n"), ("/api/chat", {"model": "tiny"}, b'"done":true')],
)
def test_slow_reader_does_not_hold_up_others_and_loses_nothing(server, engine, wait_until, path, fields, end):
    engine.reply = engine.reply * 12
    with server.raw(request_bytes(path, stream=True, **fields)) as slow:
        wait_until(lambda: len(engine.submitted) == 1)
        assert server.chat().status_code == 200
        wait_until(lambda: not server.api.live)  # what the client does not take yet keeps nothing in the engine
        said = b""
        while end not in said and (more := slow.recv(65536)):
            said += more
    lines = [line.removeprefix(b"data: ") for line in said.split(b"\r\n\r\n", 1)[1].splitlines() if b"{" in line]
    parts = [json.loads(line) for line in lines]
    texts = [(part["choices"] or [{"delta": {}}])[0]["delta"] if "choices" in part else part["message"] for part in parts]
    assert end in said and "".join(text.get("content") or "" for text in texts) == engine.text()


class PanicException(BaseException):
    """As libraries written in Rust raise: no Exception."""


@pytest.mark.parametrize("error", [PanicException("hi"), TypeError("hi")], ids=lambda error: type(error).__name__)
def test_a_tokenizer_that_panics_costs_its_request(shared, monkeypatch, caplog, error):
    class Library:
        def __init__(self, whole):
            self.id_to_token = whole.id_to_token

        def encode_batch_fast(self, texts, **_):
            raise error

    with monkeypatch.context() as broken:
        broken.setattr(FastBackend, "_tokenizer", property(lambda self: Library(vars(self)["_tokenizer"])), raising=False)
        for path, body in (
            ("/v1/chat/completions", {**BODY, "stream": True}),
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/embeddings", {"input": "hi"}),
            ("/tokenize", {"prompt": "hi"}),
        ):
            answer = shared.http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "tokenizer_failed"), path
    assert "'hi'" not in caplog.text and type(error).__name__ in caplog.text
    assert shared.http.post("/v1/chat/completions", json=BODY).status_code == 200
