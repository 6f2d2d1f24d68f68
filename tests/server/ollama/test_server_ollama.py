"""Ollama's API, over an engine that answers from a script. `tests/clients` has its official client."""

from __future__ import annotations

import json
import socket

import pytest

from tandem.errors import UnavailableError
from tandem.server import generation
from tandem.server.connections import connection
from tandem.testing import CHAT_TEMPLATE

ASK = [{"role": "user", "content": "Weather?"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOLS = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"


def ask(server, path="/api/chat", **fields):
    return server.http.post(path, json={"model": "tiny", **({"messages": ASK} if path == "/api/chat" else {}), **fields})


def lines(response):
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.removesuffix("\n").split("\n")]


def joined(parts):
    """The message that the parts of a stream add up to."""
    message = {}
    for part in parts:
        for name, value in part["message"].items():
            message[name] = value if name == "role" or name not in message else message[name] + value
    return message


FIGURES = ("done_reason", "prompt_eval_count", "eval_count")


def test_a_stream_by_default_adds_up_to_the_whole_answer(shared):
    whole = ask(shared, stream=False).json()
    assert whole["message"] == {"role": "assistant", "content": shared.engine.text()}
    assert (whole["model"], whole["done"], whole["done_reason"]) == ("tiny", True, "stop")
    assert whole["prompt_eval_count"] == len(shared.engine.last.prompt) and whole["eval_count"] == len(shared.engine.reply) + 1
    assert whole["total_duration"] >= whole["prompt_eval_duration"] + whole["eval_duration"] > 0
    parts = lines(ask(shared))
    assert len(parts) > 2 and [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert joined(parts) == whole["message"]
    assert {name: parts[-1][name] for name in FIGURES} == {name: whole[name] for name in FIGURES}


def test_generate_with_and_without_the_template(shared):
    engine = shared.engine
    whole = ask(shared, "/api/generate", prompt="hi", system="Be brief.", stream=False).json()
    assert whole["response"] == engine.text() and "message" not in whole
    assert "Be brief." in engine.prompt() and "<|im_start|>" in engine.prompt()
    parts = lines(ask(shared, "/api/generate", prompt="hi", raw=True, options={"num_predict": 3}))
    assert (engine.prompt(), engine.last.params.max_tokens) == ("hi", 3)
    assert "".join(part["response"] for part in parts) == engine.tokenizer.decode(engine.reply[:3])
    assert parts[-1]["done_reason"] == "length"


def test_options_reach_the_engine_and_others_are_named(shared):
    options = {
        "num_predict": -2, "temperature": 0.5, "top_k": 7, "top_p": 0.8, "min_p": 0.1, "seed": 5, "stop": ["wör"],
        "repeat_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4, "num_ctx": 4096, "mirostat": 0,
    }  # fmt: skip
    response = ask(shared, options=options, keep_alive="5m", stream=False)
    params = shared.engine.last.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (0.5, 7, 0.8, 0.1, 5)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.2, 0.3, 0.4)
    assert params.max_tokens == 256 - len(shared.engine.last.prompt)
    assert response.json()["message"]["content"] == "Hello, " and response.json()["done_reason"] == "stop"
    assert response.headers["x-tandem-ignored-fields"] == "options.num_ctx, options.mirostat, keep_alive"


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"a": {"type": "integer"}}}])
def test_a_form(shared, form):
    assert ask(shared, format=form, stream=False).status_code == 200
    assert shared.engine.last.params.structured_outputs is not None


def test_reasoning_and_calls_whole_and_streamed(family):
    server = family("{# <think> </think> #}" + TOOLS + CHAT_TEMPLATE, f"<think>Hm.</think>I'll look.\n{CALL}\n{CALL}")
    whole = ask(server, tools=[WEATHER], think=True, stream=False).json()["message"]
    assert (whole["thinking"], whole["content"]) == ("Hm.", "I'll look.")
    assert [call["function"] for call in whole["tool_calls"]] == [
        {"index": index, "name": "weather", "arguments": {"city": "Paris"}} for index in (0, 1)
    ]
    said = joined(lines(ask(server, tools=[WEATHER])))
    for message in (whole, said):
        for call in message["tool_calls"]:
            del call["id"]
    assert said == whole
    assert "thinking" in server.http.post("/api/show", json={"model": "tiny"}).json()["capabilities"]


