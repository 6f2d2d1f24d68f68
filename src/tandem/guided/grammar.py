"""From what a client asks for to the grammar that llguidance reads. Pure; nothing is compiled here."""

from __future__ import annotations

import json
from collections.abc import Mapping

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from tandem.protocol.request import StructuredOutputs

MAX_CHARS = 256 * 1024
"""Longest grammar, in characters."""
MAX_TEXT = 4 * MAX_CHARS
"""Longest schema or grammar that comes as a text: as JSON it may be written with much white space."""
WHITESPACE = r"[ ]?|\n[ ]{0,24}"
"""Between the tokens of JSON: nothing, a space, or a new line with its indentation. JSON allows more, and a model that
has lost its way fills its whole answer with it."""

ASCII = "dws"
r"""In regular expressions \d, \w and \s stand for ASCII characters alone."""


def grammar_of(form: StructuredOutputs) -> str:
    """Return llguidance's description of `form`. Raises ValueError, saying why, for what cannot be one."""
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
    """Return `grammar`, a result of `grammar_of`, after something else: `lark`, which refers to it as `@answer`."""
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
        # One lexeme: as a rule, each choice would be an item of the parser's, and there may be 2,000 of those.
        choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in form.choice)
        return _lark(f"start: CHOICE\nCHOICE: {choices}")
    return _context_free(form.grammar or "")


def _lark(text: str) -> dict[str, object]:
    return {"grammars": [{"lark_grammar": text}]}


def json_schema(schema: str | Mapping[str, object]) -> dict[str, object]:
    """Return a schema with the whitespace that outputs may have. Raises ValueError when it is not an object."""
    content = json.loads(schema) if isinstance(schema, str) else schema
    if not isinstance(content, Mapping):
        raise ValueError("a JSON schema must be an object")
    if content.get("x-guidance") is not None:
        raise ValueError("'x-guidance' is not allowed in it")
    return {**content, "x-guidance": {"whitespace_pattern": WHITESPACE}}


def _context_free(text: str) -> dict[str, object]:
    if not text.lstrip().startswith("{"):
        if len(text) > MAX_CHARS:
            raise ValueError(f"it is {len(text)} characters long; at most {MAX_CHARS} are allowed")
        try:
            return _lark(any_to_lark(text))
        except Exception as error:  # a parser in Python, which may raise anything
            raise ValueError(f"it is neither Lark nor GBNF: {error}") from error
    description = json.loads(text)
    grammars = description.get("grammars") if isinstance(description, dict) else None
    if not isinstance(grammars, list) or not grammars or not all(isinstance(grammar, dict) for grammar in grammars):
        raise ValueError("a grammar in JSON must have a list 'grammars' of objects")
    return {**description}
