"""Checks of Macs: RDMA over Thunderbolt, cables, macOS version, MLX's fast fences and power. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tandem.diagnostics.doctor.evidence import Evidence, Findings, Host
from tandem.diagnostics.doctor.parsing import interfaces, rdma_devices, rdma_enabled, rdma_port_states, thunderbolt_ports
from tandem.diagnostics.doctor.probe_messages import Facts
from tandem.launchers.agent.link import agent_name
from tandem.planner.hardware import CHIPS, chip_of
from tandem.system.metal import FAST_FENCE

RDMA_MACOS, SMOOTH_MACOS, ACCELERATED_MACOS = (26, 2), (26, 3), (26, 2)
ENABLE = (
    "System Settings, search for RDMA, turn on RDMA over Thunderbolt, restart; where that is not there: "
    "shut down, hold the power button, Options > Utilities > Terminal: rdma_ctl enable"
)
WITHOUT_RDMA = (
    "tandem hosts write ring-hosts.json {hosts} --over thunderbolt --backend ring   (goes over any Thunderbolt cable; serve with "
    "--hostfile ring-hosts.json)"
)
BRIDGE = 'networksetup -setmanual "Thunderbolt Bridge" 10.254.0.1 255.255.255.252   (with a cable; 10.254.0.2 on the other)'
UPDATE = "softwareupdate --install --all --restart"


def no_rdma(evidence: Evidence) -> str:
    """Return why RDMA is not checked; empty if the backend needs it."""
    return "" if evidence.backend.startswith("jaccl") else f"the backend is {evidence.backend}; jaccl would need it"


def rdma(evidence: Evidence, findings: Findings) -> str:
    """Check that RDMA is enabled and that each host has the RDMA devices of the hosts file."""
    for index, host in enumerate(evidence.carriers):
        if (facts := evidence.facts.get(host.name)) is not None and _has_rdma(evidence, host.name, facts, findings):
            _devices(evidence, index, facts, findings)
    return "enabled, and every peer's device is active"


def described(name: str, facts: Facts) -> dict[str, str]:
    """Return a Mac's description for bug reports: chip, macOS version and build, ports, cables, fence mode."""
    ports, cables = thunderbolt_ports(facts.outputs.get("thunderbolt"))
    return {
        "host": name,
        "chip": facts.chip,
        "macos": facts.outputs.get("os_version", "").strip() or "unknown",
        "build": facts.outputs.get("os_build", "").strip() or "unknown",
        "ports": f"{ports} Thunderbolt" if ports else "unknown",
        "cables": ", ".join(cables) or "none seen",
        "fence": "fast" if _is_on(facts.variables) else "MLX's own",
    }


def _has_rdma(evidence: Evidence, name: str, facts: Facts, findings: Findings) -> bool:
    version = _macos(facts)
    enabled = rdma_enabled(facts.outputs.get("rdma_ctl"))
    if (preset := CHIPS.get(chip_of(facts.chip))) is not None and facts.system == "Darwin" and not preset.rdma:
        hosts = " ".join(host.name for host in evidence.carriers)
        findings.fail(name, f"{facts.chip} has no Thunderbolt 5, and RDMA needs it", WITHOUT_RDMA.format(hosts=hosts))
    elif version is not None and version < RDMA_MACOS:
        findings.fail(name, f"macOS is {version[0]}.{version[1]}, RDMA needs 26.2", evidence.on(name, UPDATE))
    elif enabled is not True:
        state = "is disabled" if enabled is False else "is not there: `rdma_ctl status` does not say that it is enabled"
        findings.fail(name, f"RDMA {state}", ENABLE)
    elif not rdma_devices(facts.outputs.get("ibv_devices")):
        remedy = "plug in the Thunderbolt 5 cable (on a Mac Studio not beside the Ethernet port)"
        findings.fail(name, "ibv_devices lists no device", remedy)
    else:
        return True
    return False


