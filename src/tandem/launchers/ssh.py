"""Launcher that starts node agents over the system's ssh, with the user's keys, agent and configuration."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from tandem.config.settings import Settings
from tandem.crash_guard import start_thread
from tandem.env import child_environment
from tandem.errors import ConfigError, RankFailure, UsageError
from tandem.launchers.agent.link import agent_name, link_command, paired_agent
from tandem.launchers.host_facts import address_towards
from tandem.launchers.hostfile import HostEntry, Hostfile, hosts_of
from tandem.launchers.hosts import HostsLauncher, copy_line
from tandem.launchers.process_groups import Devices
from tandem.processes.interpreter import SAFE, module_command
from tandem.protocol.payloads import RANK_HOST
from tandem.system.origin import install_command

log = logging.getLogger(__name__)

CONNECT_S = 10
ALIVE_S, ALIVE_COUNT = 2, 4
"""Seconds between ssh's keep-alive messages, and how many may stay unanswered before ssh disconnects."""
SSH_FAILED, NOT_FOUND = 255, 127
TAIL = 20
END_S = 3.0
OPTIONS = (
    "BatchMode=yes",
    f"ConnectTimeout={CONNECT_S}",
    f"ServerAliveInterval={ALIVE_S}",
    f"ServerAliveCountMax={ALIVE_COUNT}",
    "ControlMaster=no",
    "ControlPath=none",
    "ClearAllForwardings=yes",
    "LogLevel=ERROR",
)
"""Options against terminal prompts and shared connections, which could outlive this one."""
_PING = "ping -c 3 {host}   (is it on, and are cable and address right?)"
_NAME_PYTHON = "name its interpreter with --remote-python, or as `python` in the hostfile"
SSH_TROUBLES = (
    ("is not paired", "its agent is not paired with this machine", "tandem hosts pair {host}"),
    (
        "the agent does not answer",
        "its agent does not answer",
        "on {host}: tandem agent   (.venv/bin/tandem in a checkout; where it runs already: `tandem agent --pair` there, "
        "then tandem hosts pair {host})",
    ),
    (
        "permission denied",
        "ssh refuses this user's key",
        "ssh-copy-id {host}   (with another user name there: USER@{host}, in the hosts file too)",
    ),
    (
        "remote host identification has changed",
        "its host key is not the known one",
        "ssh-keygen -R {host}   (if you know why it changed), then ssh {host}",
    ),
    (
        "host key verification failed",
        "its host key is not the known one, or not known yet",
        "compare the key, and connect once: ssh {host} hostname",
    ),
    ("could not resolve hostname", "its name is not known here", "mend `ssh` in the hostfile, or /etc/hosts"),
    (
        "connection refused",
        "it does not take ssh connections",
        "on {host}: System Settings > General > Sharing > Remote Login, or sudo systemctl enable --now ssh",
    ),
    ("timed out", "it cannot be reached", _PING),
    ("no route to host", "it cannot be reached", _PING),
    ("network is unreachable", "it cannot be reached", _PING),
)
"""Text in the output of ssh or an agent session -> meaning, remedy."""
PYTHON_TROUBLES = (
    (
        "operation not permitted",
        "macOS withholds the folder of its Python from ssh ({said})",
        "on {host}: move the checkout out of Documents, Desktop, Downloads, iCloud and /Volumes, or System Settings > "
        "General > Sharing > Remote Login > Allow full disk access for remote users",
    ),
    ("unknown option: -p", "its Python is older than 3.11, which Tandem needs", _NAME_PYTHON),
    ("no module named", "no Python with Tandem was found there ({said})", ""),
    ("no such file", "no Python with Tandem was found there ({said})", _NAME_PYTHON),
    ("xcode-select", "no Python with Tandem was found there ({said})", _NAME_PYTHON),
)
"""Text in the output of a shell or Python -> meaning, remedy; an empty remedy means installing Tandem."""
PLACES = '"$HOME/.local/bin/tandem" "$HOME/.pyenv/shims/tandem" /opt/homebrew/bin/tandem /usr/local/bin/tandem'
"""Paths where installers put programs that a login shell may not find, for a shell."""


