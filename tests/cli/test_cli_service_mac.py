"""A service on a Mac: what launchd takes in which domain, what starts with the machine, and folders that are closed.

The stand-in for launchctl (`fake_mac/bin`) refuses as launchd does.
"""

from __future__ import annotations

import os
import plistlib
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from macs import TOOLS, mac_environment

LABEL = "io.github.mlx-tandem.default"


@pytest.fixture
def mac(tmp_path: Path) -> dict[str, str]:
    home = tmp_path / "home"
    (home / "work").mkdir(parents=True)
    return mac_environment(tmp_path / "said", HOME=str(home), TANDEM_STATE_DIR=str(home / "state"))


def tandem(
    environment: dict[str, str], *words: str, cwd: Path | None = None, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-m", "tandem", "service", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd or environment["HOME"] + "/work",
        timeout=240,
    )


def agent(environment: dict[str, str]) -> Path:
    return Path(environment["HOME"], "Library", "LaunchAgents", f"{LABEL}.plist")


def launchctl(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(TOOLS / "launchctl"), *words], env=environment, capture_output=True, text=True, check=False)


def test_with_nobody_at_the_screen_the_background_session_runs_it(mac: dict[str, str]) -> None:
    Path(mac["FAKE_MAC"], "headless").touch()
    done = tandem(mac, "install", "org/model")
    assert done.returncode == 0, done.stderr
    assert plistlib.loads(agent(mac).read_bytes())["LimitLoadToSessionType"] == "Background"
    assert "runs (process 4711)" in tandem(mac, "status").stdout
    assert launchctl(mac, "print", f"user/{os.getuid()}/{LABEL}").returncode == 0
    Path(mac["FAKE_MAC"], "headless").unlink()
    assert tandem(mac, "install", "org/model").returncode == 0  # now at the screen, in place of the other
    assert "LimitLoadToSessionType" not in plistlib.loads(agent(mac).read_bytes())
    assert launchctl(mac, "print", f"user/{os.getuid()}/{LABEL}").returncode == 113
    assert tandem(mac, "uninstall").returncode == 0
    assert not agent(mac).exists()


@pytest.mark.parametrize(
    ("domain", "session", "code"),
    [
        ("gui", None, 0),
        ("gui", "Background", 5),
        ("user", None, 5),
        ("user", ["Aqua", "Background"], 5),
        ("user", "Background", 0),
        ("system", None, 1),
    ],
)
def test_the_stand_in_refuses_as_launchd_does(mac: dict[str, str], tmp_path: Path, domain, session, code) -> None:
    file = tmp_path / f"{LABEL}.plist"
    file.write_bytes(plistlib.dumps({"Label": LABEL, **({"LimitLoadToSessionType": session} if session else {})}))
    where = domain if domain == "system" else f"{domain}/{os.getuid()}"
    assert launchctl(mac, "bootstrap", where, str(file)).returncode == code


def test_what_launchd_takes_nowhere_is_not_left_behind(mac: dict[str, str]) -> None:
    (Path(mac["FAKE_MAC"]) / "headless").touch()
    jobs = Path(mac["FAKE_MAC"], "launchd")
    jobs.mkdir()
    (jobs / f"user_{os.getuid()}_{LABEL}").touch()  # one of that name that another file has started
    done = tandem(mac, "install", "org/model")
    assert done.returncode == 2
    assert "Bootstrap failed: 5: Input/output error; default is not installed" in done.stderr
    assert not agent(mac).exists()


def test_with_system_two_commands_have_it_start_with_the_machine(mac: dict[str, str], tmp_path: Path) -> None:
    done = tandem(mac, "install", "org/model", "--system", "--port", "8001")
    assert done.returncode == 0, done.stderr
    assert not agent(mac).exists()
    _, copy, bootstrap = done.stdout.splitlines()
    words = shlex.split(copy)
    assert [*words[:8], words[-1]] == ["sudo", "install", "-m", "644", "-o", "root", "-g", "wheel", "/Library/LaunchDaemons/"]
    daemon = plistlib.loads(Path(words[8]).read_bytes())
    assert daemon["UserName"] == subprocess.run(["id", "-un"], capture_output=True, text=True).stdout.strip()
    assert daemon["EnvironmentVariables"]["HOME"] == mac["HOME"]
    assert daemon["ProgramArguments"][-4:] == ["serve", "org/model", "--port", "8001"]
    assert "LimitLoadToSessionType" not in daemon
    target = tmp_path / "LaunchDaemons"
    target.mkdir()
    (target / Path(words[8]).name).write_bytes(Path(words[8]).read_bytes())
    assert "does not run" in tandem(mac, "status").stdout
    for command in (bootstrap,):
        there = command.replace("/Library/LaunchDaemons", str(target))
        assert subprocess.run(["sh", "-c", there], env=mac, check=False).returncode == 0
    status = tandem(mac, "status")
    assert (status.returncode, "runs (process 4711); /Library/LaunchDaemons/" in status.stdout) == (0, True)
    again = tandem(mac, "install", "org/model", "--system", "--port", "8002").stdout.splitlines()
    assert again[1:] == [f"sudo launchctl bootout system/{LABEL}", copy, bootstrap], "what runs must end first"
    other = tandem(mac, "install", "org/model")
    assert other.returncode == 2 and "default is installed with --system" in other.stderr
    gone = tandem(mac, "uninstall").stdout.splitlines()
    assert gone[1:] == [f"sudo launchctl bootout system/{LABEL}", f"sudo rm /Library/LaunchDaemons/{LABEL}.plist"]
    assert "is not installed" in tandem(mac, "status").stdout
    assert tandem(mac, "install", "org/model").returncode == 0
    other = tandem(mac, "install", "org/model", "--system")
    assert other.returncode == 2 and "default is installed without --system" in other.stderr


