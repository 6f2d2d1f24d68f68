"""Choose the tool call and reasoning formats of a model, from its chat template or from the settings."""

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
"""Predicate: whether a text consists of special tokens of the model."""


@dataclass(frozen=True)
class CallFormat:
    """Tool call format of one model family."""

    read: Callable[[Feed, Tools], Steps[None]]
    starts: tuple[str, ...] = ()
    """Texts that begin calls. Those made of special tokens end reasoning too."""
    others: tuple[str, ...] = ()
    """Other markers to keep in the text even if they are special tokens."""
    signs: tuple[tuple[str, ...], ...] = ()
    """Alternatives of template texts that identify the family (all of one tuple); if empty, any of `starts`."""


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
"""Formats by the names of `--tool-parser`; `auto` selects the first whose signs are in the chat template."""

THINKING: dict[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"), "brackets": ("[THINK]", "[/THINK]"),
    "longcat": ("<longcat_think>", "</longcat_think>"), "minimax-m3": ("<mm:think>", "</mm:think>"),
    "seed": ("<seed:think>", "</seed:think>"), "gemma": ("<|channel>thought", "<channel|>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"), "solar": ("<|think:start|>", "<|think:end|>"),
    "kimi-k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
}  # fmt: skip
"""Opening and closing tags of reasoning, by the names of `--reasoning-parser` besides `harmony`."""

ANSWERS: dict[str, tuple[str, ...]] = {
    "cohere": ("<|START_RESPONSE|>", "<|START_TEXT|>", "<|END_RESPONSE|>", "<|END_TEXT|>"),
    "kimi-k3": ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
}
"""Markers around answers, by family; the first one begins an answer."""


@lru_cache(maxsize=64)
def _shown(template: str) -> tuple[str | None, str]:
    """Return the names of the call format (None: none found) and reasoning format (`none`) that a template shows."""
    calls = _first(template.__contains__)
    marked = (name for name, (_, closing) in THINKING.items() if closing in template)
    return calls, calls if calls in ("harmony", *ANSWERS) else next(marked, "none")


def _first(seen: Callable[[str], bool]) -> str | None:
    """Return the first format all of whose signs satisfy `seen`, or None."""
    signs = ((name, wanted) for name, known in FORMATS.items() for wanted in known.signs or zip(known.starts, strict=True))
    return next((name for name, wanted in signs if all(map(seen, wanted))), None)


def thinks(reasoning: str, template: str) -> bool:
    """Return whether the reasoning of a model with this chat template is separated. `reasoning`: --reasoning-parser."""
    return (_shown(template)[1] if reasoning == "auto" else reasoning) != "none"


def knows_tools(template: str) -> bool:
    """Return whether the chat template supports tools."""
    return "tools" in template


def tool_format(choice: str, template: str, special: Special | None = None) -> str:
    """Return the name of the tool call format: `choice`, or for `auto` the one found; by default `hermes`.

    `auto` looks at the template, then, if that supports tools but shows no call, at the special tokens.
    """
    if choice != "auto":
        return choice
    shown = _shown(template)[0]
    if shown is None and special is not None and knows_tools(template):
        shown = _first(special)
    return shown or "hermes"


@dataclass(frozen=True)
class OutputFormat:
    """Formats of one answer."""

    format: str
    """Name of the tool call format."""
    reasoning: str
    """Name of the reasoning format; `none` leaves reasoning in the content."""
    tools: Tools | None
    """Tools that may be called; None for none."""
    begun: bool
    """True if the prompt ends with the opening tag of reasoning."""
    several: bool = True
    """True if more than one call is allowed."""


def told_formats(
    calls: str, reasoning: str, template: str, prompt_end: str, tools: Tools | None, special: Special
) -> OutputFormat:
    """Return the formats from --tool-parser (`calls`) and --reasoning-parser; `auto` detects them from the template."""
    if reasoning == "auto":
        reasoning = _shown(template)[1]
    begun = reasoning in THINKING and prompt_end.rstrip().endswith(THINKING[reasoning][0])
    return OutputFormat(tool_format(calls, template, None if tools is None else special), reasoning, tools, begun)


@dataclass(frozen=True)
class Marks:
    """Tags around reasoning."""

    opening: str
    closing: str
    ends: tuple[str, ...]
    """Other special tokens that end reasoning."""
    begun: bool = False
    """True if the prompt ends with the opening tag."""
    again: bool = False
    """True if an answer may have several reasoning parts."""


_HARMONY = Marks(f"{harmony.CHANNEL}analysis{harmony.MESSAGE}", harmony.ENDS[0], harmony.ENDS[1:], again=True)


@dataclass(frozen=True)
class OutputParser:
    """Parser of one answer."""

    reader: Reader
    markers: tuple[str, ...]
    """Markers to keep in the text even if they are special tokens."""
    thinking: Marks | None = None
    """Tags of reasoning; None if reasoning is not separated."""


def output_parser(output_format: OutputFormat, special: Special) -> OutputParser | None:
    """Return the parser for an answer in these formats; None if all text is content."""
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
    """Return the token ids around reasoning; None without reasoning, or if a tag has no unique tokenization."""
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
