"""`tandem cache` on a directory in which others have put things: all that is there is shown or left, as what it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.cli.main import main
from tandem.kv.files import ABOUT, MARK

NAME = f"{bytes(16).hex()}.0-1.0-1.kv"


@pytest.fixture
def space(tmp_path: Path) -> Path:
    (tmp_path / MARK).touch()
    (tmp_path / "model-float32").mkdir()
    (tmp_path / "model-float32" / NAME).write_bytes(b"x")
    return tmp_path / "model-float32"


def listed(space: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The first word of the only row."""
    assert main(["cache", "list", "--kv-disk", str(space.parent)]) == 0
    _, row = capsys.readouterr().out.splitlines()
    return row.split()[0]


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (os.mkfifo, "?"),  # whoever opened it would wait for a writer
        (Path.mkdir, "?"),
        (lambda path: path.write_bytes(bytes(1 << 20)), "?"),
        (lambda path: path.write_text("\x1b[31mred"), "?"),
        (lambda path: path.write_text("org/model[4bit]"), "org/model[4bit]"),
        (lambda path: path.write_text("[/b]"), "[/b]"),
    ],
)
def test_a_models_name_is_shown_as_it_is_or_not_at_all(
    space: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], object], shown: str
) -> None:
    make(space / ABOUT)
    assert listed(space, capsys) == shown


def test_a_checkpoint_adds_no_tokens_and_a_ranks_states_are_of_its_type(space: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = space.rename(space.parent / "model-auto-float32-tp0.2-0.1-0.32")
    (space / f"{bytes(17).hex()}.0-1.0-1.kv").write_bytes(b"x")
    assert main(["cache", "list", "--kv-disk", str(space.parent)]) == 0
    assert "float32, rank 0 of 2      64      2" in capsys.readouterr().out


def test_what_is_no_piece_keeps_none_from_being_deleted(space: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (space / f"{bytes(15).hex()}.kv").mkdir()
    elsewhere = space.parent.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    (elsewhere / "mine.kv").write_bytes(b"x")
    (space / "link.kv").symlink_to(elsewhere / "mine.kv")
    (space.parent / "link").symlink_to(elsewhere)
    assert main(["cache", "drop", "--kv-disk", str(space.parent)]) == 0
    assert capsys.readouterr().out.startswith("1 files are gone")
    assert not (space / NAME).exists() and (elsewhere / "mine.kv").exists()
