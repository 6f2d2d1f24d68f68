"""A server that the system keeps running: what launchd and systemd are told, and that it runs."""

from __future__ import annotations

import json
import os
import plistlib
import re
import select
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from macs import mac_environment
from system_packages import require
from tandem.cli.service import Service, launchd_agent, systemd_unit
from tandem.testing import tiny_model

SYSTEMCTL = """#!/bin/sh
# As systemctl: remembers what it is told, and has a process for what is enabled.
echo "$*" >> "$FAKE/systemctl.log"
case "$*" in
*daemon-reload*) if [ -e "$FAKE/nobody" ]; then echo "Failed to connect to bus" >&2; exit 1; fi;;
*restart*) if [ -e "$FAKE/broken" ]; then echo "no" >&2; exit 1; fi;;
*disable*) if [ -e "$FAKE/nobody" ]; then echo "Failed to connect to bus" >&2; exit 1; fi; rm -f "$FAKE/enabled";;
*enable*) touch "$FAKE/enabled";;
*show*) if [ -e "$FAKE/enabled" ]; then echo 4711; else echo 0; fi;;
esac
"""


def tandem(environment: dict[str, str], *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tandem", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        timeout=240,
    )


@pytest.fixture(params=["darwin", "linux"])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    home = tmp_path / "a home"
    home.mkdir()
    own = {"HOME": str(home), "TANDEM_STATE_DIR": str(home / "state"), "FAKE": str(tmp_path), "TANDEM_API_KEY": "sesame"}
    if request.param == "darwin":
        return mac_environment(tmp_path / "said", **own)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "systemctl").write_text(SYSTEMCTL)
    (tmp_path / "bin" / "systemctl").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name != "XDG_CONFIG_HOME"}
    return {**kept, **own, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "OPENBLAS_NUM_THREADS": "1"}


def described(environment: dict[str, str], name: str = "default") -> tuple[list[str], dict[str, str], str]:
    """Command, variables and directory, as the system reads them."""
    home = Path(environment["HOME"])
    if "FAKE_MAC" in environment:
        path = home / "Library" / "LaunchAgents" / f"io.github.mlx-tandem.{name}.plist"
        agent = plistlib.loads(path.read_bytes())
        assert agent["KeepAlive"] == {"SuccessfulExit": False} and agent["SoftResourceLimits"]["NumberOfFiles"] > 256
        assert path.stat().st_mode & 0o077 == 0
        return agent["ProgramArguments"], agent["EnvironmentVariables"], agent["WorkingDirectory"]
    text = (home / ".config" / "systemd" / "user" / f"tandem-{name}.service").read_text()
    [command] = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    pairs = [shlex.split(one)[0].partition("=")[::2] for one in re.findall(r"^Environment=(.*)$", text, re.MULTILINE)]
    [directory] = re.findall(r"^WorkingDirectory=(.*)$", text, re.MULTILINE)
    return shlex.split(command), dict(pairs), directory


@pytest.mark.slow
def test_what_is_installed_serves_and_is_taken_away(environment: dict[str, str], tmp_path: Path) -> None:
    tiny_model(tmp_path / "here" / "tiny")
    keys = tmp_path / "keys"
    keys.write_text("open\n")
    keys.chmod(0o600)
    assert tandem(environment, "service", "status").returncode == 1
    open_to_all = tandem(environment, "service", "install", "tiny", "--name", "mine", cwd=tmp_path / "here")
    assert open_to_all.returncode == 2 and "TANDEM_API_KEY: keys of the environment" in open_to_all.stderr
    given = ("--device=cpu", f"--api-key-file={keys}")
    done = tandem(environment, "service", "install", "tiny", "--name", "mine", "--port", "0", *given, cwd=tmp_path / "here")
    assert done.returncode == 0, done.stderr
    assert "mine is installed" in done.stdout and "`tandem service status`" in done.stdout
    assert "default is not installed" in tandem(environment, "service", "status").stdout
    status = tandem(environment, "service", "status", "--name", "mine")
    assert (status.returncode, "runs (process 4711)" in status.stdout) == (0, True)

    command, variables, directory = described(environment, "mine")
    run = ["-c", "from tandem.cli.service import serve; serve()"] if "FAKE_MAC" in environment else ["-m", "tandem"]
    assert command[1:] == ["-P", *run, "serve", "tiny", "--port", "0", *given]
    assert directory == str(tmp_path / "here")
    assert "TANDEM_API_KEY" not in variables and "sesame" not in json.dumps([command, variables])
    with subprocess.Popen(
        command,
        env={**variables, "HOME": environment["HOME"]},
        cwd=directory,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as server:
        try:
            assert server.stdout is not None
            assert select.select([server.stdout], [], [], 240)[0]
            ready = re.search(r"Tandem is ready: (\S+)", server.stdout.readline())
            assert ready
            assert httpx.get(f"{ready[1]}/health", timeout=240).status_code == 200
        finally:
            server.terminate()
            server.communicate(timeout=240)
    assert server.returncode == 0  # so that it is not started again

    del environment["TANDEM_API_KEY"]
    again = tandem(
        environment,
        "service",
        "install",
        "tiny",
        "--name",
        "mine",
        "--port",
        "8001",
        "--drain-timeout=200",
        cwd=tmp_path / "here",
    )
    assert again.returncode == 0, again.stderr
    assert described(environment, "mine")[0][-2] == "8001" and "`tandem status --port 8001`" in again.stdout
    [told] = [path for path in Path(environment["HOME"]).rglob("*mine*") if path.suffix in (".plist", ".service")]
    assert re.search(r"TimeoutStopSec=230|<key>ExitTimeOut</key>\s*<integer>230<", told.read_text())
    assert tandem(environment, "service", "uninstall", "--name", "mine").returncode == 0
    assert tandem(environment, "service", "status", "--name", "mine").returncode == 1
    assert "mine is not installed" in tandem(environment, "service", "uninstall", "--name", "mine").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tiny", "--api-key", "sesame"), "--api-key: every user of this machine could read it"),
        (("tiny", "--memory-fraction", "2"), "--memory-fraction: 2.0 is out of range"),
        (("tiny", "--name", "../x"), "--name ../x: use up to 32 letters"),
        (("nothing-here",), "nothing-here: no such directory or file"),
        (("org/model", "--served-model-name", "a\nb"), "'a\\nb': a service's options"),
        (("org/model", "--served-model-name", "a\udce9"), "'a\\udce9': a service's options"),
        ((), "no model is given"),
    ],
)
@pytest.mark.parametrize("environment", ["linux"], indirect=True)
def test_mistakes_are_told_before_anything_is_installed(
    environment: dict[str, str], words: tuple[str, ...], message: str
) -> None:
    del environment["TANDEM_API_KEY"]
    done = tandem(environment, "service", "install", *words)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert not list(Path(environment["HOME"]).rglob("*.plist")) + list(Path(environment["HOME"]).rglob("*.service"))


