"""What is kept of models goes when nobody has needed it for long, and not while somebody does."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tandem.checkpoints.stored import kept, new_directory, used
from tandem.cli.main import main
from tandem.models.slice_cache import fetch_files
from tandem.processes.interpreter import code_command
from tandem.protocol.blob_messages import BlobFile, Range

DAY = 86400
HOLD = """
import sys
from pathlib import Path
from tandem.checkpoints.stored import used
used(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    for name, days in (
        ("slices/abc", 40),
        ("slices/def", 3),
        ("headers/org--model/c1", 40),
        ("adapters/lora", 40),
        ("gguf/m-1", 40),
        ("gguf/.m-2-x", 40),
        ("models/demo", 400),
    ):
        (tmp_path / name / "parts").mkdir(parents=True)
        (tmp_path / name / "parts" / "data").write_bytes(b"x" * 2**20)
        then = time.time() - days * DAY
        os.utime(tmp_path / name, (then, then))
    return tmp_path


def names() -> set[str]:
    return {one.path.name for one in kept()}


def test_what_was_not_used_for_long_goes(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "prune", "--dry-run"]) == 0
    assert "5.0 MiB would be free again" in capsys.readouterr().out
    assert names() == {"abc", "def", "c1", "m-1", ".m-2-x", "lora"}
    assert main(["model", "prune"]) == 0
    said = capsys.readouterr().out
    assert f"{cache}/slices/abc  1.0 MiB, not used for 40 days" in said and "5.0 MiB are free again" in said
    assert names() == {"def"} and (cache / "models" / "demo").is_dir()
    assert main(["model", "prune", "--unused-days", "0"]) == 0
    assert names() == set()
    assert main(["model", "prune"]) == 0


def test_what_a_process_uses_stays(cache: Path) -> None:
    entry = cache / "slices" / "abc"
    with subprocess.Popen(code_command(HOLD, str(entry)), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == b"held\n"
        assert main(["model", "prune", "--unused-days", "0"]) == 0
        assert names() == {"abc"}
    assert main(["model", "prune"]) == 0
    assert names() == {"abc"}, "it was used just now"
    assert main(["model", "prune", "--unused-days", "0"]) == 0
    assert names() == set()
    used(entry)  # nothing is there: no error


def test_what_is_being_converted_stays(cache: Path) -> None:
    with new_directory(cache / "gguf" / "m-3") as directory:
        assert main(["model", "prune", "--unused-days", "0"]) == 0
        assert names() == {directory.name}
        (directory / "config.json").write_text("{}")
    assert names() == {"m-3"}
    assert main(["model", "prune", "--unused-days", "0"]) == 0
    assert names() == set()


def test_a_fetched_adapter_is_kept_for_as_long_as_a_model_since_it_was_last_loaded(cache: Path) -> None:
    """No lock holds it: once in memory its files are not needed, and an unloaded one makes room."""

    class Nothing:
        def files(self) -> list[BlobFile]:
            return []

        def read(self, ranges: Sequence[Range]) -> Iterator[tuple[int, memoryview, bytes]]:
            return iter(())

    place = fetch_files(Nothing(), "adapters")
    os.utime(place, (1, 1))
    assert fetch_files(Nothing(), "adapters") == place and main(["model", "prune"]) == 0
    assert names() == {"def", place.name}
    os.utime(place, (1, 1))
    assert main(["model", "prune"]) == 0 and names() == {"def"}
