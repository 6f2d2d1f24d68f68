"""OpenAI's Responses API, driven by the official client, with an engine that answers from a script."""

from __future__ import annotations

import json

import openai
import pytest

from tandem.testing import CHAT_TEMPLATE

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "strict": None,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOLS = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def ask(server, **fields):
    with server.openai() as client:
        return client.responses.create(**{"model": "tiny", "input": "Weather?", **fields})


def streamed(server, **fields):
    """The response that the events add up to by the client's reckoning, and the events."""
    with server.openai() as client, client.responses.stream(**{"model": "tiny", "input": "Weather?", **fields}) as stream:
        events = list(stream)
        return events[-1].response, events


def comparable(response):
    data = response.to_dict()
    for item in data["output"]:
        for name in ("id", "call_id", "parsed_arguments"):
            item.pop(name, None)
        for part in item.get("content", ()):
            part.pop("parsed", None)
    return {key: value for key, value in data.items() if key not in ("id", "created_at", "completed_at")}


def test_text_whole_and_streamed(server, engine):
    whole = ask(server, instructions="Be brief.", metadata={"a": "b"}, store=False)
    assert whole.output_text == engine.text()
    assert (whole.object, whole.status, whole.model, whole.metadata) == ("response", "completed", "tiny", {"a": "b"})
    assert whole.to_dict()["store"] is False
    assert whole.usage.input_tokens == len(engine.last.prompt)
    assert whole.usage.output_tokens == len(engine.reply) + 1
    assert whole.usage.output_tokens_details.reasoning_tokens == 0
    assert "Be brief." in engine.prompt()
    response, _ = streamed(server, instructions="Be brief.", metadata={"a": "b"})
    assert comparable(response) == comparable(whole)


def test_events_come_by_name_number_and_order(server, engine):
    text = server.http.post("/v1/responses", json={"input": "hi", "stream": True}).text
    events = [[line.split(": ", 1)[1] for line in event.split("\n")] for event in text.split("\n\n") if event]
    data = [json.loads(line) for _, line in events]
    assert [name for name, _ in events] == [one["type"] for one in data]
    assert [one["sequence_number"] for one in data] == list(range(len(data)))
    names = [one["type"].removeprefix("response.") for one in data]
    deltas = names.count("output_text.delta")
    assert deltas > 1
    assert names == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    item = data[2]["item"]
    assert (item["status"], item["content"]) == ("in_progress", [])
    assert data[3]["part"]["text"] == ""
    assert all(one["item_id"] == item["id"] for one in data[3:-2])
    assert data[-2]["item"] == data[-1]["response"]["output"][0]
    assert data[-3]["part"]["text"] == data[-4]["text"] == engine.text()


@pytest.mark.parametrize("run", [ask, lambda server, **fields: streamed(server, **fields)[0]], ids=["whole", "stream"])
def test_an_answer_that_was_cut_off_says_so(server, run):
    response = run(server, max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"
    assert response.usage.output_tokens == 3


def test_calls_whole_and_streamed(family):
    server = family(TOOLS + CHAT_TEMPLATE, f"I'll look.\n{CALL}\n{CALL}")
    whole = ask(server, tools=[WEATHER])
    text, first, second = whole.output
    assert (text.content[0].text, first.type, first.name) == ("I'll look.", "function_call", "weather")
    assert json.loads(first.arguments) == {"city": "Paris"}
    assert first.call_id != second.call_id
    assert whole.tools[0].name == "weather"
    response, events = streamed(server, tools=[WEATHER])
    assert comparable(response) == comparable(whole)
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == first.arguments + second.arguments


def test_functions_of_a_namespace_are_called_by_both_names(family, engine):
    """Codex CLI groups tools so, and sends `client_metadata`."""
    names = "{% for m in messages %}{% for c in m.tool_calls %}[{{ c.function.name }}]{% endfor %}{% endfor %}"
    server = family(names + TOOLS, CALL.replace("weather", "europe.weather"))
    space = {"type": "namespace", "name": "europe", "description": "Of Europe.", "tools": [WEATHER]}
    fields = {"tools": [WEATHER, space], "extra_body": {"client_metadata": {"turn_id": "1"}}}
    for response in (streamed(server, **fields)[0], ask(server, **fields)):
        [call] = response.output
        assert (call.name, call.namespace) == ("weather", "europe")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    ask(server, **fields, input=[{"role": "user", "content": "Weather?"}, call.to_dict(), result])
    assert engine.prompt().startswith("[europe.weather]")


def test_reasoning_is_an_item_and_goes_back(family, engine):
    template = (
        "{# </think> #}{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.reasoning_content }}|"
        "{{ m.tool_call_id }}|{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}]"
        "{% endfor %}" + TOOLS
    )
    server = family(template, f"<think>Hm.</think>{CALL}")
    whole = ask(server, tools=[WEATHER], include=["reasoning.encrypted_content"])
    assert [item.type for item in whole.output] == ["reasoning", "function_call"]
    assert whole.output[0].content[0].text == "Hm."
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    response, _ = streamed(server, tools=[WEATHER])
    assert comparable(response) == comparable(whole)
    call_id = whole.output[1].call_id
    ask(
        server,
        instructions="Be brief.",
        tools=[WEATHER],
        input=[
            {"role": "developer", "content": "In French."},
            {"role": "user", "content": "Weather?"},
            *[item.to_dict() for item in whole.output],
            {"type": "function_call_output", "call_id": call_id, "output": "sunny"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
        ],
    )
    assert engine.prompt().startswith(
        '[system|Be brief.\n\nIn French.|||][user|Weather?|||][assistant||Hm.||{"city": "Paris"}]'
        f"[tool|sunny||{call_id}|][user|Go on.|||]"
    )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}], ids=str)
