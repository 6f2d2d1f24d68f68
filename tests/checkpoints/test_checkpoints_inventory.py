"""Models that are on this machine, and which of them may be removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.checkpoints.resolve import resolve
from tandem.checkpoints.stored import demo_path, find_stored, remove, used
from tandem.cli.main import main
from tandem.errors import ModelNotFound, UsageError
from tandem.testing import tiny_model


@pytest.mark.parametrize("by_path", [False, True])
def test_a_model_that_a_process_uses_is_not_removed(by_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    tiny_model(demo_path())
    resolve(str(demo_path()) if by_path else "demo")
    with pytest.raises(UsageError, match="demo is in use; end what serves it first"):
        remove(find_stored("demo"))
    assert (demo_path() / "config.json").is_file()


def test_a_hub_model_of_which_an_older_revision_is_used_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    old, new = (tmp_path / "models--one--two" / "snapshots" / name for name in ("old", "new"))
    for age, snapshot in ((10**9, old), (2 * 10**9, new)):
        os.utime(tiny_model(snapshot) / "config.json", (age, age))
    used(old)
    assert find_stored("one/two").path == new
    with pytest.raises(UsageError, match="one/two is in use"):
        remove(find_stored("one/two"))
    assert old.is_dir() and new.is_dir()


def test_one_that_nobody_uses_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    tiny_model(demo_path())
    assert main(["model", "rm", "demo"]) == 0
    with pytest.raises(ModelNotFound, match="is in no cache of models"):
        find_stored("demo")
