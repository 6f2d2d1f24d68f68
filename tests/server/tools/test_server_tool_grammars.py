"""Whatever a forced grammar lets through is read back as calls that fit their schemas, in every format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from tandem.checkpoints.files import ModelFiles
from tandem.guided.accept import GrammarCheck
from tandem.guided.grammar import grammar_of
from tandem.guided.guides import Guides
from tandem.guided.vocabulary import Vocabulary
from tandem.protocol.request import StructuredOutputs
from tandem.server.tools.choose import FORMATS, THINKING, OutputFormat, output_parser
from tandem.server.tools.deltas import CallArguments, CallStart, Content
from tandem.server.tools.forced import answer_grammar, forced_format, literal_of
from tandem.server.tools.scan import StreamParser, Tools
from tandem.testing import EOS, write_tokenizer
from tandem.text.tokenizer import Tokenizer, load_tokenizer

TOOLS: Tools = {
    "get-weather": {
        "type": "object",
        "additionalProperties": False,
        "required": ["city", "days"],
        "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
SPECIAL = {
    "hermes": "<tool_call>",
    "deepseek": "<｜tool▁sep｜>",
    "harmony": "<|message|>",
    "mistral": "[TOOL_CALLS]",
    "kimi": "<|tool_call_argument_begin|>",
    "cohere": "<|END_ACTION|>",
}
"""For each format a marker that is one special token in the second run; its id is 1."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return load_tokenizer(ModelFiles(path, "tiny"))


@pytest.fixture(scope="module")
def sampled(tokenizer: Tokenizer) -> Callable[[str, int], str | None]:
    """A random output of a grammar, in which free text soon comes to `end`; None if it is long nevertheless."""
    check, guides = GrammarCheck(tokenizer), Guides(Vocabulary(lambda: tokenizer, 512, (EOS,)))

    def one(grammar: str, seed: int, end: str = "<|end|>") -> str | None:
        rng, produced = np.random.default_rng([seed, 5]), []
        guides.add("walk", check.accept(StructuredOutputs(grammar=grammar)), [])
        try:
            for _ in range(600):
                masks = guides.masks(["walk"])
                assert not masks.given_up
                allowed = np.flatnonzero(np.unpackbits(masks.bits.view(np.uint8), bitorder="little"))
                token = int(rng.choice(allowed))
                if len(allowed) > 400:  # free text
                    token = next_of(tokenizer, end, tokenizer.decode(produced, skip_special_tokens=False))
                guides.advance("walk", token)
                if token == EOS:
                    return tokenizer.decode(produced, skip_special_tokens=False)
                produced.append(token)
            return None
        finally:
            guides.remove("walk")

    return one


def next_of(tokenizer: Tokenizer, end: str, text: str) -> int:
    """The token that brings `text` nearer to `end`."""
    begun = next((length for length in range(len(end) - 1, 0, -1) if text.endswith(end[:length])), 0)
    [token] = tokenizer.encode(end[begun], False)
    return token


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_forced_calls_are_read_back(tokenizer: Tokenizer, sampled: Any, name: str, special: bool) -> None:
    if special and name not in SPECIAL:
        pytest.skip("no marker of this format is tried as a special token")
    literal = literal_of({SPECIAL[name]: 1} if special else {})
    reasoning = "harmony" if name == "harmony" else "none"
    seen = set()
    for several in (False, True):
        output_format = OutputFormat(forced_format(name), reasoning, TOOLS, begun=False, several=several)
        grammar = answer_grammar(output_format, literal, None)
        for seed in range(10):
            text = sampled(grammar, seed)
            if text is None:
                continue
            text = text.replace("<|im_start|>", SPECIAL[name]) if special else text
            calls = read(output_format, text)
            assert calls, text
            assert several or len(calls) == 1
            seen |= {(tool, several and len(calls) > 1) for tool, _ in calls}
            for tool, arguments in calls:
                jsonschema.validate(json.loads(arguments), TOOLS[tool])
    assert len(seen) >= 3 or name == "harmony", seen


def read(output_format: OutputFormat, text: str) -> list[tuple[str, str]]:
    how = output_parser(output_format, lambda text: False)
    assert how is not None
    parser, calls = StreamParser(how.reader), []
    for event in parser.push(text) + parser.finish():
        assert not isinstance(event, Content), (event, text)
        if isinstance(event, CallStart):
            calls.append((event.name, ""))
        elif isinstance(event, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return calls


@pytest.mark.parametrize("reasoning", ["none", "think", "brackets", "harmony"])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_form_may_follow_reasoning(
    tokenizer: Tokenizer, sampled: Any, reasoning: str, begun: bool, tools: Tools | None
) -> None:
    answer = grammar_of(StructuredOutputs(choice=("yes", "no")))
    output_format = OutputFormat("harmony" if reasoning == "harmony" else "hermes", reasoning, tools, begun=begun)
    how = output_parser(output_format, lambda text: False)
    end = THINKING.get(reasoning, ("", "<|end|>"))[1]
    outputs = [sampled(answer_grammar(output_format, literal_of({}), answer), seed, end) for seed in range(6)]
    ended = [text for text in outputs if text is not None]
    assert ended
    for text in ended:
        content = text if how is None else ""
        calls = 0
        if how is not None:
            parser = StreamParser(how.reader)
            for event in parser.push(text) + parser.finish():
                content += event.text if isinstance(event, Content) else ""
            calls = parser.calls
        assert content in ("yes", "no") if not calls else content == "", text
        assert tools is not None or not calls
