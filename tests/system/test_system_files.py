"""Why a file cannot be opened, in words that help."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.checkpoints.resolve import resolve
from tandem.diagnostics.doctor.model_files import look_at
from tandem.errors import BrokenModel, ConfigError, ModelNotFound
from tandem.models.description import describe
from tandem.system.files import file_errors, file_trouble, read_text
from tandem.testing import tiny_model


def trouble(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def test_a_file_that_macos_withholds_is_not_one_without_permission_bits(monkeypatch):
    assert file_trouble(trouble(errno.EPERM)) == "Operation not permitted"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "Full Disk Access" in file_trouble(trouble(errno.EPERM))
    assert file_trouble(trouble(errno.EACCES)) == "Permission denied"


@pytest.mark.parametrize("method", ["pathlib.Path.iterdir", "tandem.checkpoints.config.read_text", "pathlib.Path.is_dir"])
def test_a_model_in_a_folder_that_macos_withholds(tmp_path, monkeypatch, method):
    model = tiny_model(tmp_path / "tiny")

    def withheld(*arguments, **options):
        raise trouble(errno.EPERM)

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(method, withheld)
    with pytest.raises((ModelNotFound, BrokenModel), match="Documents.*Allow full disk access"):
        describe(resolve(str(model)))


def test_the_doctor_says_it_too(tmp_path, monkeypatch):
    model = tiny_model(tmp_path / "tiny")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(Path, "iterdir", lambda self: (_ for _ in ()).throw(trouble(errno.EPERM)))
    assert "macOS withholds this folder" in (look_at(str(model)).problem or "")


LOAD = """
import resource, sys
from pathlib import Path
from tandem.loading.weights import load_file
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
held = []
try:
    for number in range(60):
        held.append(load_file(Path(sys.argv[1])))
except Exception as error:
    print(error)
"""


def test_too_many_open_files_are_not_a_broken_model(tmp_path):
    model = tiny_model(tmp_path / "tiny")
    file = next(model.glob("model*.safetensors"))
    done = subprocess.run([sys.executable, "-c", LOAD, str(file)], capture_output=True, text=True, check=True)
    assert "Too many open files: this process may have 40; raise the limit (`ulimit -n 65536`)" in done.stdout


def test_text_that_is_not_utf_8_is_told_like_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "a").write_bytes(b"\xff")
    for name, why in (("a", "not UTF-8 text"), ("b", "No such file or directory")):
        with pytest.raises(ConfigError) as told, file_errors(f"{name} cannot be read", "give another", kind=ConfigError):
            read_text(tmp_path / name)
        assert told.value.message == f"{name} cannot be read: {why}; give another"
