"""MLX's hostfile, as `mlx.distributed_config` writes it and `mlx.launch` reads it.

Either a list of hosts, or an object with `backend`, `envs` and `hosts`; a host has `ssh`, `ips` and `rdma`. Fields of
Tandem's own: `python` (the host's interpreter), and what `tandem plan` wants to know of a machine.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

from tandem.config.settings import ParallelSettings
from tandem.config.sizes import memory_size
from tandem.errors import ConfigError
from tandem.system.files import read_text

TOP_FIELDS = ("backend", "envs", "hosts")
PLAN_FIELDS = ("memory", "chip", "gpu", "bandwidth", "tflops", "fence")
"""For `tandem plan`; `memory`, where every host has it, also decides how many layers each gets."""
HOST_FIELDS = ("ssh", "ips", "rdma", "python", *PLAN_FIELDS)
BACKENDS = tuple(name for name in get_args(get_type_hints(ParallelSettings)["backend"]) if name != "auto")
LOCAL_NAMES = ("127.0.0.1", "localhost")


@dataclass(frozen=True, kw_only=True)
class HostEntry:
    """One host of the file: room for one rank. A host that shall run several stands there several times."""

    ssh: str
    """Destination for ssh: a name, an address, user@host, or a name from ~/.ssh/config."""
    ips: tuple[str, ...] = ()
    """Addresses over which its collectives go."""
    rdma: tuple[str | tuple[str, ...] | None, ...] = ()
    """RDMA devices towards each host of the file, in order; None for itself."""
    python: str | None = None
    """The host's Python interpreter."""
    memory_bytes: int | None = None
    facts: tuple[tuple[str, str], ...] = ()
    """Values for `tandem plan` (`PLAN_FIELDS`) as they are written in the file."""

    @property
    def is_here(self) -> bool:
        """True for the machine that reads the file."""
        return self.ssh in LOCAL_NAMES


@dataclass(frozen=True, kw_only=True)
class Hostfile:
    """A hostfile that was read."""

    path: str
    hosts: tuple[HostEntry, ...]
    backend: str | None = None
    envs: tuple[tuple[str, str], ...] = ()
    """Variables for all ranks."""


def read_hostfile(path: str, label: str = "--hostfile") -> Hostfile:
    """Read and check a hostfile. Raises ConfigError in one line that names entry, field, value and remedy."""
    return _Reader(path, label).read()


