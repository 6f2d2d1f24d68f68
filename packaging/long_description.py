"""README as package indexes show it, where a relative link leads nowhere: with the address of the release's sources.

That address comes from GitHub's runner, which builds releases. Where it is not known, links become the names of files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|mailto:|#)([^)\s]+)\)")
PICTURE = re.compile(r"<picture>.*?(<img\b[^>]*>).*?</picture>\n*", re.DOTALL)
IMAGE = re.compile(r'(<img\b[^>]*\bsrc=")(?!https?:)([^"]+)"')


def repository(environment: Mapping[str, str]) -> str | None:
    """Address of the repository at the tag that is built, or None."""
    server, name, tag = (environment.get(f"GITHUB_{one}") for one in ("SERVER_URL", "REPOSITORY", "REF_NAME"))
    return f"{server}/{name}/{{kind}}/{tag}" if server and name and tag else None


def long_description(readme: str, address: str | None) -> str:
    """`readme` without relative links; `address` holds `{kind}`: `blob` for pages, `raw` for images."""
    if address is None:
        return LINK.sub(lambda link: f"{link[1]} (`{link[2]}`)", PICTURE.sub("", readme))
    pages, images = address.format(kind="blob"), address.format(kind="raw")
    readme = IMAGE.sub(rf'\1{images}/\2"', PICTURE.sub(r"\1\n\n", readme))
    return LINK.sub(rf"[\1]({pages}/\2)", readme)


def get_metadata_hook() -> type:
    """What hatchling asks for."""
    from hatchling.metadata.plugin.interface import MetadataHookInterface

    class LongDescription(MetadataHookInterface):
        def update(self, metadata: dict[str, Any]) -> None:
            """Put the text into the metadata."""
            readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
            text = long_description(readme, repository(os.environ))
            metadata["readme"] = {"content-type": "text/markdown", "text": text}

    return LongDescription
