"""The commands of docs/clients.md, run as they stand there, against one server.

A block whose packages are missing is skipped. To run all: TANDEM_CLIENTS_PYTHON=PYTHON, an interpreter that has them.
"""

from __future__ import annotations

import ast
import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from clients.page import ADDRESS, PAGE, blocks
from clients.strict import PNG

PYTHON = os.environ.get("TANDEM_CLIENTS_PYTHON", sys.executable)
HERE = Path(__file__).parent
NAMED = {"pydantic-ai-slim": "pydantic-ai"}
TORCH_ASKS = ("mpmath", "networkx", "sympy")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PAGE.is_file(), reason="only in a checkout")]


def missing(code: str) -> list[str]:
    """Top-level packages that a block imports and PYTHON does not have."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {(node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0] for node in nodes}
    ask = f"import importlib.util as u; print(*[n for n in {sorted(names)} if u.find_spec(n) is None])"
    return subprocess.run([PYTHON, "-c", ask], capture_output=True, text=True, check=True).stdout.split()


def run(command: list[str], place: Path | None = None) -> str:
    """Its output, run in `place`. LiteLLM asks the network for prices otherwise."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=place,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("heading", "code"), blocks("python"), ids=lambda value: value.split("\n")[0])
def test_python(url: str, heading: str, code: str, tmp_path: Path) -> None:
    if packages := missing(code):
        pytest.skip(f"{', '.join(packages)} not installed")
    (tmp_path / "chart.png").write_bytes(base64.b64decode(PNG))
    assert run([PYTHON, "-c", code.replace(ADDRESS, url)], tmp_path).strip()


def test_curl(url: str) -> None:
    [(_, code)] = [block for block in blocks("bash") if block[0] == "curl"]
    commands = [command for command in re.split(r"\n(?=curl )", code.strip()) if command]
    answers = [run(["bash", "-c", command.replace("curl ", "curl -sS -f ", 1).replace(ADDRESS, url)]) for command in commands]
    assert '"object":"list"' in answers[0]
    assert '"chat.completion"' in answers[1]
    assert answers[2].rstrip().endswith('data: {"type":"message_stop"}')


def test_versions_of_the_table_are_those_that_are_run() -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", (HERE / "requirements.txt").read_text(), re.MULTILINE))
    modules = json.loads((HERE / "package.json").read_text())["dependencies"]
    named = re.findall(r"^([a-z][\w-]+)", (HERE / "requirements.in").read_text(), re.MULTILINE)
    table = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    cells = {name: versions for names, versions in table for name in names.split(", ")}
    clients = {name: pinned[name] for name in named if name not in TORCH_ASKS} | modules
    assert {name for name, version in clients.items() if version not in cells[NAMED.get(name, name)]} == set()
