"""Machines and links to plan for: from the text form of `tandem plan` and the web page, from an MLX hosts file, or this
machine."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tandem.config.settings import Settings
from tandem.config.sizes import counted_memory, memory_size
from tandem.env import machine_memory
from tandem.errors import ConfigError, LayoutError
from tandem.launchers.host_addresses import hosts_for
from tandem.launchers.hostfile import Hostfile, read_hostfile
from tandem.models.description import ModelDescription
from tandem.planner.hardware import CHIPS, GIB, Link, Machine, chip_of, link, machine
from tandem.planner.profile import Cluster, HostProfile, Profile, measured_machine, with_profile
from tandem.planner.types import Request
from tandem.processes.device import this_device

_DEFAULT_LINK = "thunderbolt5-tcp"
_HOST_KEYS = ("gpu", "bandwidth", "tflops", "fence")
_LINK_KEYS = ("latency", "bandwidth")
_BACKEND_LINKS = {"jaccl": "thunderbolt5-rdma", "jaccl-ring": "thunderbolt5-rdma", "nccl": "nvlink"}


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Machines to plan for, the link that their hosts file implies, and notes about assumptions."""

    machines: list[Machine]
    notes: list[str] = field(default_factory=list)
    link: str | None = None
    backend: str | None = None
    """Backend of the collectives in the hosts file; None if not given."""


def read_hosts(specs: Sequence[str], hostfile: str | None, profile: Profile | None = None) -> Hosts:
    """Return the machines of a hosts file, if given, completed and extended by the specifications in `--hosts`.

    The profile supplies the memory of machines without one. Raise ConfigError naming the host, the value and what is
    expected.
    """
    facts: dict[str, dict[str, str]] = {}
    backend = None
    if hostfile is not None:
        found = read_hostfile(hostfile)
        facts, backend = _facts_of(found), found.backend
    for spec in host_specs(specs):
        name, told = _parse_host(spec)
        if name in facts and hostfile is None:
            raise ConfigError(f"--hosts: {name} is there twice; one rank runs on a machine", param="hosts")
        facts.setdefault(name, {}).update(told)
    notes: list[str] = []
    machines = [_machine(name, known, notes, profile.host(name) if profile else None) for name, known in facts.items()]
    return Hosts(
        machines=machines, notes=notes, link=_BACKEND_LINKS.get(backend or ""), backend=None if backend == "any" else backend
    )


def host_spec(name: str, memory_bytes: int, chip: str) -> str:
    """Return the specification of a machine for `--hosts`, from what it says of itself."""
    known = host_fields(memory_bytes, chip) or host_fields(memory_bytes, "cpu")
    return f"{name}={known['memory']}:{known['chip']}"


def host_fields(memory_bytes: int, chip: str) -> dict[str, str]:
    """Return a machine's memory and chip as a hosts file has them; empty for a chip without known figures."""
    known = chip_of(chip)
    return {"memory": f"{memory_bytes / GIB:.1f}GB", "chip": known} if known in CHIPS else {}


def host_specs(texts: Sequence[str]) -> list[str]:
    """Split texts with comma-separated host specifications into single ones."""
    return [part for text in texts for part in text.split(",") if part]


def read_links(texts: Sequence[str], hosts: Hosts, profile: Profile | None = None) -> tuple[list[Link], list[str]]:
    """Return the links of `--link`, else of the hosts file, else a default, and a note if one is assumed without
    measurements."""
    links = [_parse_link(text) for text in texts]
    notes = []
    if not any(x.between is None for x in links) and len(hosts.machines) > 1:
        if hosts.link:
            links.append(link(hosts.link))
        elif not links:
            if profile is None or not profile.knows([machine.name for machine in hosts.machines], hosts.backend):
                notes.append(
                    f"--link is not given: {_DEFAULT_LINK} is assumed between all machines"
                    f"{'' if profile is None else ' whose link was not measured'}."
                )
            links.append(link(_DEFAULT_LINK))
    return links, notes


def cluster_of(
    hosts: Hosts,
    links: Sequence[str],
    *,
    description: ModelDescription,
    request: Request,
    fast: bool,
    profile: Profile | None = None,
    source: str = "The profile",
) -> Cluster:
    """Return machines and links with the profile's figures, or without a profile with default or `fast` fences."""
    joined, notes = read_links(links, hosts, profile)
    cluster = with_profile(
        hosts.machines, joined, profile, description=description, request=request, fast=fast, backend=hosts.backend, source=source
    )
    return replace(cluster, notes=[*hosts.notes, *notes, *cluster.notes])


def this_name() -> str:
    """Return this machine's name in plans and profiles: the host name up to the first dot."""
    return socket.gethostname().split(".")[0] or "this machine"


def this_machine() -> Hosts:
    """Return the machine this process runs on, as MLX reports it."""
    name, device = this_name(), this_device()
    known = _known_chip(device.name)
    found = machine(name, machine_memory(), known or ("m4" if device.gpu else "cpu"))
    if device.gpu:
        found = replace(found, memory=device.memory_bytes)
    note = f"Without --hosts, this machine is planned for: {device.name}, {found.memory / GIB:.1f} GiB for MLX."
    if device.gpu and known is None:
        note += f" Its speed is not known, that of {found.chip} is assumed."
    return Hosts(machines=[found], notes=[note])