class _Reader:
    def __init__(self, path: str, label: str) -> None:
        self._path = path
        self._where = f"{label} {path}"

    def _fail(self, message: str) -> NoReturn:
        raise ConfigError(f"{self._where}: {message}", param="hostfile")

    def read(self) -> Hostfile:
        try:
            data = json.loads(read_text(Path(self._path).expanduser()))
        except OSError as error:
            self._fail(f"cannot be read: {error.strerror or error}")
        except json.JSONDecodeError as error:
            self._fail(f"line {error.lineno}, column {error.colno}: is not valid JSON: {error.msg}")
        except UnicodeDecodeError:
            self._fail("is not UTF-8 text")
        except (ValueError, RecursionError) as error:  # endless digits, endless nesting
            self._fail(f"cannot be read: {error}")
        if isinstance(data, list):
            data = {"hosts": data}
        if not isinstance(data, dict):
            self._fail('must be a list of hosts, or an object that has one as "hosts"')
        self._known(data, TOP_FIELDS, "")
        entries = data.get("hosts")
        if not isinstance(entries, list) or not entries:
            self._fail('"hosts" must be a list with at least one host, such as [{"ssh": "mac1", "ips": ["10.0.0.1"]}]')
        hosts = tuple(self._host(entry, f"host {index}", len(entries)) for index, entry in enumerate(entries))
        return Hostfile(path=self._path, hosts=hosts, backend=self._backend(data), envs=self._envs(data))

    def _known(self, data: dict[str, Any], fields: Sequence[str], where: str) -> None:
        for name in data:
            if name not in fields:
                near = difflib.get_close_matches(name, fields, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there is {', '.join(fields)}"
                self._fail(f"{where}{name!r} is not a field of a hostfile; {hint}")

    def _backend(self, data: dict[str, Any]) -> str | None:
        backend = data.get("backend")
        if backend in (None, ""):
            return None
        if backend not in BACKENDS:
            self._fail(f"backend is {backend!r}; must be one of {', '.join(BACKENDS)}")
        return str(backend)

    def _envs(self, data: dict[str, Any]) -> tuple[tuple[str, str], ...]:
        envs = data.get("envs")
        if envs is None:
            return ()
        if not isinstance(envs, list):
            self._fail(f'envs is {envs!r}; must be a list of texts such as "NAME=value"')
        pairs = []
        for index, text in enumerate(envs):
            name, equals, value = text.partition("=") if isinstance(text, str) else ("", "", "")
            if (not equals or not name.replace("_", "a").isalnum() or not name.isascii() or name[0].isdigit()
                    or not value.isprintable()):
                self._fail(f'envs[{index}] is {text!r}; must be a text such as "NAME=value"')
            pairs.append((name, value))
        return tuple(pairs)

    def _host(self, entry: Any, where: str, count: int) -> HostEntry:
        if not isinstance(entry, dict):
            self._fail(f'{where} is {entry!r}; must be an object such as {{"ssh": "mac1", "ips": ["10.0.0.1"]}}')
        self._known(entry, HOST_FIELDS, f"{where}: ")
        ssh = entry.get("ssh")
        if not isinstance(ssh, str) or not ssh or ssh.startswith("-") or " " in ssh or not ssh.isprintable():
            self._fail(f'{where}: ssh is {ssh!r}; must be what `ssh` is given to reach the host, such as "mac1.local" '
                       'or "user@10.0.0.1"')
        where = f"{where} ({ssh})"
        python = entry.get("python")
        if python is not None and (not isinstance(python, str) or not python or not python.isprintable()):
            self._fail(f"{where}: python is {python!r}; must be the path of that host's Python")
        facts = tuple((name, self._fact(entry, name, where)) for name in PLAN_FIELDS if entry.get(name) is not None)
        return HostEntry(ssh=ssh, ips=self._ips(entry, where), rdma=self._rdma(entry, where, count), python=python,
                         memory_bytes=self._memory(entry, where), facts=facts)

    def _fact(self, entry: dict[str, Any], name: str, where: str) -> str:
        value = entry[name]
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            self._fail(f"{where}: {name} is {value!r}; must be a text or a number")
        return str(value)

    def _memory(self, entry: dict[str, Any], where: str) -> int | None:
        memory = entry.get("memory")
        return None if memory is None else memory_size(str(memory), f"{self._where}: {where}: memory")

    def _ips(self, entry: dict[str, Any], where: str) -> tuple[str, ...]:
        ips = entry.get("ips", [])
        if not isinstance(ips, list):
            self._fail(f'{where}: ips is {ips!r}; must be a list such as ["10.0.0.1"]')
        for ip in ips:
            try:
                ipaddress.IPv4Address(ip if isinstance(ip, str) else "")
            except ValueError:
                self._fail(f"{where}: ips has {ip!r}; must be IPv4 addresses, which is what MLX's ring takes; find the "
                           f"host's with `ssh {entry['ssh']} ifconfig`")
        return tuple(ips)

    def _rdma(self, entry: dict[str, Any], where: str, count: int) -> tuple[str | tuple[str, ...] | None, ...]:
        rdma = entry.get("rdma") or []
        if not isinstance(rdma, list):
            self._fail(f'{where}: rdma is {rdma!r}; must be a list such as [null, "rdma_en2"]')
        if rdma and len(rdma) != count:
            self._fail(f"{where}: rdma has {len(rdma)} entries; must have one for each of the {count} hosts, null for "
                       "itself")
        devices: list[str | tuple[str, ...] | None] = []
        for device in rdma:
            several = device if isinstance(device, list) else [device]
            if device is not None and (not several or not all(isinstance(name, str) and name for name in several)):
                self._fail(f'{where}: rdma has {device!r}; must be a device such as "rdma_en2", a list of devices, or '
                           "null")
            devices.append(tuple(device) if isinstance(device, list) else device)
        return tuple(devices)


def hosts_of(hostfile: Hostfile, entries: Sequence[int] | None) -> tuple[HostEntry, ...]:
    """Return the hosts with these numbers, in this order, or all. Raises ConfigError."""
    for number in entries or ():
        if number >= len(hostfile.hosts):
            raise ConfigError(f"--host-entries {number}: {hostfile.path} has {len(hostfile.hosts)} hosts, counted from "
                              "0", param="host_entries")
    return hostfile.hosts if entries is None else tuple(hostfile.hosts[number] for number in entries)
