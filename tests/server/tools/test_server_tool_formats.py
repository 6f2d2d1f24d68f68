"""What each family writes for tool calls and reasoning, whole and in pieces; what is malformed stays content."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.server.tools import choose
from tandem.server.tools.choose import FORMATS, THINKING, OutputFormat, output_parser, told_formats, tool_format
from tandem.server.tools.deltas import CallArguments, CallStart, Content, Event, ReasoningText
from tandem.server.tools.json_calls import hermes
from tandem.server.tools.scan import Reader, StreamParser, Tools, everything

TOOLS: Tools = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "where": {"type": "object"},
            "code": {"type": ["string", "null"]},
            "any": {},
            "list": {"type": "array", "items": {"type": "string"}},
            "none": {"type": "array"},
        },
    }
}
THINK = ("<think>", "</think>")


SPECIAL = ("<|", "<｜", "]<]")
"""What begins special tokens here."""


def reader(calls: str, reasoning: str = "none", *, begun: bool = False) -> Reader:
    how = output_parser(OutputFormat(calls, reasoning, TOOLS, begun), lambda text: text.startswith(SPECIAL))
    assert how is not None
    return how.reader


READERS: dict[str, Reader] = {
    **{name: reader(name) for name in FORMATS},
    "plain": everything,
    **{f"{name} think": reader({"think": "hermes", "brackets": "mistral"}.get(name, name), name) for name in THINKING},
    **{f"{name} begun": reader(name, "think", begun=True) for name in FORMATS if name != "harmony"},
    "kimi-k3 begun": reader("kimi-k3", "kimi-k3", begun=True),
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
        elif isinstance(event, ReasoningText):
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
KIMI = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
MINIMAX = """<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Paris</parameter>
</invoke>
<invoke name="now">
</invoke>
</minimax:tool_call>"""
MUSE = (
    MINIMAX.replace("minimax:tool_call", "atem:function_calls")
    .replace("invoke", "atem:invoke")
    .replace("parameter", "atem:parameter")
)
DSML = (
    MINIMAX.replace("minimax:tool_call", "｜DSML｜function_calls")
    .replace("invoke", "｜DSML｜invoke")
    .replace("parameter", "｜DSML｜parameter")
    .replace('"city"', '"city" string="true"')
)
NS = "]<]minimax[>["
K3_CALLS = """<|open|>call tool="weather" index="1"<|sep|>
<|open|>argument key="city" type="string"<|sep|>a "b"<|close|>argument<|sep|>
<|open|>argument key="days" type="number"<|sep|>5<|close|>argument<|sep|>
<|open|>argument key="where" type="object"<|sep|>{"x": [1]}<|close|>argument<|sep|>
<|open|>argument key="code"<|sep|>7<|close|>argument<|sep|>
<|close|>call<|sep|>
<|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|>
<|open|>call tool="f" index="3"<|sep|><|open|>json type="object"<|sep|>{"a": [1]}<|close|>json<|sep|>
<|close|>call<|sep|>
"""
ODD = '{"city": "a \\"b\\" </tool_call> {[", "days": 2}'


def m3(calls: str) -> str:
    return f"¤<tool_call>\n¤{calls}\n¤</tool_call>".replace("¤", NS)


Case = tuple[str, str, str, str, list[tuple[str, Any]]]
WELL_FORMED: list[Case] = [
    # family, text, content, reasoning, calls
    ("plain", "just text \n", "just text \n", "", []),
    ("hermes", "just text \n", "just text \n", "", []),
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", "", PARIS),
    (
        "hermes",
        'Let me see.\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>{"name":"now","arguments":{}}</tool_call>\n',
        "Let me see.",
        "",
        BOTH,
    ),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "weather"}</tool_call>', "", "", PARIS),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', "", "", PARIS),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", "", [("now", {})]),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {ODD}}}</tool_call>', "", "", [("weather", json.loads(ODD))]),
    ("hermes", '<tool_call>{"name": "weather", "parameters": {"city": "Paris"}}', "", "", PARIS),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call> and then', " and then", "", PARIS),
    ("llama3", '{"name": "weather", "parameters": {"city": "Paris"}}', "", "", PARIS),
    (
        "llama3",
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}',
        "",
        "",
        BOTH,
    ),
    ("llama3", ' {"type": "function", "name": "weather", "parameters": {"city": "Paris"}}', "", "", PARIS),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}, "id": "a1", "n": 3}</tool_call>', "", "", PARIS),
    (
        "hermes",
        '<tool_call>{"arguments": {"city": "\\ud83d"}, "name": "weather"}</tool_call>',
        "",
        "",
        [("weather", {"city": "?"})],
    ),
    ("llama3", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', "", []),
    ("llama3", "It is {sunny}.", "It is {sunny}.", "", []),
    ("llama3", '{"temperature": 5, "name": "x"}', '{"temperature": 5, "name": "x"}', "", []),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]',
        "",
        "",
        BOTH,
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}, '
        '{"name": "now", "arguments": {}, "id": "b"}]',
        "",
        "",
        BOTH,
    ),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}', "", "", BOTH),
    ("mistral", 'Well. [TOOL_CALLS]weather[CALL_ID]a1b2[ARGS]{"city": "Paris"}', "Well.", "", PARIS),
    ("mistral", '[TOOL_CALLS]weather{"city": "Paris"}', "", "", PARIS),
    ("deepseek", DEEP.format(V3.format("weather", '{"city": "Paris"}') + "\n" + V3.format("now", "{}")), "", "", BOTH),
    (
        "deepseek",
        "Sure.\n" + DEEP.format(V31.format("weather", '{"city": "Paris"}') + V31.format("now", "{}")),
        "Sure.",
        "",
        BOTH,
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>Answer.",
        "Answer.",
        "Think.",
        [],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        "",
        "Hm.",
        PARIS,
    ),
    (
        "harmony",
        "<|channel|>commentary<|message|>First.<|end|><|start|>assistant to=functions.weather<|channel|>"
        'commentary json<|message|>{"city": "Paris"}<|end|><|start|>assistant<|channel|>commentary '
        "to=functions.now<|message|>{}",
        "First.",
        "",
        BOTH,
    ),
    ("harmony", "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Hi.", "Hi.", "Hm.", []),
    ("harmony", "no channels at all", "no channels at all", "", []),
    (
        "kimi",
        "I look.\n" + SECTION.format(KIMI.format("weather", 0, '{"city": "Paris"}') + KIMI.format("now", 1, "{}")),
        "I look.",
        "",
        BOTH,
    ),
    (
        "kimi",
        SECTION.format("<|tool_call_begin|> weather:3 <|tool_call_argument_begin|> " + ODD + "<|tool_call_end|>"),
        "",
        "",
        [("weather", json.loads(ODD))],
    ),
    ("minimax", "Sure.\n" + MINIMAX + "\n", "Sure.", "", BOTH),
    (
        "minimax",
        "<minimax:tool_call><invoke name='weather'><parameter name=days>3</parameter>"
        '<parameter name="where">\n{"x": [1]}\n</parameter><parameter name="city">12 < 13</parameter></invoke>'
        "</minimax:tool_call>",
        "",
        "",
        [("weather", {"days": 3, "where": {"x": [1]}, "city": "12 < 13"})],
    ),
    ("muse", MUSE, "", "", BOTH),
    ("deepseek-dsml", DSML, "", "", BOTH),
    (
        "deepseek-dsml",
        DSML.replace('string="true">Paris', 'string="false">["Paris", 1]'),
        "",
        "",
        [("weather", {"city": ["Paris", 1]}), ("now", {})],
    ),
    ("deepseek-dsml", DSML.replace('string="true">Paris', 'string="true">7'), "", "", [("weather", {"city": "7"}), ("now", {})]),
    (
        "longcat",
        "Hm.<longcat_tool_call>weather\n<longcat_arg_key>city</longcat_arg_key>\n<longcat_arg_value>Paris"
        "</longcat_arg_value>\n</longcat_tool_call><longcat_tool_call>now</longcat_tool_call>",
        "Hm.",
        "",
        BOTH,
    ),
    ("longcat think", "<longcat_think>Hm.</longcat_think><longcat_tool_call>now</longcat_tool_call>", "", "Hm.", [("now", {})]),
    ("pythonic", '<|tool_call_start|>[weather(city="Paris"), now()]<|tool_call_end|>', "", "", BOTH),
    (
        "pythonic",
        "Sure. <|tool_call_start|>[weather(city='a )] b', where={'x': [1, true, null, -2.5]})]<|tool_call_end|>Done.",
        "Sure.Done.",
        "",
        [("weather", {"city": "a )] b", "where": {"x": [1, True, None, -2.5]}})],
    ),
    ("pythonic", '[weather(city="Paris"), now()]', "", "", BOTH),
    ("pythonic", "<|python_start|>[os.weather(days=3)]<|python_end|>", "", "", [("os.weather", {"days": 3})]),
    ("pythonic", '{"name": "weather", "parameters": {"city": "Paris"}}', "", "", PARIS),
    ("pythonic", '<|python_start|>{"name": "weather", "parameters": {"city": "Paris"}}<|python_end|>', "", "", PARIS),
    (
        "qwen-coder begun",
        "Hm.\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "",
        "Hm.\n",
        BOTH,
    ),
    ("glm", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>", "", "", PARIS),
    (
        "glm",
        "Hm.<tool_call>weather<arg_key>days</arg_key><arg_value>3</arg_value><arg_key>where</arg_key><arg_value>"
        '{"x": [1]}</arg_value><arg_key>city</arg_key><arg_value>12</arg_value></tool_call><tool_call>now'
        "</tool_call>",
        "Hm.",
        "",
        [("weather", {"days": 3, "where": {"x": [1]}, "city": "12"}), ("now", {})],
    ),
    (
        "qwen-coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=code>\nnull\n"
        "</parameter>\n<parameter=any>\ntwo\nlines\n</parameter>\n</function>\n</tool_call>",
        "",
        "",
        [("weather", {"city": "Paris", "code": None, "any": "two\nlines"})],
    ),
    ("qwen-coder", "Hm. <function=now>\n</function>", "Hm.", "", [("now", {})]),
    (
        "gemma",
        '<|tool_call>call:weather{city:<|"|>Paris, {x}<|"|>,days:3,where:{a:[1,true,<|"|>s<|"|>]}}<tool_call|>',
        "",
        "",
        [("weather", {"city": "Paris, {x}", "days": 3, "where": {"a": [1, True, "s"]}})],
    ),
    (
        "gemma",
        "Hm. <start_function_call>call:weather{city:<escape>Paris<escape>}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>",
        "Hm.",
        "",
        BOTH,
    ),
    ("generic", '[{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]', "", "", BOTH),
    ("generic", '[{"name": "Ann", "age": 3}]', '[{"name": "Ann", "age": 3}]', "", []),
    ("think think", "<think>\nWell, 2 < 3.\n</think>\n\nYes.", "Yes.", "Well, 2 < 3.\n", []),
    ("think think", "  No thought.", "  No thought.", "", []),
    ("think think", "Then <think> is text.", "Then <think> is text.", "", []),
    ("think think", "<think>never ends", "", "never ends", []),
    ("hermes begun", "Well.</think>Yes.", "Yes.", "Well.", []),
    (
        "think think",
        '<think>I <tool_call> it</think>\n<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>',
        "",
        "I <tool_call> it",
        PARIS,
    ),
    (
        "seed",
        "Hm.<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n</function>\n"
        "</seed:tool_call><seed:tool_call><function=now></function></seed:tool_call>",
        "Hm.",
        "",
        BOTH,
    ),
    ("seed think", "<seed:think>Hm.</seed:think>\nYes.", "Yes.", "Hm.", []),
    (
        "solar",
        "<|tool_call:start|>weather\n<|tool_arg:start|>city<|tool_arg:value|>Paris<|tool_arg:end|>\n"
        "<|tool_call:end|><|tool_call:start|>now\n<|tool_call:end|>",
        "",
        "",
        BOTH,
    ),
    ("solar think", "<|think:start|>Hm.<|think:end|>Yes.", "Yes.", "Hm.", []),
    ("deepseek-dsml", "Hm.\n" + DSML.replace("function_calls", "tool_calls"), "Hm.", "", BOTH),
    ("deepseek-dsml begun", "Hm." + DSML, "", "Hm.", BOTH),
    (
        "minicpm",
        'Hm.<function name="weather"><param name="city">Paris</param></function>\n<function name="now"></function>',
        "Hm.",
        "",
        BOTH,
    ),
    (
        "minicpm",
        '<function name="weather"><param name="days">3</param><param name="city"> <![CDATA[a\n<b>]]></param></function>',
        "",
        "",
        [("weather", {"days": 3, "city": "a\n<b>"})],
    ),
    (
        "cohere",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Paris"}'
        '},\n    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        "",
        "",
        BOTH,
    ),
    ("cohere", '<|START_ACTION|>{"tool_name": "weather", "parameters": {"city": "Paris"}}<|END_ACTION|>', "", "", PARIS),
    ("cohere think", "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>", "Yes.", "Hm.", []),
    (
        "cohere think",
        '<|START_THINKING|>Hm.<|START_ACTION|>[{"tool_name": "now", "parameters": {}}]<|END_ACTION|>',
        "",
        "Hm.",
        [("now", {})],
    ),
    ("gemma think", "<|channel>thought\nHm.<channel|>Yes.<|tool_call>call:now{}<tool_call|>", "Yes.", "Hm.", [("now", {})]),
    ("gemma think", "<|channel>thought\nHm.<|tool_call>call:now{}<tool_call|>", "", "Hm.", [("now", {})]),
    (
        "kimi-k3",
        "Hm.<|close|>response<|sep|><|open|>tools<|sep|>" + K3_CALLS + "<|close|>tools<|sep|><|close|>message<|sep|>",
        "Hm.",
        "",
        [("weather", {"city": 'a "b"', "days": 5, "where": {"x": [1]}, "code": "7"}), ("now", {}), ("f", {"a": [1]})],
    ),
    (
        "kimi-k3 begun",
        "Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|><|close|>message<|sep|>",
        "Yes.",
        "Hm.",
        [],
    ),
    ("kimi-k3 begun", "Hm.<|open|>response<|sep|>Yes.<|close|>response<|sep|>", "Yes.", "Hm.", []),
    (
        "kimi-k3 begun",
        'Hm.<|open|>tools<|sep|><|open|>call tool="now" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        "",
        "Hm.",
        [("now", {})],
    ),
    ("minimax-m3", m3('<invoke name="weather">¤<city>Paris¤</city>¤</invoke>¤<invoke name="now">¤</invoke>'), "", "", BOTH),
    (
        "minimax-m3",
        "Hm."
        + m3(
            '<invoke name="weather">¤<city>12¤</city>¤<days>3¤</days>¤<where>¤<a>¤<item>1'
            "¤</item>¤<item>¤<b>x¤</b>¤</item>¤</a>¤</where>¤<list>¤<v>1¤</v>¤</list>¤<none>¤</none>¤<any>p¤</any>"
            "¤<any>q¤</any>¤</invoke>"
        ),
        "Hm.",
        "",
        [("weather", {"city": "12", "days": 3, "where": {"a": [1, {"b": "x"}]}, "list": ["1"], "none": [], "any": ["p", "q"]})],
    ),
    ("minimax-m3 think", "<mm:think>Hm.</mm:think>Yes.", "Yes.", "Hm.", []),
    ("minimax-m3 begun", "Hm." + m3('<invoke name="now">¤</invoke>'), "", "Hm.", [("now", {})]),
    ("brackets think", '[THINK]Hm[/THINK]Now.[TOOL_CALLS]weather[ARGS]{"city": "Paris"}', "Now.", "Hm", PARIS),
]
MENDED: list[Case] = [
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}\n{"name": "now", "arguments": {}}</tool_call>Then',
        "Then",
        "",
        BOTH,
    ),
    ("hermes", '<tool_call>[{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "now"}] </tool_call>', "", "", BOTH),
    (
        "hermes",
        '<tool_call>{"arguments": {"city": "a </tool_call> b"}, "name": "weather"}</tool_call>',
        "",
        "",
        [("weather", {"city": "a </tool_call> b"})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": True, "b": [None, NaN, -Infinity], "c": False,}}</tool_call>',
        "",
        "",
        [("f", {"a": True, "b": [None, None, None], "c": False})],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"x": NaN, "y": [1,],}, "name": "f"}</tool_call>',
        "",
        "",
        [("f", {"x": None, "y": [1]})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "1\n2\t\x00", "b": "\\d+ \\\'s\\\n"}}</tool_call>',
        "",
        "",
        [("f", {"a": "1\n2\t\x00", "b": "\\d+ 's\n"})],
    ),
    ("mistral", '[TOOL_CALLS][{"arguments": {"city": "a ] b"}, "name": "weather"}]', "", "", [("weather", {"city": "a ] b"})]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "1\n2", "b": None,}', "", "", [("f", {"a": "1\n2", "b": None})]),
    ("llama3", '{"name": "f", "parameters": {"a": "1\n2", "b": True}}', "", "", [("f", {"a": "1\n2", "b": True})]),
    (
        "deepseek",
        V31.format("f", '```json\n{"a": "1\n2", "b": True,}\n```') + V31.format("now", ""),
        "",
        "",
        [("f", {"a": "1\n2", "b": True}), ("now", {})],
    ),
    (
        "kimi",
        SECTION.format(
            "<|tool_call_begin|>functions.f<|tool_call_argument_begin|>{'a'}<|tool_call_end|>".replace("{'a'}", '{"a": False}')
            + KIMI.format("now", 1, " ")
        ),
        "",
        "",
        [("f", {"a": False}), ("now", {})],
    ),
    (
        "gemma",
        '<|tool_call>call:f{"a":"x, {y}: \\"z\\"","b":[True,None,"q"],c:"d" e}<tool_call|>',
        "",
        "",
        [("f", {"a": 'x, {y}: "z"', "b": [True, None, "q"], "c": '"d" e'})],
    ),
    (
        "pythonic",
        '<|tool_call_start|>[get-weather(from="a-b=(c", class=1), a.b-c(null=null)]<|tool_call_end|>',
        "",
        "",
        [("get-weather", {"from": "a-b=(c", "class": 1}), ("a.b-c", {"null": None})],
    ),
    (
        "qwen-coder",
        "<tool_call>\n<function=weather>\n<parameter=days>\n1\n<parameter=city>\nParis\n</function>\n"
        "</tool_call>\n<tool_call><function=now></function></tool_call>",
        "",
        "",
        [("weather", {"days": 1, "city": "Paris"}), ("now", {})],
    ),
    (
        "qwen-coder",
        "<tool_call><function=weather><parameter=city>Paris</tool_call> then <tool_call><function=now></tool_call>",
        " then",
        "",
        BOTH,
    ),
    ("qwen-coder", "<tool_call><function=weather><parameter=city>Paris</parameter><function=now></function>", "", "", BOTH),
    (
        "qwen-coder",
        "<tool_call><function=weather><parameter=city>\na </function> </tool_call>\n</parameter></function></tool_call>",
        "",
        "",
        [("weather", {"city": "a </function> </tool_call>"})],
    ),
    (
        "minicpm",
        '<function name="weather"><param name="city"> <![CDATA[a </param>\n<b>]]></param></function>',
        "",
        "",
        [("weather", {"city": "a </param>\n<b>"})],
    ),
    (
        "minimax",
        '<minimax:tool_call><invoke name="weather"><parameter name="days">1<parameter name="city">Paris'
        '</invoke><invoke name="now"></invoke></minimax:tool_call>',
        "",
        "",
        [("weather", {"days": 1, "city": "Paris"}), ("now", {})],
    ),
    (
        "glm",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>a </tool_call> b</arg_value></tool_call>",
        "",
        "",
        [("weather", {"city": "a </tool_call> b"})],
    ),
    ("glm", "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</tool_call><tool_call>now</tool_call>", "", "", BOTH),
    ("kimi begun", "Hm." + SECTION.format(KIMI.format("now", 0, "{}")), "", "Hm.", [("now", {})]),
    ("kimi begun", "Hm." + SECTION.format(KIMI.format("now", 0, "{}")) + "</think>Yes.", "Yes.", "Hm.", [("now", {})]),
    ("kimi begun", "Hm." + KIMI.format("now", 0, "{}"), "", "Hm.", [("now", {})]),
    ("deepseek begun", "Hm." + V31.format("now", "{}"), "", "Hm.", [("now", {})]),
    (
        "hermes begun",
        'I <tool_call>{"name": "now", "arguments": {}}</tool_call>',
        "",
        'I <tool_call>{"name": "now", "arguments": {}}</tool_call>',
        [],
    ),
]
MALFORMED = [
    ("hermes", "<tool_call>not JSON</tool_call> and more"),
    ("hermes", "<tool_call>"),
    ("hermes", "</tool_call>"),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>[1, 2]</tool_call>"),
    ("gemma", "<|tool_call>call:x{a:1e999}<tool_call|>"),
    ("hermes", '<tool_call>{"name": "x", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "x"'),
    ("hermes", "<tool_call>" + "[" * 3000 + "</tool_call>"),
    ("hermes", "a <tool_cal"),
    ("llama3", '{"name": 5}'),
    ("llama3", '{"name": "x", "parameters": 7}'),
    ("llama3", "{"),
    ("llama3", '{"na'),
    ("mistral", "[TOOL_CALLS] nothing"),
    ("mistral", "[TOOL_CALLS][1, 2]"),
    ("mistral", "[TOOL_CALLS]"),
    ("deepseek", "<｜tool▁call▁begin｜>x<｜tool▁call▁end｜>"),
    ("deepseek", V31.format("x", "no object")),
    ("glm", "<tool_call>two words</tool_call>"),
    ("glm", "<tool_call>\n{}</tool_call>"),
    ("qwen-coder", "<tool_call>nothing</tool_call>"),
    ("qwen-coder", "<function=a b>x"),
    ("gemma", "<|tool_call>call:x{a<tool_call|>"),
    ("gemma", "<|tool_call>call:x{a:1}}<tool_call|>"),
    ("gemma", "<|tool_call>call:x{" + "a:{" * 100 + "<tool_call|>"),
    ("gemma", '<|tool_call>call:x{a:<|"|>b}<tool_call|>'),
    ("generic", "[1]"),
    ("generic", "[{}]"),
    ("generic", "{}"),
    ("kimi", SECTION.format("nothing")[len("<|tool_calls_section_begin|>") : -len("<|tool_calls_section_end|>")]),
    ("kimi", "<|tool_call_begin|>no id<|tool_call_argument_begin|>{}"),
    ("kimi", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>no object<|tool_call_end|>"),
    ("kimi", "<|tool_call_begin|>functions.f:0<|tool_call_end|>"),
    ("minimax", "<minimax:tool_call>nothing</minimax:tool_call> and more"),
    ("minimax", "<minimax:tool_call>"),
    ("minimax", '<minimax:tool_call><invoke name="two words"></invoke></minimax:tool_call>'),
    ("minimax", "<minimax:tool_call><invoke for=f></invoke>"),
    ("minimax", '<invoke name="f"></invoke>'),
    ("deepseek-dsml", "<｜DSML｜function_calls>nothing"),
    ("muse", "<atem:function_calls></atem:function_calls>"),
    ("longcat", "<longcat_tool_call>two words</longcat_tool_call>"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[a link](https://x.org/(y))"),
    ("pythonic", "[f(a=b)]"),
    ("pythonic", "[f(a=1"),
    ("pythonic", "[]"),
    ("pythonic", "<|tool_call_start|>[f(a=1)<|tool_call_end|>"),
    ("pythonic", "[f(a=open('x'))]"),
    ("pythonic", "[f(a={1, 2})]"),
    ("pythonic", "[f(a=1e999)]"),
    ("pythonic", "[f(a=" + "-" * 9000 + "1)]"),
    ("pythonic", "[f(a=" + "[" * 500 + "]" * 500 + ")]"),
    ("pythonic", "[f(*a)]"),
    ("pythonic", "[f(**a)]"),
    ("pythonic", "[f(a='\\d', b=c)]"),
    ("pythonic", '{"temperature": 5}'),
]


@pytest.mark.parametrize("case", WELL_FORMED + MENDED, ids=lambda case: f"{case[0]}: {case[1][:40]}")
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
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    '{"name": "',
    'x", "arguments": ',
    '{"a": [1, "}"]}',
    "}",
    '"',
    "\\",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[{",
    "]",
    ",",
    ";",
    "<|python_tag|>",
    "<|channel|>",
    "analysis",
    "final",
    "<|message|>",
    "<|end|>",
    "<|start|>assistant",
    " to=functions.f",
    "<|call|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "f\n```json\n",
    "<｜tool▁call▁end｜>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<function=",
    ">",
    "<parameter=",
    "</parameter>",
    "</function>",
    "<|tool_call>",
    "call:f{",
    "a:1",
    '<|"|>',
    "<tool_call|>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "functions.f:0",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    '<invoke name="f">',
    "<invoke ",
    "</invoke>",
    '<parameter name="k">',
    "</longcat_tool_call>",
    "<longcat_tool_call>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "[f(",
    "a=1",
    ")]",
    "<｜DSML｜function_calls>",
    '<｜DSML｜invoke name="f">',
    "</｜DSML｜invoke>",
    "<tool_call",
    "<|open|>tools<|sep|>",
    '<|open|>call tool="f"<|sep|>',
    '<|open|>argument key="a"<|sep|>',
    "<|close|>argument<|sep|>",
    "<|close|>call<|sep|>",
    "<|close|>tools<|sep|>",
    "<|open|>json<|sep|>",
    "<|open|>response<|sep|>",
    "<|close|>response<|sep|>",
    "<|close|>think<|sep|>",
    NS,
    "<k>",
    "</k>",
    "<item>",
    "</item>",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    '"tool_name": "f", "parameters": ',
    '<function name="f">',
    '<param name="k">',
    "</param>",
    "<![CDATA[",
    "]]>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "True",
    "NaN",
    "\t",
    "'",
    "=",
    "from=",
    "<｜DSML｜tool_calls>",
    "</｜DSML｜tool_calls>",
    "<|channel>thought",
    "<channel|>",
    "<mm:think>",
    "```",
    " ",
    "\n",
    "word",
    "é漢",
    "{}",
    "<",
    "[THINK]",
    "[/THINK]",
]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(READERS)), st.lists(st.sampled_from(MARKUP), max_size=25), st.data())
def test_how_a_text_is_cut_changes_nothing(family: str, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(family, pieces) == read(family, [text]) == read(family, list(text))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(WELL_FORMED + MENDED), st.data())
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


@pytest.mark.parametrize(
    ("family", "module", "tags"),
    [
        ("kimi", "kimi_k2", ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")),
        ("minimax", "minimax_m2", ("<minimax:tool_call>", "</minimax:tool_call>")),
        ("muse", "muse_spark", ("<atem:function_calls>", "</atem:function_calls>")),
        ("glm", "glm47", ("<tool_call>", "</tool_call>")),
        ("qwen-coder", "qwen3_coder", ("<tool_call>\n", "\n</tool_call>")),
        ("longcat", "longcat", ("<longcat_tool_call>", "</longcat_tool_call>")),
        ("pythonic", "pythonic", ("<|tool_call_start|>", "<|tool_call_end|>")),
        ("mistral", "mistral", ("[TOOL_CALLS]", "")),
        ("kimi-k3", "kimi_k3", ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>")),
        ("minicpm", "minicpm5", ("<function name=", "</function>")),
        ("gemma", "gemma4", ("<|tool_call>", "<tool_call|>")),
    ],
)
def test_mlx_lm_reads_the_same_calls(family: str, module: str, tags: tuple[str, str]) -> None:
    parse = importlib.import_module(f"mlx_lm.tool_parsers.{module}").parse_tool_call
    tools = [{"function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()]
    compared = 0
    for case in WELL_FORMED:
        opening, closing = tags
        start = case[1].find(opening)
        if case[0] != family or start < 0 or (family, case[1].count("<arg_key>")) == ("glm", 0):
            continue
        body = case[1][start + len(opening) :].partition(closing)[0] if closing else case[1][start + len(opening) :]
        if "[CALL_ID]" in body or "[TOOL_CALLS]" in body or body.startswith(("weather{", "{")):
            continue
        theirs = parse(body, tools)
        ours = [{"name": name, "arguments": json.loads(text)} for name, text in read(family, [case[1]]).calls]
        theirs = theirs if isinstance(theirs, list) else [theirs]
        assert [{key: call[key] for key in ("name", "arguments")} for call in theirs] == ours[: len(theirs)]
        compared += 1
    assert compared


def test_ids_that_models_give_to_calls_are_kept() -> None:
    for family, text, ids in (
        ("kimi", KIMI.format("f", 0, "{}") + KIMI.format("g", 1, "{}"), ["functions.f:0", "functions.g:1"]),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{}[TOOL_CALLS]f[CALL_ID]short[ARGS]{}", ["abcdef123", ""]),
    ):
        parser = StreamParser(READERS[family])
        events = [*parser.push(text), *parser.finish()]
        assert [event.id for event in events if isinstance(event, CallStart)] == ids


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<minimax:tool_call>' }}", "minimax"),
        ("<|tool_calls_section_begin|>", "kimi"),
        ("<｜DSML｜function_calls>", "deepseek-dsml"),
        ("<longcat_tool_call>", "longcat"),
        ("<arg_key><tool_call>", "glm"),
        ("<|tool_list_start|>", "pythonic"),
        ('<|header_start|> "parameters"', "pythonic"),
        ("<tool_call>\n<function=", "qwen-coder"),
        ("<｜tool▁call▁begin｜>", "deepseek"),
        ("", "hermes"),
        ("<atem:function_calls>", "muse"),
        ("[TOOL_CALLS][CALL_ID]", "mistral"),
    ],
)
def test_a_template_tells_the_format(template: str, name: str) -> None:
    assert tool_format("auto", template) == name


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("<|channel>thought <channel|> <|tool_call>call:f{}<tool_call|>", "gemma", "gemma"),
        ("<|open|>think<|sep|> <|close|> <|open|>tools<|sep|>", "kimi-k3", "kimi-k3"),
        ("<mm:think></mm:think> ]<]minimax[>[<tool_call>", "minimax-m3", "minimax-m3"),
        ('<think></think><function name="f"><param name="p">', "minicpm", "think"),
        ("<|START_THINKING|><|END_THINKING|><|START_ACTION|>", "cohere", "cohere"),
        ("<think></think><｜DSML｜tool_calls><｜DSML｜invoke name=", "deepseek-dsml", "think"),
        ("<seed:think></seed:think><seed:tool_call><function=f><parameter=a>", "seed", "seed"),
        ("<|think:start|><|think:end|><|tool_call:start|>", "solar", "solar"),
        ("<longcat_think></longcat_think><longcat_tool_call>", "longcat", "longcat"),
        ("<|channel|><|message|>", "harmony", "harmony"),
        ("nothing", "hermes", "none"),
    ],
)
def test_a_template_tells_both_formats_and_a_chat_without_tools_walks_no_table(
    template: str, calls: str, reasoning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = told_formats("auto", "auto", template, "", None, bool)
    assert (told.format, told.reasoning) == (calls, reasoning)
    monkeypatch.setattr(choose, "FORMATS", None)
    assert told_formats("auto", "auto", template, "", None, bool) == told
    opening = THINKING.get(reasoning, ("<none>",))[0]
    assert told_formats("auto", "auto", template, f"... {opening}\n", None, bool).begun == (reasoning in THINKING)


def test_special_tokens_tell_the_format_of_a_template_that_takes_tools_but_shows_no_call() -> None:
    def special(text: str) -> bool:
        return text in ("<|tool_call_start|>", "<|tool_call_end|>")

    assert tool_format("auto", "{{ tools }}", special) == "pythonic"
    assert tool_format("auto", "no t-word: calls are explained to the model in hermes' words", special) == "hermes"