def test_system_is_about_macs(tmp_path: Path) -> None:
    (tmp_path / "systemctl").write_text("#!/bin/sh\n")
    (tmp_path / "systemctl").chmod(0o755)
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = tandem(environment, "install", "org/model", "--system", cwd=tmp_path)
    assert done.returncode == 2 and "loginctl enable-linger" in done.stderr


@pytest.mark.parametrize("folder", ["Documents", "Desktop", "Downloads", "Library/Mobile Documents", "Library/CloudStorage"])
def test_folders_that_macos_closes_are_refused_before_anything_is_written(mac: dict[str, str], folder: str) -> None:
    place = Path(mac["HOME"], folder, "tandem")
    place.mkdir(parents=True)
    before = sorted(Path(mac["HOME"]).rglob("*"))
    for words in (("org/model",), ("org/model", "--system")):
        done = tandem(mac, "install", *words, cwd=place)
        assert done.returncode == 2
        assert f"macOS closes {mac['HOME']}/{folder} to services" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    assert sorted(Path(mac["HOME"]).rglob("*")) == before
    (place / "model").mkdir()
    assert f"{place}/model: macOS closes" in tandem(mac, "install", str(place / "model")).stderr


def test_a_mistake_is_not_tried_again_and_a_failure_is(mac: dict[str, str]) -> None:
    """launchd restarts whatever ends with another code than 0."""
    assert tandem(mac, "install", "org/model").returncode == 0
    command = plistlib.loads(agent(mac).read_bytes())["ProgramArguments"]
    head = command[: command.index("serve")]
    for words, code in (
        (["serve", "/nowhere/at/all"], 0),
        (["serve", "demo", "--no-such-flag"], 0),
        (["status", "--name", "nobody"], 1),
    ):
        done = subprocess.run([*head, *words], env=mac, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == code, done.stderr
        assert ("not started again" in done.stderr) == (code == 0)


def test_homebrews_service_outlives_an_upgrade(mac: dict[str, str], tmp_path: Path) -> None:
    prefix = tmp_path / "homebrew"
    for version in ("0.1.0", "0.2.0"):
        (prefix / "Cellar" / "mlx-tandem" / version / "libexec" / "bin").mkdir(parents=True)
    (prefix / "opt").mkdir()
    (prefix / "opt" / "mlx-tandem").symlink_to(prefix / "Cellar" / "mlx-tandem" / "0.1.0")
    for version in ("0.1.0", "0.2.0"):
        python = prefix / "Cellar" / "mlx-tandem" / version / "libexec" / "bin" / "python"
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        python.chmod(0o755)
    code = "import sys; sys.executable = sys.argv.pop(1); from tandem.cli.main import main; sys.exit(main(sys.argv[1:]))"
    old = prefix / "Cellar" / "mlx-tandem" / "0.1.0" / "libexec" / "bin" / "python"
    done = subprocess.run(
        [sys.executable, "-c", code, str(old), "service", "install", "org/model"],
        env=mac,
        text=True,
        capture_output=True,
        check=False,
        cwd=mac["HOME"],
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    (prefix / "opt" / "mlx-tandem").unlink()
    (prefix / "opt" / "mlx-tandem").symlink_to(prefix / "Cellar" / "mlx-tandem" / "0.2.0")
    old.unlink()
    named = Path(plistlib.loads(agent(mac).read_bytes())["ProgramArguments"][0])
    assert named == prefix / "opt" / "mlx-tandem" / "libexec" / "bin" / "python"
    assert named.exists()
