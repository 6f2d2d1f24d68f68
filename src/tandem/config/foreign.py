"""Remedies for other products' commands and flags: `foreign.toml`, which is read when a command line is refused."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import resources


@cache
def table() -> dict[str, dict[str, str]]:
    """Return `flags` with what replaces each, and `words` with a sentence for each."""
    return tomllib.loads(resources.files("tandem.config").joinpath("foreign.toml").read_text("utf-8"))


def remedy(word: str, options: Iterable[str] = ()) -> str:
    """Return `; ` and what to use in place of a foreign command or flag; an empty string for any other word, and for a
    flag in whose place is none of the command's `options`."""
    flags, words = table()["flags"], table()["words"]
    if word in words:
        return f"; {words[word]}"
    if flags.get(word) == "":
        return f"; {word}: not needed here, leave it out"
    return f"; {word}: use {flags[word]} here" if flags.get(word) in {*options, "HF_HOME"} else ""
