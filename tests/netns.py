"""Several machines on one: network namespaces joined by a bridge, each with its own sshd, name, home and processes.

`make_machines(3)` gives machines `h0 h1 h2` that reach one another, by name and by address, over a real network stack;
`tandem` there is this checkout. The test process has an address on the same bridge (`Machines.address`), so it can talk
HTTP to a server that listens on a machine's address. Needs root on Linux; `why_not()` says what is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import tandem
from system_packages import missing
from tandem.env import cache_dir

TOOLS = ("ip", "tc", "sshd", "ssh", "ssh-keygen", "nsenter", "unshare")
PATHS = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
START_S = 240.0
SHADOW = "root:*:19000:0:99999:7:::\nsshd:!:19000::::::\n"
SSHD = """\
Port 22
HostKey {home}/host_key
AuthorizedKeysFile {home}/.ssh/authorized_keys
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
PermitUserEnvironment yes
PidFile none
MaxStartups 100
MaxSessions 100
"""
ENTER = """\
set -e
mount --make-rprivate /
hostname {name}
mount -t sysfs sysfs /sys
mount --bind {home}/passwd /etc/passwd
mount --bind {home}/shadow /etc/shadow
mount --bind {home}/hosts /etc/hosts
exec {sshd} -D -e -f {home}/sshd_config
"""


def why_not() -> str | None:
    """Why machines cannot be made here; None when they can."""
    if sys.platform != "linux":
        return "network namespaces are a Linux thing"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if absent := missing(*TOOLS, path=PATHS):
        return absent
    tried = subprocess.run(["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "true"], capture_output=True)
    return None if tried.returncode == 0 else f"namespaces are not allowed here: {tried.stderr.decode().strip()}"


def has_netem() -> bool:
    """Whether the kernel can delay and lose packets (`Machines.slow` limits the rate without it)."""
    script = "ip link set lo up && tc qdisc add dev lo root netem delay 1ms"
    return subprocess.run(["unshare", "--net", "sh", "-c", script], capture_output=True).returncode == 0


def share_kernels(temporary: Path) -> None:
    """Let MLX find in this TMPDIR the kernels that it has compiled for a CPU before: each costs seconds of g++."""
    kernels = Path(tempfile.gettempdir()) / "mlx"
    kernels.mkdir(exist_ok=True)
    (temporary / "mlx").symlink_to(kernels)


def sh(*words: str) -> str:
    """Run a command of the system; its output. Fails with what it said."""
    done = subprocess.run(words, capture_output=True, text=True, env={"PATH": PATHS})
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
    return done.stdout


@dataclass
class Machine:
    """One of the machines: `name` is also its host name, `namespace` what `ip netns` calls it."""

    name: str
    address: str
    namespace: str
    home: Path
    sshd: subprocess.Popen[bytes]

    @property
    def init(self) -> int:
        """Process id, here, of its first process."""
        return children(self.sshd.pid)[0]

    @property
    def ssh_log(self) -> str:
        """What its sshd has said."""
        return (self.home / "sshd.log").read_text()


class Machines:
    """`count` machines on one bridge; use as a context manager."""

    def __init__(self, count: int) -> None:
        self._base = Path(tempfile.mkdtemp(prefix="tdm-", dir="/tmp"))
        self._number = self._take_number()
        self.switch = f"tdm{self._number}"
        self.address = f"10.213.{self._number}.254"
        self.names = [f"h{i}" for i in range(count)]
        self.variables: dict[str, dict[str, str]] = {}
        self._machines: dict[str, Machine] = {}
        self._started: list[subprocess.Popen[str]] = []
        self._links = 0

    def _take_number(self) -> int:
        """A subnet that no other test run has: whoever can make the switch's namespace owns it."""
        for number in range(1, 255):
            if subprocess.run(["ip", "netns", "add", f"tdm{number}"], capture_output=True).returncode == 0:
                return number
        raise RuntimeError("254 sets of machines are there already")

    def __enter__(self) -> Machines:
        try:
            switch = ("ip", "-n", self.switch)
            sh(*switch, "link", "add", "br0", "type", "bridge")
            sh(*switch, "link", "set", "br0", "up")
            sh("ip", "link", "add", self.switch, "type", "veth", "peer", "name", "test", "netns", self.switch)
            sh(*switch, "link", "set", "test", "master", "br0", "up")
            sh("ip", "addr", "add", f"{self.address}/24", "dev", self.switch)
            sh("ip", "link", "set", self.switch, "up")
            sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._base / "user_key"))
            Path("/run/sshd").mkdir(exist_ok=True)
            for index, name in enumerate(self.names):
                self._prepare(name, f"10.213.{self._number}.{index + 1}")
            for name in self.names:
                self._introduce(name)
            self._wait_for_ssh()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Machine:
        return self._machines[name]

    def _prepare(self, name: str, address: str) -> None:
        """Network, home and sshd of one machine."""
        namespace, home = f"{self.switch}-{name}", self._base / name
        for path in (home / ".ssh", home / "run", home / "tmp"):
            path.mkdir(parents=True, mode=0o700)
        share_kernels(home / "tmp")
        sh("ip", "netns", "add", namespace)
        sh("ip", "-n", self.switch, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        sh("ip", "-n", self.switch, "link", "set", name, "master", "br0", "up")
        for words in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
        ):
            sh("ip", "-n", namespace, *words)
        sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / "host_key"))
        others = [line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith("root:")]
        (home / "passwd").write_text("\n".join([f"root:x:0:0:root:{home}:/bin/bash", *others]) + "\n")
        (home / "shadow").write_text(SHADOW)
        (home / "hosts").write_text("127.0.0.1 localhost\n")
        (home / "sshd_config").write_text(SSHD.format(home=home))
        script = ENTER.format(name=name, home=home, sshd=shutil.which("sshd", path=PATHS))
        with (home / "sshd.log").open("wb") as log:
            sshd = subprocess.Popen(
                [
                    "nsenter",
                    f"--net=/run/netns/{namespace}",
                    "unshare",
                    "--mount",
                    "--uts",
                    "--pid",
                    "--fork",
                    "--kill-child",
                    "--mount-proc",
                    "sh",
                    "-c",
                    script,
                ],
                env={"PATH": PATHS},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._machines[name] = Machine(name, address, namespace, home, sshd)
        source = Path(tandem.__file__).parents[1]
        self.variables[name] = {
            "PATH": PATHS,
            "PYTHONPATH": str(source),
            "TANDEM_RUNTIME_DIR": str(home / "run"),
            "TANDEM_CACHE": str(cache_dir()),
            "TMPDIR": str(home / "tmp"),
            "LANG": "C.UTF-8",
        }
        self.set_variables(name, {})

    def _introduce(self, name: str) -> None:
        """Keys and names of all machines, on machine `name`."""
        home = self[name].home
        public = (self._base / "user_key.pub").read_text()
        shutil.copy(self._base / "user_key", home / ".ssh" / "id_ed25519")
        (home / ".ssh" / "authorized_keys").write_text(public)
        machines = self._machines.values()
        keys = {one.name: " ".join((one.home / "host_key.pub").read_text().split()[:2]) for one in machines}
        (home / ".ssh" / "known_hosts").write_text("".join(f"{m.name},{m.address} {keys[m.name]}\n" for m in machines))
        with (home / "hosts").open("a") as file:
            file.writelines(f"{one.address} {one.name}\n" for one in machines)

    def _wait_for_ssh(self) -> None:
        for machine in self._machines.values():
            deadline = time.monotonic() + START_S
            while "listening" not in machine.ssh_log:
                assert machine.sshd.poll() is None, f"{machine.name}: {machine.ssh_log}"
                assert time.monotonic() < deadline, f"sshd of {machine.name} does not listen: {machine.ssh_log}"
                time.sleep(0.02)

    def set_variables(self, name: str, changes: Mapping[str, str]) -> None:
        """Change the environment of what will be started on machine `name`, over ssh or by `run`."""
        self.variables[name] |= changes
        lines = [f"{key}={value}\n" for key, value in self.variables[name].items()]
        (self[name].home / ".ssh" / "environment").write_text("".join(lines))

    def without_tandem(self, name: str) -> tuple[Path, Path]:
        """Leave machine `name` a virtual environment with all but Tandem; its interpreter and its site-packages."""
        home = self[name].home
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home / "env")], check=True, timeout=240)
        # What Tandem needs is there already, as a machine without a network has to have it.
        [site] = (home / "env" / "lib").glob("python3*/site-packages")
        (site / "rest.pth").write_text("".join(f"{one}\n" for one in sys.path if one.endswith("site-packages")))
        self.set_variables(name, {"PYTHONPATH": ""})
        return home / "env" / "bin" / "python", site

    def start(self, name: str, command: Sequence[str], **options: object) -> subprocess.Popen[str]:
        """Start a command on machine `name` (`options` are Popen's). To signal it, see `signal`."""
        machine = self[name]
        words = ["nsenter", f"--target={machine.init}", "--mount", "--uts", "--net", "--pid", f"--wd={machine.home}", *command]
        environment = {**self.variables[name], "HOME": str(machine.home), "USER": "root"}
        process = subprocess.Popen(words, text=True, env=environment, start_new_session=True, **options)  # type: ignore[call-overload]
        self._started.append(process)
        return process

    def run(
        self, name: str, command: Sequence[str] | str, timeout: float = 240.0, check: bool = True, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command (words, or a line of shell) on machine `name` to its end, output captured."""
        words = ["sh", "-c", command] if isinstance(command, str) else list(command)
        process = self.start(name, words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE)
        try:
            output, errors = process.communicate(stdin, timeout)
        except subprocess.TimeoutExpired:
            self.signal(process, signal.SIGKILL)
            output, errors = process.communicate()
            raise AssertionError(f"{name}: {command} took over {timeout} s\n{output}\n{errors}") from None
        done = subprocess.CompletedProcess(words, process.returncode, output, errors)
        assert not check or done.returncode == 0, f"{name}: {command}: {done.returncode}\n{output}\n{errors}"
        return done

    def signal(self, process: subprocess.Popen[str], number: int) -> None:
        """Send a signal to what `start` started (the process it returns is only its guardian here)."""
        for pid in children(process.pid):
            os.kill(pid, number)

    def processes(self, name: str, containing: str = "") -> dict[int, str]:
        """Processes of machine `name` but for its sshd: process id here -> command line."""
        found = {}
        home = os.readlink(f"/proc/{self[name].init}/ns/pid")
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.readlink(entry / "ns" / "pid") == home:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if line and not line.startswith(("sshd", "/usr/sbin/sshd")) and containing in line:
                        found[int(entry.name)] = line
            except OSError:
                continue  # ended meanwhile
        return found

    def cut(self, name: str) -> None:
        """Pull the machine's cable: packets are lost in silence."""
        sh("ip", "-n", self.switch, "link", "set", name, "down")

    def heal(self, name: str) -> None:
        """Plug it in again, at full speed."""
        sh("ip", "-n", self.switch, "link", "set", name, "up")
        for namespace, device in ((self.switch, name), (self[name].namespace, "eth0")):
            subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"], capture_output=True)

    def sent(self, name: str) -> int:
        """Bytes that the machine has sent over its cable."""
        words = sh("ip", "-n", self.switch, "-s", "-j", "link", "show", name)
        return int(json.loads(words)[0]["stats64"]["rx"]["bytes"])

    def slow(self, name: str, *, rate: str | None = None, delay: str | None = None) -> None:
        """Limit the machine's cable both ways to `rate` ("20mbit") or delay each packet ("50ms"; see `has_netem`)."""
        shape = (
            ["netem", "delay", delay, *(["rate", rate] if rate else [])]
            if delay
            else ["tbf", "rate", str(rate), "burst", "64kb", "latency", "400ms"]
        )
        for namespace, device in ((self.switch, name), (self[name].namespace, "eth0")):
            sh("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shape)

    def link(self, one: str, other: str, addresses: tuple[str, str], device: str = "") -> str:
        """A cable between two machines alone, with addresses like "192.168.0.1/30"; the interface's name on both."""
        device = device or f"p2p{self._links}"
        self._links += 1
        near, far = self[one].namespace, self[other].namespace
        sh("ip", "-n", near, "link", "add", device, "type", "veth", "peer", "name", device, "netns", far)
        for namespace, address in zip((near, far), addresses, strict=True):
            sh("ip", "-n", namespace, "addr", "add", address, "dev", device)
            sh("ip", "-n", namespace, "link", "set", device, "up")
        return device

    def unlink(self, name: str, device: str) -> None:
        """Take away what `link` made."""
        sh("ip", "-n", self[name].namespace, "link", "del", device)

    def power_off(self, name: str) -> None:
        """End every process of the machine at once, and cut it off."""
        self.cut(name)
        self[name].sshd.kill()
        self[name].sshd.wait(START_S)

    def close(self) -> None:
        """Take all away."""
        for machine in self._machines.values():
            machine.sshd.kill()  # its end takes the machine's processes with it
            machine.sshd.wait(START_S)
        for process in self._started:
            process.kill()
            process.communicate()
        for namespace in [*(one.namespace for one in self._machines.values()), self.switch]:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
        subprocess.run(["ip", "link", "del", self.switch], capture_output=True)
        shutil.rmtree(self._base, ignore_errors=True)


def children(pid: int) -> list[int]:
    """Process ids of a process's children."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == pid:
                found.append(int(entry.name))
        except OSError:
            continue  # ended meanwhile
    return sorted(found)


@pytest.fixture(scope="module")
def make_machines() -> Iterator[Callable[[int], Machines]]:
    """Make machines that last as long as the test file; skips where they cannot be made."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    made: list[Machines] = []

    def make(count: int) -> Machines:
        made.append(Machines(count).__enter__())
        return made[-1]

    yield make
    for machines in made:
        machines.close()
