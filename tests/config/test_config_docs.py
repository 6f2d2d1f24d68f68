"""docs/configuration.md says what the dataclasses say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "generate_docs"


@pytest.mark.skipif(not SCRIPT.is_file(), reason="only in a checkout")
def test_configuration_page_is_current():
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
