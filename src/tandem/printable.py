"""Sanitising of text from other machines and programs for terminals and logs."""

from __future__ import annotations

import re

_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return `text` without control characters (except newline and tab) and bidirectional overrides.

    Lone surrogates, which cannot be encoded, become escapes.
    """
    return _UNSAFE.sub("", text).encode("utf-8", "backslashreplace").decode()
