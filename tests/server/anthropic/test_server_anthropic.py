"""Anthropic's Messages API, driven by the official client, with an engine that answers from a script."""

from __future__ import annotations

import json

import anthropic
import pytest

from tandem.testing import CHAT_TEMPLATE

WEATHER = {
    "name": "weather",
    "description": "Tells the weather.",
    "cache_control": {"type": "ephemeral"},
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ASK = [{"role": "user", "content": "Weather?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOLS = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"


def client_of(server, key="none"):
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=240)


def ask(server, **fields):
    with client_of(server) as client:
        return client.messages.create(**{"model": "tiny", "max_tokens": 200, "messages": ASK, **fields})


def streamed(server, **fields):
    """The message that the client makes of the events, and the types of these."""
    with (
        client_of(server) as client,
        client.messages.stream(**{"model": "tiny", "max_tokens": 200, "messages": ASK, **fields}) as stream,
    ):
        kinds = [event.type for event in stream]
        return stream.get_final_message(), kinds


def comparable(message):
    data = message.to_dict()
    for block in data["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    data.pop("id")
    return data


def test_text_whole_and_streamed(server, engine):
    whole = ask(server, system="Be brief.")
    assert [block.to_dict() for block in whole.content] == [{"type": "text", "text": engine.text(), "citations": None}]
    assert (whole.type, whole.role, whole.model, whole.stop_reason) == ("message", "assistant", "tiny", "end_turn")
    assert whole.id.startswith("msg_")
    assert whole.usage.input_tokens == len(engine.last.prompt)
    assert whole.usage.output_tokens == len(engine.reply) + 1
    assert "Be brief." in engine.prompt()
    message, _ = streamed(server, system=[{"type": "text", "text": "Be brief."}])
    assert comparable(message) == comparable(whole)


def test_events_come_by_name_in_order(server):
    body = {"model": "tiny", "max_tokens": 200, "messages": ASK, "stream": True}
    response = server.http.post("/v1/messages", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [event.split("\n") for event in response.text.split("\n\n") if event]
    names = [lines[0].removeprefix("event: ") for lines in events]
    assert names == [json.loads(lines[1].removeprefix("data: "))["type"] for lines in events]
    deltas = names.count("content_block_delta")
    assert deltas > 1
    assert names == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


@pytest.mark.parametrize("run", [ask, lambda server, **fields: streamed(server, **fields)[0]], ids=["whole", "stream"])
def test_why_an_answer_ended(server, engine, run):
    assert run(server, max_tokens=3).stop_reason == "max_tokens"
    stopped = run(server, stop_sequences=["zzz", "wör"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "wör")
    assert stopped.content[0].text == "Hello, "


@pytest.mark.parametrize("run", [ask, lambda server, **fields: streamed(server, **fields)[0]], ids=["whole", "stream"])
def test_a_limit_beyond_the_context_ends_where_the_context_does(server, engine, run):
    engine.reply = engine.tokenizer.encode("a b " * 200)
    message = run(server, max_tokens=32_000)
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.input_tokens + message.usage.output_tokens == 256


def test_what_agents_send_without_need_is_taken(shared):
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    body = {"model": "tiny", "max_tokens": 5, "messages": ASK, "context_management": {"edits": edits}}
    assert shared.http.post("/v1/messages?beta=true", json=body).status_code == 200
    assert shared.http.head("/").status_code == 200


def test_sampling_reaches_the_engine(server, engine):
    ask(server, extra_body={"temperature": 0.5, "top_p": 0.8, "top_k": 7}, metadata={"user_id": "u"})
    params = engine.last.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (200, 0.5, 0.8, 7)


def test_tool_use_whole_and_streamed(family):
    server = family(TOOLS + CHAT_TEMPLATE, f"I'll look.\n{CALL}\n{CALL}")
    whole = ask(server, tools=[WEATHER])
    assert whole.stop_reason == "tool_use"
    text, first, second = whole.content
    assert text.text == "I'll look."
    assert (first.type, first.name, first.input) == ("tool_use", "weather", {"city": "Paris"})
    assert first.id != second.id
    message, kinds = streamed(server, tools=[WEATHER])
    assert comparable(message) == comparable(whole)
    assert kinds.count("content_block_stop") == 3
    assert "input_json" in kinds


def test_a_call_that_was_cut_off_is_what_there_is_of_it(family):
    server = family(TOOLS + CHAT_TEMPLATE, CALL[:-30])
    cut = ask(server, tools=[WEATHER])
    assert all(isinstance(block.to_dict().get("input", {}), dict) for block in cut.content)


def test_thinking_comes_as_blocks_and_goes_back(family, engine):
    server = family(TOOLS + "{# </think> #}{{ enable_thinking }}" + CHAT_TEMPLATE, f"<think>Hm.</think>{CALL}")
    fields = {"tools": [WEATHER], "thinking": {"type": "enabled", "budget_tokens": 100}}
    whole = ask(server, **fields)
    assert [block.type for block in whole.content] == ["thinking", "tool_use"]
    assert whole.content[0].thinking == "Hm."
    assert "True" in engine.prompt()
    message, _ = streamed(server, **fields)
    assert comparable(message) == comparable(whole)
    result = {"type": "tool_result", "tool_use_id": whole.content[1].id, "content": "sunny"}
    ask(
        server,
        tools=[WEATHER],
        thinking={"type": "disabled"},
        messages=[*ASK, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}],
    )
    assert "False" in engine.prompt()


def test_calls_and_results_reach_the_template(family, engine):
    server = family(
        "{{ tools | tojson }}{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.tool_call_id }}|"
        "{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments | tojson }};{% endfor %}]"
        "{% endfor %}<tool_call>",
        "ok",
    )
    ask(
        server,
        system="Be brief.",
        tools=[WEATHER],
        messages=[
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": [{"type": "text", "text": "no"}],
                        "is_error": True,
                    },
                    {"type": "tool_result", "tool_use_id": "toolu_2"},
                    {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
                ],
            },
        ],
    )
    tool = {
        "type": "function",
        "function": {"name": "weather", "description": "Tells the weather.", "parameters": WEATHER["input_schema"]},
    }
    assert engine.prompt() == (
        json.dumps([tool]) + '[system|Be brief.||][user|a\nb||][assistant|Let me see.||weather {"city": "Paris"};]'
        "[tool|Error: no|toolu_1|][tool||toolu_2|][user|Go on.||]<tool_call>"
    )


@pytest.mark.parametrize(
    ("choice", "several"),
    [
        ({"type": "any"}, True),
        ({"type": "any", "disable_parallel_tool_use": True}, False),
        ({"type": "tool", "name": "weather"}, False),
    ],
)
def test_forced_calls_reach_the_engine_as_a_grammar(family, engine, choice, several):
    server = family(TOOLS + CHAT_TEMPLATE, CALL)
    assert ask(server, tools=[WEATHER], tool_choice=choice).stop_reason == "tool_use"
    grammar = engine.last.params.structured_outputs.grammar
    assert "weather" in grammar
    assert ("{0,15}" in grammar) == several


def test_no_choice_leaves_the_tools_out(family, engine):
    server = family(TOOLS + CHAT_TEMPLATE, "ok")
    ask(server, tools=[WEATHER], tool_choice={"type": "none"})
    assert "weather" not in engine.prompt()


def test_structured_output(server, engine):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    ask(server, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert '"integer"' in engine.last.params.structured_outputs.grammar


def test_tokens_are_counted_as_the_engine_gets_them(family, engine):
    server = family(TOOLS + CHAT_TEMPLATE, "ok")
    fields = {"messages": ASK, "system": "Be brief.", "tools": [WEATHER]}
    with client_of(server) as client:
        count = client.messages.count_tokens(model="tiny", **fields).input_tokens
    assert not engine.submitted
    assert count == ask(server, **fields).usage.input_tokens == len(engine.last.prompt)


def test_kept_prefixes_are_counted_apart(server, engine, monkeypatch):
    monkeypatch.setattr(
        "tandem.server.generation.Generation.usage",
        lambda self: {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}},
    )
    for message in (ask(server), streamed(server)[0]):
        assert message.usage.input_tokens == 2
        assert message.usage.cache_read_input_tokens == 8


USER_CALL = {"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "a", "input": {}}]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "'max_tokens'"),
        ({"nonsense": 1}, "Unknown parameter: 'nonsense'"),
        ({"n": 2}, "Unknown parameter: 'n'"),
        ({"mcp_servers": [{"type": "url"}]}, "'mcp_servers' is not supported"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "'context_management' is not"),
        ({"temperature": 1.5}, "'temperature'"),
        ({"stop_sequences": ["x"] * 17}, "Invalid 'stop_sequences': at most 16"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "prompt is too long: "),
        ({"messages": [*ASK, {"role": "assistant", "content": ""}]}, "last message"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "'messages[0].content[0]': a image block needs 'source'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "needs 'text'"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "id": "1"}]}]}, "'id' does not belong"),
        ({"messages": [USER_CALL, *ASK]}, "no place in a user message"),
        ({"tools": [{"type": "strange", "name": "bash"}]}, "'tools[0]': tools of type 'strange'"),
        ({"tools": [WEATHER, WEATHER]}, "two tools 'weather'"),
        ({"tool_choice": {"type": "any"}}, "'tool_choice' needs 'tools'"),
        ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "'name' belongs"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [WEATHER]}, "no tool 'x'"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, "'output_config.format.schema'"),
    ],
    ids=str,
)
def test_what_cannot_be_is_a_400_in_anthropics_shape(shared, fields, words):
    body = {"model": "tiny", "max_tokens": 5, "messages": ASK, **fields}
    response = shared.http.post("/v1/messages", json={k: v for k, v in body.items() if v is not None})
    assert response.status_code == 400, response.text
    assert set(response.json()) == {"type", "error", "request_id"}
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert words in response.json()["error"]["message"]


