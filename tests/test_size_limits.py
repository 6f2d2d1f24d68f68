"""Files and functions stay small enough to read. Aim for half of these limits."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

import tandem

SOURCE = Path(tandem.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
MAX_FILE, MAX_FUNCTION = 500, 80
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "misc"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_size(file):
    text = file.read_text(encoding="utf-8")
    lines = len(text.splitlines())
    assert lines <= MAX_FILE, f"{file.name} has {lines} lines, at most {MAX_FILE} are allowed"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION, f"{file.name}:{node.lineno} {node.name} has {length} lines"


def test_names_say_what_is_inside():
    parts = {part for file in FILES for part in file.relative_to(SOURCE).with_suffix("").parts}
    assert not parts & FORBIDDEN_NAMES


@pytest.mark.parametrize("folder", sorted({file.parent for file in FILES}), ids=lambda folder: folder.name)
def test_no_folder_is_a_heap(folder):
    if folder.name not in ("families", "tools"):
        assert len([file for file in folder.glob("*.py") if file.name != "__init__.py"]) <= 20


def test_no_class_name_stands_three_times():
    names = Counter(node.name.lstrip("_") for file in FILES for node in ast.walk(ast.parse(file.read_text("utf-8")))
                    if isinstance(node, ast.ClassDef))
    assert not [name for name, times in names.items() if times > 2]
