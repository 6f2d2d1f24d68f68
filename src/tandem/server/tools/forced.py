"""Grammars of whole answers: optional reasoning, then tool calls that fit their schemas, or a response format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tandem.guided.grammar import json_schema, preceded
from tandem.server.tools import harmony, json_calls
from tandem.server.tools.choose import THINKING, OutputFormat
from tandem.server.tools.scan import Tools
from tandem.server.tools.token_calls import DEEPSEEK, KIMI, Tokens

MOST_CALLS = 16
"""Most calls in one forced answer; without a limit, a model could call for ever."""
_SPECIAL = re.compile(r"[][\\/.^$*+?(){}|]")
"""Characters to escape in a regular expression; llguidance rejects other escapes."""
Literal = Callable[[str], str]
"""Function that writes a text for a Lark grammar: as a string, or as a special token if it is one."""


@dataclass(frozen=True)
class CallGrammar:
    """Grammar pieces of a tool call format."""

    call: Callable[[str, Literal], tuple[str, str]]
    """Function of tool name and `Literal`; returns the grammar before and after the arguments."""
    before: tuple[str, ...] = ()
    between: tuple[str, ...] | None = ("\n",)
    """Texts between calls; None if the format allows only one call."""
    after: tuple[str, ...] = ()


def literal_of(special: Mapping[str, int]) -> Literal:
    """Return the `Literal` for a model with these special tokens (ids by text)."""
    return lambda text: f"<[{special[text]}]>" if text in special else _string(text)


def forced_format(name: str) -> str:
    """Return the format for forced calls: the model's own if it has a grammar here, else `generic`."""
    return name if name in _FRAMES else "generic"


def answer_grammar(output_format: OutputFormat, text: Literal, answer: str | None) -> str:
    """Return the grammar of a whole answer as llguidance JSON: optional reasoning, then calls or `answer`.

    `answer`: a grammar from `grammar_of`; None allows only calls.
    """
    rules = [] if output_format.tools is None else _calls(output_format, output_format.tools, text)
    if answer is None:
        return _json("\n".join([*_start(output_format, text, "calls"), *rules]))
    final = "@answer"
    if output_format.reasoning == "harmony":
        final = f"{_joined((harmony.CHANNEL, 'final', harmony.MESSAGE), text)} {final}"
    if rules:
        final = f"calls | {final}"
    return preceded(answer, "\n".join([*_start(output_format, text, "either"), f"either: {final}", *rules]))


def _calls(output_format: OutputFormat, tools: Tools, text: Literal) -> list[str]:
    """Return the Lark rule `calls` and the rules it needs."""
    frame = _FRAMES[output_format.format]
    rules = []
    for index, (tool, schema) in enumerate(tools.items()):
        head, tail = frame.call(tool, text)
        rules.append(f"call_{index}: {head} %json {json.dumps(json_schema(schema), ensure_ascii=False)} {tail}")
    more = ""
    if output_format.several and frame.between is not None:
        more = f"({_joined(frame.between, text)} call){{0,{MOST_CALLS - 1}}}"
    choice = " | ".join(f"call_{index}" for index in range(len(rules)))
    return [f"calls: {_joined(frame.before, text)} call {more} {_joined(frame.after, text)}", f"call: {choice}", *rules]


def _start(output_format: OutputFormat, text: Literal, answer: str) -> list[str]:
    """Return the Lark rule `start`: reasoning (optional, unless the prompt has begun it), then the rule `answer`."""
    if output_format.reasoning == "harmony":
        opening = _joined((harmony.CHANNEL, "analysis", harmony.MESSAGE), text)
        again = _joined((harmony.START, "assistant"), text)
        return [f"start: ({opening} free {again})? {answer}", _until("<|end|>", text)]
    if output_format.reasoning not in THINKING:
        return [f"start: {answer}"]
    opening, closing = THINKING[output_format.reasoning]
    thought = f"free /[ \\n]{{0,4}}/ {answer}"
    start = f"start: {thought}" if output_format.begun else f"start: {answer} | {text(opening)} {thought}"
    return [start, _until(closing, text)]


def _joined(parts: tuple[str, ...], text: Literal) -> str:
    return " ".join(map(text, parts))


def _json(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark}]}, ensure_ascii=False)


def _until(end: str, text: Literal) -> str:
    """Return the Lark rule `free`: any text up to and including the first `end`."""
    if text(end).startswith("<["):
        return f"free: /(.|\\n)*/ {text(end)}"
    return f"free[lazy]: /(.|\\n)*{_SPECIAL.sub(lambda found: chr(92) + found[0], end)}/"


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _named(arguments: str, name: str = "name") -> Callable[[str, Literal], tuple[str, str]]:
    return lambda tool, text: (_string(f'{{"{name}": {json.dumps(tool)}, "{arguments}": '), _string("}"))


def _hermes(tool: str, text: Literal) -> tuple[str, str]:
    head, tail = _named("arguments")(tool, text)
    return f'{text(json_calls.OPEN)} "\\n" {head}', f'{tail} "\\n" {text(json_calls.CLOSE)}'


def _tokens(tokens: Tokens, before: str, after: str, between: tuple[str, ...]) -> CallGrammar:
    """Return the pieces of a `token_calls` format; the text `before` and the regex `after` surround the name."""

    def call(tool: str, text: Literal) -> tuple[str, str]:
        return f"{text(tokens.one)} {_string(before + tool)} {after} {text(tokens.separator)}", text(tokens.one_end)

    return CallGrammar(call, (tokens.all,), between, (tokens.all_end,))


def _harmony(tool: str, text: Literal) -> tuple[str, str]:
    to = _string(f"commentary to=functions.{tool} ")
    return f'{text(harmony.CHANNEL)} {to} {text(harmony.CONSTRAIN)} "json" {text(harmony.MESSAGE)}', ""


_FRAMES: dict[str, CallGrammar] = {
    "hermes": CallGrammar(_hermes),
    "llama3": CallGrammar(_named("parameters"), between=("; ",)),
    "mistral": CallGrammar(_named("arguments"), before=(json_calls.CALLS, "["), between=(", ",), after=("]",)),
    "cohere": CallGrammar(
        _named("parameters", "tool_name"), before=(json_calls.ACTION, "["), between=(", ",), after=("]", json_calls.ACTION_END)
    ),
    "deepseek": _tokens(DEEPSEEK, "", "", ("\n",)),
    "kimi": _tokens(KIMI, "functions.", '":" /[0-9]{1,3}/', ()),
    "harmony": CallGrammar(_harmony, between=None),
    "generic": CallGrammar(_named("arguments"), before=("[",), between=(", ",), after=("]",)),
}
