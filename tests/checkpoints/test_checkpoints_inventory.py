"""Models that are on this machine, and which of them may be removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.checkpoints.demo import demo_path
from tandem.checkpoints.inventory import find_stored, remove
from tandem.checkpoints.resolve import resolve
from tandem.cli.main import main
from tandem.errors import ModelNotFound, UsageError
from tandem.testing import tiny_model


@pytest.mark.parametrize("by_path", [False, True])
def test_a_model_that_a_process_uses_is_not_removed(by_path: bool, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    tiny_model(demo_path())
    resolve(str(demo_path()) if by_path else "demo")
    with pytest.raises(UsageError, match="demo is in use; end what serves it first"):
        remove(find_stored("demo"))
    assert (demo_path() / "config.json").is_file()


def test_one_that_nobody_uses_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    tiny_model(demo_path())
    assert main(["model", "rm", "demo"]) == 0
    with pytest.raises(ModelNotFound, match="is in no cache of models"):
        find_stored("demo")
