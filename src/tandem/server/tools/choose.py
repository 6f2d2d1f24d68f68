"""Which format a model writes: told from its chat template, or by the operator."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import astuple, dataclass

from tandem.server.tools import invoke, kimi, pythonic
from tandem.server.tools.deepseek import ALL, ALL_END, ONE, ONE_END, SEPARATOR, deepseek
from tandem.server.tools.gemma import QUOTES, TAGS, gemma
from tandem.server.tools.generic import generic
from tandem.server.tools.harmony import CHANNEL, CONSTRAIN, ENDS, MESSAGE, START, harmony
from tandem.server.tools.hermes import CLOSE, OPEN, hermes
from tandem.server.tools.llama3 import TAG, llama3
from tandem.server.tools.mistral import ARGS, CALL_ID, mistral
from tandem.server.tools.mistral import OPEN as CALLS
from tandem.server.tools.prompt import knows_tools
from tandem.server.tools.reasoning import thinking
from tandem.server.tools.scan import Feed, Reader, Steps, Tools, everything
from tandem.server.tools.xml import FUNCTION, KEY, KEY_END, LONGCAT, VALUE, VALUE_END, glm, longcat, qwen_coder

Special = Callable[[Collection[str]], Collection[str]]


@dataclass(frozen=True)
class Format:
    """How one family writes tool calls."""

    read: Callable[[Feed, Tools], Steps[None]]
    markers: tuple[str, ...] = ()
    """Texts that may be special tokens and yet must be seen."""
    signs: tuple[tuple[str, ...], ...] = ()
    """What a template of the family contains: all of one of these."""


def _plain(read: Reader) -> Callable[[Feed, Tools], Steps[None]]:
    return lambda feed, tools: read(feed)


def _elements(read: Callable[[Feed, Tools], Steps[None]], names: invoke.Elements) -> Format:
    return Format(read, (names.open, names.close, *names.marks), (names.marks or (names.open,),))


FORMATS: dict[str, Format] = {
    "harmony": Format(_plain(harmony), (CHANNEL, MESSAGE, START, CONSTRAIN, *ENDS), ((CHANNEL, MESSAGE),)),
    "mistral": Format(_plain(mistral), (CALLS, ARGS, CALL_ID), ((CALLS,),)),
    "deepseek": Format(_plain(deepseek), (ALL, ALL_END, ONE, ONE_END, SEPARATOR), ((ONE,),)),
    "kimi": Format(_plain(kimi.kimi), kimi.TOKENS, ((kimi.ALL,),)),
    "minimax": _elements(invoke.minimax, invoke.MINIMAX),
    "deepseek-dsml": _elements(invoke.dsml, invoke.DSML),
    "muse": _elements(invoke.muse, invoke.MUSE),
    "longcat": Format(longcat, astuple(LONGCAT), ((LONGCAT.open,),)),
    "pythonic": Format(_plain(pythonic.pythonic), (*pythonic.TAGS, *pythonic.TAGS.values()), pythonic.SIGNS),
    "glm": Format(glm, (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END), ((KEY,),)),
    "qwen-coder": Format(qwen_coder, (OPEN, CLOSE), ((FUNCTION,),)),
    "gemma": Format(_plain(gemma), (*TAGS, *TAGS.values(), *QUOTES), tuple((tag,) for tag in TAGS)),
    "llama3": Format(_plain(llama3), (TAG,), ((TAG,), ("<|start_header_id|>", '"parameters"'))),
    "hermes": Format(_plain(hermes), (OPEN, CLOSE), ((OPEN,),)),
    "generic": Format(_plain(generic)),
}
"""By the names that `--tool-parser` takes; `auto` takes the first whose signs the template shows."""

THINKING: dict[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"), "brackets": ("[THINK]", "[/THINK]"),
    "longcat": ("<longcat_think>", "</longcat_think>"),
}  # fmt: skip
"""Tags around reasoning, by the names that `--reasoning-parser` takes beside `harmony`."""


def tool_format(choice: str, template: str, special: Special = lambda _: ()) -> str:
    """Name of the format: `choice`, unless it is `auto`; models that were taught none are told of hermes'.

    `special` gives those of some texts that are special tokens of the model: they tell where the template does not.
    """
    if choice != "auto":
        return choice
    signs = [(name, signs) for name, one in FORMATS.items() for signs in one.signs]
    shown = next((name for name, wanted in signs if all(sign in template for sign in wanted)), None)
    if shown is None and knows_tools(template):
        found = special({sign for _, wanted in signs for sign in wanted})
        shown = next((name for name, wanted in signs if set(wanted) <= set(found)), None)
    return shown or "hermes"


@dataclass(frozen=True)
class Formats:
    """How a model writes what is not content."""

    calls: str
    """Tool calls."""
    reasoning: str
    """Reasoning; `none` if it is not told apart."""
    begun: bool
    """The prompt ends with the tag that opens reasoning."""


def told_formats(calls: str, reasoning: str, template: str, prompt_end: str, special: Special) -> Formats:
    """The formats that the operator chose, or what the chat template shows where that is `auto`."""
    if reasoning == "auto":
        harmonic = tool_format("auto", template) == "harmony"
        tagged = (name for name, (_, closing) in THINKING.items() if closing in template)
        reasoning = "harmony" if harmonic else next(tagged, "none")
    begun = reasoning in THINKING and prompt_end.rstrip().endswith(THINKING[reasoning][0])
    return Formats(tool_format(calls, template, special), reasoning, begun)


@dataclass(frozen=True)
class Writing:
    """What one answer may hold, and how."""

    format: str
    """How calls are written."""
    reasoning: str
    """How reasoning is written; `none` if it is not told apart."""
    tools: Tools | None
    """The tools that may be called; None for none."""
    begun: bool
    """The prompt holds the opening tag of the reasoning already."""
    several: bool = True
    """There may be more than one call."""


@dataclass(frozen=True)
class Dialect:
    """How to read one answer."""

    reader: Reader
    markers: tuple[str, ...]
    """Texts that may be special tokens and yet must be seen."""


def dialect(writing: Writing) -> Dialect | None:
    """How to read what is written so; None when all of it is content."""
    tools = writing.tools
    if "harmony" in (writing.reasoning, writing.format if tools is not None else ""):
        return Dialect(harmony, FORMATS["harmony"].markers)
    reader: Reader = everything
    markers: tuple[str, ...] = ()
    if tools is not None:
        chosen = FORMATS[writing.format]
        reader, markers = (lambda feed: chosen.read(feed, tools)), chosen.markers
    if writing.reasoning in THINKING:
        tags = THINKING[writing.reasoning]
        return Dialect(thinking(tags, reader, begun=writing.begun), (*markers, *tags))
    return None if reader is everything else Dialect(reader, markers)
