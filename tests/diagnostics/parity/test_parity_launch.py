"""`tandem parity` as the ranks of a real `mlx.launch`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tandem.cli.main import main
from tandem.testing import tiny_model

LAUNCH = Path(sys.executable).parent / "mlx.launch"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not LAUNCH.is_file(), reason="mlx.launch stands beside the interpreter")]


def _free_block(count: int) -> int:
    """First of `count` free ports in a row: mlx.launch counts up from it."""
    for first in range(21000 + os.getpid() % 5000, 32000, count):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise RuntimeError("no free ports")


def _launch(ranks: int, *arguments: str, directory: Path) -> str:
    """What all ranks printed. mlx.launch's own exit code says nothing."""
    command = [
        str(LAUNCH),
        "-n",
        str(ranks),
        "--backend",
        "ring",
        "--starting-port",
        str(_free_block(ranks)),
        "--",
        sys.executable,
        "-m",
        "tandem",
        "parity",
        *arguments,
    ]
    with (directory / "out").open("w+") as out:
        # An open pipe: it would spin on a closed one.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT)
        try:
            process.wait(240)
        finally:
            process.kill()
            assert process.stdin is not None
            process.stdin.close()
        out.seek(0)
        return out.read()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", "gemma3_text")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_first_alone_then_as_two_ranks(model: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", str(model)]) == 0
    assert capsys.readouterr().out == "PARITY PASS max_abs_diff=0.000e+00\n"
    printed = _launch(2, str(model), directory=cache)
    assert printed.splitlines().count("PARITY PASS max_abs_diff=0.000e+00") == 1
    printed = _launch(2, str(model), "--tensor-parallel-size", "2", directory=cache)
    assert printed.count("PARITY PASS max_abs_diff=") == 1


def test_other_weights_fail(model: Path, cache: Path) -> None:
    reference = str(cache / "reference.npz")
    other = tiny_model(cache / "other", "gemma3_text", seed=1)
    assert main(["parity", str(other), "--reference", reference]) == 0
    printed = _launch(2, str(model), "--reference", reference, directory=cache)
    assert printed.count("PARITY FAIL max_abs_diff=") == 1