def test_results_find_their_calls(family, engine):
    template = "{% for m in messages %}{{ m.role }}:{{ m.tool_call_id or '' }}:{{ m.content }}{% for c in m.tool_calls or [] %}" \
        "[{{ c.id }} {{ c.function.name }}]{% endfor %};{% endfor %}{# tools #}"  # fmt: skip
    server = family(template, "ok")
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b", "b")]
    results = [{"role": "tool", "tool_name": name, "content": text} for name, text in (("b", "1"), ("a", "2"), ("b", "3"))]
    assert ask(server, messages=[*ASK, {"role": "assistant", "tool_calls": calls}, *results], stream=False).status_code == 200
    assert engine.prompt() == (
        "user::Weather?;assistant::[call_1_0 a][call_1_1 b][call_1_2 b];tool:call_1_1:1;tool:call_1_0:2;tool:call_1_2:3;"
    )


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "takes text alone"),
        ("/api/generate", {"prompt": "x", "images": ["aGk="]}, "Invalid 'images': the model takes no pictures"),
        ("/api/chat", {"format": "xml"}, "Invalid 'format'"),
        ("/api/chat", {"format": {"type": "nonsense"}}, "Invalid 'format'"),
        ("/api/chat", {"options": {"temperature": "hot"}}, "'options.temperature'"),
        ("/api/chat", {"options": {"num_predict": 0}}, "'options.num_predict' is 0"),
        ("/api/chat", {"options": {"temprature": 1}}, "'options.temprature'"),
        ("/api/chat", {"options": {"messages": []}}, "'options.messages'"),
        ("/api/chat", {"options": 5}, "'options'"),
        ("/api/chat", {"think": "much"}, "'think'"),
        ("/api/chat", {"messages": [{"role": "robot", "content": "x"}]}, "'messages[0].role'"),
        ("/api/chat", {"messages": [*ASK, {"role": "assistant", "tool_calls": [{"function": 5}]}]}, "messages[1].tool_calls[0]"),
        ("/api/generate", {"prompt": "x", "template": "y"}, "'template'"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, "fill-in-the-middle tokens"),
        ("/api/generate", {"prompt": "a " * 600}, "maximum context length"),
        ("/api/embed", {"input": []}, "'input'"),
        ("/api/embed", {}, "'input'"),
    ],
)
def test_bad_requests_are_named_in_ollamas_shape(shared, path, fields, words):
    response = ask(shared, path, **fields)
    assert response.status_code == 400
    assert response.json().keys() == {"error"} and words in response.json()["error"]


INSTEAD = {"create": "no Modelfiles", "copy": "--served-name", "pull": "`tandem pull`"}
MISSING = {"embed": {"input": "x"}, "embeddings": {"prompt": "x"}, "chat": {"messages": ASK}}


@pytest.mark.parametrize("path", ["chat", "generate", "embed", "embeddings", "show", "pull", "delete", "create", "copy", "push"])
def test_what_is_not_here_is_404(shared, path):
    method = "DELETE" if path == "delete" else "POST"
    response = shared.http.request(method, f"/api/{path}", json={"model": "other", **MISSING.get(path, {})})
    assert response.status_code == 404 and INSTEAD.get(path, "") in response.json()["error"]


def test_models(shared):
    [entry] = shared.http.get("/api/tags").json()["models"]
    assert (entry["name"], entry["model"], entry["size"]) == ("tiny", "tiny", 10)
    [loaded] = shared.http.get("/api/ps").json()["models"]
    assert (loaded["name"], loaded["context_length"], loaded["size_vram"]) == ("tiny", 256, 10)
    shown = shared.http.post("/api/show", json={"name": "tiny:latest"}).json()
    assert shown["template"] and shown["capabilities"] == ["completion", "tools"]
    assert [value for name, value in shown["model_info"].items() if name.endswith(".context_length")] == [256]
    assert lines(shared.http.post("/api/pull", json={"model": "tiny"}))[-1] == {"status": "success"}
    assert tuple(map(int, shared.http.get("/api/version").json()["version"].split("."))) >= (0, 6, 4)
    refused = shared.http.request("DELETE", "/api/delete", json={"model": "tiny"})
    assert refused.status_code == 409 and "tandem model rm" in refused.json()["error"]
    assert ask(shared, model="tiny:latest", stream=False).json()["model"] == "tiny:latest"


