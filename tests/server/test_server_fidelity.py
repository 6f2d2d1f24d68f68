"""Where clients of the official services look for more than the answer: ids, words, statuses, what they send along."""

from __future__ import annotations

import json

import anthropic
import openai
import pytest

from tandem.config.settings import ModelSettings, ServerSettings
from tandem.testing import CHAT_TEMPLATE

HELLO = [{"role": "user", "content": "hi"}]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
BODIES = {CHAT: {"messages": HELLO}, MESSAGES: {"model": "tiny", "max_tokens": 9, "messages": HELLO}, RESPONSES: {"input": "hi"}}
IGNORED = "x-tandem-ignored-fields"


def post(server, route, /, headers=None, **fields):
    return server.http.post(route, json={**BODIES[route], **fields}, headers=headers)


def prompt_of(server):
    [*_, request] = server.engine.submitted.values()
    return server.engine.tokenizer.decode(request.prompt, skip_special_tokens=False)


@pytest.fixture
def server(serve, engine):
    live = serve()
    live.engine = engine
    return live


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models", None),
        ("GET", "/nowhere", None),
        ("POST", CHAT, BODIES[CHAT]),
        ("GET", "/health", None),
        ("POST", CHAT, {**BODIES[CHAT], "stream": True}),
        ("POST", CHAT, {"messages": 5}),
        ("POST", MESSAGES, {}),
        ("POST", MESSAGES, BODIES[MESSAGES]),
        ("POST", MESSAGES, {**BODIES[MESSAGES], "stream": True}),
        ("HEAD", "/", None),
    ],
)
def test_every_answer_has_the_id_of_its_request(shared, method, path, body):
    fresh = [shared.http.request(method, path, json=body).headers for _ in range(2)]
    assert all(headers["x-request-id"].startswith("req_") for headers in fresh)
    assert fresh[0]["x-request-id"] != fresh[1]["x-request-id"]
    echoed = shared.http.request(method, path, json=body, headers={"X-Request-Id": "my-req.42"}).headers
    assert echoed.get_list("x-request-id") == ["my-req.42"]
    assert echoed["request-id"] == "my-req.42"
    strange = shared.http.request(method, path, json=body, headers={"X-Request-Id": "a b\t;" * 100}).headers
    assert strange["x-request-id"].startswith("req_")


def test_the_clients_of_both_services_tell_the_id(shared):
    with shared.openai() as client:
        assert client.chat.completions.create(model="tiny", messages=HELLO)._request_id.startswith("req_")
        with pytest.raises(openai.NotFoundError) as missing:
            client.models.retrieve("other")
        assert missing.value.request_id.startswith("req_")
    with anthropic.Anthropic(base_url=shared.url, api_key="none", max_retries=0) as client:
        assert client.messages.create(**BODIES[MESSAGES])._request_id.startswith("req_")
        with pytest.raises(anthropic.NotFoundError) as missing:
            client.messages.create(**{**BODIES[MESSAGES], "model": "other"})
        assert missing.value.body["request_id"] == missing.value.request_id


def test_head_is_get_without_a_body(shared):
    for path in ("/v1/models", "/health", "/v1/models/tiny", "/"):
        head, get = shared.http.head(path), shared.http.get(path)
        assert (head.status_code, head.content, head.headers["content-type"]) == (200, b"", get.headers["content-type"])
    assert shared.http.head("/nowhere").status_code == 404
    assert shared.http.head(CHAT).status_code == 405
    assert shared.http.get("/v1/models").json()["data"]  # on the same connection


def test_overload_is_529_for_anthropics_clients_and_a_quota_is_not(server, engine):
    for refusal, status in (
        ((429, "full", "overloaded", 3.0), 529),
        ((503, "loading", "loading", 3.0), 529),
        ((429, "yours", "rate_limit_exceeded", 3.0), 429),
    ):
        engine.refusal = refusal
        sent = post(server, MESSAGES)
        kind = "overloaded_error" if status == 529 else "rate_limit_error"
        assert (sent.status_code, sent.json()["error"]["type"]) == (status, kind)
        assert post(server, CHAT).status_code == refusal[0]


def test_errors_about_models_have_the_shape_of_who_asks(shared):
    ours = shared.http.get("/v1/models/other").json()
    theirs = shared.http.get("/v1/models/other", headers={"anthropic-version": "2023-06-01"}).json()
    assert ours["error"]["code"] == "model_not_found"
    assert (theirs["type"], theirs["error"]["type"]) == ("error", "not_found_error")


@pytest.mark.parametrize("times", [300, 60_000])
def test_a_prompt_that_is_too_long_has_claudes_words(shared, times):
    sent = post(shared, MESSAGES, messages=[{"role": "user", "content": "xq " * times}])
    assert sent.status_code == 400
    before, after = sent.json()["error"]["message"].split(" tokens > ")
    assert after == "256 maximum"
    assert int(before.removeprefix("prompt is too long: ")) > 256


