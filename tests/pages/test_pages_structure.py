"""docs/structure.md: "Where do I change ..." names files that are there, and traced words stand where it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tandem

SOURCE = Path(tandem.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "structure.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="only in a checkout")


def table(heading: str) -> list[list[str]]:
    """Cells of the rows of the first table below a heading."""
    if not PAGE.is_file():
        return []
    section = re.split(rf"^#+ {re.escape(heading)}$", PAGE.read_text(), flags=re.MULTILINE)[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return rows[1:]


def traced() -> list[tuple[str, set[str]]]:
    """Each word, and the files that the page names for it."""
    return [(word.strip("`"), set(re.findall(r"`([^`]+)`", files))) for _, word, files in table("Traced")]


@pytest.mark.parametrize(("word", "files"), traced(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_traced_word_stands_where_the_page_says(word: str, files: set[str]) -> None:
    pattern = re.compile(word if word.startswith('"') else rf"\b{word}\b")
    there = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*")
        if path.suffix in (".py", ".js", ".html")
        and "vendored" not in path.parts
        and pattern.search(path.read_text(encoding="utf-8"))
    }
    assert there == files


def test_files_of_the_table_are_there() -> None:
    rows = table("Where do I change ...")
    assert len(rows) > 20
    named = [name for row in rows for name in re.findall(r"`([\w/]+/[\w.*]*)`", " ".join(row)) if "docs" not in name]
    root = SOURCE.parents[1]
    assert [name for name in named if not any([*SOURCE.glob(name), *root.glob(name)])] == []
