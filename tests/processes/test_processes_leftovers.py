"""What killed processes have left in the temporary directory is taken away by the next."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from tandem.launchers.process_groups import make_process_group
from tandem.processes.interpreter import code_command


def test_files_of_dead_processes_go_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen(code_command("pass")) as process:
        dead = process.pid
    stale, fresh = time.time() - 7200, time.time()
    files = {
        f"tandem-ring-{dead}-a.json": stale,
        f"tandem-ring-{dead}-b.json": fresh,
        "tandem-ring-x.json": stale,
        f"tandem-ring-{os.getpid()}-c.json": stale,
        f"other-{dead}-d": stale,
    }
    for name, then in files.items():
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (then, then))
    directory = tmp_path / f"tandem-rank-{dead}-e"
    (directory / "inner").mkdir(parents=True)
    os.utime(directory, (stale, stale))
    process_group = make_process_group("ring", 2, 0)
    left = {one.name for one in tmp_path.iterdir()}
    assert set(files) - left == {f"tandem-ring-{dead}-a.json"} and not directory.exists()
    assert len(left - set(files)) == 1
    process_group.remove()
    assert {one.name for one in tmp_path.iterdir()} <= set(files)