@pytest.mark.parametrize(
    ("route", "field"),
    [(CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (RESPONSES, "max_output_tokens"), (MESSAGES, "max_tokens")],
)
def test_an_output_limit_beyond_the_context_is_what_is_left(server, route, field):
    assert post(server, route, **{field: 32_000}).status_code == 200
    [request] = server.engine.submitted.values()
    assert request.params.max_tokens == 256 - len(request.prompt)


def test_unknown_fields_are_warned_about_by_default(serve, engine, caplog):
    assert ServerSettings().unknown_fields == "warn"
    server = serve(unknown_fields=ServerSettings().unknown_fields)
    for route in BODIES:
        sent = post(server, route, frobnicate=1)
        assert (sent.status_code, sent.headers[IGNORED]) == (200, "frobnicate")
    assert "no effect of frobnicate" in caplog.text
    assert post(server, RESPONSES, truncation="auto").headers[IGNORED] == "truncation"


def test_tools_that_their_server_runs_are_left_out(serve, engine, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + CHAT_TEMPLATE)
    server = serve(model=ModelSettings(model="org/tiny", served_name=("tiny",), chat_template=str(template)))
    server.engine = engine
    engine.set_status(max_context=2048)
    now = {"type": "function", "name": "now"}
    custom = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}
    sent = post(server, RESPONSES, tools=[{"type": "web_search", "filters": {}}, now, {"type": "local_shell"}, custom])
    assert sent.status_code == 200, sent.text
    assert sent.headers[IGNORED] == "tools.web_search, tools.local_shell, tools.custom"
    assert [tool["name"] for tool in sent.json()["tools"]] == ["now"]
    assert "now" in prompt_of(server) and "web_search" not in prompt_of(server)
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    own = {"name": "own", "input_schema": {"type": "object"}}
    sent = post(server, MESSAGES, tools=[search, own])
    assert (sent.status_code, sent.headers[IGNORED]) == (200, "tools.web_search_20250305")
    assert "own" in prompt_of(server) and "web_search" not in prompt_of(server)
    assert post(server, RESPONSES, tools=[{"type": "unheard_of"}]).status_code == 400


def test_reasoning_of_other_servers_is_taken_back(serve, engine, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}|{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}")
    server = serve(model=ModelSettings(model="org/tiny", served_name=("tiny",), chat_template=str(template)))
    server.engine = engine
    sent = post(
        server,
        RESPONSES,
        input=[
            {"role": "user", "content": "a"},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "brief"}],
                "encrypted_content": "gAAAA",
            },
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
            {"role": "user", "content": "c"},
        ],
    )
    assert sent.status_code == 200, sent.text
    assert "[assistant|brief|b]" in prompt_of(server)


@pytest.mark.parametrize("route", [MESSAGES, CHAT])
def test_an_answer_goes_on_with_what_the_assistant_began(server, route):
    more = {"continue_final_message": True} if route == CHAT else {}
    sent = post(server, route, messages=[*HELLO, {"role": "assistant", "content": "Once upon"}], **more)
    assert sent.status_code == 200, sent.text
    assert prompt_of(server).endswith("<|im_start|>assistant\nOnce upon")
    text = sent.json()["content"][0]["text"] if route == MESSAGES else sent.json()["choices"][0]["message"]["content"]
    assert text == server.engine.tokenizer.decode(server.engine.reply[:9] if route == MESSAGES else server.engine.reply)


def test_what_was_begun_is_no_reasoning(serve, engine, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text(CHAT_TEMPLATE + "<think>\n{# </think> #}")
    server = serve(model=ModelSettings(model="org/tiny", served_name=("tiny",), chat_template=str(template)))
    server.engine = engine
    sent = post(server, MESSAGES, max_tokens=100, messages=[*HELLO, {"role": "assistant", "content": "Once"}])
    assert prompt_of(server).endswith("<think>\n</think>\n\nOnce")
    assert [block["type"] for block in sent.json()["content"]] == ["text"]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": HELLO},
        {"messages": [{"role": "assistant", "content": "x"}]},
        {"messages": [*HELLO, {"role": "assistant", "content": "{"}], "response_format": {"type": "json_object"}},
        {"messages": [*HELLO, {"role": "assistant", "content": ""}]},
    ],
)
def test_an_answer_that_cannot_go_on_is_a_400(shared, fields):
    sent = post(shared, CHAT, **{**fields, "continue_final_message": True})
    assert (sent.status_code, sent.json()["error"]["param"]) == (400, "messages")


