"""Arguments as models write them: typed by a tool's schema, and JSON that is mended."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.server.tools.json_text import JsonMender, loads
from tandem.server.tools.tagged import typed_value


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "123", "123"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
        ({"type": "boolean"}, "True", True),
        ({"oneOf": [{"type": "boolean"}, {"type": "null"}]}, "None", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": ["1", 1]}, "1", "1"),
        ({"const": "5"}, "5", "5"),
        ({"const": True}, "True", True),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "5", "5"),
        ({"type": "string"}, "None", "None"),
        ({"type": ["integer", "string"]}, "5", 5),
        ({"type": ["integer", "string"]}, "five", "five"),
        ({"type": ["string", "null"]}, '{"a": 1}', '{"a": 1}'),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "1e400", "1e400"),
        ({"type": "array"}, "['a', True]", ["a", True]),
        ({"type": "array"}, "[1, None,]", [1, None]),
        ({"type": "object"}, '{"a": "1\n2"}', {"a": "1\n2"}),
        ({"type": "array"}, "{1}", "{1}"),
        ({}, "True", "True"),
        ({}, "5", 5),
        (None, "five", "five"),
        ({"$ref": "#/$defs/Kind"}, "1", "1"),
        ({"$ref": "#/$defs/Loop"}, "1", 1),
        ({"anyOf": "x", "type": 5, "enum": 3}, "1", "1"),
    ],
    ids=str,
)
def test_a_schema_tells_the_type_of_an_argument(schema: Any, text: str, value: Any) -> None:
    root = {"$defs": {"Kind": {"enum": ["1", "2"]}, "Loop": {"$ref": "#/$defs/Loop"}}}
    got = json.loads(typed_value(text, schema, root))
    assert (got, type(got)) == (value, type(value))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@given(st.recursive(SCALARS, lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(), inside, max_size=3)))
def test_json_that_needs_no_mending_stays_as_it_is(value: Any) -> None:
    text, mender = json.dumps([value], ensure_ascii=False), JsonMender()
    assert (mender.read(text, 0, True), mender.text, mender.over) == (len(text), text, True)
    assert loads(text) == [value]
