"""A test group that says much is still measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.doctor.messages import RunRank, TimingTask
from tandem.doctor.probe import run_rank

CHATTY = """
import sys
sys.stdin.buffer.readline()
for _ in range(20000):
    sys.stderr.write("NCCL INFO: " + "x" * 90 + chr(10))
print("NCCL version 2")
if {works}:
    print('{{"type": "RankTimes", "mlx": "1.0"}}')
else:
    sys.exit("the link is down")
"""


@pytest.mark.parametrize(("works", "expected"), [(True, "1.0"), (False, "the link is down")])
def test_complaints_beyond_a_pipe_hold_up_nothing(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool, expected: str) -> None:
    (tmp_path / "chatty.py").write_text(CHATTY.format(works=works))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = run_rank(RunRank(TimingTask(), variables={}, files={}, timeout_s=60), "chatty")
    assert (found.mlx if works else found.error) == expected
