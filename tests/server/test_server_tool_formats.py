"""What each family writes for tool calls and reasoning, whole and in pieces; what is malformed stays content."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.server.tools.deepseek import deepseek
from tandem.server.tools.events import CallArguments, CallStart, Content, Event, Reasoning
from tandem.server.tools.gemma import gemma
from tandem.server.tools.generic import generic
from tandem.server.tools.harmony import harmony
from tandem.server.tools.hermes import hermes
from tandem.server.tools.llama3 import llama3
from tandem.server.tools.mistral import mistral
from tandem.server.tools.reasoning import thinking
from tandem.server.tools.scan import Feed, Reader, Steps, StreamParser, Tools, everything
from tandem.server.tools.xml import glm, qwen_coder

TOOLS: Tools = {
    "weather": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"},
        "code": {"type": ["string", "null"]}, "any": {}}},
}
THINK = ("<think>", "</think>")


def with_tools(reader: Callable[[Feed, Tools], Steps[None]]) -> Reader:
    return lambda feed: reader(feed, TOOLS)


READERS: dict[str, Reader] = {
    "hermes": hermes, "llama3": llama3, "mistral": mistral, "deepseek": deepseek, "harmony": harmony, "gemma": gemma,
    "generic": generic, "plain": everything, "glm": with_tools(glm), "qwen_coder": with_tools(qwen_coder),
    "think": thinking(THINK, everything, begun=False), "think hermes": thinking(THINK, hermes, begun=False),
    "begun": thinking(THINK, everything, begun=True), "begun hermes": thinking(THINK, hermes, begun=True),
    "brackets": thinking(("[THINK]", "[/THINK]"), mistral, begun=False),
}


@dataclass
class Read:
    """What came out, put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, event: Event) -> None:
        if isinstance(event, Content):
            self.content += event.text
        elif isinstance(event, Reasoning):
            self.reasoning += event.text
        elif isinstance(event, CallStart):
            assert event.index == len(self.calls)
            self.calls.append((event.name, ""))
        else:
            assert isinstance(event, CallArguments) and event.index == len(self.calls) - 1
            self.calls[-1] = (self.calls[-1][0], self.calls[-1][1] + event.text)


def read(family: str, pieces: list[str]) -> Read:
    parser, found = StreamParser(READERS[family]), Read()
    for piece in pieces:
        for event in parser.push(piece):
            found.add(event)
    for event in parser.finish():
        found.add(event)
    assert parser.calls == len(found.calls)
    return found


