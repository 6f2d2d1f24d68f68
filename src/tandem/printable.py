"""Text of other machines and programs, made safe for a terminal and for a log."""

from __future__ import annotations

import re

_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return `text` without what a terminal obeys instead of showing it: control characters other than newline and
    tab, and overrides of the direction of writing. Lone surrogates, which no stream encodes, become escapes."""
    return _UNSAFE.sub("", text).encode("utf-8", "backslashreplace").decode()
