"""Checks with processes of their own: faults that are planted in what they start (planted/sitecustomize.py)."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.diagnostics.selftest.check import look
from tandem.diagnostics.selftest.checks.machine import make_random
from tandem.diagnostics.tasks import Task, TaskResult

PLANTED = Path(__file__).parent / "planted"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_random(directory)
    return directory


@pytest.fixture(autouse=True)
def surroundings(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread a rank, a cache for all tests here; limits as they were afterwards, and no process left."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    monkeypatch.setenv("TANDEM_CACHE", str(model.parent / "cache"))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    children = psutil.Process().children(recursive=True)
    for one in children:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(children, timeout=240)


@pytest.fixture
def looked(model: Path) -> Callable[..., TaskResult]:
    def look_at(entry: str, **fields: Any) -> TaskResult:
        return look(Task(**{"entry": entry, "result": "", "directory": "", "model": str(model), "random": True, **fields}))

    return look_at


def plant(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PLANTED))
    monkeypatch.setenv("PLANTED", fault)


def hostfile(directory: Path, *names: str) -> str:
    path = directory / "hosts.json"
    path.write_text(json.dumps([{"ssh": name, "ips": ["127.0.0.1"]} for name in names]))
    return str(path)


@pytest.mark.parametrize(
    ("entry", "fault", "words"),
    [
        ("single:pace", "unlikely tokens", "24 tokens of mlx-lm's, expected"),
        ("single:connections", "few files", "300 connections, expected"),
        ("layouts:stages", "later stages", "logits and tokens of one process, expected"),
        ("layouts:ring", "later stages", "logits and tokens of one process, expected"),
        ("layouts:tensor", "no sums", "logits and tokens of one process, expected"),
        ("layouts:both", "no sums", "logits and tokens of one process, expected"),
        ("fences:collectives", "wrong sums", "a sum of 4096 bytes over 2 ranks gives 3 everywhere, expected"),
        ("faults:orphans", "no lifeline", "no process outlives its supervisor"),
        ("hosts:layouts", "later stages", "the answer of one rank from stages, expected"),
    ],
)
def test_a_planted_fault_is_seen(
    entry: str, fault: str, words: str, tmp_path: Path, looked: Callable[..., TaskResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.diagnostics.selftest.checks.faults.GONE_S", 4.0)
    monkeypatch.setattr("tandem.diagnostics.selftest.checks.single.HEALTH_S", 4.0)
    plant(monkeypatch, fault)
    found = looked(entry, directory=str(tmp_path), hostfile=hostfile(tmp_path, "localhost", "localhost"))
    assert found.verdict == "failed"
    assert words in found.detail


@pytest.mark.parametrize(
    ("entry", "variable", "value", "words"),
    [
        ("single:chunks", "TANDEM_MAX_CONTEXT", "100", "100"),
        ("faults:killed", "TANDEM_MAX_RESTARTS", "0", "gave up after 1 failures in a row"),
    ],
)
def test_a_setting_that_breaks_it_is_seen(
    entry: str, variable: str, value: str, words: str, looked: Callable[..., TaskResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.diagnostics.selftest.checks.faults.BACK_S", 5.0)
    monkeypatch.setenv(variable, value)
    found = looked(entry)
    assert found.verdict == "failed"
    assert found.detail.startswith("a request failed") and words in found.detail


@pytest.mark.parametrize("entry", ["single:pace", "faults:stopped", "faults:orphans"])
def test_without_a_fault(entry: str, looked: Callable[..., TaskResult]) -> None:
    """`faults:killed` differs from `faults:stopped` by the signal alone; test_selftest_cluster.py has ranks killed."""
    found = looked(entry)
    assert (found.verdict, found.detail) == ("ok", "")
    assert found.figures


@pytest.mark.parametrize("entry", ["hosts:doctor", "hosts:links", "hosts:deaths"])
def test_a_host_that_does_not_answer(entry: str, tmp_path: Path, looked: Callable[..., TaskResult]) -> None:
    """`hosts:layouts` serves over a hosts file as `hosts:deaths` does."""
    found = looked(entry, directory=str(tmp_path), hostfile=hostfile(tmp_path, "localhost", "nobody.invalid"))
    assert found.verdict == "failed"
    assert "nobody.invalid" in found.detail


def firstlight(directory: Path, *words: str) -> subprocess.Popen[str]:
    """The command as somebody has it who has PYTHONPATH and nothing else: no `tandem` on PATH, no demo model."""
    environment = {
        **os.environ,
        "PATH": "/usr/bin:/bin",
        "TANDEM_STATE_DIR": str(directory / "state"),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OPENBLAS_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tandem", "firstlight", *words],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_run_that_is_killed_in_the_middle_goes_on(tmp_path: Path) -> None:
    words = ("--only", "digests,wiring,stages", "--minutes", "9")
    journal = tmp_path / "state" / "firstlight" / "run.json"

    def begun() -> dict[str, list[str]]:
        """Boot ids by check, for each time that it was begun."""
        return json.loads(journal.read_bytes())["begun"] if journal.exists() else {}

    first = firstlight(tmp_path, *words)
    try:
        while "wiring" not in begun():
            assert first.poll() is None, first.communicate()
            time.sleep(0.01)
        children = psutil.Process(first.pid).children(recursive=True)
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    _, alive = psutil.wait_procs(children, timeout=240)
    assert not alive
    done = firstlight(tmp_path, *words)
    out, errors = done.communicate(timeout=500)
    assert done.returncode == 0, out + errors
    assert "2 of 4 checks were made before; going on behind them" in errors
    assert "a tiny one with random weights is made" in errors
    assert {name: len(boots) for name, boots in begun().items()} == {"model": 1, "digests": 1, "wiring": 2, "stages": 1}
    report = json.loads((tmp_path / "firstlight.json").read_text())
    assert [(one["name"], one["verdict"], one.get("attempts", 1)) for one in report["checks"]] == [
        ("model", "ok", 1),
        ("digests", "ok", 1),
        ("wiring", "ok", 2),
        ("stages", "ok", 1),
    ]
    assert "| weights in memory after a pause | ok (attempt 2) |" in (tmp_path / "firstlight.md").read_text()
    assert str(tmp_path) not in out + (tmp_path / "firstlight.json").read_text()
