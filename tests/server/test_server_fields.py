"""Fields that the server has no use for, over HTTP: taken, taken as others of ours, or refused by their names."""

from __future__ import annotations

import logging

import httpx
import pytest

from server.conftest import events
from tandem.config.settings import ModelSettings
from tandem.server.fields import BY_SCHEMA, ROUTES
from tandem.server.workers.work import _SCHEMAS
from tandem.testing import CHAT_TEMPLATE

HELLO = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"model": "tiny", "max_tokens": 9, "messages": HELLO},
    "/v1/embeddings": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
}
HEADER = "x-tandem-ignored-fields"


def ask(server, route="/v1/chat/completions", /, **fields):
    return server.http.post(route, json={**BODIES[route], **fields})


def ignored(response):
    assert response.status_code == 200, response.text
    return [name for name in response.headers.get(HEADER, "").split(", ") if name]


def fault(response):
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize(("schema", "route"), ROUTES.items())
def test_known_fields_of_other_servers_are_taken_and_named(shared, schema, route):
    assert BY_SCHEMA[schema].keys().isdisjoint(_SCHEMAS[schema].model_fields)
    vain = [name for name, known in BY_SCHEMA[schema].items() if known.accepted is None]
    assert vain
    for value in ("x", {"a": [1]}):
        assert ignored(ask(shared, route, **dict.fromkeys(vain[:18], value))) == vain[:18]
    others = [name for name, known in BY_SCHEMA[schema].items() if known.accepted is not None]
    for name in others:
        error = fault(ask(shared, route, **{name: "what is not here"}))
        assert error["message"] if route == "/v1/messages" else error["param"] == name
    assert ignored(ask(shared, route, **dict.fromkeys([*others, *vain, "nobody_knows_it", "lora"]))) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"skip_special_tokens": True, "length_penalty": 1.0, "use_beam_search": False, "include_stop_str_in_output": False},
        {"typical_p": 1, "xtc_probability": 0.0, "mirostat": 0, "dry_multiplier": 0, "top_n_sigma": -1},
        {"continue_final_message": False, "add_generation_prompt": True, "include_reasoning": True, "store": None},
        {"functions": [], "function_call": "auto", "modalities": ["text"], "best_of": 1, "lora": [], "options": {}},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}],
                    "cache_control": {"type": "ephemeral"},
                    "reasoning": None,
                    "frob": None,
                }
            ]
        },
        {"tools": [{"type": "function", "strict": None, "function": {"name": "f", "defer": None}}]},
        {"stream_options": {"frob": None, "continuous_usage_stats": True}},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "response_format": {"type": "text"}},
        {"audio": None, "reasoning_effort": None, "functions": None},
    ],
)
def test_what_changes_nothing_is_no_stranger(shared, fields):
    assert ignored(ask(shared, **fields)) == []


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ({"max_token": 5}, "max_token", "did you mean 'max_tokens'?"),
        ({"repeat_penatly": 5}, "repeat_penatly", "did you mean 'repeat_penalty'?"),
        ({"frobnicate": 1}, "frobnicate", "Unknown parameter: 'frobnicate'."),
        (
            {"stream_options": {"include_usages": True}},
            "stream_options.include_usages",
            "did you mean 'stream_options.include_usage'?",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_cal_id": "x"}]},
            "messages[0].tool_cal_id",
            "did you mean 'messages[0].tool_call_id'?",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]},
            "tools[0].function.paramters",
            "did you mean 'tools[0].function.parameters'?",
        ),
        ({"skip_special_tokens": False}, "skip_special_tokens", "not supported by this server"),
        ({"typical_p": 0.5}, "typical_p", "not supported"),
        ({"typical_p": True}, "typical_p", "not supported"),
        ({"cache_salt": "x"}, "cache_salt", "not supported"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort", "'none', 'minimal', 'low'"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning.effort", "contradicts"),
        ({"reasoning": True, "thinking": {"type": "disabled"}}, "reasoning.enabled", "contradicts 'thinking.type'"),
        ({"reasoning": {"max_tokens": "many"}}, "reasoning.max_tokens", "integer"),
        ({"thinking": "yes"}, "thinking", "thinking"),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty", "contradict"),
        ({"repeat_penalty": "x"}, "repeat_penalty", "Invalid 'repeat_penalty'"),
        ({"n_predict": 0.5}, "n_predict", "Invalid 'n_predict'"),
    ],
)
def test_what_is_refused_is_named(shared, fields, param, words):
    error = fault(ask(shared, **fields))
    assert error["param"] == param
    assert words in error["message"]


