"""`benchmarks/soak.py` for a minute: rising load, a fault every few seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.slow
def test_a_minute_of_faults_under_rising_load(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SOAK), "--minutes", "0.7", "--every", "8", "--clients", "6",
                           "--heavy", "0", "--no-gaps", "--evidence", str(tmp_path)],
                          capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "all is well" in done.stdout and "wrong 0" in done.stdout
