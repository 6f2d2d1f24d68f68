"""docs/behaviour.md: each promise is one short sentence, and the test that shows it is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "behaviour.md"
MOST_WORDS = 25

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="only in a checkout")


def promises(text: str) -> list[tuple[str, str]]:
    """Return the cells of each row of the tables of promises: the sentence, and the test behind it."""
    found, inside = [], False
    for line in text.splitlines():
        inside = line == "| promise | shown by |" or (inside and line.startswith("|"))
        if inside and not line.startswith(("| promise ", "|---")):
            sentence, shown_by = line.strip("| ").rsplit(" | ", 1)
            found.append((sentence, shown_by))
    return found


def faults(sentence: str, shown_by: str) -> str:
    """Name what is wrong with a row, or return an empty text."""
    plain = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", sentence))
    words = [word for word in plain.split() if re.search(r"\w", word)]
    if len(words) > MOST_WORDS or not sentence.endswith(".") or re.search(r"[.!?] [A-Z]", plain):
        return f"not one sentence of at most {MOST_WORDS} words"
    named = re.fullmatch(r"`((?:tests|benchmarks)/[\w/]+\.py)((?:::\w+)*)`", shown_by)
    if named is None:
        return "not the name of one test"
    path = ROOT / named[1]
    if not path.is_file():
        return f"no file {named[1]}"
    source = path.read_text(encoding="utf-8")
    there = set(re.findall(r"^ *(?:async def|def|class) (\w+)", source, re.MULTILINE))
    gone = [name for name in named[2].split("::")[1:] if name not in there]
    return f"no {gone[0]} in {named[1]}" if gone else ""


def test_each_promise_is_a_sentence_with_its_test() -> None:
    rows = promises(PAGE.read_text(encoding="utf-8"))
    assert len(rows) > 400
    assert [(row[0], fault) for row in rows if (fault := faults(*row))] == []


@pytest.mark.parametrize(
    ("sentence", "shown_by", "fault"),
    [
        ("It holds. It is fast.", "`tests/pages/test_pages_behaviour.py`", "not one sentence"),
        (" ".join(["word"] * 26) + ".", "`tests/pages/test_pages_behaviour.py`", "not one sentence"),
        ("It holds.", "`tests/pages`", "not the name"),
        ("It holds.", "`tests/pages/test_pages_nowhere.py`", "no file"),
        ("It holds.", "`tests/pages/test_pages_behaviour.py::test_of_nothing`", "no test_of_nothing"),
    ],
)
def test_a_row_at_fault_is_seen(sentence: str, shown_by: str, fault: str) -> None:
    assert faults(sentence, shown_by).startswith(fault)
