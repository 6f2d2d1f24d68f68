"""Reader of MLX's hostfile, as `mlx.distributed_config` writes it and `mlx.launch` reads it.

A hostfile is a list of hosts, or an object with `backend`, `envs` and `hosts`; a host has `ssh`, `ips` and `rdma`. Tandem's own
fields: `address` (at which all others reach the host), `python` (its interpreter), and the machine data of `tandem plan`
(`PLAN_FIELDS`). In place of a path, the list or object itself is taken too.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeGuard, get_args, get_type_hints

from tandem.config.settings import ParallelSettings
from tandem.config.sizes import memory_size
from tandem.errors import ConfigError
from tandem.json_types import JsonObject
from tandem.system.files import read_text

TOP_FIELDS = ("backend", "envs", "hosts")
PLAN_FIELDS = ("memory", "chip", "gpu", "bandwidth", "tflops", "fence")
"""Fields for `tandem plan`. `memory`, if every host has it, also weights the layer split."""
HOST_FIELDS = ("ssh", "ips", "address", "rdma", "python", *PLAN_FIELDS)
BACKENDS = tuple(name for name in get_args(get_type_hints(ParallelSettings)["backend"]) if name != "auto")
LOCAL_NAMES = ("127.0.0.1", "localhost")


@dataclass(frozen=True, kw_only=True)
class HostEntry:
    """One host of the file, for one rank. A host is listed several times to run several ranks."""

    ssh: str
    """Destination for ssh (name, address, user@host, or alias in ~/.ssh/config), or agent:NAME."""
    ips: tuple[str, ...] = ()
    """Addresses for the host's collectives."""
    address: str | None = None
    """Address at which all other hosts reach this one, if not among `ips`: each of those may be a cable to one host."""
    rdma: tuple[str | tuple[str, ...] | None, ...] = ()
    """RDMA devices towards each host of the file, in order; None for itself."""
    python: str | None = None
    """Path of the host's Python interpreter."""
    memory_bytes: int | None = None
    facts: tuple[tuple[str, str], ...] = ()
    """Values of `PLAN_FIELDS` as written in the file."""

    @property
    def reached_at(self) -> str | None:
        """Address for channels, the engine's bus and a group's coordinator; None if the file has none."""
        return self.address or next(iter(self.ips), None)

    @property
    def is_here(self) -> bool:
        """True for the machine that reads the file."""
        return self.ssh in LOCAL_NAMES


@dataclass(frozen=True, kw_only=True)
class Hostfile:
    """Content of a hostfile."""

    path: str
    hosts: tuple[HostEntry, ...]
    backend: str | None = None
    envs: tuple[tuple[str, str], ...] = ()
    """Environment variables for all ranks."""


def is_in_memory(hostfile: str) -> bool:
    """True if the setting holds the hosts themselves, as JSON, and no path."""
    return hostfile.startswith(("[", "{"))


def read_hostfile(path: str, label: str = "--hostfile") -> Hostfile:
    """Return the checked hostfile. Raises ConfigError with one line: entry, field, value and remedy."""
    return _HostfileReader(path, label).read()


