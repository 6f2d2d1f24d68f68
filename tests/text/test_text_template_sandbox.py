"""Chat templates that would take the machine's time or memory end with an error; the usual ones are unchanged."""

# ruff: noqa: E501 - templates

from __future__ import annotations

import json
import subprocess
import sys

import jinja2.ext
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.errors import BrokenModel, RequestError, TandemError
from tandem.testing import CHAT_TEMPLATE
from tandem.text import template_sandbox
from tandem.text.template import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello, hello & <b>\n"},
    {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nHi.", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, "ü"]}}}]},
    {"role": "user", "content": "And?"},
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def render(source, messages=MESSAGES, tools=TOOLS, **variables):
    template = ChatTemplate(source, {"bos_token": "<s>"}, origin="model")
    return template.render(messages, tools=tools, add_generation_prompt=True, variables=variables)


BOMBS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops without turns": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "lists of loops": "{% for a in range(99999) %}{% set x = range(99999)|list|length %}{% endfor %}",
    "product": "{{ 'a' * 10**9 }}",
    "list product": "{{ ([0] * 10**8)|length }}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "powers": "{% set ns = namespace(x=10) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "width": "{{ '%999999999d' % 1 }}",
    "width argument": "{{ '%*d' % (999999999, 1) }}",
    "width filter": "{{ '%999999999d'|format(1) }}",
    "width method": "{{ '{:>999999999}'.format(1) }}",
    "computed width": "{{ '{:>{}}'.format(1, 999999999) }}",
    "format_map": "{{ '{a:>999999999}'.format_map({'a': 1}) }}",
    "padding": "{{ 'a'.ljust(999999999) }}",
    "zeros": "{{ 'a'.zfill(999999999) }}",
    "tabs": "{{ '\\t'.expandtabs(999999999) }}",
    "translate": "{{ 'a'.translate({97: 'b'}) }}",
    "indent": "{{ 'a'|indent(999999999, true) }}",
    "json": "{{ messages|tojson(indent=999999999) }}",
    "center": "{{ 'a'|center(999999999) }}",
    "lipsum": "{{ lipsum(n=999999) }}",
    "replace": "{{ ('a' * 10000000).replace('', 'b' * 10000000) }}",
    "replace filter": "{{ ('a' * 10000000)|replace('a', 'b' * 10000000) }}",
    "join": "{{ ('b' * 10000000).join(('a' * 10000)|list) }}",
    "join filter": "{{ ('a' * 10000)|list|join('b' * 10000000) }}",
    "join of attributes": "{{ ([namespace(b='a' * 10000000)] * 9999)|map(attribute='b')|join }}",
    "sum": "{{ ([[1] * 2000] * 2000)|sum(start=[]) }}",
    "doubling": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by ~": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by blocks": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set b %}{{ ns.x }}{{ ns.x }}{% endset %}"
                          "{% set ns.x = b %}{% endfor %}",
    "doubling lists": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "doubling dicts": "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}"
                      "{{ ns.x|tojson }}",
    "doubling through dict()": "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}"
                               "{{ ns.x }}",
    "nesting": "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop([a]) }}{{ loop([a]) }}{% endfor %}",
    "recursive block": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "constant text": "{% for a in range(99999) %}" + "x" * 20_000 + "{% endfor %}",
    "way out": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "way out through globals": "{{ cycler.__init__.__globals__.os.environ }}",
    "mutation": "{% set x = [] %}{% for i in range(9) %}{{ x.append(i) }}{% endfor %}",
    "nested parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nested blocks": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "division by nothing": "{{ 1 / 0 }}",
    "files": "{% include '/etc/passwd' %}",
}  # fmt: skip
_RUN = """
import json, resource, sys, time
def peak():  # Linux's ru_maxrss starts with what the parent had, VmHWM does not
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
if sys.platform == "linux":
    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
from tandem.errors import BrokenModel, RequestError
from tandem.text import template_sandbox
from tandem.text.template import ChatTemplate
template_sandbox.MAX_SECONDS, template_sandbox.MAX_STEPS = 1.0, 300_000
for name, source in json.load(sys.stdin).items():
    try:
        ChatTemplate(source, {}, origin="model").render([{"role": "user", "content": "hi"}], tools=None,
                                                        add_generation_prompt=True)
        outcome = "rendered"
    except (BrokenModel, RequestError) as error:
        outcome = "refused"
    print(json.dumps([name, outcome, peak()]), flush=True)
"""


@pytest.mark.slow
def test_bombs_end_soon_and_small():
    done = subprocess.run([sys.executable, "-c", _RUN], input=json.dumps(BOMBS), capture_output=True, text=True, timeout=240)
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) == len(BOMBS), done.stderr[-2000:]
    for name, outcome, peak in outcomes:
        assert outcome == "refused", name
        assert peak < 600e6, name


