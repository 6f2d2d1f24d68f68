"""What is said of a prompt's tokens: `prompt_logprobs` and `echo` with `logprobs`, in vLLM's and OpenAI's shapes."""

from __future__ import annotations

import threading
import tracemalloc

import pytest

from server.conftest import events, prompt_logprobs_of
from tandem.server.openai.completions import CompletionWriter
from tandem.server.openai.logprobs import CompletionLogprobs, prompt_places
from tandem.server.sse import encode_json


def complete(server, **fields):
    return server.http.post("/v1/completions", json=fields)


def asked(engine):
    """`prompt_logprobs` of what the engine got last."""
    return [request.params.prompt_logprobs for request in engine.submitted.values()]


def test_echo_with_logprobs_begins_with_the_prompt(server, engine):
    choice = complete(server, prompt="hé there", echo=True, logprobs=2).json()["choices"][0]
    ids = engine.tokenizer.encode("hé there")
    names, values = choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]
    assert len(names) == len(ids) + len(engine.reply) + 1, "the token that ended it is there: lm-eval leaves it out"
    assert values[: len(ids)] == [None, *[-token / 128 for token in ids[1:]]]
    assert values[len(ids) :] == [-0.25] * (len(engine.reply) + 1)
    tops = choice["logprobs"]["top_logprobs"]
    assert tops[0] is None
    assert all(top[name] == value for name, value, top in zip(names[1:], values[1:], tops[1:], strict=True))
    assert len(tops[1]) == 3, "two, and the token itself"
    for offset, name in zip(choice["logprobs"]["text_offset"], names[:-1], strict=False):
        if not name.startswith("bytes:"):
            assert choice["text"][offset : offset + len(name)] == name
    assert "prompt_logprobs" not in choice and asked(engine) == [2]


def test_a_stream_has_the_same_in_pieces(server, engine):
    fields = {"prompt": ["hé there", "abc"], "echo": True, "logprobs": 2, "n": 2}
    whole = complete(server, **fields).json()["choices"]
    assert asked(engine) == [2, None, 2, None], "one choice says it for all of a prompt"
    chunks = [chunk["choices"][0] for chunk in events(complete(server, **fields, stream=True))[:-1]]
    for choice in whole:
        mine = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in mine) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for chunk in mine for value in chunk["logprobs"][name]] == values


@pytest.mark.parametrize(
    ("param", "route", "fields"),
    [
        ("prompt_logprobs", "/v1/completions", {"prompt": [72] * 10, "prompt_logprobs": 20}),
        ("prompt_logprobs", "/v1/completions", {"prompt": [[72] * 5, [73] * 6], "prompt_logprobs": 8, "n": 2}),
        ("logprobs", "/v1/completions", {"prompt": [72] * 10, "echo": True, "logprobs": 20, "stream": True}),
        ("prompt_logprobs", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "prompt_logprobs": 20}),
    ],
)
def test_an_answer_has_room_for_so_many(server, engine, monkeypatch, param, route, fields):
    monkeypatch.setattr("tandem.server.openai.sampling.MOST_PROMPT_LOGPROBS", 197)
    refused = server.http.post(route, json=fields)
    assert refused.status_code == 400 and not engine.submitted
    error = refused.json()["error"]
    assert error["param"] == param and "log probabilities; an answer may hold 197" in error["message"]
    assert ("in each of" in error["message"]) == (fields.get("n", 1) > 1)
    assert server.http.post(route, json={**fields, param: 1}).status_code == 200


def test_what_is_told_of_prompts_is_kept_as_json(engine):
    """An object for each log probability takes ten times the memory of its JSON."""
    tokens, count = [72 + i % 8 for i in range(800)], 20
    found = prompt_logprobs_of(tokens, count)
    writer = CompletionLogprobs(engine.tokenizer)
    text = engine.tokenizer.decode(tokens)
    for write in (
        lambda: prompt_places(engine.tokenizer, tokens, found, count),
        lambda: writer.echoed(text, tokens, found, count),
    ):
        write()
        tracemalloc.start()
        written = write()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 3 * len(encode_json(written))


def test_much_of_a_prompt_is_written_beside_the_loop(serve, engine, monkeypatch):
    threads, told = [], CompletionWriter.delta

    def delta(*given):
        threads.append(threading.current_thread().name)
        return told(*given)

    monkeypatch.setattr(CompletionWriter, "delta", delta)
    engine.set_status(max_context=4096)
    server = serve()
    for prompt in ([72] * 10, [72] * 800):
        chunks = events(complete(server, prompt=prompt, echo=True, logprobs=20, stream=True, max_tokens=1))[:-1]
        assert len(chunks[0]["choices"][0]["logprobs"]["tokens"]) == len(prompt)
    assert [name.startswith("texts") for name in threads] == [False, True]


