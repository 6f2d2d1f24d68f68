"""Commands of docs/clients.md. Run as `python -m clients.page HEADING URL` it runs those in Python below a heading."""

from __future__ import annotations

import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
ADDRESS = "http://127.0.0.1:8000"


def blocks(language: str) -> list[tuple[str, str]]:
    """Heading and text of each block in `language`."""
    heading, found = "", []
    pattern = rf"^## ([^\n]+)$|^```{language}\n(.*?)^```$"
    for title, block in re.findall(pattern, PAGE.read_text(), re.MULTILINE | re.DOTALL):
        if title:
            heading = title
        elif heading:
            found.append((heading, block))
    return found


if __name__ == "__main__":
    for name, code in blocks("python"):
        if name == sys.argv[1]:
            exec(code.replace(ADDRESS, sys.argv[2]), {"__name__": "block"})