def test_what_cannot_be_started_is_not_left_behind(environment: dict[str, str], tmp_path: Path) -> None:
    if "FAKE_MAC" in environment:
        pytest.skip("the stand-in for launchctl starts everything")
    del environment["TANDEM_API_KEY"]
    for trouble, words in (("nobody", "bus; Where nobody is"), ("broken", "restart tandem-default.service: no")):
        (tmp_path / trouble).touch()
        done = tandem(environment, "service", "install", "org/model")
        (tmp_path / trouble).unlink()
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    assert not list(Path(environment["HOME"]).rglob("*.service"))


def test_variables_that_mean_nothing_here_or_hold_passwords_stay_out(environment: dict[str, str]) -> None:
    del environment["TANDEM_API_KEY"]
    environment |= {
        "TANDEM_OTHER_TOKEN": "sesame",
        "HF_TOKEN": "sesame",
        "TANDEM_KV_TOKENS": "9000",
        "HF_ENDPOINT": "https://me:sesame@hub.example",
    }
    refused = tandem(environment, "service", "install", "org/model")
    assert (refused.returncode, "HF_ENDPOINT: has a password in it" in refused.stderr) == (2, True), refused.stderr
    assert "sesame" not in refused.stderr
    environment["HF_ENDPOINT"] = "https://hub.example:8443/a@b"
    done = tandem(environment, "service", "install", "org/model")
    assert done.returncode == 0, done.stderr
    assert "HF_TOKEN does not go along" in done.stdout
    _, variables, _ = described(environment)
    assert "sesame" not in json.dumps(variables)
    assert (variables["TANDEM_KV_TOKENS"], variables["HF_ENDPOINT"]) == ("9000", "https://hub.example:8443/a@b")


def test_what_cannot_be_written_or_stopped_is_said(environment: dict[str, str], tmp_path: Path) -> None:
    del environment["TANDEM_API_KEY"]
    (tmp_path / "file").touch()
    done = tandem({**environment, "TANDEM_STATE_DIR": str(tmp_path / "file")}, "service", "install", "org/model")
    words = f"{tmp_path}/file/services: cannot be written: Not a directory; default is not installed"
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    if "FAKE_MAC" in environment:
        return  # the stand-in for launchctl stops everything
    assert tandem(environment, "service", "install", "org/model").returncode == 0
    (tmp_path / "nobody").touch()
    kept = tandem(environment, "service", "uninstall")
    assert (kept.returncode, "bus; default is still installed, and may run" in kept.stderr) == (2, True), kept.stderr
    (tmp_path / "nobody").unlink()
    assert tandem(environment, "service", "uninstall").returncode == 0
    assert not list(Path(environment["HOME"]).rglob("*.service"))


def odd(tmp_path: Path) -> Service:
    return Service(
        "odd",
        ("/a b/python", "-m", "tandem", "serve", 'a "model" of 100 % for $5 \\ it'),
        tmp_path,
        tmp_path / "a log",
        {"TANDEM_CACHE": "/a b/100 %"},
    )


def test_odd_words_reach_launchd_whole(tmp_path: Path) -> None:
    agent = plistlib.loads(launchd_agent(odd(tmp_path)))
    assert (tuple(agent["ProgramArguments"]), agent["EnvironmentVariables"]) == (odd(tmp_path).command, odd(tmp_path).variables)


def test_odd_words_reach_systemd_whole(tmp_path: Path) -> None:
    text = systemd_unit(odd(tmp_path))
    assert '"a \\"model\\" of 100 %% for $$5 \\\\ it"' in text
    assert 'Environment="TANDEM_CACHE=/a b/100 %%"' in text
    require("systemd-analyze")
    unit = tmp_path / "tandem-odd.service"
    unit.write_text(text.replace("/a b/python", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False)
    assert "tandem-odd" not in done.stderr, done.stderr