def test_an_answer_that_begins_with_a_mark_cannot_go_on(serve):
    server = serve(reasoning_parser="harmony")
    sent = post(server, MESSAGES, messages=[*HELLO, {"role": "assistant", "content": "Paris is"}])
    assert sent.status_code == 400 and "begin with a mark" in sent.json()["error"]["message"]


def test_thinking_is_signed_whole_and_streamed(serve, engine, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{# </think> #}" + CHAT_TEMPLATE)
    engine.reply = engine.tokenizer.encode("<think>Hm, hm.</think>Yes")
    server = serve(model=ModelSettings(model="org/tiny", served_name=("tiny",), chat_template=str(template)))
    whole = post(server, MESSAGES, max_tokens=200).json()["content"][0]
    assert (whole["type"], len(whole["signature"]) > 40) == ("thinking", True)
    streamed = post(server, MESSAGES, max_tokens=200, stream=True).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: ")]
    kinds = [event.get("delta", {}).get("type") or event["type"] for event in events]
    at = kinds.index("signature_delta")
    assert (kinds[at - 1], kinds[at + 1], kinds.count("signature_delta")) == ("thinking_delta", "content_block_stop", 1)
    assert events[at]["delta"]["signature"] == whole["signature"]


def test_a_response_that_fails_in_its_stream_says_so(server, engine):
    engine.delay = 0.2
    with server.openai() as client:
        events = []
        for event in client.responses.create(model="tiny", input="hi", stream=True):
            events.append(event)
            if event.type == "response.created":
                assert server.http.post(f"/v1/requests/{event.response.id}/cancel").status_code == 200
    last = events[-1]
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "request_cancelled")
    assert (last.response.id, last.sequence_number) == (events[0].response.id, len(events) - 1)


@pytest.mark.parametrize("number", ["9" * 5000, "1"])
def test_a_path_that_quotes_claudes_words_is_not_found(shared, number):
    path = f"/v1/maximum context length is {number} tokens. x resulted in {number} tokens"
    sent = shared.http.get(path, headers={"anthropic-version": "2023-06-01"})
    assert (sent.status_code, sent.json()["error"]["type"]) == (404, "not_found_error")


@pytest.mark.parametrize("kind", [["function"], {"a": 1}, 5])
def test_a_tool_of_an_odd_type_is_a_400(shared, kind):
    sent = post(shared, RESPONSES, tools=[{"type": kind, "name": "f", "parameters": {}}])
    assert sent.status_code == 400 and "tools" in sent.json()["error"]["param"]


def test_no_client_can_have_its_own_tool_left_out(server, engine):
    function = {"type": "function", "name": "look", "parameters": {"type": "object"}, "hosted": True}
    theirs = {"name": "look", "input_schema": {"type": "object"}, "hosted": True}
    for route, tool in ((RESPONSES, function), (MESSAGES, theirs)):
        sent = post(server, route, tools=[tool])
        assert "tools.look" not in sent.headers.get(IGNORED, "")
        assert (sent.status_code, "hosted" in sent.json()["error"]["message"]) == (400, True)
    assert '"hosted"' not in json.dumps(server.http.get("/openapi.json").json())


@pytest.mark.parametrize("route", [MESSAGES, CHAT, RESPONSES])
def test_an_image_in_a_tools_result_is_told_to_be_left_out(server, route):
    url = "data:image/png;base64,AAAA"
    text = {"type": "text", "text": "seen: "}
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    call = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    if route == MESSAGES:
        result = {"type": "tool_result", "tool_use_id": "t1", "content": [text, {"type": "image", "source": source}]}
        used = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
        talk = {"messages": [*HELLO, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]}
    elif route == CHAT:
        result = {"role": "tool", "tool_call_id": "t1", "content": [text, {"type": "image_url", "image_url": {"url": url}}]}
        talk = {"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}, result]}
    else:
        output = [{"type": "input_text", "text": "seen: "}, {"type": "input_image", "image_url": url, "detail": "auto"}]
        called = {"type": "function_call", "call_id": "t1", "name": "look", "arguments": "{}"}
        talk = {"input": [*HELLO, called, {"type": "function_call_output", "call_id": "t1", "output": output}]}
    sent = post(server, route, **talk)
    assert sent.status_code == 200, sent.text
    prompt = prompt_of(server)
    assert prompt.count("[image omitted: this model does not see]") == 1 and "AAAA" not in prompt and "seen: " in prompt
    asks = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    assert post(server, CHAT, messages=[asks]).status_code == 400, "a question about an image has no answer"


def test_the_older_name_of_the_form_of_an_answer_is_taken(server, engine):
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}}
    assert post(server, MESSAGES, output_format=form).status_code == 200
    [request] = engine.submitted.values()
    assert request.params.structured_outputs is not None
    sent = post(server, MESSAGES, output_format=form, output_config={"format": form})
    assert sent.status_code == 400 and "older name of 'output_config.format'" in sent.json()["error"]["message"]