def test_an_empty_request_loads_or_unloads(shared):
    assert ask(shared, messages=[]).json()["done_reason"] == "load"
    assert ask(shared, "/api/generate").json()["done_reason"] == "load"
    for none in (0, 0.0, "0", "0s", "0m"):  # 0.0: of Ollama's Python client
        refused = ask(shared, "/api/generate", keep_alive=none)
        assert refused.status_code == 409 and "stays loaded" in refused.json()["error"]


def test_embeddings(shared):
    given = shared.http.post("/v1/embeddings", json={"input": ["a", "b"], "encoding_format": "float"}).json()["data"]
    whole = ask(shared, "/api/embed", input=["a", "b"]).json()
    assert whole["embeddings"] == [one["embedding"] for one in given] and whole["prompt_eval_count"] == 2
    assert ask(shared, "/api/embeddings", prompt="b").json() == {"embedding": whole["embeddings"][1]}


def test_keys_pauses_failures_and_clients_that_leave(serve, engine, wait_until):
    server = serve(api_key=("sesame",), heartbeat_s=0.05)
    refused = ask(server)
    assert refused.status_code == 401 and "API key" in refused.json()["error"]
    server.http.headers["authorization"] = "Bearer sesame"
    engine.outputs = 2
    with server.http.stream("POST", "/api/chat", json={"model": "tiny", "messages": ASK}) as response:
        pieces = response.iter_lines()
        while json.loads(next(pieces))["message"]["content"]:
            pass  # until a line without text, which says that the server is alive
        server.api.fail_live(UnavailableError("It ends."))
        assert json.loads(list(pieces)[-1]) == {"error": "It ends."}
    engine.submitted.clear()
    with server.http.stream("POST", "/api/chat", json={"model": "tiny", "messages": ASK}) as response:
        next(response.iter_lines())
    wait_until(lambda: not server.api.live and engine.aborted >= set(engine.submitted))


@pytest.mark.parametrize("reads_on", [True, False])
def test_a_client_that_stops_reading_is_ended_before_its_answer_fills_the_memory(
    serve, engine, monkeypatch, wait_until, reads_on
):
    """Once 500 parts wait beyond the sockets' buffers, and then its connection after the time of all; others go on."""
    monkeypatch.setattr(generation, "MOST_UNREAD", 500)
    server, engine.reply, engine.outputs = serve(), engine.tokenizer.encode("word ", False) * 2000, 0
    server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of the connections that come, too
    engine.set_status(max_context=100_000)
    wait_until(lambda: server.knows(engine.status))
    body = json.dumps({"model": "tiny", "messages": ASK, "options": {"num_predict": -1}})
    head = f"POST /api/chat HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.address)
        client.sendall((head + body).encode())
        wait_until(lambda: server.api.live)
        [slow], own = server.api.live.values(), client.getsockname()
        [sender] = [one for one in server.server.server_state.connections if one.client == own]
        while not slow.error:
            told, engine.outputs = slow.completion_tokens, 50
            wait_until(lambda told=told: slow.error or slow.completion_tokens == told + 50)
            wait_until(lambda: slow.error or not slow._deltas or sender.flow.write_paused)
        wait_until(lambda: engine.aborted)
        assert sender.flow.write_paused and len(slow._deltas) == 501
        engine.outputs, engine.reply = None, engine.reply[:20]
        assert joined(lines(ask(server)))["content"] == engine.text()
        if reads_on:
            with client.makefile("rb") as file:
                last = next(line for line in file if line.startswith(b'{"error"'))
            assert json.loads(last) == {"error": "The client has not read 501 parts of its answer."}
        else:
            monkeypatch.setattr(connection, "STALL_S", 0.5)
            wait_until(lambda: sender not in server.server.server_state.connections)
            wait_until(lambda: not server.api.live)