def _devices(evidence: Evidence, index: int, facts: Facts, findings: Findings) -> None:
    host, count = evidence.carriers[index], len(evidence.carriers)
    setup = "mlx.distributed_config --over thunderbolt --backend jaccl --auto-setup --hosts " + ",".join(
        carrier.name for carrier in evidence.carriers
    )
    for number, (peer, named) in enumerate(zip(evidence.carriers, host.rdma, strict=False), 1):
        for device in [named] if isinstance(named, str) else named or []:
            _device(evidence, host, peer, facts, findings, device=device, setup=setup, address=f"{index + 1}.{number}")
        if not named and peer is not host and evidence.backend == "jaccl":
            findings.fail(host.name, f"the hosts file names no device for {peer.name}", setup)
    if len(host.rdma) != count:
        findings.fail(host.name, f"`rdma` has {len(host.rdma)} entries for {count} hosts", setup)


def _device(
    evidence: Evidence, host: Host, peer: Host, facts: Facts, findings: Findings, *, device: str, setup: str, address: str
) -> None:
    devices = rdma_devices(facts.outputs.get("ibv_devices"))
    state = rdma_port_states(facts.outputs.get("ibv_devinfo")).get(device, "PORT_ACTIVE")
    name, named = device.removeprefix("rdma_"), f"{device} (for {peer.name})"
    there = interfaces(facts)
    bridge = next((interface.name for interface in there if name in interface.members), None)
    if device not in devices:
        findings.fail(host.name, f"has no device {named}, only {', '.join(devices)}", setup)
    elif state != "PORT_ACTIVE":
        findings.fail(host.name, f"{named} is {state}", f"check the cable between {host.name} and {peer.name}")
    elif bridge:
        remedy = evidence.on(host.name, f"sudo ifconfig {bridge} down")
        findings.fail(host.name, f"the interface of {device} is part of {bridge}", remedy)
    elif there and not any(interface.networks for interface in there if interface.name == name):
        # jaccl cannot use a device without an IPv4 address.
        problem = f"{name}, the interface of {named}, has no IPv4 address; a restart of the Mac takes it away"
        remedy = evidence.on(host.name, f"sudo ifconfig {name} inet 169.254.{address} netmask 255.255.0.0 alias")
        findings.fail(host.name, problem, remedy)


def _macos(facts: Facts) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", facts.outputs.get("os_version", ""))
    return (int(match[1]), int(match[2])) if match and facts.system == "Darwin" else None


def no_rdma_macs(evidence: Evidence) -> str:
    """Return why macOS's version is not checked; empty if Macs use RDMA."""
    return "" if evidence.macs and evidence.backend.startswith("jaccl") else "matters for RDMA between Macs only"


def macos(evidence: Evidence, findings: Findings) -> str:
    """Check that Macs with RDMA run the same build of macOS, 26.3 or later."""
    builds = {name: facts.outputs.get("os_build", "").strip() for name, facts in evidence.macs.items()}
    wanted = builds.get(evidence.here) or max(builds.values())
    source = evidence.host_with(builds, wanted)
    for name, build in builds.items():
        if build != wanted:
            findings.fail(name, f"build {build}, on {source} {wanted}", evidence.on(name, UPDATE))
    for name, facts in evidence.macs.items():
        if (version := _macos(facts)) is not None and version < SMOOTH_MACOS:
            problem = "before 26.3 RDMA sends 4 KB at a time and runs out of memory under load"
            findings.warn(name, problem, evidence.on(name, UPDATE))
    return f"build {wanted} on all Macs"


def single_mac(evidence: Evidence) -> str:
    """Return why cables are not checked; empty if there are several Macs."""
    macs = sum(host.name in evidence.macs or host.name not in evidence.facts for host in evidence.carriers)
    return "" if macs > 1 else "matters between Macs only"


def thunderbolt(evidence: Evidence, findings: Findings) -> str:
    """Check that each Mac's address belongs to a Thunderbolt interface, not to Wi-Fi."""
    kinds = set()
    for host in evidence.carriers:
        if (facts := evidence.macs.get(host.name)) is None:
            continue
        kind, address = _kind_of(facts, host.address), host.address or "its address"
        kinds.add(kind)
        if kind == "wifi":
            hosts = [host.name for host in evidence.carriers]
            remedy = f"tandem hosts write cable-hosts.json {' '.join(hosts)} --over thunderbolt   (with a cable between the Macs)"
            remedy = BRIDGE if any(map(agent_name, hosts)) else remedy
            if evidence.backend.startswith("jaccl"):
                findings.fail(host.name, f"{host.address} is on Wi-Fi", remedy)
            else:
                findings.warn(host.name, f"{host.address} is on Wi-Fi, which works but is slow", remedy)
        elif kind != "thunderbolt" and evidence.backend.startswith("jaccl"):
            if cable := _on_cable(facts):
                why = f"pipeline stages and weights would go over {address} ({kind}), not over the cable, where it has {cable}"
                remedy = f"put the addresses of the cables into `ips`, {cable} for {host.name}"
                findings.warn(host.name, why, f"{remedy}; stages of one rank group alone do not need it")
        elif kind != "thunderbolt":
            findings.warn(host.name, f"{address} is not on a Thunderbolt interface", BRIDGE)
    return f"addresses are on: {', '.join(sorted(kinds))}"


