"""scripts/readme, which runs README's commands: what it takes for a command, and what it does not let pass; and what
the first of them starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "readme"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="only in a checkout")


def run(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    page = tmp_path / "page.md"
    page.write_text(text)
    return subprocess.run([sys.executable, str(SCRIPT), str(page)], capture_output=True, text=True, timeout=240, check=False)


def test_commands_run_in_order_also_over_several_lines(tmp_path):
    shell = "```bash\necho 'one\ntwo'   # said\necho three \\\n  four\n```\n"
    done = run(tmp_path, f"{shell}text\n```python\nprint(5)\n```\n")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line and line[0] not in "$ "] == [
        "two'   # said",
        "one",
        "two",
        "three four",
        "5",
        "readme: everything works",
    ]


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("```bash\nfalse\necho late\n```\n", "it ended with code 1: false"),
        ("```bash\nfalse | cat\n```\n", "it ended with code 1"),
        ("```python\n1 / 0\n```\n", "it ended with code 1"),
        ("```bash\necho 'What is the capital of France?' >/dev/null\n```\n", 'the answer has no "Paris"'),
    ],
)
def test_a_page_that_does_not_hold_fails(tmp_path, block, said):
    done = run(tmp_path, block)
    assert done.returncode == 1
    assert said in done.stderr
    assert "late" not in done.stdout


def test_readme_asks_for_what_it_can_check():
    text = (ROOT / "README.md").read_text()
    assert text.count("capital of France") >= 4
    assert "make serve" in text


@pytest.mark.parametrize(("system", "stages"), [("Linux", "2"), ("Darwin", "1")])
def test_make_serve_has_ranks_that_do_not_share_a_gpu(tmp_path: Path, system: str, stages: str) -> None:
    """As scripts/serve stands there, with stand-ins for all that it calls."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "serve", tmp_path / "scripts" / "serve")
    for name, text in (("scripts/setup", ""), ("bin/uname", f"echo {system}"), (".venv/bin/tandem", 'echo "$*"')):
        stand_in = tmp_path / name
        stand_in.parent.mkdir(parents=True, exist_ok=True)
        stand_in.write_text(f"#!/bin/sh\n{text}\n")
        stand_in.chmod(0o755)
    done = subprocess.run(
        [tmp_path / "scripts" / "serve", "--port", "0"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
    )
    assert done.stdout.splitlines() == ["model get demo", f"serve demo --pipeline-parallel-size {stages} --port 0"]
