"""Answers have the official libraries' own types: each validates them strictly, in the versions of versions.txt.

Without `make test-clients`, the versions of the interpreter are tried.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PYTHON = Path(os.environ.get("TANDEM_CLIENTS_PYTHON", sys.executable))
MADE = "TANDEM_CLIENTS_PYTHON" in os.environ
PINS = [line for line in (HERE / "versions.txt").read_text().splitlines() if not line.startswith("#")]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("heading", [f"{pin} strict" for pin in PINS] if MADE else ["openai", "anthropic"])
def test_every_answer_has_the_types_of_the_library(url: str, heading: str) -> None:
    pin = heading.removesuffix(" strict")
    library, _, version = pin.partition("==")
    env = {**os.environ, "PYTHONPATH": str(PYTHON.parents[1] / "versions" / pin)} if MADE else None
    command = [str(PYTHON), str(HERE / "strict.py"), library, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    named, *calls = done.stdout.splitlines()
    assert named == f"{library} {version}" or (not MADE and named.startswith(library))
    assert len(calls) > (20 if library == "openai" else 8)
