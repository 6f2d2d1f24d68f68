"""POST /v1/embeddings over an engine that answers from a script."""

from __future__ import annotations

import base64
import json
import re

import numpy as np
import openai
import pytest

from tandem.cli.main import main


def unit(tokens, dimensions=8):
    """What the fake engine's hidden state comes to."""
    values = np.array([sum(tokens) % (5 + i) + 1 for i in range(8)])[:dimensions]
    return pytest.approx((values / np.linalg.norm(values)).tolist(), abs=1e-6)


def ask(server, given="hi", **fields):
    return server.http.post("/v1/embeddings", json={"input": given, **fields})


def vectors(response):
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    assert all(one["object"] == "embedding" for one in data)
    return [one["embedding"] for one in data]


@pytest.mark.parametrize(
    ("given", "tokens"), [("hi", None), (["hi", "ho"], None), ([5, 6, 7], [[5, 6, 7]]), ([[5, 6], [7]], [[5, 6], [7]])]
)
def test_every_form_of_input(shared, given, tokens):
    if tokens is None:
        tokens = [shared.engine.tokenizer.encode(text) for text in ([given] if isinstance(given, str) else given)]
    response = ask(shared, given)
    assert vectors(response) == [unit(one) for one in tokens]
    body = response.json()
    count = sum(map(len, tokens))
    assert (body["object"], body["model"]) == ("list", "tiny")
    assert body["usage"] == {"prompt_tokens": count, "total_tokens": count}


def test_the_official_client_packed_or_not(shared):
    client = shared.openai()
    packed = client.embeddings.create(model="tiny", input="hi").data[0].embedding
    plain = client.embeddings.create(model="tiny", input="hi", encoding_format="float").data[0].embedding
    assert packed == pytest.approx(plain)
    assert packed == unit(shared.engine.tokenizer.encode("hi"))
    [raw] = vectors(ask(shared, encoding_format="base64"))
    assert np.frombuffer(base64.b64decode(raw), "<f4").tolist() == pytest.approx(plain)
    cut = client.embeddings.create(model="tiny", input="hi", dimensions=3).data[0].embedding
    assert cut == unit(shared.engine.tokenizer.encode("hi"), 3)


def test_what_reaches_the_engine(serve, engine, wait_until):
    server = serve()
    engine.set_status(pooling="mean")
    wait_until(lambda: server.api.client.status.pooling == "mean")
    ask(server, [5, 6])
    [request] = engine.submitted.values()
    assert (request.pooling, request.params.max_tokens, request.prompt) == ("mean", 0, [5, 6])


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": ""}, "input", "empty"),
        ({"input": ["a", ""]}, "input", "empty string"),
        ({"input": []}, "input", ""),
        ({"input": [[]]}, "input", ""),
        ({"input": [1.5]}, "input", ""),
        ({"input": ["a", 1]}, "input", ""),
        ({"input": [512]}, "input", "not in the vocabulary"),
        ({"input": [1] * 257}, "input", "resulted in 257 tokens"),
        ({"input": ["a"] * 2049}, "input", "2048"),
        ({"dimensions": 9}, "dimensions", "more than the 8"),
        ({"dimensions": 0}, "dimensions", ""),
        ({"encoding_format": "int8"}, "encoding_format", ""),
        ({"pooling": "cls"}, "pooling", "Unknown"),
        ({"stream": True}, "stream", "Unknown"),
    ],
)
def test_bad_requests_are_named(shared, fields, param, words):
    response = ask(shared, **{"given": fields.pop("input", "hi"), **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param and words in error["message"]


def test_an_unknown_model_and_one_that_cannot(serve, engine, wait_until):
    server = serve()
    assert ask(server, model="other").status_code == 404
    engine.set_status(pooling=None)
    wait_until(lambda: server.api.client.status.pooling is None)
    error = ask(server).json()["error"]
    assert error["code"] == "embeddings_unsupported" and "--pooling last" in error["message"]


def test_a_full_context_fits_and_a_long_list_goes_in_parts(serve, engine, wait_until):
    server = serve(max_choices=4)
    assert len(vectors(ask(server, [1] * 256))) == 1
    engine.submitted.clear()
    inputs = [[number % 500 + 1] for number in range(50)]
    assert vectors(ask(server, inputs)) == [unit(tokens) for tokens in inputs]
    assert len(engine.submitted) == 50
    wait_until(lambda: not server.api.live)
    engine.hold = True
    engine.submitted.clear()
    try:
        with pytest.raises(openai.APITimeoutError):
            server.openai().embeddings.create(model="tiny", input=inputs, timeout=1.0)
        assert len(engine.submitted) == 4
        wait_until(lambda: engine.aborted == set(engine.submitted))
        assert ask(server, timeout=0.05).status_code == 504
        wait_until(lambda: not server.api.live)
    finally:
        engine.hold = False


def test_the_engines_refusal_and_limits_of_clients(serve, engine):
    server = serve(tokens_per_minute=10)
    engine.refusal = (429, "full", "overloaded", 7.0)
    refused = ask(server, [1, 2, 3])
    assert refused.status_code == 429 and refused.headers["retry-after"] == "7"
    engine.refusal = None
    assert ask(server, [1, 2, 3]).headers["x-ratelimit-limit-tokens"] == "10"
    refused = ask(server, [1] * 8)
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"


def test_a_key_is_needed_where_there_are_keys(serve):
    server = serve(api_key=("sesame",))
    assert ask(server).status_code == 401
    assert server.openai(api_key="sesame").embeddings.create(model="tiny", input="hi").usage.prompt_tokens > 0


def test_batches_the_journal_and_the_description(serve, engine, tmp_path):
    server = serve(journal=str(tmp_path / "journal"))
    request = {"custom_id": "e", "url": "/v1/embeddings", "body": {"input": [5, 6], "encoding_format": "float"}}
    (tmp_path / "in").write_text(json.dumps(request))
    assert main(["batch", str(tmp_path / "in"), str(tmp_path / "out"), "--base-url", server.url]) == 0
    body = json.loads((tmp_path / "out").read_text())["response"]["body"]
    assert body["data"][0]["embedding"] == unit([5, 6])
    answers = [server.http.post("/v1/embeddings", json={"input": "hi"}, headers={"idempotency-key": "k"}) for _ in range(2)]
    assert answers[0].content == answers[1].content and len(engine.submitted) == 2
    described = server.http.get("/openapi.json").json()["paths"]["/v1/embeddings"]["post"]["requestBody"]["content"]
    assert described["application/json"]["schema"]["$ref"].endswith("/EmbeddingRequest")
    assert re.search(r'route="/v1/embeddings"', server.http.get("/metrics").text)
