from __future__ import annotations

import json

import pytest

from server.conftest import events


def complete(server, **fields):
    fields.setdefault("prompt", "hi")
    return server.http.post("/v1/completions", json=fields)


def test_answer_in_one_piece(server, engine):
    body = complete(server, model="tiny").json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    choice = body["choices"][0]
    assert choice == {"text": engine.text(), "index": 0, "logprobs": None, "finish_reason": "stop"}
    assert body["usage"]["prompt_tokens"] == len(engine.tokenizer.encode("hi"))
    assert "performance" in body


@pytest.mark.parametrize(("prompt", "count"), [("hi", 1), (["hi", "there"], 2), ([5, 6, 7], 1), ([[5, 6], [7]], 2), (["one"], 1)])
def test_forms_of_the_prompt(server, engine, prompt, count):
    body = complete(server, prompt=prompt, n=2).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * count))
    prompts = [request.prompt for request in engine.submitted.values()]
    encoded = [engine.tokenizer.encode(p) if isinstance(p, str) else p for p in (prompt if count == 2 else [prompt])]
    encoded = [engine.tokenizer.encode("one")] if prompt == ["one"] else encoded
    assert prompts == [p for p in encoded for _ in range(2)]
    assert body["usage"]["prompt_tokens"] == sum(map(len, encoded))


def test_echo(server, engine):
    assert complete(server, prompt="hé", echo=True).json()["choices"][0]["text"] == "hé" + engine.text()
    ids = engine.tokenizer.encode("hé")
    assert complete(server, prompt=ids, echo=True).json()["choices"][0]["text"] == "hé" + engine.text()
    chunks = events(complete(server, prompt="hé", echo=True, stream=True))[:-1]
    assert "".join(c["choices"][0]["text"] for c in chunks) == "hé" + engine.text()


def test_a_client_that_splits_at_every_line_end_of_unicode_reads_a_stream(server, engine):
    ends = "a\u2028b\u2029c\x85d"
    answer = complete(server, prompt=ends, echo=True, stream=True)
    chunks = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == ends + engine.text()


def test_logprobs(server, engine):
    body = complete(server, logprobs=2).json()
    logprobs = body["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"])
    assert logprobs["token_logprobs"][0] == -0.25
    assert len(logprobs["top_logprobs"][0]) == 2
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        if not token.startswith("bytes:"):
            assert engine.text()[offset : offset + len(token)] == token
    assert any(token.startswith("bytes:\\x") for token in logprobs["tokens"])
    assert complete(server, logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"][0] == {"H": -0.25}
    chunks = events(complete(server, logprobs=2, stream=True))[:-1]
    parts = [c["choices"][0]["logprobs"] for c in chunks]
    for key in ("tokens", "text_offset", "top_logprobs", "token_logprobs"):
        assert [x for part in parts for x in part[key]] == logprobs[key]


def test_stream_with_usage(server, engine):
    chunks = events(complete(server, prompt=["a", "b"], stream=True, stream_options={"include_usage": True}))
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"]["completion_tokens"] == 2 * (len(engine.reply) + 1)
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks[:-2] if c["choices"][0]["index"] == index]
        assert "".join(c["text"] for c in mine) == engine.text()
        assert mine[-1]["finish_reason"] == "stop"


def test_official_client(server, engine):
    with server.openai() as client:
        answer = client.completions.create(model="tiny", prompt=["a", "b"], logprobs=1)
        assert [choice.text for choice in answer.choices] == [engine.text()] * 2
        stream = client.completions.create(model="tiny", prompt="a", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == engine.text()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [512]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"prompt": ["a"] * 9, "n": 2}, "n"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": []}, "messages"),
        ({"prompt": [5] * 256}, "prompt"),
        ({"prompt": [5] * 256, "max_tokens": 57}, "prompt"),
    ],
)
def test_bad_fields(shared, fields, param):
    response = complete(shared, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param, error
    assert complete(shared).status_code == 200


def test_best_of_equal_to_n_is_harmless(server):
    assert complete(server, n=2, best_of=2).status_code == 200