PARIS: list[tuple[str, Any]] = [("weather", {"city": "Paris"})]
BOTH: list[tuple[str, Any]] = [("weather", {"city": "Paris"}), ("now", {})]
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
DEEP = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
ODD = '{"city": "a \\"b\\" </tool_call> {[", "days": 2}'
Case = tuple[str, str, str, str, list[tuple[str, Any]]]
WELL_FORMED: list[Case] = [
    # family, text, content, reasoning, calls
    ("plain", "just text \n", "just text \n", "", []),
    ("hermes", "just text \n", "just text \n", "", []),
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", "", PARIS),
    ("hermes", 'Let me see.\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
               '<tool_call>{"name":"now","arguments":{}}</tool_call>\n', "Let me see.", "", BOTH),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "weather"}</tool_call>', "", "", PARIS),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', "", "", PARIS),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", "", [("now", {})]),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {ODD}}}</tool_call>', "", "",
     [("weather", json.loads(ODD))]),
    ("hermes", '<tool_call>{"name": "weather", "parameters": {"city": "Paris"}}', "", "", PARIS),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call> and then', " and then", "",
     PARIS),
    ("llama3", '{"name": "weather", "parameters": {"city": "Paris"}}', "", "", PARIS),
    ("llama3", '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}',
     "", "", BOTH),
    ("llama3", ' {"type": "function", "name": "weather", "parameters": {"city": "Paris"}}', "", "", PARIS),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}, "id": "a1", "n": 3}</tool_call>', "", "",
     PARIS),
    ("hermes", '<tool_call>{"arguments": {"city": "\\ud83d"}, "name": "weather"}</tool_call>', "", "",
     [("weather", {"city": "?"})]),
    ("llama3", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', "", []),
    ("llama3", "It is {sunny}.", "It is {sunny}.", "", []),
    ("llama3", '{"temperature": 5, "name": "x"}', '{"temperature": 5, "name": "x"}', "", []),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]',
     "", "", BOTH),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}, '
                '{"name": "now", "arguments": {}, "id": "b"}]', "", "", BOTH),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}', "", "", BOTH),
    ("mistral", 'Well. [TOOL_CALLS]weather[CALL_ID]a1b2[ARGS]{"city": "Paris"}', "Well.", "", PARIS),
    ("mistral", '[TOOL_CALLS]weather{"city": "Paris"}', "", "", PARIS),
    ("deepseek", DEEP.format(V3.format("weather", '{"city": "Paris"}') + "\n" + V3.format("now", "{}")), "", "", BOTH),
    ("deepseek", "Sure.\n" + DEEP.format(V31.format("weather", '{"city": "Paris"}') + V31.format("now", "{}")), "Sure.",
     "", BOTH),
    ("harmony", "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>Answer.",
     "Answer.", "Think.", []),
    ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
                '<|constrain|>json<|message|>{"city": "Paris"}<|call|>', "", "Hm.", PARIS),
    ("harmony", "<|channel|>commentary<|message|>First.<|end|><|start|>assistant to=functions.weather<|channel|>"
                'commentary json<|message|>{"city": "Paris"}<|end|><|start|>assistant<|channel|>commentary '
                "to=functions.now<|message|>{}", "First.", "", BOTH),
    ("harmony", "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Hi.", "Hi.", "Hm.", []),
    ("harmony", "no channels at all", "no channels at all", "", []),
    ("glm", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>", "", "", PARIS),
    ("glm", "Hm.<tool_call>weather<arg_key>days</arg_key><arg_value>3</arg_value><arg_key>where</arg_key><arg_value>"
            '{"x": [1]}</arg_value><arg_key>city</arg_key><arg_value>12</arg_value></tool_call><tool_call>now'
            "</tool_call>", "Hm.", "", [("weather", {"days": 3, "where": {"x": [1]}, "city": "12"}), ("now", {})]),
    ("qwen_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=code>\nnull\n"
                   "</parameter>\n<parameter=any>\ntwo\nlines\n</parameter>\n</function>\n</tool_call>", "", "",
     [("weather", {"city": "Paris", "code": None, "any": "two\nlines"})]),
    ("qwen_coder", "Hm. <function=now>\n</function>", "Hm.", "", [("now", {})]),
    ("gemma", '<|tool_call>call:weather{city:<|"|>Paris, {x}<|"|>,days:3,where:{a:[1,true,<|"|>s<|"|>]}}<tool_call|>',
     "", "", [("weather", {"city": "Paris, {x}", "days": 3, "where": {"a": [1, True, "s"]}})]),
    ("gemma", "Hm. <start_function_call>call:weather{city:<escape>Paris<escape>}<end_function_call>"
              "<start_function_call>call:now{}<end_function_call>", "Hm.", "", BOTH),
    ("generic", '[{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]', "", "",
     BOTH),
    ("generic", '[{"name": "Ann", "age": 3}]', '[{"name": "Ann", "age": 3}]', "", []),
    ("think", "<think>\nWell, 2 < 3.\n</think>\n\nYes.", "Yes.", "Well, 2 < 3.\n", []),
    ("think", "  No thought.", "  No thought.", "", []),
    ("think", "Then <think> is text.", "Then <think> is text.", "", []),
    ("think", "<think>never ends", "", "never ends", []),
    ("begun", "Well.</think>Yes.", "Yes.", "Well.", []),
    ("think hermes", '<think>I <tool_call> it</think>\n<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}'
                     "</tool_call>", "", "I <tool_call> it", PARIS),
    ("brackets", '[THINK]Hm[/THINK]Now.[TOOL_CALLS]weather[ARGS]{"city": "Paris"}', "Now.", "Hm", PARIS),
]
MALFORMED = [
    ("hermes", "<tool_call>not JSON</tool_call> and more"), ("hermes", "<tool_call>"), ("hermes", "</tool_call>"),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'), ("hermes", "<tool_call>[1, 2]</tool_call>"),
    ("hermes", '<tool_call>{"arguments": {"x": NaN}, "name": "x"}</tool_call>'),
    ("gemma", "<|tool_call>call:x{a:1e999}<tool_call|>"),
    ("hermes", '<tool_call>{"name": "x", "arguments": [1]}</tool_call>'), ("hermes", '<tool_call>{"name": "x"'),
    ("hermes", "<tool_call>" + "[" * 3000 + "</tool_call>"), ("hermes", "a <tool_cal"),
    ("llama3", '{"name": 5}'), ("llama3", '{"name": "x", "parameters": 7}'), ("llama3", "{"), ("llama3", '{"na'),
    ("mistral", "[TOOL_CALLS] nothing"), ("mistral", "[TOOL_CALLS][1, 2]"), ("mistral", "[TOOL_CALLS]"),
    ("deepseek", "<｜tool▁call▁begin｜>x<｜tool▁call▁end｜>"), ("deepseek", V31.format("x", "no object")),
    ("glm", "<tool_call>two words</tool_call>"), ("glm", "<tool_call>\n{}</tool_call>"),
    ("qwen_coder", "<tool_call>nothing</tool_call>"), ("qwen_coder", "<function=a b>x"),
    ("gemma", "<|tool_call>call:x{a<tool_call|>"), ("gemma", "<|tool_call>call:x{a:1}}<tool_call|>"),
    ("gemma", "<|tool_call>call:x{" + "a:{" * 100 + "<tool_call|>"),
    ("gemma", '<|tool_call>call:x{a:<|"|>b}<tool_call|>'),
    ("generic", "[1]"), ("generic", "[{}]"), ("generic", "{}"),
]


