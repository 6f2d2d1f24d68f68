"""The tables at the heads of files in tests/seeds, of which docs/migrating.md is made: each row is whole and has its test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from script_files import script

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests" / "seeds").glob("test_*.py"))
SHORTEST = 3
"""Words of a reason."""

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="only in a checkout")


def names(path: Path) -> set[str]:
    return set(re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))


def fault(table: str, row: tuple[str, ...], here: Path) -> str:
    """What is wrong with a row of a table in the file `here`; empty if nothing is."""
    if len(row) != (2 if table == "ONLY_A_MAC" else 3) or not all(cell.strip() for cell in row):
        return "a cell is missing"
    if any(re.search(r"(?<!\\)\||\n", cell) for cell in row):
        return "a cell would be two in the page"
    if table == "DIFFERS" and (len(row[2].split()) < SHORTEST or row[2] == row[1]):
        return "no reason"
    if table == "WORKS":
        path, _, name = row[2].rpartition("::") if "::" in row[2] or "/" not in row[2] else (row[2], "", "")
        file = ROOT / path if path else here
        if not file.is_file() or (name and name not in names(file)):
            return f"no test {row[2]}"
    return ""


def test_each_row_is_whole_and_what_works_has_its_test() -> None:
    for path in FILES:
        tables = script("generate_docs").seed_tables(path)
        assert list(tables) == ["WORKS", "DIFFERS", "ONLY_A_MAC"], path.name
        rows = [(table, row) for table, found in tables.items() for row in found]
        assert [(row[0], why) for table, row in rows if (why := fault(table, row, path))] == []
        theirs = [row[0] for _, row in rows]
        assert len(theirs) == len(set(theirs)), path.name
        assert names(path) <= {row[2] for row in tables["WORKS"]}, f"{path.name} has a test that no row names"
    assert len(FILES) == 5


def test_a_document_without_a_place_in_the_page_is_seen() -> None:
    text = (ROOT / "docs" / "migrating.md").read_text()
    assert script("generate_docs").with_seeds(text) == text
    for path in FILES:
        assert text.count(f"<!-- from tests/seeds/{path.name}, by scripts/generate_docs -->") == 1
        assert script("generate_docs").seeds(path) in text


@pytest.mark.parametrize(
    ("table", "row", "why"),
    [
        ("WORKS", ("`a`", "the same", "test_of_nothing"), "no test test_of_nothing"),
        ("WORKS", ("`a`", "the same", "tests/pages/test_pages_migrating.py::test_of_nothing"), "no test tests/pages"),
        ("WORKS", ("`a`", "the same", "tests/pages/nothing.py"), "no test tests/pages/nothing.py"),
        ("DIFFERS", ("`a`", "`b`", ""), "a cell is missing"),
        ("DIFFERS", ("`a`", "`b`", "so"), "no reason"),
        ("ONLY_A_MAC", ("`a|b`", "a cable"), "a cell would be two"),
    ],
)
def test_a_row_at_fault_is_seen(table: str, row: tuple[str, ...], why: str) -> None:
    assert fault(table, row, Path(__file__)).startswith(why)