@pytest.mark.parametrize(
    "fields",
    [{"echo": True}, {"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}, {"echo": True, "prompt_logprobs": 0, "n": 2}],
)
def test_of_the_prompt_alone(server, engine, fields):
    body = complete(server, prompt=[72, 73, 74], max_tokens=0, **fields).json()
    assert body["usage"]["completion_tokens"] == 0 and len(body["choices"]) == fields.get("n", 1)
    for choice in body["choices"]:
        assert choice["text"] == (engine.tokenizer.decode([72, 73, 74]) if "echo" in fields else "")
        assert choice["finish_reason"] == "length"
        if "logprobs" in fields:
            assert choice["logprobs"]["token_logprobs"] == [None, -73 / 128, -74 / 128]
        if "prompt_logprobs" in fields:
            none, second, _ = choice["prompt_logprobs"]
            assert none is None and second["73"] == {
                "logprob": -73 / 128,
                "rank": 3,
                "decoded_token": engine.tokenizer.token_text(73),
            }
            assert list(second) == ["73", "5"][: fields["prompt_logprobs"] + 1]
    assert all(request.params.max_tokens == 0 for request in engine.submitted.values())
    if "echo" in fields and "prompt_logprobs" not in fields:
        chunks = events(complete(server, prompt=[72, 73, 74], max_tokens=0, stream=True, **fields))[:-1]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == body["choices"][0]["text"]


def test_a_chat_says_it_once_for_all_choices(server, engine):
    body = server.chat(prompt_logprobs=2, n=2, max_tokens=2).json()
    [prompt] = {tuple(request.prompt) for request in engine.submitted.values()}
    assert asked(engine) == [2, None] and "prompt_logprobs" not in body["choices"][0]
    assert [list(place or ())[:1] for place in body["prompt_logprobs"]] == [[], *[[str(token)] for token in prompt[1:]]]
    alone = server.chat(prompt_logprobs=0, max_tokens=0).json()
    assert (alone["choices"][0]["message"]["content"] or "") == "" and len(alone["prompt_logprobs"]) == len(prompt)
    assert "prompt_logprobs" not in server.chat(prompt_logprobs=None).json()


def test_a_prompt_that_fills_the_context_has_room_for_no_token(server):
    full = [5] * 256
    body = complete(server, prompt=full, max_tokens=0, prompt_logprobs=0).json()
    assert len(body["choices"][0]["prompt_logprobs"]) == 256
    assert complete(server, prompt=full, max_tokens=1).json()["error"]["code"] == "context_length_exceeded"
    assert complete(server, prompt=[5] * 257, max_tokens=0, echo=True).status_code == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 10**400}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": "1"}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ({"logprobs": 21, "echo": True}, "logprobs"),
    ],
)
def test_what_cannot_be(shared, fields, param):
    response = complete(shared, prompt="hi", **fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_one_token_and_odd_starts(server, engine):
    [choice] = complete(server, prompt=[72], echo=True, logprobs=1, max_tokens=0).json()["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None] and choice["logprobs"]["text_offset"] == [0]
    [choice] = complete(server, prompt=[0, 72, 73], echo=True, logprobs=0, max_tokens=1).json()["choices"]
    assert choice["logprobs"]["tokens"][0] == "<|endoftext|>"
    offsets = choice["logprobs"]["text_offset"]
    assert len(offsets) == 4 and offsets[-1] == len(choice["text"]) - 1


def test_large_ones_leave_the_event_loop(server, engine, wait_until):
    engine.set_status(max_context=4096)
    wait_until(lambda: server.api.client.status.max_context == 4096)
    ids = [5 + i % 400 for i in range(2000)]
    body = complete(server, prompt=ids, max_tokens=0, prompt_logprobs=20, echo=True, logprobs=20).json()
    [choice] = body["choices"]
    assert len(choice["prompt_logprobs"]) == len(choice["logprobs"]["tokens"]) == 2000


def test_tokenizer_info_is_there_where_it_is_asked_for(serve, shared, engine):
    off = shared.http.get("/tokenizer_info")
    assert off.status_code == 404 and "--enable-tokenizer-info-endpoint" in off.json()["error"]["message"]
    body = serve(enable_tokenizer_info_endpoint=True).http.get("/tokenizer_info").json()
    assert (body["bos_token"], body["eos_token"], body["unk_token"]) == ("<|endoftext|>", "<|im_end|>", None)
    assert body["chat_template"] == engine.tokenizer.chat_template and body["max_model_len"] == 256
    assert body["tokenizer_class"] == "PreTrainedTokenizerFast"
