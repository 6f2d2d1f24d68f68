"""JSON Schema's own test suite (draft 2020-12, suite/LICENSE): its instances against the grammars of its schemas.

What is not followed is refused, and where a grammar and JSON Schema differ, this is the whole list.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tandem.guided.compile_probe import _ByteVocabulary, limits, trouble
from tandem.guided.grammar import grammar_of
from tandem.protocol.request import StructuredOutputs

SUITE: dict[str, list[dict[str, Any]]] = json.loads((Path(__file__).parent / "suite" / "draft2020-12.json").read_text())
REASONS = (
    "Unimplemented keys", "Unsatisfiable schema", "Expected positive integer", "too many digits",
    "oneOf constraints are not supported", "are not disjoint",
)  # fmt: skip
TOO_MUCH = {  # leap seconds at any minute, and 29 February in any year
    '"2021-02-29"', '"1998-12-31T23:58:60Z"', '"1998-12-31T22:59:60Z"', '"22:59:60Z"', '"23:58:60Z"',
    '"22:59:60+00:00"', '"23:58:60+00:00"', '"23:59:60+01:00"', '"23:59:60+00:30"', '"23:59:60-01:00"',
    '"23:59:60-00:30"',
}  # fmt: skip
TOO_LITTLE = {
    # Properties come in the order of the schema.
    '{"foo":"baz","bar":2}', '{"foo":"quux","bar":2,"baz":null}', '{"baz":"bax","foo":"bar"}',
    # Whole numbers are written without a fraction.
    "0.0", "1.0", "-2.0", "9007199254740992.0", "[0.0]", "[1.0]",
    # Quoted local parts and addresses in e-mail, IPv4 within IPv6.
    '"\\"joe bloggs\\"@example.com"', '"\\"joe..bloggs\\"@example.com"', '"\\"joe@bloggs\\"@example.com"',
    '"joe.bloggs@[IPv6:::1]"', '"1::d6:192.168.0.1"', '"1:2::192.168.0.1"', '"::ffff:192.168.0.1"',
    '"1000:1000:1000:1000:1000:1000:255.255.255.255"',
}  # fmt: skip


def grammar(group: dict[str, Any]) -> str:
    return grammar_of(StructuredOutputs(json=group["schema"]))


@pytest.fixture(scope="module")
def followed() -> dict[str, list[dict[str, Any]]]:
    """The groups whose schema is accepted, by keyword."""
    return {name: [group for group in groups if not trouble(grammar(group), {})] for name, groups in SUITE.items()}


def instances(followed: dict[str, list[dict[str, Any]]], valid: bool) -> Iterator[tuple[str, bool]]:
    """Each valid (or invalid) instance as text, and whether the grammar of its schema can write it."""
    letters = _ByteVocabulary({})
    tokenizer = LLTokenizer(TokenizerWrapper(letters))
    for group in (group for groups in followed.values() for group in groups):
        for text in (
            json.dumps(data, ensure_ascii=False, separators=(",", ":")) for data, fits in group["tests"] if fits is valid
        ):
            matcher = LLMatcher(tokenizer, grammar(group), log_level=0, limits=limits())
            tokens = letters(text)
            yield text, matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_every_keyword_is_followed_or_refused_with_a_reason(followed: dict[str, list[dict[str, Any]]]) -> None:
    assert all(followed.values()), "of each keyword, some schemas are followed"
    assert sum(map(len, followed.values())) >= 155
    refused = [group for name, groups in SUITE.items() for group in groups if group not in followed[name]]
    for group in refused:
        assert any(reason in trouble(grammar(group), {}) for reason in REASONS), group["description"]


def test_no_invalid_instance_can_be_written(followed: dict[str, list[dict[str, Any]]]) -> None:
    outcomes = list(instances(followed, valid=False))
    assert len(outcomes) > 300
    assert {text for text, written in outcomes if written} == TOO_MUCH


def test_valid_instances_can_be_written(followed: dict[str, list[dict[str, Any]]]) -> None:
    outcomes = list(instances(followed, valid=True))
    assert len(outcomes) > 300
    assert {text for text, written in outcomes if not written} == TOO_LITTLE