def remote_command(python: str | None, module: str = RANK_HOST, words: str = "rank --stdin") -> str:
    """Return a command for the host's login shell that runs `python -m module`, or the equivalent `tandem words`.

    Without `python`, these interpreters are tried in order: this machine's path, also below the home directory; the login
    shell's; those in `PLACES`; the interactive shell's. Many users set PATH for zsh only in the last.
    """
    run = f"{SAFE} -m {module}"
    if python is not None:
        return f"exec {shlex.quote(python)} {run}"
    look = "command -v tandem"
    interpreters = own_interpreter()
    script = "; ".join(
        [
            f'for one in {interpreters}; do [ -x "$one" ] && exec "$one" {run}; done',
            'shell="${SHELL:-/bin/sh}"',
            f'[ -n "$("$shell" -lc {shlex.quote(look)} </dev/null 2>/dev/null)" ] && '
            f'exec "$shell" -lc {shlex.quote(f"exec tandem {words}")}',
            f'found="$("$shell" -ilc {shlex.quote(look)} </dev/null 2>/dev/null | tail -n 1)"',
            f'for one in {PLACES} "$found"; do [ -x "$one" ] && exec "$one" {words}; done',
            # macOS privacy makes a forbidden path look missing.
            f'for one in {interpreters}; do case "$(LC_ALL=C ls -d "$one" 2>&1)" in *"not permitted"*) '
            'echo "$one: Operation not permitted" >&2; exit 126;; esac; done',
            f'exec "$shell" -lc {shlex.quote(f"exec python3 {run}")}',
        ]
    )
    return f"exec sh -c {shlex.quote(script)}"


def own_interpreter() -> str:
    """Return this machine's interpreter for another one's shell: its path and, below the home directory, that in theirs."""
    path, home = sys.executable, str(Path.home())
    below = f' "$HOME"{shlex.quote(path.removeprefix(home))}' if path.startswith(home + os.sep) else ""
    return shlex.quote(path) + below


def ssh_command(host: str, command: str) -> list[str]:
    """Return an ssh command that runs a shell command on `host`, without a terminal."""
    return ["ssh", "-T", "-x", *(word for option in OPTIONS for word in ("-o", option)), "--", host, command]


def diagnose(host: str, code: int, said: Sequence[str]) -> tuple[str, str] | None:
    """Return why ssh to `host`, or the program there, failed, and the remedy; None if unknown. `said` has the last lines of
    output."""
    text = "\n".join(said).lower()
    if code == NOT_FOUND:
        text += ": no such file"
    name = agent_name(host) or host
    for words, meaning, remedy in (*(SSH_TROUBLES if code == SSH_FAILED else ()), *PYTHON_TROUBLES):
        if words in text:
            return meaning.format(said=_last(said)), remedy.format(host=name) or same_tandem(host)
    return None


def same_tandem(host: str, python: str = "python") -> str:
    """Return what gives `host`, an `ssh` entry of a hosts file, this machine's Tandem. `python`: its interpreter."""
    agent = agent_name(host)
    return "tandem hosts sync --hostfile FILE" if agent is None else install_command(python, agent)


def _last(said: Sequence[str]) -> str:
    return next((line for line in reversed(said) if line.strip()), "nothing was said")


def explain(entry: HostEntry, code: int, lines: Sequence[str]) -> str:
    """Return an error message for a host whose node agent did not start. `lines` are the last of its output."""
    if trouble := diagnose(entry.ssh, code, lines):
        return f"host {entry.ssh}: {'; '.join(trouble)}"
    ended = f" (ssh ended with {code})" if code != 2 and agent_name(entry.ssh) is None else ""
    return f"host {entry.ssh}: {_last(lines).removeprefix('tandem: ')}{ended}"