class _HostfileReader:
    def __init__(self, path: str, label: str) -> None:
        self._path = path
        self._where = "hosts list" if is_in_memory(path) else f"{label} {path}"

    def _fail(self, message: str) -> NoReturn:
        raise ConfigError(f"{self._where}: {message}", param="hostfile")

    def read(self) -> Hostfile:
        try:
            text = self._path if is_in_memory(self._path) else read_text(Path(self._path).expanduser())
            data: object = json.loads(text)
        except OSError as error:
            self._fail(f"cannot be read: {error.strerror or error}")
        except json.JSONDecodeError as error:
            self._fail(f"line {error.lineno}, column {error.colno}: is not valid JSON: {error.msg}")
        except UnicodeDecodeError:
            self._fail("is not UTF-8 text")
        except (ValueError, RecursionError) as error:  # e.g. too many digits, too deep nesting
            self._fail(f"cannot be read: {error}")
        if isinstance(data, list):
            data = {"hosts": data}
        if not isinstance(data, dict):
            self._fail('must be a list of hosts, or an object that has one as "hosts"')
        fields = self._fields(data, TOP_FIELDS, "")
        entries = fields.get("hosts")
        if not isinstance(entries, list) or not entries:
            self._fail('"hosts" must be a list with at least one host, such as [{"ssh": "mac1", "ips": ["10.0.0.1"]}]')
        envs = fields.get("envs") or []
        for index, text in enumerate(envs):
            self._check("NAME=value", text, f"envs[{index}]")
        hosts = tuple(self._host(entry, f"host {index}", len(entries)) for index, entry in enumerate(entries))
        return Hostfile(
            path=self._path,
            hosts=hosts,
            backend=fields.get("backend") or None,
            envs=tuple((name, value) for name, _, value in (text.partition("=") for text in envs)),
        )

    def _fields(self, values: JsonObject, fields: Sequence[str], where: str) -> JsonObject:
        """Check names and values of an object's fields; return those that are not null."""
        for name in values:
            if name not in fields:
                near = difflib.get_close_matches(name, fields, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there is {', '.join(fields)}"
                self._fail(f"{where}{name!r} is not a field of a hostfile; {hint}")
        present = {name: value for name, value in values.items() if value is not None}
        for name, value in present.items():
            if name in CHECKS:
                self._check(name, value, f"{where}{name}")
        return present

    def _check(self, kind: str, value: object, what: str, verb: str = "is", **words: str) -> None:
        """Raise ConfigError unless `value` fits `kind`, a key of `CHECKS`."""
        fits, must = CHECKS[kind]
        if not fits(value):
            self._fail(f"{what} {verb} {value!r}; must be {must.format(**words)}")

    def _host(self, entry: object, where: str, count: int) -> HostEntry:
        self._check("host", entry, where)
        assert isinstance(entry, dict)
        self._check("ssh", ssh := entry.get("ssh"), f"{where}: ssh")
        where = f"{where} ({ssh})"
        fields = self._fields(entry, HOST_FIELDS, f"{where}: ")
        ips, rdma = fields.get("ips", []), fields.get("rdma") or []
        for address in ips:
            self._check("ip", address, f"{where}: ips", "has", ssh=str(ssh))
        if rdma and len(rdma) != count:
            self._fail(f"{where}: rdma has {len(rdma)} entries; must have one for each of the {count} hosts, null for itself")
        for device in rdma:
            self._check("device", device, f"{where}: rdma", "has")
        memory = fields.get("memory")
        return HostEntry(
            ssh=str(ssh),
            ips=tuple(ips),
            address=fields.get("address"),
            python=fields.get("python"),
            rdma=tuple(tuple(device) if isinstance(device, list) else device for device in rdma),
            memory_bytes=None if memory is None else memory_size(str(memory), f"{self._where}: {where}: memory"),
            facts=tuple((name, str(fields[name])) for name in PLAN_FIELDS if name in fields),
        )


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and bool(value) and value.isprintable()


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def is_ipv4(value: object) -> bool:
    """True for the text of an IPv4 address."""
    try:
        return isinstance(value, str) and bool(ipaddress.IPv4Address(value))
    except ValueError:
        return False


def _is_reachable(value: object) -> bool:
    return is_ipv4(value) and not ipaddress.IPv4Address(str(value)).is_unspecified


def _is_device(value: object) -> bool:
    names = value if isinstance(value, list) else [value]
    return value is None or (bool(names) and all(isinstance(name, str) and name for name in names))


CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    "backend": (("", *BACKENDS).__contains__, f"one of {', '.join(BACKENDS)}"),
    "envs": (_is_list, 'a list of texts such as "NAME=value"'),
    "NAME=value": (
        lambda text: _is_text(text) and re.match(r"[A-Za-z_][A-Za-z0-9_]*=", text) is not None,
        'a text such as "NAME=value"',
    ),
    "host": (lambda entry: isinstance(entry, dict), 'an object such as {{"ssh": "mac1", "ips": ["10.0.0.1"]}}'),
    "ssh": (
        lambda text: _is_text(text) and not text.startswith("-") and " " not in text,
        'what `ssh` is given to reach the host, such as "mac1.local" or "user@10.0.0.1"',
    ),
    "python": (_is_text, "the path of that host's Python"),
    "ips": (_is_list, 'a list such as ["10.0.0.1"]'),
    "address": (_is_reachable, 'the IPv4 address at which all other hosts reach this one, such as "192.168.1.4"'),
    "ip": (is_ipv4, "IPv4 addresses, which is what MLX's ring takes; find the host's with `ssh {ssh} ifconfig`"),
    "rdma": (_is_list, 'a list such as [null, "rdma_en2"]'),
    "device": (_is_device, 'a device such as "rdma_en2", a list of devices, or null'),
    **dict.fromkeys(
        PLAN_FIELDS, (lambda value: isinstance(value, str | int | float) and not isinstance(value, bool), "a text or a number")
    ),
}
"""Kind of value, usually a field's name -> predicate, and what the value must be."""


def hosts_of(hostfile: Hostfile, entries: Sequence[int] | None) -> tuple[HostEntry, ...]:
    """Return the hosts with these indices, in this order; all for None. Raises ConfigError for an index out of range."""
    for number in entries or ():
        if number >= len(hostfile.hosts):
            raise ConfigError(
                f"--host-entries {number}: {hostfile.path} has {len(hostfile.hosts)} hosts, counted from 0", param="host_entries"
            )
    return hostfile.hosts if entries is None else tuple(hostfile.hosts[number] for number in entries)