@pytest.mark.parametrize("case", WELL_FORMED, ids=lambda case: f"{case[0]}: {case[1][:40]}")
def test_what_families_write_is_read(case: Case) -> None:
    family, text, content, reasoning, calls = case
    found = read(family, [text])
    assert (found.content, found.reasoning) == (content, reasoning)
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == calls
    assert read(family, list(text)) == found, "one character at a time"


@pytest.mark.parametrize(("family", "text"), MALFORMED, ids=lambda value: value[:40])
def test_what_is_malformed_stays_content(family: str, text: str) -> None:
    found = read(family, [text])
    assert not found.calls
    assert "".join(found.content.split()) == "".join(text.split())
    assert read(family, list(text)) == found, "one character at a time"


MARKUP = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "', 'x", "arguments": ',
    '{"a": [1, "}"]}', "}", '"', "\\", "[TOOL_CALLS]", "[ARGS]", "[{", "]", ",", ";", "<|python_tag|>",
    "<|channel|>", "analysis", "final", "<|message|>", "<|end|>", "<|start|>assistant", " to=functions.f",
    "<|call|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "f\n```json\n",
    "<｜tool▁call▁end｜>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<function=", ">",
    "<parameter=", "</parameter>", "</function>", "<|tool_call>", "call:f{", "a:1", '<|"|>', "<tool_call|>",
    " ", "\n", "word", "é漢", "{}", "<", "[THINK]", "[/THINK]",
]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(READERS)), st.lists(st.sampled_from(MARKUP), max_size=25), st.data())
def test_how_a_text_is_cut_changes_nothing(family: str, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(family, pieces) == read(family, [text]) == read(family, list(text))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(WELL_FORMED), st.data())
def test_how_a_well_formed_text_is_cut_changes_nothing(case: Case, data: st.DataObject) -> None:
    family, text = case[:2]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(family, pieces) == read(family, [text])


def test_arguments_stream_while_they_come() -> None:
    parser = StreamParser(hermes)
    pieces = ('<tool_call>{"name": "f", "arguments": {"a"', ': "one', ' two"', "}}", "</tool")
    start, *rest = [parser.push(piece) for piece in pieces]
    assert start == [CallStart(0, "f"), CallArguments(0, '{"a"')]
    assert rest == [[CallArguments(0, ': "one')], [CallArguments(0, ' two"')], [CallArguments(0, "}")], []]