def test_forced_calls_reach_the_engine_as_a_grammar(family, engine, choice):
    server = family(TOOLS + CHAT_TEMPLATE, CALL)
    response = ask(server, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
    assert response.output[0].name == "weather"
    assert response.parallel_tool_calls is False
    grammar = engine.last.params.structured_outputs.grammar
    assert "weather" in grammar and "{0,15}" not in grammar


def test_structured_output(server, engine):
    form = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
    response = ask(server, text={"format": form})
    assert '"integer"' in engine.last.params.structured_outputs.grammar
    assert response.text.format.to_dict() == form
    ask(server, text={"format": {"type": "json_object"}})
    assert engine.last.params.structured_outputs is not None


def test_sampling_and_effort_reach_their_place(family, engine):
    server = family("{{ reasoning_effort }}" + CHAT_TEMPLATE, "ok")
    ask(server, temperature=0.5, top_p=0.8, max_output_tokens=9, reasoning={"effort": "low", "summary": "auto"})
    params = engine.last.params
    assert (params.max_tokens, params.temperature, params.top_p) == (9, 0.5, 0.8)
    assert engine.prompt().startswith("low")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "--journal DIR"),
        ({"background": True}, "background", "--journal DIR"),
        ({"nonsense": 1}, "nonsense", "Unknown parameter"),
        ({"messages": []}, "messages", "Unknown parameter"),
        ({"conversation": "c"}, "conversation", "not supported"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "needs 'image_url'"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "n"}]}, "input[0]", "needs 'arguments'"),
        ({"input": [{"role": "user", "content": "x", "name": "n"}]}, "input[0]", "'name' does not belong"),
        ({"tools": [{"type": "strange"}]}, "tools[0]", "of type 'strange'"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "two tools"),
        ({"tool_choice": "required"}, "tool_choice", "needs 'tools'"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [WEATHER]}, "tool_choice", "no tool 'x'"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "expected"),
        ({"input": "xq " * 300}, "input", "maximum context length is 256"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format", "'schema'"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}}},
            "text.format.schema",
            "'text.format.schema'",
        ),
        ({"include": ["message.output_text.logprobs"]}, "include[0]", "encrypted_content"),
    ],
    ids=str,
)
def test_what_cannot_be_is_a_400_naming_field_and_reason(shared, fields, param, words):
    response = shared.http.post("/v1/responses", json={"input": "hi", **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert words in response.json()["error"]["message"]


def test_errors_are_those_of_the_client(server, engine):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        ask(server, model="other")
    engine.refusal = (429, "full", "overloaded", 3.0)
    with pytest.raises(openai.RateLimitError, match="full"):
        ask(server)


def test_an_error_within_a_stream_is_an_event(server, engine):
    engine.delay = 0.2
    with server.openai() as client:
        events = []
        for event in client.responses.create(model="tiny", input="hi", stream=True):
            events.append(event)
            if event.type == "response.created":
                assert server.http.post(f"/v1/requests/{event.response.id}/cancel").status_code == 200
    assert (events[-1].type, events[-1].response.error.code) == ("response.failed", "request_cancelled")
    assert events[-1].sequence_number == len(events) - 1
