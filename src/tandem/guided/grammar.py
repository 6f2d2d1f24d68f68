"""Conversion of a client's structured output request to a grammar for llguidance. Pure; compiles nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from tandem.protocol.request import StructuredOutputs

MAX_CHARS = 256 * 1024
"""Maximum characters of a grammar."""
MAX_TEXT = 4 * MAX_CHARS
"""Maximum characters of a schema or grammar given as text, since JSON may contain much whitespace."""
SEPARATORS = {"whitespace_flexible": False, "item_separator": r",([ ]|\n[ ]{0,24})?", "key_separator": ":[ ]?"}
"""Whitespace of JSON: after a comma none, a space, or a newline with indentation; after a colon none or a space. JSON allows
more, but a confused model may fill its whole answer with it. A `whitespace_pattern` would be taken any number of times."""

ASCII = "dws"
r"""In regular expressions \d, \w and \s stand for ASCII characters alone."""


def grammar_of(form: StructuredOutputs) -> str:
    """Return llguidance's grammar, as JSON text, for `form`. Raises ValueError with the reason if it is invalid."""
    for text in (form.json, form.regex, form.grammar):
        if isinstance(text, str) and len(text) > (MAX_CHARS if text is form.regex else MAX_TEXT):
            raise ValueError(f"it is {len(text)} characters long; at most {MAX_CHARS} are allowed")
    try:
        grammar = json.dumps(_described(form), ensure_ascii=False)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if len(grammar) > MAX_CHARS:
        raise ValueError(f"it is {len(grammar)} characters long; at most {MAX_CHARS} are allowed")
    return grammar


def preceded(grammar: str, lark: str) -> str:
    """Return a grammar for `lark`, which refers to `grammar` (from `grammar_of`) as `@answer`."""
    answer, *others = json.loads(grammar)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**answer, "name": "answer"}, *others]}, ensure_ascii=False)


def _described(form: StructuredOutputs) -> dict[str, object]:
    if form.json is not None:
        return {"grammars": [{"json_schema": json_schema(form.json)}]}
    if form.json_object:
        return {"grammars": [{"json_schema": json_schema({"type": "object"})}]}
    if form.regex is not None:
        return _lark(f"start: /{regex_to_lark(form.regex, ASCII)}/")
    if form.choice is not None:
        if not form.choice or "" in form.choice:
            raise ValueError("it must hold at least one string, none of them empty")
        # One lexeme, since as a rule each choice would be a parser item, of which 2,000 are allowed.
        choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in form.choice)
        return _lark(f"start: CHOICE\nCHOICE: {choices}")
    return _context_free(form.grammar or "")


def _lark(text: str) -> dict[str, object]:
    return {"grammars": [{"lark_grammar": text}]}


def json_schema(schema: str | Mapping[str, object]) -> dict[str, object]:
    """Return a JSON schema with the allowed whitespace. Raises ValueError if it is not an object."""
    content = json.loads(schema) if isinstance(schema, str) else schema
    if not isinstance(content, Mapping):
        raise ValueError("a JSON schema must be an object")
    if content.get("x-guidance") is not None:
        raise ValueError("'x-guidance' is not allowed in it")
    return {**content, "x-guidance": SEPARATORS}


def _context_free(text: str) -> dict[str, object]:
    if not text.lstrip().startswith("{"):
        if len(text) > MAX_CHARS:
            raise ValueError(f"it is {len(text)} characters long; at most {MAX_CHARS} are allowed")
        try:
            return _lark(any_to_lark(text))
        except Exception as error:  # the parser may raise any exception
            raise ValueError(f"it is neither Lark nor GBNF: {error}") from error
    description = json.loads(text)
    grammars = description.get("grammars") if isinstance(description, dict) else None
    if not isinstance(grammars, list) or not grammars or not all(isinstance(grammar, dict) for grammar in grammars):
        raise ValueError("a grammar in JSON must have a list 'grammars' of objects")
    return {**description}