def test_names_of_other_servers_for_fields_of_ours(shared):
    shared.engine.submitted.clear()
    assert ignored(ask(shared, repeat_penalty=1.5, num_predict=7, random_seed=3)) == []
    [request] = shared.engine.submitted.values()
    assert (request.params.repetition_penalty, request.params.max_tokens, request.params.seed) == (1.5, 7, 3)
    assert ignored(ask(shared, "/v1/completions", n_predict=-1)) == []
    assert ignored(ask(shared, repeat_penalty=1.5, repetition_penalty=1.5)) == []


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_a_limit_of_minus_one_is_none(shared, name):
    shared.engine.submitted.clear()
    assert ask(shared).status_code == ask(shared, **{name: -1}).status_code == 200
    open_, unlimited = shared.engine.submitted.values()
    assert unlimited.params.max_tokens == open_.params.max_tokens > 1


def test_strangers_are_left_out_where_the_operator_says_so(serve, engine, caplog):
    server = serve(unknown_fields="warn")
    with caplog.at_level(logging.WARNING, "tandem"):
        assert ignored(ask(server, frobnicate=1, typical_p=0.5, best_of=4)) == ["frobnicate", "typical_p", "best_of"]
    assert "/v1/chat/completions: no effect of frobnicate, typical_p, best_of" in caplog.text
    nested = [{"role": "user", "content": "hi", "frob": 1}, {"role": "user", "content": "hi", "frob": 2}]
    assert ignored(ask(server, messages=nested, stream_options={"x": 1})) == ["stream_options.x", "messages[0].frob"]
    engine.submitted.clear()
    assert fault(ask(server, lora_request={"a": 1}))["param"] == "lora_request"
    assert fault(ask(server, messages=nested, temperature=9))["param"] == "temperature"
    assert engine.submitted == {}


def test_hostile_names_are_told_safely_and_in_bounds(serve):
    server = serve(unknown_fields="ignore")
    names = ["a\r\nset-cookie: x", "\u2028é" * 100, "x" * 100_000, "", "a,b"]
    shown = ignored(ask(server, **dict.fromkeys(names, 1)))
    assert shown[0] == "a\\r\\nset-cookie: x"
    assert max(map(len, shown)) <= 60
    many = ask(server, **{f"f{number}": 1 for number in range(30_000)})
    assert ignored(many)[-1] == "and 29980 more"
    large = {"messages": [{"role": "user", "content": "hi", f"f{'x' * 300_000}": 1}]}
    assert len(ask(server, **large).headers[HEADER]) < 1000  # judged by a worker first


@pytest.mark.parametrize("fields", [{"x" * 100_000: 1}, {"stream_options": {"x" * 100_000: 1}}], ids=("top", "within"))
def test_a_name_without_end_is_not_sent_back_in_whole(shared, fields):
    refused = ask(shared, **fields)
    assert fault(refused)["code"] == "unknown_parameter" and len(refused.content) < 2000


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_each_chunk_carries_the_usage_where_that_is_asked_for(shared, route):
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events(ask(shared, route, stream=True, max_tokens=6, stream_options=options))[:-1]
    counts = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert all(chunk["usage"]["prompt_tokens"] == found[0]["usage"]["prompt_tokens"] > 0 for chunk in found)
    alone = events(ask(shared, route, stream=True, max_tokens=6, stream_options={"continuous_usage_stats": True}))[:-1]
    assert alone[-1]["usage"]["completion_tokens"] == 6
    assert alone[-1]["choices"]


SWITCH = "{% if enable_thinking is defined %}[enable {{ enable_thinking }}]{% endif %}"
OTHER = "{% if thinking is defined %}[thinking {{ thinking }}]{% endif %}"
EFFORT = "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}[{{ reasoning_effort }}]"
LISTED = "{% if reasoning_effort in ['none', 'high'] %}[{{ reasoning_effort }}]{% endif %}"


