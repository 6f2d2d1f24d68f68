"""Checks that matter on Macs: RDMA over Thunderbolt, and the cable itself. Pure."""

from __future__ import annotations

import re

from tandem.doctor.checks_software import on
from tandem.doctor.findings import Evidence, Finding, alike
from tandem.doctor.messages import Facts
from tandem.doctor.parsing import interfaces, rdma_devices, rdma_enabled, rdma_port_states

RDMA_MACOS, SMOOTH_MACOS = (26, 2), (26, 3)
ENABLE = "shut down, hold the power button, Options > Utilities > Terminal: rdma_ctl enable"


def rdma(evidence: Evidence) -> list[Finding]:
    """RDMA is on, and each machine has the devices that the hosts file names for its peers."""
    if not evidence.backend.startswith("jaccl"):
        return [Finding("rdma", "skip", "", f"the backend is {evidence.backend}; jaccl would need it")]
    found: list[Finding] = []
    for index, host in enumerate(evidence.carriers):
        if (facts := evidence.facts.get(host.name)) is not None:
            found += _machine_rdma(evidence, host.name, facts) or _devices(evidence, index, facts)
    return alike("rdma", found, "enabled, and every peer's device is active")


def _machine_rdma(evidence: Evidence, name: str, facts: Facts) -> list[Finding]:
    version = _macos(facts)
    if version is not None and version < RDMA_MACOS:
        return [Finding("rdma", "fail", name, f"macOS is {version[0]}.{version[1]}, RDMA needs 26.2",
                        on(evidence, name, "softwareupdate --install --all --restart"))]
    enabled = rdma_enabled(facts.outputs.get("rdma_ctl"))
    if enabled is not True:
        said = "is disabled" if enabled is False else "is not there: `rdma_ctl status` does not say that it is enabled"
        return [Finding("rdma", "fail", name, f"RDMA {said}", ENABLE)]
    if not rdma_devices(facts.outputs.get("ibv_devices")):
        return [Finding("rdma", "fail", name, "ibv_devices lists no device",
                        "plug in the Thunderbolt 5 cable (on a Mac Studio not beside the Ethernet port)")]
    return []


def _devices(evidence: Evidence, index: int, facts: Facts) -> list[Finding]:
    host = evidence.carriers[index]
    there = rdma_devices(facts.outputs.get("ibv_devices"))
    states = rdma_port_states(facts.outputs.get("ibv_devinfo"))
    setup = "mlx.distributed_config --over thunderbolt --backend jaccl --auto-setup --hosts " + ",".join(
        one.name for one in evidence.carriers)
    found = []
    for peer, named in zip(evidence.carriers, host.rdma, strict=False):
        for device in [named] if isinstance(named, str) else named or []:
            if device not in there:
                found.append(Finding("rdma", "fail", host.name, f"has no device {device} (for {peer.name}), only "
                                     f"{', '.join(there)}", setup))
            elif states.get(device, "PORT_ACTIVE") != "PORT_ACTIVE":
                found.append(Finding("rdma", "fail", host.name, f"{device} (for {peer.name}) is {states[device]}",
                                     f"check the cable between {host.name} and {peer.name}"))
            elif bridge := _bridge_of(facts, device.removeprefix("rdma_")):
                found.append(Finding("rdma", "fail", host.name, f"the interface of {device} is part of {bridge}",
                                     on(evidence, host.name, f"sudo ifconfig {bridge} down")))
        if not named and peer is not host and evidence.backend == "jaccl":
            found.append(Finding("rdma", "fail", host.name, f"the hosts file names no device for {peer.name}", setup))
    if len(host.rdma) != len(evidence.carriers):
        found.append(Finding("rdma", "fail", host.name, f"`rdma` has {len(host.rdma)} entries for "
                             f"{len(evidence.carriers)} hosts", setup))
    return found


def _bridge_of(facts: Facts, interface: str) -> str | None:
    return next((one.name for one in interfaces(facts) if interface in one.members), None)


def _macos(facts: Facts) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", facts.outputs.get("os_version", ""))
    return (int(match[1]), int(match[2])) if match and facts.system == "Darwin" else None


def macos(evidence: Evidence) -> list[Finding]:
    """Macs that share RDMA run the same build of macOS, 26.3 or later."""
    macs = {name: facts for name, facts in evidence.facts.items() if facts.system == "Darwin"}
    if not macs or not evidence.backend.startswith("jaccl"):
        return [Finding("macos", "skip", "", "matters for RDMA between Macs only")]
    builds = {name: facts.outputs.get("os_build", "").strip() for name, facts in macs.items()}
    wanted = builds.get(evidence.here) or max(builds.values())
    update = "softwareupdate --install --all --restart"
    found = [Finding("macos", "fail", name, f"build {build}, on {evidence.here} {wanted}", on(evidence, name, update))
             for name, build in builds.items() if build != wanted]
    found += [Finding("macos", "warn", name, "before 26.3 RDMA sends 4 KB at a time and runs out of memory under load",
                      on(evidence, name, update))
              for name, facts in macs.items() if (version := _macos(facts)) is not None and version < SMOOTH_MACOS]
    return alike("macos", found, f"build {wanted} on all Macs")


def thunderbolt(evidence: Evidence) -> list[Finding]:
    """The addresses in use lie on a Thunderbolt cable, not on Wi-Fi."""
    macs = [host for host in evidence.carriers
            if (facts := evidence.facts.get(host.name)) is not None and facts.system == "Darwin"]
    if len(macs) < 2:
        return [Finding("thunderbolt", "skip", "", "matters between Macs only")]
    found, kinds = [], set()
    for host in macs:
        kind = _kind_of(evidence.facts[host.name], host.address)
        kinds.add(kind)
        if kind == "wifi":
            found.append(Finding("thunderbolt", "fail", host.name, f"{host.address} is on Wi-Fi",
                                 "tandem hosts write --over thunderbolt, with a cable between the Macs"))
        elif kind != "thunderbolt" and not evidence.backend.startswith("jaccl"):
            found.append(Finding("thunderbolt", "warn", host.name, f"{host.address or 'its address'} is not on a "
                                 "Thunderbolt interface", 'networksetup -setmanual "Thunderbolt Bridge" 10.254.0.1 '
                                 "255.255.255.252   (and 10.254.0.2 on the other)"))
    return alike("thunderbolt", found, f"addresses are on: {', '.join(sorted(kinds))}")


def _kind_of(facts: Facts, address: str) -> str:
    for one in interfaces(facts):
        if any(str(network.ip) == address for network in one.networks):
            return one.kind or ("thunderbolt" if one.name.startswith("bridge") and one.members else "unknown")
    return "unknown"