class HostProcess:
    """A local command that runs a program on a host, with threads that read its output."""

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str | None] | None = None, *, stderr: int = subprocess.STDOUT
    ) -> None:
        """Start `command` with `variables` in its environment. Subclasses start the reader threads."""
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=child_environment(variables),
            start_new_session=True,
        )
        self._readers: list[threading.Thread] = []

    def _follow(
        self, stream: IO[bytes] | None, take: Callable[[bytes], None], name: str, on_end: Callable[[], None] = lambda: None
    ) -> None:
        """Start a thread that calls `take` with each line of a stream, and `on_end` at its end or after a failure."""

        def read() -> None:
            assert stream is not None
            with stream:
                for line in stream:
                    take(line)
            on_end()

        self._readers.append(start_thread(read, name=name, on_failure=lambda _: on_end()))

    def tell(self, line: bytes) -> None:
        """Write a line to standard input; ignored if the process has exited."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def poll(self) -> int | None:
        """Return the exit code once all output is read; None before."""
        code = self._process.poll()
        if code is not None:
            self._join()
        return code

    def _join(self) -> None:
        for reader in self._readers:
            reader.join(END_S)

    def hang_up(self) -> None:
        """Close standard input, which makes the remote program exit."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def end(self, timeout_s: float) -> None:
        """Close standard input; kill the local command after `timeout_s` seconds."""
        self.hang_up()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._join()


class _Connection(HostProcess):
    """A connection to a started node agent; its output is logged line by line."""

    def __init__(self, command: Sequence[str], payload: bytes, label: str, on_end: Callable[[], None]) -> None:
        """Start the command and send it `payload`. `on_end` is called in another thread at the end of the output."""
        super().__init__(command)
        self.lines: deque[str] = deque(maxlen=TAIL)
        self.served = False
        """True once the node agent was part of a complete rank group."""
        self._label = label
        self._follow(self._process.stdout, self._copy, f"log of {label}", on_end)
        self.tell(payload)

    def _copy(self, line: bytes) -> None:
        self.lines.append(line.decode(errors="replace").rstrip())
        copy_line(self._label, self.lines[-1])


