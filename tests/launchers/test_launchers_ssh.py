"""What ssh is told, what its failures mean, and which addresses and devices the hosts of a file have."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.config.settings import ParallelSettings, Settings
from tandem.errors import ConfigError, UsageError
from tandem.launchers.host_facts import launched_process_group
from tandem.launchers.hostfile import HostEntry, Hostfile
from tandem.launchers.manual import make_token, read_token
from tandem.launchers.ssh import RANK_HOST, SshLauncher, explain, remote_command, ssh_command

HOST = HostEntry(ssh="mac2")


def test_ssh_asks_nothing_shares_nothing_and_gives_up() -> None:
    words = ssh_command("me@mac2", "true")
    assert words[0] == "ssh" and words[-3:] == ["--", "me@mac2", "true"]
    options = {words[i + 1] for i, word in enumerate(words) if word == "-o"}
    assert {"BatchMode=yes", "ControlMaster=no", "ControlPath=none", "ConnectTimeout=10"} <= options
    interval, count = (
        int(next(o for o in options if o.startswith(name)).partition("=")[2])
        for name in ("ServerAliveInterval", "ServerAliveCountMax")
    )
    assert interval * count <= 8  # seconds until a cut line is noticed, as with heartbeats


def fake_python(path: Path, says: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\necho {says} "$@"\n')
    path.chmod(0o755)
    return path


def run(command: str, **variables: str) -> str:
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "SHELL": "/bin/sh", **variables}
    )
    return done.stdout.strip()


def test_the_interpreter_that_is_named_runs(tmp_path: Path) -> None:
    python = fake_python(tmp_path / "a dir" / "python", "named")
    assert run(remote_command(str(python))) == f"named -P -m {RANK_HOST}"


def test_otherwise_that_of_the_same_path_or_what_a_login_shell_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = fake_python(tmp_path / "same" / "python", "same")
    monkeypatch.setattr(sys, "executable", str(same))
    assert run(remote_command(None)) == f"same -P -m {RANK_HOST}"
    same.unlink()
    (tmp_path / ".profile").write_text(f"PATH={tmp_path}/bin:$PATH\n")
    fake_python(tmp_path / "bin" / "python3", "python3")
    assert run(remote_command(None), HOME=str(tmp_path)) == f"python3 -P -m {RANK_HOST}"
    fake_python(tmp_path / "bin" / "tandem", "tandem")
    assert run(remote_command(None), HOME=str(tmp_path)) == "tandem rank --stdin"


SHELL = """#!/bin/sh
# As zsh: a login shell reads .zprofile, an interactive one .zshrc too, which may print what it likes.
[ -e "$HOME/.zprofile" ] && . "$HOME/.zprofile"
case "$1" in *i*) [ -e "$HOME/.zshrc" ] && . "$HOME/.zshrc";; esac
eval "$2"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a user on a machine where nothing lies at the same path as here."""
    monkeypatch.setattr(sys, "executable", "/nowhere/bin/python")
    there = tmp_path / "a home"
    fake_python(there / "zsh", "").write_text(SHELL)
    return there


def found_in(home: Path, command: str | None = None) -> str:
    return run(command or remote_command(None), HOME=str(home), SHELL=str(home / "zsh"))


@pytest.mark.parametrize("place", [".local/bin/tandem", ".pyenv/shims/tandem"])
def test_where_uv_pipx_and_pyenv_put_it_though_no_shell_is_told(home: Path, place: str) -> None:
    fake_python(home / place, "tandem")
    assert found_in(home) == "tandem rank --stdin"


def test_what_only_an_interactive_shell_finds(home: Path) -> None:
    fake_python(home / "envs" / "tandem", "conda")
    (home / ".zshrc").write_text(f'echo welcome; cat >/dev/null; PATH="{home}/envs:$PATH"; echo "a warning" >&2\n')
    assert found_in(home) == "conda rank --stdin"


def test_a_login_shells_own_goes_first(home: Path) -> None:
    fake_python(home / ".local/bin/tandem", "uv")
    fake_python(home / "chosen" / "tandem", "chosen")
    (home / ".zprofile").write_text(f'PATH="{home}/chosen:$PATH"; export TOLD=1\n')
    assert found_in(home) == "chosen rank --stdin"


def test_the_same_place_below_another_users_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/Users/ann")
    monkeypatch.setattr(sys, "executable", "/Users/ann/my venv/bin/python")
    command = remote_command(None)
    fake_python(home / "my venv" / "bin" / "python", "theirs")
    assert found_in(home, command) == f"theirs -P -m {RANK_HOST}"


def test_a_python_that_is_there_and_closed_to_ssh_is_no_missing_one(home: Path, tmp_path: Path) -> None:
    """macOS answers EPERM below Documents and its like, also to `[ -x`."""
    ls = fake_python(tmp_path / "bin" / "ls", "")
    ls.write_text('#!/bin/sh\nfor last; do :; done\necho "ls: $last: Operation not permitted" >&2\nexit 1\n')
    done = subprocess.run(
        ["sh", "-c", remote_command(None)],
        capture_output=True,
        text=True,
        env={"PATH": f"{ls.parent}:/usr/bin:/bin", "SHELL": str(home / "zsh"), "HOME": str(home)},
    )
    assert done.returncode == 126
    said = explain(HOST, done.returncode, done.stderr.splitlines())
    assert "macOS withholds the folder of its Python from ssh (/nowhere/bin/python: Operation not permitted)" in said
    assert "on mac2: move the checkout out of Documents" in said
    fake_python(home / ".local/bin/tandem", "another")  # a Tandem elsewhere is taken
    assert (
        run(remote_command(None), HOME=str(home), SHELL=str(home / "zsh"), PATH=f"{ls.parent}:/usr/bin:/bin")
        == "another rank --stdin"
    )


def test_the_command_is_one_word_for_any_login_shell() -> None:
    words = shlex.split(remote_command(None))
    assert words[:3] == ["exec", "sh", "-c"] and len(words) == 4


@pytest.mark.parametrize(
    ("code", "lines", "words"),
    [
        (255, ["me@mac2: Permission denied (publickey)."], "refuses this user's key; ssh-copy-id mac2"),
        (255, ["Host key verification failed."], "host key is not the known one"),
        (255, ["ssh: Could not resolve hostname mac2: Name or service not known"], "its name is not known here"),
        (
            255,
            ["ssh: connect to host mac2 port 22: Connection refused"],
            "on mac2: System Settings > General > Sharing > Remote Login",
        ),
        (255, ["ssh: connect to host mac2 port 22: Connection timed out"], "it cannot be reached; ping -c 3 mac2   (is it on"),
        (255, ["ssh: connect to host mac2 port 22: Operation timed out"], "it cannot be reached; ping"),
        (255, ["ssh: connect to host mac2 port 22: No route to host"], "it cannot be reached; ping"),
        (255, ["kex_exchange_identification: banner line"], "banner line (ssh ended with 255)"),
        (255, [], "nothing was said (ssh ended with 255)"),
        (
            127,
            ["sh: 1: exec: python3: not found"],
            "no Python with Tandem was found there (sh: 1: exec: python3: not found); name its interpreter",
        ),
        (
            1,
            ["/usr/bin/python3: Error while finding module (ModuleNotFoundError: No module named 'tandem')"],
            "No module named 'tandem')); ",
        ),
        (
            1,
            ["/usr/bin/python3: Error while finding module (ModuleNotFoundError: No module named 'tandem')"],
            "tandem hosts sync --hostfile FILE",
        ),
        (
            1,
            ["xcode-select: note: No developer tools were found, requesting install."],
            "requesting install.); name its interpreter with --remote-python, or as `python` in the hostfile",
        ),
        (
            2,
            ["Unknown option: -P", "usage: python3 [option] ...", "Try `python -h' for more information."],
            "its Python is older than 3.11",
        ),
        (2, ["some rank log", "tandem: h2 has no address 10.0.0.9"], "host mac2: h2 has no address 10.0.0.9"),
    ],
)
def test_failures_become_one_line_with_a_remedy(code: int, lines: list[str], words: str) -> None:
    line = explain(HOST, code, lines)
    assert line.startswith("host mac2: ") and words in line and "\n" not in line


def launcher(*hosts: HostEntry, entries: tuple[int, ...] | None = None, **fields: object) -> SshLauncher:
    settings = Settings(parallel=ParallelSettings(host_entries=entries))
    return SshLauncher(Hostfile(path="hosts.json", hosts=hosts, **fields), settings)  # type: ignore[arg-type]


def test_hosts_on_this_machine_alone_need_loopback_alone() -> None:
    one = launcher(HostEntry(ssh="127.0.0.1"), HostEntry(ssh="localhost"), backend="ring", envs=(("A", "1"),))
    try:
        assert one.bus_host == "127.0.0.1" and one.environment(0) == {"A": "1"} and one.default_backend() == "ring"
    finally:
        one.close()


def test_more_slots_than_hosts_are_refused() -> None:
    one = launcher(HostEntry(ssh="127.0.0.1"))
    try:
        with pytest.raises(UsageError, match=r"more ranks than hosts.json has hosts \(1\)"):
            one.bring([1], first=True)
    finally:
        one.close()


def test_a_release_kills_what_does_not_end_when_its_input_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.launchers.ssh.END_S", 0.1)
    monkeypatch.setattr("tandem.launchers.ssh.module_command", lambda *_, **__: ["sleep", "600"])
    one = launcher(HostEntry(ssh="127.0.0.1"))
    one.bring([0], first=True)
    process = one._connections[0]._process
    try:
        one.close()
        assert process.poll() == -signal.SIGKILL
    finally:
        process.kill()
        process.stdout.close()  # type: ignore[union-attr]


def test_devices_of_the_chosen_hosts_alone() -> None:
    rows = [(None, "en1", "en2"), ("en3", None, ("en4", "en5")), ("en6", "en7", None)]
    hosts = [HostEntry(ssh="127.0.0.1", rdma=row, ips=("127.0.0.1",)) for row in rows]
    one = launcher(*hosts, entries=(1, 2))
    try:
        assert one.devices(0) == [None, ["en4", "en5"]] and one.devices(1) == ["en7", None]
        assert one.addresses(0) == ["127.0.0.1"]
    finally:
        one.close()


def test_channels_and_coordinator_have_an_address_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a mesh of three no cable of a host reaches all others."""
    hosts = [HostEntry(ssh="127.0.0.1", ips=(f"127.0.1.{one}",), address=f"127.0.2.{one}") for one in (1, 2, 3)]
    one = launcher(*hosts)
    invited: list[str | None] = []
    monkeypatch.setattr(one, "invite", lambda slot, head, address=None, **_: invited.append(address) or 1 / 0)
    try:
        for slot in range(3):
            with pytest.raises(ZeroDivisionError):
                one._connect(slot)
        assert invited == ["127.0.2.1", "127.0.2.2", "127.0.2.3"]
        assert [one.addresses(slot) for slot in range(3)] == [["127.0.1.1"], ["127.0.1.2"], ["127.0.1.3"]]
        assert [one.meeting_address(slot) for slot in range(3)] == invited
    finally:
        one.close()