def test_errors_are_those_of_the_client(serve, engine):
    server = serve(api_key=("secret",))
    with client_of(server, key="wrong") as client, pytest.raises(anthropic.AuthenticationError) as wrong:
        client.messages.create(model="tiny", max_tokens=5, messages=ASK)
    assert wrong.value.body["error"]["type"] == "authentication_error"
    with client_of(server, key="secret") as client:
        assert client.messages.create(model="tiny", max_tokens=5, messages=ASK).content
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            client.messages.create(model="other", max_tokens=5, messages=ASK)
        engine.refusal = (429, "full", "overloaded", 3.0)
        with pytest.raises(anthropic.OverloadedError) as full:
            client.messages.create(model="tiny", max_tokens=5, messages=ASK)
    assert full.value.response.headers["retry-after"] == "3"
    assert full.value.body["error"] == {"type": "overloaded_error", "message": "full"}


def cancelled(server, client):
    for event in client.messages.create(model="tiny", max_tokens=200, messages=ASK, stream=True):
        if event.type == "message_start":
            assert server.http.post(f"/v1/requests/{event.message.id}/cancel").status_code == 200


def test_an_error_within_a_stream_is_an_event(server, engine):
    engine.delay = 0.2
    with client_of(server) as client, pytest.raises(anthropic.APIStatusError, match="was cancelled"):
        cancelled(server, client)


def test_the_page_of_routes_names_them(shared):
    assert shared.http.get("/").json()["endpoints"]["messages"] == "/v1/messages"


def test_models_are_listed_and_found(server):
    with client_of(server) as client:
        [one] = client.models.list()
        assert (one.type, one.id, one.display_name, one.lifecycle) == ("model", "tiny", "tiny", "active")
        assert one.max_input_tokens == server.http.get("/v1/models/tiny").json()["max_model_len"]
        assert client.models.retrieve("tiny") == one
        with pytest.raises(anthropic.NotFoundError):
            client.models.retrieve("gpt-4")
