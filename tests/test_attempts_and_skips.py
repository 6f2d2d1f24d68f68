"""What a run of the tests promises: one attempt for each, and at its end the packages that tests were skipped for."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from system_packages import PACKAGES, advice

TESTS = Path(__file__).parent
SHELLS = "cli/test_cli_completions.py"


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    return subprocess.run(
        command, cwd=TESTS, env={**os.environ, "PYTEST_ADDOPTS": "", **variables}, check=False, capture_output=True, text=True
    )


def test_there_is_no_second_attempt() -> None:
    done = run("test_log.py", "--reruns", "1")
    assert (done.returncode, "unrecognized arguments: --reruns" in done.stderr) == (pytest.ExitCode.USAGE_ERROR, True)
    files = set(TESTS.rglob("*.py")) - {Path(__file__)}
    assert [path.name for path in files if "mark.flaky" in path.read_text(encoding="utf-8")] == []


CLOCKS = {"time.monotonic()", "time.perf_counter()", "time.time()"}


def test_nothing_is_asserted_of_how_long_something_took() -> None:
    """Other work on the machine would decide it. Loops that wait may end in an assertion."""

    def timed(node: ast.AST) -> Iterator[ast.Assert]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Assert) and any(
                isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub) and ast.unparse(part.left) in CLOCKS
                for part in ast.walk(child)
            ):
                yield child
            elif not isinstance(child, ast.While):
                yield from timed(child)

    found = [
        f"{path.name}:{one.lineno}" for path in TESTS.rglob("*.py") for one in timed(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []


def test_a_run_says_at_its_end_which_packages_it_lacked(tmp_path: Path) -> None:
    done = run(SHELLS, "-n", "1", PATH=str(tmp_path))
    assert done.returncode == 0, done.stdout
    last, command = done.stdout.rstrip().splitlines()[-3:-1]
    assert last.endswith("tests were skipped for want of system packages. This installs them:")
    assert command.split()[-3:] == ["bash", "fish", "zsh"] and "install" in command


def test_packages_are_named_as_the_platform_names_them() -> None:
    reasons = ["Skipped: programs not found: chromium, chromedriver", "programs not found: sshd", "needs root"]
    assert advice(reasons, "linux").splitlines() == [
        "2 tests were skipped for want of system packages. This installs them:",
        "  sudo apt-get install --no-install-recommends chromium chromium-driver openssh-server",
    ]
    assert advice(reasons, "darwin").endswith("\n  brew install chromedriver chromium")
    assert advice(["needs root"], "linux") == advice(reasons[1:], "darwin") == ""
    assert all(PACKAGES.values())
