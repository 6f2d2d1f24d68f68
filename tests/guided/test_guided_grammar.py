"""What can be asked for is followed; what cannot is refused with a reason, and hostile grammars harm nobody."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tandem.errors import UnavailableError
from tandem.guided import accept as check_module
from tandem.guided.accept import GrammarCheck
from tandem.guided.grammar import grammar_of, preceded
from tandem.protocol.request import StructuredOutputs
from tandem.text.tokenizer import Tokenizer

FORMATS = jsonschema.FormatChecker(["email", "ipv4", "ipv6", "uuid"])
"""Not `date`: the grammar allows 29 February in any year."""
GBNF = 'root ::= "[" item ("," item)* "]"\nitem ::= [0-9]'
LARK = 'start: greeting " " NAME\ngreeting: "hello" | "bye"\nNAME: /[A-Z][a-z]{1,4}/'
CALLS = 'start: "f(" args ")"\nargs: arg ("," arg){0,2}\narg: %json {"type": "boolean"}'


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize("text", [True, False])
def test_outputs_of_every_schema_validate(schemas: dict[str, Any], check: GrammarCheck, walk: Any, text: bool) -> None:
    for name, schema in schemas.items():
        form = check.accept(StructuredOutputs(json=json.dumps(schema) if text else schema))
        validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
        for seed in range(3):
            output = walk(form, seed, 8000)
            assert not list(validator.iter_errors(json.loads(output))), (name, output)
            bare = re.sub(r'"(\\.|[^"\\])*"', "", output)
            assert not re.search(r"\s", re.sub(r",( |\n {0,24})?|: ", "", bare)), f"{output!r} could be all white space"


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (StructuredOutputs(regex=r"[A-Z]{2}-\d{4}"), r"[A-Z]{2}-[0-9]{4}"),
        (StructuredOutputs(regex=r"a/b\s\w"), r"a/b[ \t\n\r\f\v][0-9a-zA-Z_]"),
        (StructuredOutputs(regex=r"(?i)yes|no\n"), r"(?i)yes|no\n"),
        (StructuredOutputs(choice=("yes", "no", 'a "b"\\c\n', "größe 漢🙂")), 'yes|no|a "b"\\\\c\n|größe 漢🙂'),
        (StructuredOutputs(choice=(" lead", "trail ")), " lead|trail "),
        (StructuredOutputs(choice=("<|im_end|>", "</s>")), r"<\|im_end\|>|</s>"),
        (StructuredOutputs(grammar=GBNF), r"\[\d(,\d)*\]"),
        (StructuredOutputs(grammar=LARK), r"(hello|bye) [A-Z][a-z]{1,4}"),
        (StructuredOutputs(grammar=CALLS), r"f\((true|false)(,(true|false)){0,2}\)"),
        (StructuredOutputs(grammar='{"grammars": [{"lark_grammar": "start: /a{3}/"}]}'), "aaa"),
    ],
    ids=str,
)
def test_outputs_match_expressions_choices_and_grammars(
    check: GrammarCheck, walk: Any, form: StructuredOutputs, pattern: str
) -> None:
    accepted = check.accept(form)
    outputs = {walk(accepted, seed) for seed in range(40)}
    assert all(re.fullmatch(pattern, output) for output in outputs), outputs
    if form.choice:
        assert outputs == set(form.choice), "every choice can be taken"


def test_an_answer_may_follow_something_else(check: GrammarCheck, walk: Any) -> None:
    answer = grammar_of(StructuredOutputs(choice=("a", "b")))
    form = check.accept(StructuredOutputs(grammar=preceded(answer, 'start: /x{1,3}/ "-" @answer')))
    assert re.fullmatch("x{1,3}-[ab]", walk(form, 1))
    with_special = preceded(answer, "start: <|im_start|> @answer")
    assert re.fullmatch(r"<\|im_start\|>[ab]", walk(check.accept(StructuredOutputs(grammar=with_special)), 1))


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (StructuredOutputs(json="{"), "Expecting"),
        (StructuredOutputs(json="[1]"), "must be an object"),
        (StructuredOutputs(json={"type": "strin"}), "strin"),
        (StructuredOutputs(json={"type": "object", "if": {}, "then": {}}), "Unimplemented keys"),
        (StructuredOutputs(json={"type": "array", "uniqueItems": True}), "Unimplemented keys"),
        (StructuredOutputs(json={"type": "string", "format": "unheard-of"}), "format"),
        (StructuredOutputs(json={"$ref": "http://example.com/schema"}), "example.com"),
        (StructuredOutputs(json={"$ref": "#/$defs/none"}), "none"),
        (StructuredOutputs(json={"type": "integer", "minimum": 5, "maximum": 1}), "minimum"),
        (StructuredOutputs(json={"x-guidance": {"lenient": True}}), "x-guidance"),
        (StructuredOutputs(json='{"items":' * 20_000 + "{}" + "}" * 20_000), "deep"),
        (StructuredOutputs(json=deep(150)), "recursion"),
        (StructuredOutputs(json={"enum": ["x" * 300_000]}), "characters long"),
        (StructuredOutputs(regex="(unclosed"), "unclosed"),
        (StructuredOutputs(regex="(?=ahead)"), "look"),
        (StructuredOutputs(choice=()), "at least one"),
        (StructuredOutputs(choice=("a", "")), "none of them empty"),
        (StructuredOutputs(grammar="start: nowhere"), "nowhere"),
        (StructuredOutputs(grammar="not a grammar"), ""),
        (StructuredOutputs(grammar='{"grammars": []}'), "grammars"),
        (StructuredOutputs(grammar='{"grammars": [5]}'), "of objects"),
        (StructuredOutputs(grammar='{"a":' * 20_000), "deep"),
        (StructuredOutputs(grammar="start: <|no such token|>"), "token"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(check: GrammarCheck, form: StructuredOutputs, reason: str) -> None:
    with pytest.raises(ValueError, match=f"(?i){re.escape(reason)}"):
        check.accept(form)


HOSTILE = {
    "a chain of rules": "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(3000)) + '\na3000: "x"',
    "parentheses": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000,
    "repetitions": 'start: (("a"{1,9999}){1,9999}){1,9999}',
    "an expression": "start: /" + "(a|b|ab|c.{90})*" * 500 + "/",
    "a large enumeration": json.dumps({"grammars": [{"json_schema": {"enum": [f"x{i * 7}" for i in range(20_000)]}}]}),
    "all of any of": json.dumps(
        {
            "grammars": [
                {
                    "json_schema": {
                        "allOf": [
                            {"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for i in range(8)]} for j in range(12)
                        ]
                    }
                }
            ]
        }
    ),
}


@pytest.mark.parametrize("grammar", HOSTILE.values(), ids=HOSTILE)
def test_hostile_grammars_end_soon_and_elsewhere(check: GrammarCheck, grammar: str) -> None:
    reason = ""
    try:
        check.accept(StructuredOutputs(grammar=grammar))
    except ValueError as refusal:
        reason = str(refusal)
    assert len(reason) < 500


def test_what_crashes_the_compiler_or_takes_too_long_is_too_complex(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="too complex"):
        GrammarCheck(tokenizer).check(HOSTILE["a chain of rules"])


@pytest.mark.parametrize(
    "form",
    [
        StructuredOutputs(regex="a{1000000}"),
        StructuredOutputs(grammar='start: /x{30}/ "-" A\nA: /a{1000000}/'),
        StructuredOutputs(grammar='start: x\nx: x x x | "a" |'),
    ],
    ids=str,
)
def test_a_grammar_whose_steps_would_hold_up_everybody_is_refused(check: GrammarCheck, form: StructuredOutputs) -> None:
    with pytest.raises(ValueError, match="steps take too long|too complex"):
        check.accept(form)


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have grammars tried by a probe of other words."""

    def replace(source: str) -> None:
        (tmp_path / "odd_probe.py").write_text(source)
        monkeypatch.setattr(check_module, "PROBE", "odd_probe")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))

    return replace


