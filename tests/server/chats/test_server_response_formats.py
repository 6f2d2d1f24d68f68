"""Structured output over HTTP: every way to ask reaches the engine as a grammar; what cannot be is a 400."""

from __future__ import annotations

import json

import pytest

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
OPENAI = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
ASKED = {
    "json_schema": {"response_format": OPENAI},
    "json_object": {"response_format": {"type": "json_object"}},
    "schema without a schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}},
    "guided_json": {"guided_json": SCHEMA},
    "guided_json as text": {"guided_json": json.dumps(SCHEMA)},
    "guided_regex": {"guided_regex": "[ab]+"},
    "guided_choice": {"guided_choice": ["yes", "no"]},
    "guided_grammar": {"guided_grammar": 'root ::= "a" | "b"'},
    "structured_outputs": {"structured_outputs": {"regex": "x{3}"}},
    "structured choice": {"structured_outputs": {"choice": ["x"]}},
    "structured json": {"structured_outputs": {"json": SCHEMA}},
    "structured object": {"structured_outputs": {"json_object": True}},
}


@pytest.mark.parametrize("fields", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_is_asked_for_reaches_the_engine(shared, path, fields):
    body = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    shared.engine.submitted.clear()
    assert shared.http.post(path, json={**body, **fields}).status_code == 200
    [request] = shared.engine.submitted.values()
    assert json.loads(request.params.structured_outputs.grammar)["grammars"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"guided_json": None},
        {"structured_outputs": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False}},
    ],
    ids=str,
)
def test_nothing_asked_is_nothing_sent(shared, fields):
    shared.engine.submitted.clear()
    assert shared.chat(**fields).status_code == 200
    [request] = shared.engine.submitted.values()
    assert request.params.structured_outputs is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "text", **{"json_schema": OPENAI["json_schema"]}}}, "response_format", "belongs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "response_format.json_schema.schema",
            "not",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
            "Missing",
        ),
        ({"guided_json": "{"}, "guided_json", "Expecting"),
        ({"guided_json": 5}, "guided_json.str", "string"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_choice": [""]}, "guided_choice[0]", "at least 1"),
        ({"guided_grammar": "nonsense"}, "guided_grammar", "neither Lark nor GBNF"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex", "unclosed"),
        ({"structured_outputs": {"backend": "xgrammar"}}, "structured_outputs.backend", "Unknown"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "both"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "both"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "contradicts"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "contradicts"),
    ],
    ids=str,
)
def test_what_cannot_be_is_a_400_naming_field_and_reason(shared, fields, param, words):
    response = shared.chat(**fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert len(error["message"]) < 700
