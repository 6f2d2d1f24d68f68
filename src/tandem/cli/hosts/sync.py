"""`tandem hosts sync`: install this machine's Tandem on the machines of a hosts file, over ssh.

Settings are not copied: ranks get them from the head at each start.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from tandem.cli.arguments import fail
from tandem.cli.hosts import receive
from tandem.config.settings import Settings
from tandem.env import child_environment
from tandem.errors import UsageError
from tandem.launchers.agent.link import agent_name
from tandem.launchers.host_facts import is_own
from tandem.launchers.hostfile import HostEntry, Hostfile, is_in_memory, read_hostfile
from tandem.launchers.ssh import PLACES, explain, own_interpreter, ssh_command
from tandem.system.identity import machine_id
from tandem.system.origin import write_wheel

SAME = ("mlx", "mlx-lm")
"""Packages whose versions must equal the head's."""
INSTALL_S = 1800.0
_PATHS = 'PATH="$PATH:$HOME/.local/bin:/opt/homebrew/bin:/usr/local/bin"'
"""PATH with uv and Homebrew's Pythons, which a shell over ssh may lack."""
ENVIRONMENT = ".local/share/tandem/env"
"""Environment created on a host without Tandem, relative to the home directory."""


def run(arguments: argparse.Namespace) -> int:
    """Install on every other host of the file. Return 1 if one failed, else 0. Raises UsageError."""
    hosts = others(read_hostfile(arguments.hostfile))
    if not hosts:
        raise UsageError(f"--hostfile {arguments.hostfile}: names no host but this one", param="hostfile")
    failures = [failure for _, failure in install(hosts, arguments.remote_python) if failure]
    for failure in failures:
        fail(failure)
    if failures:
        return 1
    print(f"{len(hosts)} host(s) have this machine's Tandem; settings reach ranks when they start")
    return 0


def sync_workers(settings: Settings, *, files: bool = False) -> None:
    """Install this machine's Tandem on the hosts of a hosts list in memory, with `files` also on those of a hosts file.

    Raises UsageError, also for a host listed twice in memory.
    """
    text = settings.parallel.hostfile
    if text is None or not (files or is_in_memory(text)):
        return
    hosts, listed = others(read_hostfile(text)), is_in_memory(text)
    if listed and (own := next((address for host in hosts for address in host.ips if is_own(address)), None)):
        raise UsageError(
            f"WORKER_HOSTS: {own} is this machine's own address; start on a machine that is no worker, or set WORKER_HOSTS, "
            "WORKER_SSH and API_HOST for this one as the head",
            param="hostfile",
        )
    machines, failures = {machine_id(): "127.0.0.1"}, []
    for host, (machine, failure) in zip(hosts, install(hosts, settings.parallel.remote_python), strict=True):
        same = machines.setdefault(machine, host.ssh) if listed and not failure else host.ssh
        if failure or same != host.ssh:
            failures.append(failure or f"host {host.ssh}: is the same machine as {same}; name each once in WORKER_HOSTS")
    if failures:
        raise UsageError("; ".join(failures), param="hostfile")


def others(hostfile: Hostfile) -> list[HostEntry]:
    """Return the hosts other than this machine, each once."""
    return list({entry.ssh: entry for entry in hostfile.hosts if not entry.is_here}.values())


def install(hosts: Sequence[HostEntry], python: str | None) -> list[tuple[str, str]]:
    """Install this machine's Tandem on each host that differs, and print the results.

    Return (machine id, reason of a failure) for each host; one of the two is empty. Raises UsageError.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-sync-") as directory, ThreadPoolExecutor(len(hosts) or 1) as pool:
        wheel = write_wheel(Path(directory))
        return list(pool.map(lambda entry: _sync(entry, wheel, entry.python or python), hosts))


def _sync(entry: HostEntry, wheel: Path, python: str | None) -> tuple[str, str]:
    if (name := agent_name(entry.ssh)) is not None:
        return "", (
            f"host {entry.ssh}: an agent starts ranks and nothing else; give {name} an ssh destination in another "
            "hostfile, or install there by hand (`make release` makes a wheel)"
        )
    command = ssh_command(entry.ssh, remote_line(python, _words(wheel)))
    with wheel.open("rb") as file:
        try:
            done = subprocess.run(
                command, stdin=file, capture_output=True, timeout=INSTALL_S, env=child_environment(), check=False
            )
        except subprocess.TimeoutExpired:
            return "", f"host {entry.ssh}: was not done within {INSTALL_S:g} s"
    if done.returncode:
        return "", explain(entry, done.returncode, done.stderr.decode(errors="replace").splitlines())
    said = json.loads(done.stdout.decode().splitlines()[-1])
    numbers = zip(("tandem", *SAME), said["versions"], strict=True)
    installed = " ".join(f"{package} {number}" for package, number in numbers)
    print(f"{entry.ssh}: {installed} in {said['python']}{', as here: nothing to do' if said['same'] else ''}", flush=True)
    return str(said["machine"]), ""


def _words(wheel: Path) -> list[str]:
    """Return the arguments of `receive`."""
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    return [wheel.name, minor, *(f"{package}=={version(package)}" for package in SAME)]


def remote_line(python: str | None, words: Sequence[str]) -> str:
    """Return the command line for the host's login shell that runs `receive`.

    The interpreter is `python`, else the one that ranks would run with, else that of a newly created environment.
    """
    code = f"{Path(receive.__file__).read_text(encoding='utf-8')}\n\nmain(*sys.argv[1:])\n"
    end = f'exec "$py" -c {shlex.quote(code)} {shlex.join(words)}'
    if python is not None:
        return f"exec sh -c {shlex.quote(f'{_PATHS}; py={shlex.quote(python)}; {end}')}"
    minor = words[1]
    make = "; ".join(
        [
            f'if command -v uv >/dev/null; then uv venv --quiet --python {minor} "$env"',
            f'elif command -v python{minor} >/dev/null; then python{minor} -m venv "$env"',
            f'else echo "there is neither python{minor} nor uv; install one of them" >&2; exit 1',
            'fi >&2 && mkdir -p "$HOME/.local/bin" && ln -sf "$env/bin/tandem" "$HOME/.local/bin/tandem"',
        ]
    )
    script = "; ".join(
        [
            _PATHS,
            'py=""',
            f'for one in {own_interpreter()}; do [ -z "$py" ] && [ -x "$one" ] && py="$one"; done',
            'found="$("${SHELL:-/bin/sh}" -lc "command -v tandem" </dev/null 2>/dev/null | tail -n 1)"',
            # The first line of a script installed by pip or uv names its interpreter.
            f'for one in "$found" {PLACES}; do if [ -z "$py" ] && [ -f "$one" ]; then py="$(sed -n "1s/^#!//p" "$one")"; '
            '[ -x "$py" ] || py=""; fi; done',
            f'env="$HOME/{ENVIRONMENT}"',
            f'if [ -z "$py" ]; then {{ [ -x "$env/bin/python" ] || {{ {make}; }}; }} || exit 1; py="$env/bin/python"; fi',
            end,
        ]
    )
    return f"exec sh -c {shlex.quote(script)}"