def test_a_grammar_whose_masks_take_longer_than_one_may_is_refused(tokenizer: Tokenizer, odd: Any) -> None:
    odd("from tandem.guided import compile_probe as probe\nprobe.MASK_SECONDS = 0.0005\ntried = probe.tried\n")
    with pytest.raises(ValueError, match="steps take too long"):
        GrammarCheck(tokenizer).accept(StructuredOutputs(regex="a{50000}"))


def test_a_large_ordinary_grammar_is_taken(check: GrammarCheck) -> None:
    inner = {f"q{i}": {"enum": [f"v{k}" for k in range(10)]} for i in range(20)}
    properties = {f"p{i}": {"type": "object", "properties": inner} for i in range(60)}
    check.accept(StructuredOutputs(json={"type": "object", "properties": properties}))


def test_thousands_of_choices_can_all_be_taken(check: GrammarCheck, walk: Any) -> None:
    choices = tuple(f"choice number {i}" for i in range(5000))
    form = check.accept(StructuredOutputs(choice=choices))
    assert all(walk(form, seed) in choices for seed in range(10))


def test_a_grammar_that_fails_after_its_first_steps_is_refused(check: GrammarCheck) -> None:
    rules = " | ".join(f'"a" "{i}"' for i in range(3000))
    with pytest.raises(ValueError, match="too complex: .*items"):
        check.accept(StructuredOutputs(grammar=f"start: {rules}"))


@pytest.mark.parametrize(
    "what",
    ["import time; time.sleep(60)", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "import no_such_module"],
    ids=["too slow", "killed", "broken"],
)
def test_a_grammar_that_could_not_be_tried_is_tried_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, odd: Any, what: str
) -> None:
    check, form = GrammarCheck(tokenizer), StructuredOutputs(regex="again")
    with monkeypatch.context() as patch:
        patch.setattr(check_module, "TIMEOUT_S", 2.0)
        odd(what)
        with pytest.raises(UnavailableError, match="could not be tried"):
            check.accept(form)
        patch.setattr(check_module, "PROBE", "tandem.guided.compile_probe")
        patch.setattr(check_module, "TIMEOUT_S", 240.0)
        check.accept(form)


def test_a_grammar_that_uses_up_its_time_is_remembered(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, odd: Any) -> None:
    check = GrammarCheck(tokenizer)
    monkeypatch.setattr(check_module, "CPU_S", 1)
    odd("def tried(grammar: str, special: dict[str, int]) -> str:\n    while True: pass\n")
    with pytest.raises(ValueError, match="too complex"):
        check.check("start: /a/")
    monkeypatch.setattr(check, "task", lambda grammar: pytest.fail("asked again"))
    with pytest.raises(ValueError, match="too complex"):
        check.check("start: /a/")


def test_grammars_are_tried_once_and_by_one_process(check: GrammarCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    form = StructuredOutputs(regex="once")
    check.accept(form)
    process = check._sandbox
    check.accept(StructuredOutputs(regex="and another"))
    assert process is not None and check._sandbox is process
    monkeypatch.setattr(check, "task", lambda grammar: pytest.fail("asked again"))
    check.accept(form)
