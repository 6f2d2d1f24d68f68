from __future__ import annotations

import pytest

from server.conftest import events

MESSAGES = [{"role": "user", "content": "hi"}]


def test_answer_in_one_piece(server, engine):
    body = server.chat(model="tiny", conversation_id="c1", user="me").json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["conversation_id"] == "c1"
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": engine.text(), "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    prompt = engine.tokenizer.render_chat(MESSAGES)
    output = len(engine.reply) + 1
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": output,
        "total_tokens": len(prompt) + output,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert {"prompt_eval_tokens_per_second", "eval_tokens_per_second", "cache_hit"} <= body["performance"].keys()
    request = next(iter(engine.submitted.values()))
    assert request.prompt == prompt
    assert request.params.max_tokens == 256 - len(prompt)


@pytest.mark.parametrize("name", ["tiny", "default", "org/tiny"])
def test_names_of_the_model(server, name):
    assert server.chat(model=name).json()["model"] == "tiny"


def test_stream_has_openai_order(server, engine):
    response = server.chat(stream=True, n=2, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response)
    assert chunks[-1] == "[DONE]"
    chunks = chunks[:-1]
    assert [c["choices"][0]["delta"] for c in chunks[:2]] == [{"role": "assistant", "content": ""}] * 2
    assert len({c["id"] for c in chunks}) == 1
    usage = chunks[-1]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2 * (len(engine.reply) + 1)
    assert usage["performance"]["cache_hit"] is False
    assert all(c["usage"] is None for c in chunks[:-1])
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in mine) == engine.text()
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert mine[-1]["delta"] == {}


def test_stream_without_usage_ends_with_performance(server):
    chunks = events(server.chat(stream=True))[:-1]
    assert not any("usage" in chunk for chunk in chunks)
    assert [i for i, chunk in enumerate(chunks) if "performance" in chunk] == [len(chunks) - 1]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_official_client(server, engine):
    with server.openai() as client:
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, seed=3)
        assert answer.choices[0].message.content == engine.text()
        assert answer.usage.completion_tokens == len(engine.reply) + 1
        follow_up = [*MESSAGES, answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
        stream = client.chat.completions.create(
            model="default", messages=follow_up, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == engine.text()
        assert chunks[-1].usage.total_tokens > 0
        assert client.models.list().data[0].id == "tiny"
        assert client.models.retrieve("org/tiny").id == "tiny"


def test_parameters_reach_the_engine(server, engine):
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "n": 2, "seed": -1,
        "frequency_penalty": 0.2, "presence_penalty": -0.2, "logit_bias": {"5": -100, "6": 1.5}, "stop": ["zz"],
        "stop_token_ids": [9], "ignore_eos": True, "max_completion_tokens": 5, "min_tokens": 2,
    }  # fmt: skip
    body = server.chat(**fields).json()
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "length"]
    first, second = (request.params for request in engine.submitted.values())
    assert (first.temperature, first.top_p, first.top_k, first.min_p) == (0.5, 0.9, 7, 0.1)
    assert (first.repetition_penalty, first.frequency_penalty, first.presence_penalty) == (1.1, 0.2, -0.2)
    assert first.logit_bias == {5: -100.0, 6: 1.5}
    assert (first.stop, first.stop_token_ids, first.ignore_eos) == (("zz",), (9,), True)
    assert (first.max_tokens, first.min_tokens) == (5, 2)
    assert (first.seed, second.seed) == (2**64 - 1, 0)


def test_logprobs(server, engine):
    body = server.chat(logprobs=True, top_logprobs=2).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == engine.text()
    assert len(content) == len(engine.reply)
    assert set(content[0]) == {"token", "logprob", "bytes", "top_logprobs"}
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.25, -9999.0]
    assert content[0]["token"] == engine.tokenizer.token_text(engine.reply[0])
    assert server.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_streamed_logprobs_come_with_their_text(server, engine):
    chunks = events(server.chat(stream=True, logprobs=True, top_logprobs=1))[:-1]
    seen = b""
    for chunk in chunks:
        choice = chunk["choices"][0]
        if choice["logprobs"]:
            raw = bytes(b for entry in choice["logprobs"]["content"] for b in entry["bytes"])
            assert raw.decode() == choice["delta"]["content"]
            seen += raw
    assert seen.decode() == engine.text()


@pytest.mark.parametrize("per_output", [1, 3, 100])
@pytest.mark.parametrize("stream", [True, False])
def test_stop_string_ends_the_answer_wherever_tokens_are_cut(server, engine, per_output, stream, wait_until):
    engine.reply = engine.tokenizer.encode("one two three four five" + " on" * 200)
    engine.tokens_per_output = per_output
    engine.delay = 0.02
    response = server.chat(stop=["three f", "xyz"], stream=stream, stream_options={"include_usage": True})
    if stream:
        chunks = events(response)[:-1]
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
        finish, usage = chunks[-2]["choices"][0]["finish_reason"], chunks[-1]["usage"]
    else:
        body = response.json()
        text, finish = body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]
        usage = body["usage"]
    assert (text, finish) == ("one two ", "stop")
    expected = len(engine.tokenizer.encode("one two three f"))
    assert abs(usage["completion_tokens"] - expected) <= 1
    if per_output < 100:
        wait_until(lambda: engine.aborted == set(engine.submitted))
        assert engine.answered == engine.aborted, "that is success, not a client who gave up"


def test_what_may_be_missing_and_stop_as_a_string(server):
    assert server.chat().json()["conversation_id"], "it is made up where it is missing"
    assert server.chat(stop="w").json()["choices"][0]["message"]["content"] == "Hello, "


def test_content_parts_and_roles(server, engine):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "x"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": []},
    ]
    assert server.chat(messages=messages).status_code == 200
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "ab"}, {"role": "assistant", "content": ""}]
    assert next(iter(engine.submitted.values())).prompt == engine.tokenizer.render_chat(plain)


def test_many_streams_at_once(server, engine, wait_until):
    from concurrent.futures import ThreadPoolExecutor

    engine.delay = 0.005
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: events(server.chat(stream=True)), range(48)))
    for chunks in answers:
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
        assert text == engine.text()
    wait_until(lambda: not server.api.live)
