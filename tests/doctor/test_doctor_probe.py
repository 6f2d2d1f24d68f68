"""A test group that says much is still measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.doctor import probe
from tandem.doctor.messages import Collect

CHATTY = """
import sys
sys.stdin.buffer.readline()
for _ in range(20000):
    sys.stderr.write("NCCL INFO: " + "x" * 90 + chr(10))
print("NCCL version 2")
if {works}:
    print('{{"4096": 0.5}}')
else:
    sys.exit("the link is down")
"""


@pytest.mark.parametrize(("works", "expected"), [(True, {"4096": 0.5}), (False, "the link is down")])
def test_complaints_beyond_a_pipe_hold_up_nothing(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool, expected: object) -> None:
    (tmp_path / "chatty.py").write_text(CHATTY.format(works=works))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(probe, "COLLECTIVE", "chatty")
    found = probe.collect(Collect(backend="ring", variables={}, files={}, timeout_s=60))
    assert (found.latency_s if works else found.error) == expected