class SshLauncher(HostsLauncher):
    """Places one rank on each entry of a hostfile, in order."""

    def __init__(self, hostfile: Hostfile, settings: Settings) -> None:
        """Resolve the hosts and this machine's address towards each; starts no node agent. Raises UsageError."""
        parallel = settings.parallel
        self._hostfile = hostfile
        self._entries = hosts_of(hostfile, parallel.host_entries)
        self._numbers = parallel.host_entries or tuple(range(len(hostfile.hosts)))
        self._python = parallel.remote_python
        self._connections: dict[int, _Connection] = {}
        self._head_addresses = self._find_head_addresses(parallel.head_address)
        own = set(self._head_addresses)
        super().__init__(parallel, bind=own.pop() if len(own) == 1 else "0.0.0.0", process=settings.process)

    def _find_head_addresses(self, chosen: str | None) -> list[str]:
        """Return, for each host, the address at which it reaches this machine."""
        if chosen is not None:
            return [chosen] * len(self._entries)
        addresses = [None if entry.is_here else _address_for(entry) for entry in self._entries]
        default = next((address for address in addresses if address is not None), "127.0.0.1")
        return [default if address is None else address for address in addresses]

    def bring(self, missing: list[int], *, first: bool) -> None:
        """Start a connection for each missing host. Raises UsageError (`first`) or RankFailure if one has ended."""
        for slot in missing:
            if slot >= len(self._entries):
                raise UsageError(
                    f"the layout has more ranks than {self._hostfile.path} has hosts "
                    f"({len(self._entries)}); name a host several times to run several ranks there",
                    param="hostfile",
                )
            connection = self._connections.get(slot)
            if connection is not None and connection.served:
                connection.end(0.0)  # its node agent was lost
                connection = None
            code = None if connection is None else connection.poll()
            if connection is None:
                self._connect(slot)
            elif code is not None:
                del self._connections[slot]
                kind = UsageError if first else RankFailure
                refusal = self.membership.refusal(slot)
                raise kind(refusal or explain(self._entries[slot], code, list(connection.lines)))

    def recruited(self, slots: Sequence[int]) -> None:
        """Mark the connections as served; one without a node agent is lost from now on."""
        for slot in slots:
            self._connections[slot].served = True

    def _connect(self, slot: int) -> None:
        entry = self._entries[slot]
        payload = self.invite(slot, self._head_addresses[slot], entry.reached_at)
        if entry.is_here:
            command = module_command(*RANK_HOST.split(), python=entry.python)
        elif (agent := agent_name(entry.ssh)) is not None:
            command = link_command(agent, "rank-host")
        else:
            command = ssh_command(entry.ssh, remote_command(entry.python or self._python))
        log.info("starting a node agent on %s for rank %d", entry.ssh, slot)
        self._connections[slot] = _Connection(
            command, msgspec.json.encode(payload), self._label(slot), lambda: self.membership.leave(payload.ticket, "has ended")
        )

    def _label(self, slot: int) -> str:
        """Return the host's name, with the slot if the host has several ranks."""
        name = self._entries[slot].ssh
        several = sum(entry.ssh == name for entry in self._entries) > 1
        return f"{name} {slot}" if several else name

    def describe_missing(self, missing: list[int]) -> str:
        """Return an error message with the hosts that did not join."""
        names = ", ".join(self._entries[slot].ssh for slot in missing)
        return f"{names} did not join in time (start_timeout; after a loss rejoin_timeout); what ssh has said stands above"

    def addresses(self, slot: int) -> list[str]:
        """Return `ips` of the hostfile, or else the default."""
        return list(self._entries[slot].ips) or super().addresses(slot)

    def meeting_address(self, slot: int) -> str:
        """Return `address` of the hostfile, or else the default."""
        return self._entries[slot].address or super().meeting_address(slot)

    def devices(self, slot: int) -> Devices:
        """Return `rdma` of the hostfile towards the hosts in use; empty if unspecified."""
        row = self._entries[slot].rdma
        return (
            [list(cell) if isinstance(cell, tuple) else cell for cell in (row[number] for number in self._numbers)] if row else []
        )

    def default_backend(self) -> str:
        """Return `backend` of the hostfile, or `ring`."""
        return self._hostfile.backend or "ring"

    def environment(self, slot: int) -> dict[str, str]:
        """Return `envs` of the hostfile."""
        return dict(self._hostfile.envs)

    def release(self) -> None:
        """Close all connections; the node agents were released before."""
        for connection in self._connections.values():
            connection.hang_up()
        for connection in self._connections.values():
            connection.end(END_S)
        self._connections.clear()


def _address_for(entry: HostEntry) -> str:
    """Return this machine's address towards a host. Raises ConfigError if the host does not resolve."""
    target = entry.reached_at or named_machine(entry.ssh)
    try:
        return address_towards(socket.gethostbyname(target))
    except OSError as error:
        raise ConfigError(
            f"host {entry.ssh}: {target} is not known here ({error.strerror or error}); mend the "
            "hostfile, or name the address at which hosts reach this machine: --head-address",
            param="hostfile",
        ) from error


def named_machine(ssh: str) -> str:
    """Return the hostname or address behind an `ssh` entry: the paired agent's, or ssh's configured HostName."""
    agent = agent_name(ssh)
    return ssh_hostname(ssh) if agent is None else paired_agent(agent).address.rpartition(":")[0]


def ssh_hostname(destination: str) -> str:
    """Return the HostName that ssh's configuration has for a destination."""
    done = subprocess.run(["ssh", "-G", "--", destination], capture_output=True, text=True, env=child_environment())
    for line in done.stdout.splitlines():
        if line.startswith("hostname "):
            return line.partition(" ")[2]
    return destination.rpartition("@")[2]
