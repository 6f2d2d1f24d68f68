"""The commands of docs/clients.md, run as they stand there, against one server.

A block whose packages are missing is skipped. To run all: TANDEM_CLIENTS_PYTHON=PYTHON, an interpreter that has them.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

import pytest

from clients.page import ADDRESS, PAGE, blocks

PYTHON = os.environ.get("TANDEM_CLIENTS_PYTHON", sys.executable)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PAGE.is_file(), reason="only in a checkout")]


def missing(code: str) -> list[str]:
    """Top-level packages that a block imports and PYTHON does not have."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {(node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0] for node in nodes}
    ask = f"import importlib.util as u; print(*[n for n in {sorted(names)} if u.find_spec(n) is None])"
    return subprocess.run([PYTHON, "-c", ask], capture_output=True, text=True, check=True).stdout.split()


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("heading", "code"), blocks("python"), ids=lambda value: value.split("\n")[0])
def test_python(url: str, heading: str, code: str) -> None:
    if packages := missing(code):
        pytest.skip(f"{', '.join(packages)} not installed")
    assert run([PYTHON, "-c", code.replace(ADDRESS, url)]).strip()


def test_curl(url: str) -> None:
    [(_, code)] = [block for block in blocks("bash") if block[0] == "curl"]
    commands = [command for command in re.split(r"\n(?=curl )", code.strip()) if command]
    answers = [run(["bash", "-c", command.replace("curl ", "curl -sS -f ", 1).replace(ADDRESS, url)])
               for command in commands]
    assert '"object":"list"' in answers[0]
    assert '"chat.completion"' in answers[1]
    assert answers[2].rstrip().endswith('data: {"type":"message_stop"}')