@pytest.mark.parametrize(
    ("template", "fields", "shown"),
    [
        (SWITCH, {}, ""),
        (SWITCH, {"reasoning_effort": "none"}, "[enable False]"),
        (SWITCH, {"reasoning_effort": "low"}, "[enable True]"),
        (SWITCH, {"reasoning": {"effort": "high", "summary": "auto"}}, "[enable True]"),
        (SWITCH, {"reasoning": False}, "[enable False]"),
        (SWITCH, {"thinking": {"type": "disabled"}}, "[enable False]"),
        (SWITCH, {"thinking": {"type": "auto"}}, ""),
        (SWITCH, {"reasoning_effort": "high", "enable_thinking": False}, "[enable False]"),
        (SWITCH, {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, "[enable False]"),
        (OTHER, {"enable_thinking": True}, "[thinking True]"),
        (OTHER, {"reasoning_effort": "none"}, "[thinking False]"),
        (EFFORT, {}, "[medium]"),
        (EFFORT, {"reasoning_effort": "high"}, "[high]"),
        (EFFORT, {"reasoning_effort": "max"}, "[high]"),
        (EFFORT, {"reasoning_effort": "none"}, "[low]"),
        (EFFORT, {"reasoning_effort": "none", "chat_template_kwargs": {"reasoning_effort": "odd"}}, "[odd]"),
        (EFFORT + SWITCH, {"reasoning_effort": "none"}, "[medium][enable False]"),
        (LISTED, {"reasoning_effort": "none"}, "[none]"),
        (LISTED, {"reasoning_effort": "medium"}, "[high]"),
    ],
)
def test_efforts_and_switches_reach_the_templates_that_know_them(family, engine, template, fields, shown):
    server = family(template + CHAT_TEMPLATE, "ok")
    plain = engine.tokenizer.render_chat(HELLO)

    def prompt():
        [request] = engine.submitted.values()
        engine.submitted.clear()
        return engine.tokenizer.decode(request.prompt[: len(request.prompt) - len(plain)], skip_special_tokens=False)

    assert ignored(ask(server, **fields)) == []
    assert prompt() == shown
    effort = fields.get("reasoning_effort")
    if set(fields) == {"reasoning_effort"}:
        assert ask(server, "/v1/responses", reasoning={"effort": effort}).status_code == 200
        assert prompt() == shown
    if set(fields) == {"reasoning_effort"} and effort not in ("none", "minimal"):
        assert ask(server, "/v1/messages", output_config={"effort": effort}).status_code == 200
        assert prompt() == shown


def test_a_template_that_knows_no_effort_takes_it_and_says_so(shared):
    assert ignored(ask(shared, reasoning_effort="high")) == ["reasoning_effort"]
    assert ignored(ask(shared, reasoning={"effort": "high"}, stream=True)) == ["reasoning.effort"]
    assert ignored(ask(shared, "/v1/completions", prompt="hi", reasoning_effort="high")) == ["reasoning_effort"]


@pytest.mark.parametrize("fields", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
def test_reasoning_can_be_left_out_of_the_answer(family, fields):
    server = family("{# </think> #}" + CHAT_TEMPLATE, "<think>Hm.</think>Yes.")
    assert ask(server).json()["choices"][0]["message"]["reasoning_content"] == "Hm."
    message = ask(server, **fields).json()["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == ("Yes.", None)
    streamed = events(ask(server, stream=True, **fields))[:-1]
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in streamed) == "Yes."
    assert not any("reasoning_content" in one["choices"][0]["delta"] for one in streamed)


def test_reasoning_under_vllms_name_reaches_the_template(family, engine):
    server = family("{% for m in messages %}{{ m.reasoning_content }}{% endfor %}", "ok")
    said = [*HELLO, {"role": "assistant", "content": "a", "reasoning": "because"}, *HELLO]
    assert ignored(ask(server, messages=said)) == []
    [request] = engine.submitted.values()
    assert engine.tokenizer.decode(request.prompt) == "because"


def test_the_official_clients_fields_are_taken(shared):
    client = shared.openai()
    answer = client.chat.completions.with_raw_response.create(
        model="tiny",
        messages=HELLO,
        reasoning_effort="low",
        verbosity="low",
        store=True,
        metadata={"a": "b"},
        user="u",
        safety_identifier="s",
        service_tier="flex",
        prompt_cache_key="k",
        prediction={"type": "content", "content": "x"},
    )
    assert answer.parse().choices[0].message.content
    assert set(answer.headers[HEADER].split(", ")) == {
        "verbosity",
        "store",
        "metadata",
        "user",
        "safety_identifier",
        "service_tier",
        "prediction",
        "reasoning_effort",
    }
    response = client.responses.create(
        model="tiny",
        input="hi",
        text={"verbosity": "high"},
        max_tool_calls=3,
        reasoning={"effort": "low", "generate_summary": "concise"},
    )
    assert response.status == "completed"


def test_a_page_elsewhere_may_read_the_header(serve):
    server = serve(cors_origin=("https://chat.example",))
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"messages": HELLO, "user": "u"},
        headers={"origin": "https://chat.example"},
        trust_env=False,
    )
    assert HEADER in answer.headers["access-control-expose-headers"]
    assert answer.headers[HEADER] == "user"


def test_a_model_without_a_template_of_its_own_takes_an_effort(serve, tmp_path):
    empty = tmp_path / "none.jinja"
    empty.write_text("{{ messages[0].content }}")
    server = serve(model=ModelSettings(model="org/tiny", served_name=("tiny",), chat_template=str(empty)))
    assert ignored(ask(server, reasoning_effort="none")) == ["reasoning_effort"]