USUAL = {
    "chatml": CHAT_TEMPLATE,
    "llama": "{{ bos_token }}{% for m in messages %}{% if loop.first and m.role == 'system' %}{% continue %}{% endif %}"
             "{{ '[' ~ m['role'] ~ '] ' + m.content | trim + '\n' }}{% if loop.last %}{{ loop.index0 }}{% endif %}{% endfor %}",
    "qwen": "{%- set ns = namespace(last=messages|length - 1, tool=false) %}{%- for m in messages[::-1] %}"
            "{%- set index = (messages|length - 1) - loop.index0 %}{%- if m.role == 'user' and not ns.tool %}"
            "{%- set ns.tool = true %}{%- set ns.last = index %}{%- endif %}{%- endfor %}{{ ns.last }}"
            "{% for m in messages %}{% if '</think>' in m.content %}"
            "{{ m.content.split('</think>')[-1].lstrip('\n') }}|{{ m.content.split('</think>')[0].rstrip('\n').split('<think>')[-1] }}"
            "{% endif %}{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{{ call['function'].name }}{% endfor %}{% endfor %}"
            "{% if enable_thinking is defined and enable_thinking is false %}<think>{% endif %}",
    "tools": "{% for t in tools %}{{ t | tojson(indent=2) }}{% for k, v in t.function.items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}",
    "macro": "{% macro show(m, mark='#') %}{{ mark * 2 }}{{ m.role|upper }}: {{ m['content']|replace('hello', 'x')|indent(4) }}"
             "{% endmacro %}{% for m in messages %}{{ show(m, mark='-') }}{% endfor %}",
    "filters": "{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|join('|') }}"
               "{{ messages|map(attribute='role')|unique|sort|list }}{{ messages|length + 1 }}{{ [3, 1]|max }}{{ 7 // 2 }}{{ 7 % 4 }}"
               "{{ '%s: %5d' % ('x', 3) }}{{ 'in 2024: {}'.format(3) }}{{ none is none }}{{ missing }}{{ {'b': 1, 'a': [2]} }}"
               "{{ ('a', 'b')|join(',') }}{{ 'abc'[1:] }}{{ range(3)|list }}{{ messages[0]['content'][::-1]|first }}{{ [1, 2] + [3] }}"
               "{{ messages|tojson }}{{ 'x' if messages else 'y' }}{{ 1 < 2 < 3 }}{{ dict(a=1).items()|list }}{{ 3.5|int }}",
    "set block": "{% set text %}{% for m in messages %}{{ m.role }},{% endfor %}{% endset %}{{ text|length }}{{ text }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("name", USUAL)
def test_what_templates_do_comes_out_as_without_limits(name):
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    plain.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    source = USUAL[name].replace("{% generation %}", "").replace("{% endgeneration %}", "")
    expected = plain.from_string(source).render(
        messages=MESSAGES, tools=TOOLS, add_generation_prompt=True, bos_token="<s>", enable_thinking=False
    )
    assert render(USUAL[name], enable_thinking=False) == expected


def test_a_conversation_of_a_million_characters_renders():
    messages = [{"role": "user", "content": "word " * 2000}] * 100
    assert len(render(USUAL["filters"], messages)) > 2_000_000
    assert len(render(USUAL["macro"], messages)) > 1_000_000
    assert len(render(CHAT_TEMPLATE, messages)) > 1_000_000


def test_time_runs_for_each_rendering(monkeypatch):
    template = ChatTemplate("{% for a in range(90000) %}{% endfor %}{{ messages[0].content }}", {}, origin="model")
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 100_000)
    for _ in range(3):
        assert template.render([{"content": "x"}], tools=None, add_generation_prompt=True) == "x"
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.0)
    with pytest.raises(RequestError, match="takes more than"):
        template.render([{"content": "x"}], tools=None, add_generation_prompt=True)


def test_where_others_wait_only_a_moment_is_given(monkeypatch):
    monkeypatch.setattr(template_sandbox, "QUICK_SECONDS", 60.0)  # steps are counted here; a busy machine is no fault
    source = "{% for a in range(40000) %}{% endfor %}{{ messages[0].content }}{{ quick }}"
    costly = ChatTemplate(source, {}, origin="model")
    given = {"variables": {"quick": "!"}}
    assert costly.render([{"content": "x"}], **given) == "x!"
    with pytest.raises(template_sandbox.TooExpensive):
        costly.render([{"content": "x"}], **given, quick=True)
    cheap = ChatTemplate(CHAT_TEMPLATE, {}, origin="model")
    messages = [{"role": "user", "content": "word " * 20}] * 300
    assert cheap.render(messages, **given, quick=True) == cheap.render(messages, **given)


PIECES = ["{{", "}}", "{%", "%}", "{% for a in messages %}", "{% endfor %}", "a", "messages", "|tojson", "|join", "|list", " ~ ", "*",
          "**", "+", "(", ")", "[", "]", "'", "9999", "range(999)", ".content", ".x", "{% set x = ", "namespace(x=1)", "{% macro f() %}",
          "{% endmacro %}", "f()", "%", "|length", ":", ",", "-1", "if", "else", "|map('upper')", "|sort", "{% if a %}", "{% endif %}"]  # fmt: skip


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(st.lists(st.sampled_from(PIECES), max_size=14))
def test_templates_of_random_pieces(pieces):
    for source in ("".join(pieces), "{{ " + " ".join(pieces) + " }}"):
        try:
            render(source)
        except (BrokenModel, RequestError) as error:
            assert "\n" not in error.message


TEMPLATES = [ChatTemplate(source, {}, origin="model") for source in USUAL.values()]


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "x"]), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=2), max_leaves=4)), max_size=3))  # fmt: skip
def test_messages_of_any_shape(messages):
    for template in TEMPLATES:
        try:
            template.render(messages, tools=TOOLS, add_generation_prompt=True)
        except TandemError as error:
            assert isinstance(error, RequestError)


PARTS = (
    "{% for part in messages[0].content %}{% if part.type == 'image' %}<image>{% else %}[{{ part.text }}]{% endif %}{% endfor %}"
)
PLAIN = "{% if tools == 'image' %}{% endif %}{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("source", "shown"), [(PARTS, "[hi]"), (PLAIN, "hi"), (f"{PARTS}{{{{ 'is string' }}}}", "[][]is string")]
)
def test_a_template_that_reads_parts_alone_gets_texts_in_parts(source: str, shown: str) -> None:
    assert ChatTemplate(source, {}, origin="model").render([{"role": "user", "content": "hi"}]) == shown
