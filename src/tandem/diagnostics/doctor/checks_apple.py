"""Checks that matter on Macs: RDMA over Thunderbolt, the cable itself, power, and what MLX is told. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tandem.diagnostics.doctor.checks_software import on
from tandem.diagnostics.doctor.evidence import Evidence, Finding, alike
from tandem.diagnostics.doctor.messages import Facts
from tandem.diagnostics.doctor.parsing import interfaces, rdma_devices, rdma_enabled, rdma_port_states
from tandem.system.metal import FAST_FENCE

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
    for number, (peer, named) in enumerate(zip(evidence.carriers, host.rdma, strict=False), 1):
        for device in [named] if isinstance(named, str) else named or []:
            interface = device.removeprefix("rdma_")
            if device not in there:
                found.append(Finding("rdma", "fail", host.name, f"has no device {device} (for {peer.name}), only "
                                     f"{', '.join(there)}", setup))
            elif states.get(device, "PORT_ACTIVE") != "PORT_ACTIVE":
                found.append(Finding("rdma", "fail", host.name, f"{device} (for {peer.name}) is {states[device]}",
                                     f"check the cable between {host.name} and {peer.name}"))
            elif bridge := _bridge_of(facts, interface):
                found.append(Finding("rdma", "fail", host.name, f"the interface of {device} is part of {bridge}",
                                     on(evidence, host.name, f"sudo ifconfig {bridge} down")))
            elif not _has_address(facts, interface):
                found.append(Finding("rdma", "fail", host.name, f"{interface}, the interface of {device} (for "
                                     f"{peer.name}), has no IPv4 address; a restart of the Mac takes it away",
                                     on(evidence, host.name, f"sudo ifconfig {interface} inet "
                                        f"169.254.{index + 1}.{number} netmask 255.255.0.0 alias")))
        if not named and peer is not host and evidence.backend == "jaccl":
            found.append(Finding("rdma", "fail", host.name, f"the hosts file names no device for {peer.name}", setup))
    if len(host.rdma) != len(evidence.carriers):
        found.append(Finding("rdma", "fail", host.name, f"`rdma` has {len(host.rdma)} entries for "
                             f"{len(evidence.carriers)} hosts", setup))
    return found


def _has_address(facts: Facts, interface: str) -> bool:
    """Without one jaccl finds no way to use the device. True where the machine's interfaces could not be read."""
    there = interfaces(facts)
    return not there or any(one.networks for one in there if one.name == interface)


def _bridge_of(facts: Facts, interface: str) -> str | None:
    return next((one.name for one in interfaces(facts) if interface in one.members), None)


def _macos(facts: Facts) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", facts.outputs.get("os_version", ""))
    return (int(match[1]), int(match[2])) if match and facts.system == "Darwin" else None


def macos(evidence: Evidence) -> list[Finding]:
    """Macs that share RDMA run the same build of macOS, 26.3 or later."""
    macs = _macs(evidence)
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
        elif kind != "thunderbolt" and evidence.backend.startswith("jaccl"):
            if cable := _on_cable(evidence.facts[host.name]):
                found.append(Finding("thunderbolt", "warn", host.name, f"pipeline stages and weights would go over "
                                     f"{host.address or 'its address'} ({kind}), not over the cable, where it has "
                                     f"{cable}",
                                     f"put the addresses of the cables into `ips`, {cable} for {host.name}; stages of "
                                     "one rank group alone do not need it"))
        elif kind != "thunderbolt":
            found.append(Finding("thunderbolt", "warn", host.name, f"{host.address or 'its address'} is not on a "
                                 "Thunderbolt interface", 'networksetup -setmanual "Thunderbolt Bridge" 10.254.0.1 '
                                 "255.255.255.252   (and 10.254.0.2 on the other)"))
    return alike("thunderbolt", found, f"addresses are on: {', '.join(sorted(kinds))}")


def _on_cable(facts: Facts) -> str:
    """An address that it has on a Thunderbolt cable; empty if there is none."""
    return next((str(network.ip) for one in interfaces(facts) for network in one.networks
                 if one.kind == "thunderbolt" and not network.ip.is_link_local), "")


def fences(evidence: Evidence) -> list[Finding]:
    """Nobody has turned MLX's fast fences on: they have locked GPUs up until the Mac was restarted."""
    macs = _macs(evidence)
    if not macs:
        return [Finding("fences", "skip", "", "matters on Macs only")]
    found = []
    if _is_on(evidence.variables):
        found.append(Finding("fences", "warn", "", f"`envs` of the hosts file sets {FAST_FENCE}, which has locked GPUs "
                             "up until the Mac was restarted; ranks go by --fast-sync and not by it",
                             f"take {FAST_FENCE} out of `envs`"))
    found += [Finding("fences", "warn", name, f"{FAST_FENCE} is set there, which has locked GPUs up until the Mac was "
                      "restarted; ranks go by --fast-sync, other programs by it",
                      on(evidence, name, f"grep -n {FAST_FENCE} ~/.zshenv ~/.zprofile ~/.zshrc")
                      + "   (take it out, and `unset` it here)")
              for name, facts in macs.items() if _is_on(facts.variables)]
    return alike("fences", found, "MLX's own, on all Macs")


def _is_on(variables: Mapping[str, str]) -> bool:
    return variables.get(FAST_FENCE, "0") not in ("", "0")


def power(evidence: Evidence) -> list[Finding]:
    """Macs have mains and their full power. Idle sleep is held off while ranks run."""
    macs = _macs(evidence)
    if not macs:
        return [Finding("power", "skip", "", "matters on Macs only")]
    found = []
    for name, facts in macs.items():
        if "'Battery Power'" in facts.outputs.get("battery", ""):
            found.append(Finding("power", "warn", name, "it runs on its battery: it slows down, and sleeps when that "
                                 "is low", f"plug {name} in"))
        if re.search(r"^\s*lowpowermode\s+1", facts.outputs.get("power", ""), re.MULTILINE):
            found.append(Finding("power", "warn", name, "low power mode is on: everything takes longer",
                                 on(evidence, name, "sudo pmset -a lowpowermode 0")))
    return alike("power", found, "on mains, at full power; while ranks run they do not sleep unless a lid is closed")


def _macs(evidence: Evidence) -> dict[str, Facts]:
    return {name: facts for name, facts in evidence.facts.items() if facts.system == "Darwin"}


def _kind_of(facts: Facts, address: str) -> str:
    for one in interfaces(facts):
        if any(str(network.ip) == address for network in one.networks):
            return one.kind or ("thunderbolt" if one.name.startswith("bridge") and one.members else "unknown")
    return "unknown"

