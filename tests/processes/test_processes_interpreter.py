"""Nothing is imported from the working directory, whatever lies there."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostile import imported, plant
from tandem import LLM, SamplingParams
from tandem.processes.interpreter import code_command, leave_working_directory, module_command
from tandem.testing import tiny_model

ROOT = Path(__file__).parents[2]
SHELL = re.compile(r"python[\d.]*[\"'}]? +(?!-P )-[mc] ")


def words(node: ast.AST) -> Iterator[list[object]]:
    """Each list of words in a piece of code that has -m or -c: constants as they are, other things as code."""
    for one in ast.walk(node):
        if isinstance(one, ast.List | ast.Tuple) and any(
            isinstance(item, ast.Constant) and item.value in ("-m", "-c") for item in one.elts
        ):
            yield [item.value if isinstance(item, ast.Constant) else ast.unparse(item) for item in one.elts]


def unsafe(source: str) -> list[str]:
    """Commands that start a Python whose first place for imports is the working directory."""
    tree = ast.parse(source)
    found = [
        " ".join(map(str, one))
        for one in words(tree)
        if any(flag in one and not {"-P", "SAFE"} & set(map(str, one[: one.index(flag)])) for flag in ("-m", "-c"))
        and any("python" in str(word).lower() or "executable" in str(word) for word in one)
    ]
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    found += [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in texts
        and "\n" not in node.value.strip()
        and SHELL.search(node.value)
        and node.value.startswith(("exec ", "python", "["))
    ]
    return found


def test_the_search_finds_what_it_is_for() -> None:
    assert unsafe('run([sys.executable, "-m", "x"])') and unsafe('run([entry.python, "-c", "x"])')
    assert unsafe('run("exec python3 -m x")') and unsafe('run(["python3", "-W", "error", "-m", "x"])')
    assert not unsafe('run([sys.executable, "-P", "-m", "x"])') and not unsafe('run("exec python3 -P -m x")')
    assert not unsafe('run(["sysctl", "-n", "x"])') and not unsafe('"""Run as `python -m x`."""')


@pytest.mark.parametrize("place", ["src", "benchmarks"])
def test_no_python_is_started_in_another_way(place: str) -> None:
    files = list((ROOT / place).rglob("*.py"))
    found = {str(path.relative_to(ROOT)): one for path in files if (one := unsafe(path.read_text()))}
    assert len(files) > 5 and not found, f"start these with tandem.processes.interpreter: {found}"


@pytest.mark.parametrize(
    "command", [module_command("random"), code_command("import json, random"), [*module_command("this", python=sys.executable)]]
)
def test_commands_leave_the_working_directory_alone(tmp_path: Path, command: list[str]) -> None:
    plant(tmp_path, tmp_path / "mark")
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0
    assert not imported(tmp_path / "mark")


def test_a_module_on_the_users_path_is_found(tmp_path: Path) -> None:
    (tmp_path / "a_module_of_mine.py").write_text("print('here')")
    done = subprocess.run(
        module_command("a_module_of_mine"), env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.stdout == "here\n"


def test_what_minus_m_has_put_first_is_taken_out_again() -> None:
    path = ["/work", "/usr/lib"]
    leave_working_directory(path)
    assert path == (["/work", "/usr/lib"] if sys.flags.safe_path else ["/usr/lib"])


def test_python_minus_m_tandem_in_a_hostile_directory(tmp_path: Path) -> None:
    plant(tmp_path, tmp_path / "mark")
    done = subprocess.run([sys.executable, "-m", "tandem", "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and not imported(tmp_path / "mark"), done.stderr


@pytest.mark.slow
def test_ranks_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(tmp_path)
    plant(model, tmp_path / "mark")
    monkeypatch.chdir(model)
    with LLM(".", pipeline_parallel_size=2) as llm:
        assert llm.generate("a b", SamplingParams(max_tokens=3, ignore_eos=True))[0].finish_reason == "length"
    assert not imported(tmp_path / "mark")
