from __future__ import annotations

import asyncio
import json

import pytest
from fastapi import Request

from tandem.errors import TooLargeError
from tandem.server.body import read_body

OK = {"messages": [{"role": "user", "content": "hi"}]}


def check(response, status, *, param=None, code=None):
    """The error in OpenAI's envelope, and nothing else."""
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] == param, body
    if code is not None:
        assert body["error"]["code"] == code
    assert "\n" not in body["error"]["message"]
    return body["error"]["message"]


def user(content, **more):
    return {"messages": [{"role": "user", "content": content, **more}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"prompt": "x"}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "function", "content": "x", "name": "f"}]}, "messages[0]"),
        (user("x", extra=1), "messages[0].extra"),
        (user(5), "messages[0].content"),
        (user([{"type": "image_url", "image_url": {"url": "x"}}]), "messages"),
        (user([{"type": "text"}]), "messages[0]"),
        (user(["x"]), "messages[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_completion_tokens": -2}, "max_completion_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 7}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop[0]"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"frob": 1}}, "stream_options.frob"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"timeout": 0}, "timeout"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"best_of": 4}, "best_of"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False}, "enable_thinking"),
        ({"conversation_id": ""}, "conversation_id"),
        ({"conversation_id": 5}, "conversation_id"),
    ],
)
def test_bad_field_is_named(shared, fields, param):
    shared.engine.submitted.clear()
    check(shared.chat(**fields), 400, param=param)
    assert shared.engine.submitted == {}
    assert shared.chat().status_code == 200


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"messages": NaN}', "invalid_json"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "invalid_json"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "invalid_utf8"),
        (b'{"temperature": 1e999}', "invalid_value"),
        (b'{"max_tokens": ' + b"9" * 4000 + b"}", None),
    ],
)
def test_broken_bodies(shared, body, code):
    response = shared.http.post("/v1/chat/completions", content=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert code is None or error["code"] == code, error
    assert shared.chat().status_code == 200


def test_prompt_too_long(shared):
    server = shared
    message = check(server.chat(**user("x" * 300)), 400, param="messages", code="context_length_exceeded")
    assert "maximum context length is 256 tokens" in message
    assert server.chat(max_tokens=250).json()["usage"]["total_tokens"] <= 256
    check(server.chat(**user("long " * 20_000)), 400, param="messages", code="context_length_exceeded")


def test_wrong_model(shared):
    server = shared
    check(server.chat(model="gpt-4"), 404, param="model", code="model_not_found")
    check(server.http.get("/v1/models/gpt-4"), 404, param="model", code="model_not_found")


def test_unknown_route_and_method(shared):
    server = shared
    check(server.http.get("/nope"), 404, code="unknown_url")
    for wrong, right in (("/models", "/v1/models"), ("/v1/v1/models", "/v1/models"), ("/v1/api/tags", "/api/tags")):
        assert f"There is {right}: check" in check(server.http.get(wrong), 404, code="unknown_url")
    response = server.http.get("/v1/chat/completions")
    check(response, 405, code="method_not_allowed")
    assert response.headers["allow"] == "POST"


def test_body_over_the_limit(serve):
    server = serve(max_body_mb=0.01)
    big = json.dumps({**OK, "user": "x" * 20_000}).encode()
    check(server.http.post("/v1/chat/completions", content=big), 413)
    assert server.chat().status_code == 200
    check(server.http.post("/v1/chat/completions", content=iter([big[:9_000], big[9_000:]])), 413)
    assert server.chat().status_code == 200
    connection = server.raw(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n{")
    assert connection.recv(100).startswith(b"HTTP/1.1 413")
    connection.close()
    assert server.chat().status_code == 200


def test_template_that_rejects(serve, model_dir, tmp_path):
    from tandem.config.settings import ModelSettings

    template = tmp_path / "strict.jinja"
    template.write_text("{{ raise_exception('roles must alternate') }}")
    settings = ModelSettings(model="org/tiny", served_name=("tiny",), chat_template=str(template))
    message = check(serve(model=settings).chat(), 400, param="messages")
    assert "roles must alternate" in message


def test_unexpected_exception_is_hidden(server, engine, caplog):
    secret = "the " + "secret"  # tracebacks show source lines, which are not the text of a prompt

    async def broken(status):
        raise KeyError(secret)

    server.api.served[0].texts.tokenizer = broken
    message = check(server.chat(), 500, code="internal_error")
    assert secret not in message
    assert "unexpected KeyError in POST /v1/chat/completions" in caplog.text
    assert secret not in caplog.text
    del server.api.served[0].texts.tokenizer
    assert server.chat().status_code == 200


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("", "hosts"),
        ("?hosts=a=8GB&context=0", "context"),
        ("?hosts=a=8GB&goal=speed", "goal"),
        ("?hosts=a=8GB&strems=4", "strems"),
    ],
)
def test_query_parameters_at_fault_are_named_in_openais_shape(shared, query, param):
    response = shared.http.get(f"/v1/plan{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert f"'{param}'" in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["adapters", "lora_request"])
def test_an_adapter_is_asked_for_by_the_name_of_a_model(shared, name):
    response = shared.chat(**{name: "./sql"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == name and "--lora-modules" in error["message"]


@pytest.mark.parametrize("length", ["\u00b2", "9" * 5000, "1e9", "-1", ""])
def test_an_odd_content_length_is_no_fault_of_the_server(length):
    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    scope = {"type": "http", "method": "POST", "headers": [(b"content-length", length.encode("latin-1"))]}
    reading = read_body(Request(scope, receive), 10)
    if length.startswith("9"):
        with pytest.raises(TooLargeError):
            asyncio.run(reading)
    else:
        assert asyncio.run(reading) == b"{}"