def _on_cable(facts: Facts) -> str:
    """Return an address of the machine on a Thunderbolt interface; empty if there is none."""
    cabled = (network.ip for there in interfaces(facts) if there.kind == "thunderbolt" for network in there.networks)
    return next((str(address) for address in cabled if not address.is_link_local), "")


def _kind_of(facts: Facts, address: str) -> str:
    for interface in interfaces(facts):
        if any(str(network.ip) == address for network in interface.networks):
            bridged = interface.name.startswith("bridge") and interface.members
            return interface.kind or ("thunderbolt" if bridged else "unknown")
    return "unknown"


def accelerators(evidence: Evidence, findings: Findings) -> str:
    """Check that MLX uses the neural accelerators of M5 chips: they need macOS 26.2 and MLX's wheel for macOS 26."""
    m5 = {name: facts for name, facts in evidence.macs.items() if chip_of(facts.chip).startswith("m5")}
    for name, facts in m5.items():
        lacking = f"so MLX leaves the neural accelerators of {facts.chip} unused, and long prompts take several times as long"
        version, built = _macos(facts), re.match(r"macosx_(\d+)_", facts.mlx_tag)
        if version is not None and version < ACCELERATED_MACOS:
            findings.warn(name, f"macOS is {version[0]}.{version[1]}, not 26.2, {lacking}", evidence.on(name, UPDATE))
        elif built and int(built[1]) < ACCELERATED_MACOS[0]:
            again = f"{facts.executable} -m pip install --force-reinstall --no-deps mlx-metal=={facts.versions['mlx']}"
            findings.warn(name, f"its wheel of MLX is for macOS {built[1]}, {lacking}", evidence.on(name, again))
    return "MLX uses all of every M5" if m5 else "no Mac here has one"


def fences(evidence: Evidence, findings: Findings) -> str:
    """Check that MLX's fast fences are off: they can hang the GPU until the Mac is restarted."""
    effect = "which has locked GPUs up until the Mac was restarted; ranks go by --fast-sync"
    if _is_on(evidence.variables):
        problem = f"`envs` of the hosts file sets {FAST_FENCE}, {effect} and not by it"
        findings.warn("", problem, f"take {FAST_FENCE} out of `envs`")
    for name, facts in evidence.macs.items():
        if _is_on(facts.variables):
            look = evidence.on(name, f"grep -n {FAST_FENCE} ~/.zshenv ~/.zprofile ~/.zshrc")
            problem = f"{FAST_FENCE} is set there, {effect}, other programs by it"
            findings.warn(name, problem, f"{look}   (take it out, and `unset` it here)")
    return "no Mac has the setting that can lock its GPU up"


def _is_on(variables: Mapping[str, str]) -> bool:
    return variables.get(FAST_FENCE, "0") not in ("", "0")


def power(evidence: Evidence, findings: Findings) -> str:
    """Check that Macs run on mains without low power mode."""
    for name, facts in evidence.macs.items():
        if "'Battery Power'" in facts.outputs.get("battery", ""):
            findings.warn(name, "it runs on its battery: it slows down, and sleeps when that is low", f"plug {name} in")
        if re.search(r"^\s*lowpowermode\s+1", facts.outputs.get("power", ""), re.MULTILINE):
            remedy = evidence.on(name, "sudo pmset -a lowpowermode 0")
            findings.warn(name, "low power mode is on: everything takes longer", remedy)
    return "on mains, at full power; while a model runs it does not sleep unless a lid is closed"
