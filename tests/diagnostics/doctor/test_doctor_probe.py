"""A test group that says much is still measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.diagnostics.doctor.model_files import look_at
from tandem.diagnostics.tasks import LATE, RankTimes, TimingTask, run_ranks
from tandem.testing import tiny_model

CHATTY = """
import json
import sys
from pathlib import Path

result = json.loads(sys.stdin.buffer.readline())["result"]
for _ in range(20000):
    sys.stderr.write("NCCL INFO: " + "x" * 90 + chr(10))
print("NCCL version 2")
if {works}:
    Path(result).write_text('{{"type": "RankTimes", "mlx": "1.0"}}')
else:
    sys.exit("the link is down")
"""


@pytest.mark.parametrize(("works", "expected"), [(True, "1.0"), (False, "the link is down")])
def test_complaints_beyond_a_pipe_hold_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool, expected: str
) -> None:
    (tmp_path / "chatty.py").write_text(CHATTY.format(works=works))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    [found] = run_ranks([TimingTask()], [{}], 60, "chatty")
    assert (found.mlx if works else found.error) == expected


HALF = """
import json
import sys
import time
from pathlib import Path

task = json.loads(sys.stdin.buffer.readline())
if task["rank"] == 1:
    time.sleep({seconds})
Path(task["result"]).write_text(json.dumps({{"type": "RankTimes", "error": {error}}}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "timeout_s", "expected"), [("'a wrong sum'", 60, ["a wrong sum", LATE]), ("None", 3, [None, LATE])]
)
def test_ranks_end_when_one_fails_or_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, timeout_s: float, expected: list[str | None]
) -> None:
    (tmp_path / "half.py").write_text(HALF.format(seconds=600, error=error))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found: list[RankTimes] = run_ranks([TimingTask(rank=0), TimingTask(rank=1)], [{}, {}], timeout_s, "half")
    assert [one.error for one in found] == expected


def test_a_copy_of_a_model_that_lacks_a_file_is_said_to(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", shards=2)
    assert look_at(str(model)).problem is None
    (model / "model-00002-of-00002.safetensors").unlink()
    found = look_at(str(model))
    assert found.path == str(model)
    assert "model-00002-of-00002.safetensors: is missing" in str(found.problem)
