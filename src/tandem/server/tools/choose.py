"""Which format a model writes: told from its chat template, or by the operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

from tandem.protocol.thinking import ThinkingTokens
from tandem.server.tools import harmony, json_calls, pythonic, tagged
from tandem.server.tools.gemma import TAGS, gemma
from tandem.server.tools.scan import Feed, Reader, Steps, Tools, everything, thinking, without
from tandem.server.tools.token_calls import DEEPSEEK, KIMI, Tokens, token_calls
from tandem.text.tokenizer import Tokenizer

Special = Callable[[str], bool]
"""Is a text made of special tokens of the model?"""


@dataclass(frozen=True)
class CallFormat:
    """How one family writes tool calls."""

    read: Callable[[Feed, Tools], Steps[None]]
    starts: tuple[str, ...] = ()
    """Texts that begin calls. Where special tokens are in them they end reasoning too."""
    others: tuple[str, ...] = ()
    """Other texts that may be special tokens and yet must be seen."""
    signs: tuple[tuple[str, ...], ...] = ()
    """Signs of the family in a template: all of one of these, or one of `starts` if there are none."""


def _plain(read: Reader, starts: tuple[str, ...], *others: str, signs: tuple[tuple[str, ...], ...] = ()) -> CallFormat:
    return CallFormat(lambda feed, tools: read(feed), starts, others, signs)


def _tokens(tokens: Tokens) -> CallFormat:
    return _plain(partial(token_calls, tokens=tokens), (tokens.all, tokens.one), tokens.separator, tokens.one_end,
                  tokens.all_end)  # fmt: skip


def _tagged(tags: tagged.Tags, *signs: str) -> CallFormat:
    return CallFormat(partial(tagged.tagged, tags=tags), tags.starts, tags.others, (signs,) if signs else ())


FORMATS: dict[str, CallFormat] = {
    "harmony": _plain(harmony.harmony, (), harmony.CHANNEL, harmony.MESSAGE, harmony.START, harmony.CONSTRAIN,
                      *harmony.ENDS, signs=((harmony.CHANNEL, harmony.MESSAGE),)),
    "mistral": _plain(json_calls.mistral, (json_calls.CALLS,), json_calls.ARGS, json_calls.CALL_ID),
    "cohere": _plain(json_calls.cohere, (json_calls.ACTION,), json_calls.ACTION_END),
    "deepseek": _tokens(DEEPSEEK),
    "kimi": _tokens(KIMI),
    "kimi-k3": _tagged(tagged.KIMI_K3, "<|open|>", "<|close|>", "<|sep|>"),
    "minimax": _tagged(tagged.MINIMAX),
    "minimax-m3": _tagged(tagged.MINIMAX_M3, tagged.MINIMAX_M3.nested),
    "deepseek-dsml": _tagged(tagged.DSML, "｜DSML｜"),
    "muse": _tagged(tagged.MUSE),
    "longcat": _tagged(tagged.LONGCAT),
    "minicpm": _tagged(tagged.MINICPM, "<function name=", "<param name="),
    "pythonic": _plain(pythonic.pythonic, tuple(pythonic.TAGS), *pythonic.TAGS.values(), signs=pythonic.SIGNS),
    "solar": _tagged(tagged.SOLAR),
    "glm": _tagged(tagged.GLM, tagged.GLM.argument),
    "seed": _tagged(tagged.SEED, "<seed:tool_call>"),
    "qwen-coder": _tagged(tagged.QWEN_CODER, tagged.QWEN_CODER.call),
    "gemma": _plain(gemma, tuple(TAGS), *TAGS.values(), '<|"|>', "<escape>"),
    "llama3": _plain(json_calls.llama3, (json_calls.PYTHON,),
                     signs=((json_calls.PYTHON,), ("<|start_header_id|>", '"parameters"'))),
    "hermes": _plain(json_calls.hermes, (json_calls.OPEN,), json_calls.CLOSE),
    "generic": _plain(json_calls.generic, ()),
}  # fmt: skip
"""By the names that `--tool-parser` takes; `auto` takes the first whose signs the template shows."""

THINKING: dict[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"), "brackets": ("[THINK]", "[/THINK]"),
    "longcat": ("<longcat_think>", "</longcat_think>"), "minimax-m3": ("<mm:think>", "</mm:think>"),
    "seed": ("<seed:think>", "</seed:think>"), "gemma": ("<|channel>thought", "<channel|>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"), "solar": ("<|think:start|>", "<|think:end|>"),
    "kimi-k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
}  # fmt: skip
"""Tags around reasoning, by the names that `--reasoning-parser` takes beside `harmony`."""

ANSWERS: dict[str, tuple[str, ...]] = {
    "cohere": ("<|START_RESPONSE|>", "<|START_TEXT|>", "<|END_RESPONSE|>", "<|END_TEXT|>"),
    "kimi-k3": ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
}
"""Marks of families around answers; the first begins one."""


@lru_cache(maxsize=64)
def _shown(template: str) -> tuple[str | None, str]:
    """The formats of calls and of reasoning that a template shows; None and `none` where it shows none."""
    calls = _first(template.__contains__)
    marked = (name for name, (_, closing) in THINKING.items() if closing in template)
    return calls, calls if calls in ("harmony", *ANSWERS) else next(marked, "none")


def _first(seen: Callable[[str], bool]) -> str | None:
    """The first format whose signs are seen."""
    signs = ((name, wanted) for name, known in FORMATS.items() for wanted in known.signs or zip(known.starts, strict=True))
    return next((name for name, wanted in signs if all(map(seen, wanted))), None)


def knows_tools(template: str) -> bool:
    """True if the chat template puts tools into the prompt."""
    return "tools" in template


def tool_format(choice: str, template: str, special: Special | None = None) -> str:
    """Name of the format: `choice`, unless it is `auto`; models that were taught none are told of hermes'.

    Special tokens tell where the template takes tools and shows no call.
    """
    if choice != "auto":
        return choice
    shown = _shown(template)[0]
    if shown is None and special is not None and knows_tools(template):
        shown = _first(special)
    return shown or "hermes"


@dataclass(frozen=True)
class OutputFormat:
    """Content of one answer, and the formats it is written in."""

    format: str
    """How calls are written."""
    reasoning: str
    """How reasoning is written; `none` if it is not told apart."""
    tools: Tools | None
    """The tools that may be called; None for none."""
    begun: bool
    """The prompt holds the opening tag of the reasoning already."""
    several: bool = True
    """True if more than one call is allowed."""


def told_formats(
    calls: str, reasoning: str, template: str, prompt_end: str, tools: Tools | None, special: Special
) -> OutputFormat:
    """The formats that the operator chose, or what the chat template shows where that is `auto`."""
    if reasoning == "auto":
        reasoning = _shown(template)[1]
    begun = reasoning in THINKING and prompt_end.rstrip().endswith(THINKING[reasoning][0])
    return OutputFormat(tool_format(calls, template, None if tools is None else special), reasoning, tools, begun)


@dataclass(frozen=True)
class Marks:
    """Texts around reasoning."""

    opening: str
    closing: str
    ends: tuple[str, ...]
    """Other texts of special tokens that end it."""
    begun: bool = False
    """The prompt ends with the opening text."""
    again: bool = False
    """True if reasoning may stand in several places."""


_HARMONY = Marks(f"{harmony.CHANNEL}analysis{harmony.MESSAGE}", harmony.ENDS[0], harmony.ENDS[1:], again=True)


@dataclass(frozen=True)
class OutputParser:
    """How to read one answer."""

    reader: Reader
    markers: tuple[str, ...]
    """Texts that may be special tokens and yet must be seen."""
    thinking: Marks | None = None
    """None if reasoning is not told apart."""


def output_parser(output_format: OutputFormat, special: Special) -> OutputParser | None:
    """Return the reader for this tool-call format; None when all text is content."""
    tools = output_format.tools
    calls = output_format.format if tools is not None else ""
    if "harmony" in (output_format.reasoning, calls):
        return OutputParser(harmony.harmony, FORMATS["harmony"].others, _HARMONY)
    reader: Reader = everything
    marks = None
    around = ANSWERS.get(output_format.reasoning) or ANSWERS.get(calls, ())
    markers, ends = around, around[:1]
    if tools is not None:
        chosen = FORMATS[calls]
        reader, ends = (lambda feed: chosen.read(feed, tools)), (*ends, *chosen.starts)
        markers = (*markers, *chosen.starts, *chosen.others)
    if tags := THINKING.get(output_format.reasoning):
        marks = Marks(*tags, tuple(filter(special, ends)), output_format.begun)
        reader = thinking(tags, reader, begun=output_format.begun, ends=marks.ends)
        markers = (*markers, *tags)
    reader = without(around, reader) if around else reader
    return None if reader is everything else OutputParser(reader, markers, marks)


def thinking_tokens(marks: Marks | None, tokenizer: Tokenizer) -> ThinkingTokens | None:
    """Return the tokens around reasoning; None without reasoning, or where a tag is text that any tokens may spell."""
    if marks is None:
        return None
    opening, closing = (tuple(tokenizer.encode(tag, False)) for tag in (marks.opening, marks.closing))
    if any(
        len(ids) != 1 and not tokenizer.special_ids_of((tag,))
        for tag, ids in ((marks.opening, opening), (marks.closing, closing))
    ):
        return None
    ends = {tokenizer.encode(end, False)[0] for end in marks.ends} - {closing[0]}
    return ThinkingTokens(opening, closing, tuple(sorted(ends)), marks.begun, marks.again)
