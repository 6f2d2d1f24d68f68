"""`tandem hosts sync`: the wheel that it makes, the interpreter that it finds, and machines that get Tandem by it."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

import tandem
from netns import Machines
from tandem.cli.hosts.receive import is_installed
from tandem.cli.hosts.sync import remote_line
from tandem.cli.lifecycle import GENERAL
from tandem.cli.main import main
from tandem.supervision.record import Background
from tandem.system.origin import write_wheel


def test_the_wheel_is_this_tandem_and_always_the_same(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    wheel, again = write_wheel(tmp_path), write_wheel(tmp_path / "again")
    assert wheel.read_bytes() == again.read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert archive.read("tandem/version.py") == (Path(tandem.__file__).parent / "version.py").read_bytes()
        info = f"mlx_tandem-{version('mlx-tandem')}.dist-info"
        recorded = {line.split(",")[0] for line in archive.read(f"{info}/RECORD").decode().splitlines()}
        assert "tandem = tandem.cli.main:main" in archive.read(f"{info}/entry_points.txt").decode()
    assert recorded == names and not any("__pycache__" in name for name in names)
    assert is_installed(wheel.read_bytes(), [f"mlx=={version('mlx')}"])
    assert not is_installed(wheel.read_bytes(), ["mlx==0.1"]) and not is_installed(wheel.read_bytes(), ["nowhere==1"])
    with zipfile.ZipFile(again, "a") as archive:
        archive.writestr("tandem/further.py", "")
    assert not is_installed(again.read_bytes(), [])


def here(home: Path, python: str | None, *words: str) -> subprocess.CompletedProcess[str]:
    """Run on this machine what ssh would have another run, with a home directory of its own."""
    variables = {"HOME": str(home), "SHELL": "/bin/sh", "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        ["sh", "-c", remote_line(python, words)],
        input="",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=variables,
    )


def test_the_interpreter_is_the_one_that_ranks_would_run_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = ("x.whl", "3.99")
    mine = sys.executable
    assert f"{mine} is Python 3." in here(tmp_path, mine, *wrong).stderr
    assert f"{mine} is Python 3." in here(tmp_path, None, *wrong).stderr
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    nothing = here(tmp_path, None, *wrong)
    assert nothing.returncode == 1 and "there is neither python3.99 nor uv" in nothing.stderr
    program = tmp_path / ".local" / "bin" / "tandem"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!{mine}\n")
    assert f"{mine} is Python 3." in here(tmp_path, None, *wrong).stderr


@pytest.mark.parametrize(
    ("hosts", "words", "code"),
    [
        ([{"ssh": "127.0.0.1"}], "names no host but this one", 2),
        ([{"ssh": "agent:mac-b"}], "host agent:mac-b: an agent starts ranks and nothing else", 1),
    ],
)
def test_hosts_that_cannot_be_reached_over_ssh(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hosts: list[dict[str, str]], words: str, code: int
) -> None:
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps(hosts))
    assert main(["hosts", "sync", "--hostfile", str(file)]) == code
    assert words in capsys.readouterr().err


def test_a_restart_installs_on_the_machines_of_its_hosts_file_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)  # the command goes where the server was started
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps([{"ssh": "127.0.0.1"}, {"ssh": "agent:mac-b"}]))
    options = {**dict.fromkeys(GENERAL), "model_argument": "nobody/nothing", "setting_hostfile": str(file)}
    place = Background("default")
    place.path.mkdir(parents=True)
    place.keep(json.dumps({"options": options, "variables": {}, "directory": str(tmp_path), "keys": 0}).encode())
    assert main(["restart", "--sync", "--no-wait"]) == 2
    assert "host agent:mac-b: an agent starts ranks and nothing else" in capsys.readouterr().err
    assert not place.runs()


@pytest.mark.slow
def test_machines_get_this_tandem(make_machines: Callable[[int], Machines], tmp_path: Path) -> None:
    machines = make_machines(3)
    python, site = machines.without_tandem("h1")
    hosts = machines["h0"].home / "hosts.json"
    hosts.write_text(json.dumps([{"ssh": "127.0.0.1"}, {"ssh": "h1", "python": str(python)}, {"ssh": "h2"}]))
    done = machines.run("h0", ["tandem", "hosts", "sync", "--hostfile", str(hosts)], timeout=400)
    versions = f"tandem {tandem.__version__} mlx {version('mlx')} mlx-lm {version('mlx-lm')}"
    assert f"h1: {versions} in {python}" in done.stdout
    assert f"h2: {versions} in {sys.executable}, as here: nothing to do" in done.stdout
    where = machines.run("h1", [str(python), "-c", "import tandem; print(tandem.__file__)"]).stdout.strip()
    assert where == str(site / "tandem" / "__init__.py")
    assert machines.run("h1", [str(python.parent / "tandem"), "version"], timeout=240).stdout.startswith("tandem ")
    hosts.write_text(json.dumps([{"ssh": "h1", "python": "/nowhere/python"}]))
    failed = machines.run("h0", ["tandem", "hosts", "sync", "--hostfile", str(hosts)], timeout=400, check=False)
    assert failed.returncode == 1 and "tandem: host h1: no Python with Tandem was found there" in failed.stderr
