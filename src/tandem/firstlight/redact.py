"""Takes out of a text what says whose machine it was: names, addresses, serials, paths. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_PATTERNS = (
    (re.compile(r"\b[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}\b"), "<id>"),
    (re.compile(r"\b(?:[0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}\b"), "<address>"),
    (re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){3,7}[0-9A-Fa-f]{0,4}(?:%\w+)?(?![\w:])"), "<address>"),
    (re.compile(r"\b(?!127\.0\.0\.1\b)\d{1,3}(?:\.\d{1,3}){3}\b"), "<address>"),
    (re.compile(r"[\w.+-]+@[\w.-]+"), "<name>"),
)
_PATH = re.compile(r"(?<![\w.<:/])~?(?:/(?!v1/)[\w.@+-]+){2,}/?")
"""Not `/health` nor `/v1/...`, nor what comes behind a server's name."""
SHORTEST = 2
"""Letters of a name that is looked for; shorter ones stand in every text."""


def redacted(text: str, names: Iterable[str]) -> str:
    """`text` without addresses, paths and ids; the machines' and users' `names` become a, b, c, ...

    Folders among the names are paths whatever letters they have, such as a home with a space in it.
    """
    known = dict.fromkeys(names)
    for place in sorted((one for one in known if one.startswith("/") and len(one) > SHORTEST), key=len, reverse=True):
        text = re.sub(rf"{re.escape(place)}(?:/[\w.@+-]+)*/?", "<path>", text)
    text = _PATH.sub("<path>", text)
    for number, name in enumerate(one for one in known if not one.startswith("/")):
        if len(name) >= SHORTEST:
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", f"<{chr(ord('a') + number % 26)}>", text)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def redacted_figures(figures: Mapping[str, str | int | float | bool], names: Iterable[str]
                     ) -> dict[str, str | int | float | bool]:
    """The same for what was measured."""
    known = list(names)
    return {name: redacted(value, known) if isinstance(value, str) else value for name, value in figures.items()}
