"""Generated pages say what the tables and dataclasses say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.skipif(not SCRIPTS.is_dir(), reason="only in a checkout")
@pytest.mark.parametrize("script", ["generate_docs", "models_list", "run_where"])
def test_pages_are_current(script):
    done = subprocess.run([sys.executable, str(SCRIPTS / script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
