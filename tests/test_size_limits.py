"""Files and functions stay small enough to read. Aim for half of these limits."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import tandem

SOURCE = Path(tandem.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
MAX_FILE, MAX_FUNCTION = 500, 80
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "misc"}


def test_files_and_functions_are_small():
    long = []
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        name, lines = file.relative_to(SOURCE), len(text.splitlines())
        long += [f"{name} has {lines} lines, at most {MAX_FILE} are allowed"] if lines > MAX_FILE else []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                long += [f"{name}:{node.lineno} {node.name} has {length} lines"] if length > MAX_FUNCTION else []
    assert not long, "; ".join(long)


def test_names_say_what_is_inside():
    parts = {part for file in FILES for part in file.relative_to(SOURCE).with_suffix("").parts}
    assert not parts & FORBIDDEN_NAMES


def test_no_folder_is_a_heap():
    counts = Counter(file.parent for file in FILES if file.name != "__init__.py")
    assert not [folder for folder, count in counts.items() if count > 20 and folder.name not in ("families", "tools")]


def test_no_class_name_stands_three_times():
    names = Counter(
        node.name.lstrip("_")
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, times in names.items() if times > 2]