def room(settings: Settings) -> int:
    """Return the bytes that a model may use on all machines of the settings; a host of unknown memory counts as this one.

    Raise ConfigError.
    """
    share, most = settings.scheduler.memory_fraction, settings.scheduler.max_memory
    here = this_device(settings.parallel.device).memory_bytes
    memory = [
        machine(host.ssh, host.memory_bytes, dict(host.facts).get("chip", "m4-pro")).memory if host.memory_bytes else here
        for host in hosts_for(settings.parallel)
    ]
    return int(sum(counted_memory(nbytes, share, most) for nbytes in memory or [here]) * share)


def nominal_machine(host: HostProfile) -> Machine:
    """Return a measured machine with the nominal figures of its chip."""
    chip = _known_chip(host.device) or ("m4" if host.gpu else "cpu")
    return replace(machine(host.name, host.memory_bytes, chip), memory=host.memory_bytes)


def _known_chip(device: str) -> str | None:
    chip = chip_of(device)
    return chip if chip in CHIPS else next((name for name in ("h200", "gb10") if name in chip), None)


def _parse_host(spec: str) -> tuple[str, dict[str, str]]:
    name, equals, rest = spec.partition("=")
    if not equals or not name or not rest:
        raise ConfigError(f"--hosts {spec}: write NAME=MEMORY[:CHIP], such as a=64GB:m4-max", param="hosts")
    memory, *words = rest.split(":")
    found = {"memory": memory}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            key, value = "chip", word
        if key not in ("chip", *_HOST_KEYS) or key in found:
            raise ConfigError(
                f"--hosts {spec}: {word!r} is not a chip or one of {', '.join(k + '=' for k in _HOST_KEYS)}", param="hosts"
            )
        found[key] = value
    return name, found


def _machine(name: str, found: Mapping[str, str], notes: list[str], measured: HostProfile | None) -> Machine:
    label = f"host {name}"
    if "memory" not in found and measured is not None and not found.keys() & {"chip", "gpu", *_HOST_KEYS}:
        return measured_machine(measured)
    if "memory" not in found:
        raise ConfigError(
            f'{label}: its memory is not known; add "memory": "64GB" to the hosts file, or --hosts {name}=64GB', param="hosts"
        )
    installed = memory_size(found["memory"], label)
    chip = found.get("chip")
    if chip is None:
        chip = "m4-pro" if installed <= 64 * GIB else "m4-max" if installed <= 128 * GIB else "m3-ultra"
        if not {"bandwidth", "tflops"} <= found.keys() and measured is None:
            notes.append(f"{label}: no chip is given, {chip} is assumed.")
    result = machine(name, installed, chip)
    if why := CHIPS[result.chip].inferred:
        notes.append(f"{label}: the figures of {result.chip} are inferred: {why}.")
    if "gpu" in found:
        memory = memory_size(found["gpu"], label)
        if memory > installed:
            raise ConfigError(f"{label}: gpu={found['gpu']} is more than its memory {found['memory']}", param="hosts")
        result = replace(result, memory=memory)

    def figure(key: str, default: float) -> float:
        return _number(found[key], label, key, "hosts") if key in found else default

    return replace(
        result,
        bandwidth=figure("bandwidth", result.bandwidth),
        flops=figure("tflops", result.flops),
        fence=figure("fence", result.fence),
        measured={"bandwidth", "tflops"} <= found.keys(),
    )


def _parse_link(text: str) -> Link:
    pair, equals, rest = text.partition("=") if "," in text.split("=")[0] else ("", "", text)
    name, *words = rest.split(":")
    try:
        found = link(name)
    except LayoutError as error:
        raise ConfigError(error.message, param="link") from error
    for word in words:
        key, _, value = word.partition("=")
        if key not in _LINK_KEYS:
            raise ConfigError(f"--link {text}: {word!r} is not latency= (us) or bandwidth= (GB/s)", param="link")
        number = _number(value, f"--link {text}", key, "link")
        found = replace(found, latency=number) if key == "latency" else replace(found, bandwidth=number)
    if not equals:
        return found
    ends = [name.strip() for name in pair.split(",")]
    if len(ends) != 2 or ends[0] == ends[1] or not all(ends):
        raise ConfigError(f"--link {text}: name two machines before =, such as a,b=10gbe", param="link")
    return replace(found, between=(ends[0], ends[1]))


def _number(text: str, label: str, key: str, param: str) -> float:
    """Parse a figure into SI units. Raise ConfigError for the option `param`."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise ConfigError(f"{label}: {key}={text} must be a number above 0", param=param)
    return value / 1e6 if key in ("latency", "fence") else value * (1e12 if key == "tflops" else 1e9)


def _facts_of(hostfile: Hostfile) -> dict[str, dict[str, str]]:
    """Return known facts per host. Raise ConfigError for a duplicate host."""
    facts = {host.ssh: dict(host.facts) for host in hostfile.hosts}
    if len(facts) < len(hostfile.hosts):
        names = [host.ssh for host in hostfile.hosts]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(
            f"--hostfile {hostfile.path}: {twice} is there twice; one rank runs on a machine in a plan", param="hostfile"
        )
    return facts