def test_a_token_file_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    keys = make_token(str(path))
    assert path.stat().st_mode & 0o777 == 0o600 and read_token(str(path)) == keys == make_token(str(path))
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="others can read .*chmod 600"):
        make_token(str(path))
    path.chmod(0o600)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="is not a token file"):
        read_token(str(path))
    with pytest.raises(ConfigError, match="cannot read .*: No such file"):
        read_token(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot make .*: No such file"):
        make_token(str(tmp_path / "no" / "dir"))


def test_what_mlx_launch_says_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("MLX_", "NCCL_", "OMPI_"))]:
        monkeypatch.delenv(name)
    assert launched_process_group().rank is None and launched_process_group().backend == ""
    hosts, devices = tmp_path / "hosts", tmp_path / "devices"
    hosts.write_text(json.dumps([["10.0.0.1:5000"], ["10.0.0.2:5001"]]))
    devices.write_text(json.dumps([[None, "rdma_en2"], ["rdma_en2", None]]))
    monkeypatch.setenv("MLX_RANK", "1")
    monkeypatch.setenv("MLX_HOSTFILE", str(hosts))
    ring = launched_process_group()
    assert (ring.rank, ring.backend, ring.hostfile[1]) == (1, "ring", ["10.0.0.2:5001"])
    monkeypatch.delenv("MLX_HOSTFILE")
    monkeypatch.setenv("MLX_IBV_DEVICES", str(devices))
    monkeypatch.setenv("MLX_JACCL_COORDINATOR", "10.0.0.1:5000")
    assert launched_process_group().backend == "jaccl" and launched_process_group().devices[0] == [None, "rdma_en2"]
    monkeypatch.setenv("MLX_JACCL_RING", "1")
    assert launched_process_group().backend == "jaccl-ring"
    monkeypatch.delenv("MLX_IBV_DEVICES")
    monkeypatch.setenv("NCCL_HOST_IP", "10.0.0.1")
    monkeypatch.setenv("NCCL_PORT", "12345")
    assert launched_process_group().backend == "nccl" and launched_process_group().nccl == "10.0.0.1:12345"


@pytest.mark.parametrize("content", ["{", "3", "[3]", None])
def test_what_mlx_launch_says_and_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    path = tmp_path / "hosts"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.setenv("MLX_HOSTFILE", str(path))
    with pytest.raises(ConfigError, match="MLX_RANK is 0, but what comes with it cannot be read"):
        launched_process_group()
