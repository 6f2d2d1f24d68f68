"""Checks of the network between machines: subnets, reachability, speed, and an all_sum over all of them. Pure."""

from __future__ import annotations

import ipaddress
from dataclasses import replace
from itertools import combinations

from tandem.diagnostics.doctor.evidence import Evidence, Findings, several
from tandem.diagnostics.doctor.parsing import Interface, gateways, interfaces
from tandem.diagnostics.doctor.probe_messages import Facts
from tandem.diagnostics.doctor.topology import free_subnets, physical
from tandem.launchers.hostfile import is_ipv4
from tandem.system.privacy import LOCAL_NETWORK, LOCAL_NETWORK_PANE

SLOW_FAIL, SLOW_WARN = 10e6, 100e6
"""Bandwidth limits in bytes a second, below which a link fails or gets a warning."""
TRIED = ("ring", "jaccl", "jaccl-ring", "nccl")
"""Backends for which the doctor can set up a test group."""
LATE_FAIL_S, LATE_WARN_S = 0.05, 0.005


def subnets(evidence: Evidence, findings: Findings) -> str:
    """Check for a cable whose subnet holds the default gateway, interfaces that share a subnet, and duplicate addresses."""
    local = any(_is_link_local(host.address) for host in evidence.hosts)
    every = {name: _real(facts, local) for name, facts in evidence.facts.items()}
    fresh = free_subnets(network.network for there in every.values() for interface in there for network in interface.networks)
    for name, here in every.items():
        for interface, problem in _clashes(evidence.facts[name], here):
            remedy = _readdress(evidence.facts[name], interface, str(next(fresh)[1]))
            findings.fail(name, problem, evidence.on(name, remedy))
    _twice(evidence, every, findings)
    return "no two networks and no two machines share one"


def _real(facts: Facts, local: bool) -> list[Interface]:
    """Return the physical interfaces that have addresses. All cables without a router share the link-local subnet, which
    suffices for RDMA; such addresses count only if `local`: Tandem connects to them."""
    real = [
        replace(interface, networks=[network for network in interface.networks if local or not network.ip.is_link_local])
        for interface in physical(interfaces(facts))
    ]
    return [interface for interface in real if interface.networks]


def _is_link_local(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_link_local
    except ValueError:
        return False  # empty, or a hostname


def _clashes(facts: Facts, here: list[Interface]) -> list[tuple[Interface, str]]:
    """Return interfaces that need another subnet, and why. Two paths to one router (cable and Wi-Fi) do not clash."""
    outward = gateways(facts)
    routers = {gateway.interface for gateway in outward}
    clashes: dict[str, tuple[Interface, str]] = {}
    for interface in here:
        for gateway in outward:
            if interface.name not in routers and any(gateway.address in network.network for network in interface.networks):
                holds = f"holds the default gateway {gateway.address} of {gateway.interface}"
                clashes[interface.name] = interface, f"the subnet of {interface.name} ({interface.networks[0]}) {holds}"
    for first, second in combinations(here, 2):
        if {first.name, second.name} <= routers or first.name in clashes or second.name in clashes:
            continue
        if any(a.network.overlaps(b.network) for a in first.networks for b in second.networks):
            loser = second if first.name in routers or second.point_to_point else first
            both = f"{first.name} ({first.networks[0]}) and {second.name} ({second.networks[0]})"
            clashes[loser.name] = loser, f"{both} share a subnet"
    return list(clashes.values())


def _readdress(facts: Facts, interface: Interface, address: str) -> str:
    name, removed = interface.name, _without(facts, interface.name, interface.networks[0])
    if facts.system == "Darwin":
        return f"{removed} && sudo ifconfig {name} inet {address} netmask 255.255.255.252"
    return f"{removed} && sudo ip addr add {address}/30 dev {name}"


def _without(facts: Facts, interface: str, address: ipaddress.IPv4Interface) -> str:
    """Return the command that takes an address away."""
    mac = facts.system == "Darwin"
    return f"sudo ifconfig {interface} inet {address.ip} delete" if mac else f"sudo ip addr del {address} dev {interface}"


def _twice(evidence: Evidence, every: dict[str, list[Interface]], findings: Findings) -> None:
    """Report addresses that two machines share. One machine listed under two names does not count."""
    owners: dict[str, str] = {}
    seen: list[tuple[str, list[Interface]]] = []
    for name, here in every.items():
        facts = evidence.facts[name]
        if (facts.hostname, here) in seen:
            continue
        seen.append((facts.hostname, here))
        for interface in here:
            for network in interface.networks:
                if (owner := owners.setdefault(str(network.ip), name)) != name:
                    remedy = evidence.on(name, _without(facts, interface.name, network))
                    findings.fail(name, f"{network.ip} of {interface.name} is {owner}'s too", remedy)


def reachable(evidence: Evidence, findings: Findings) -> str:
    """Check that every machine can connect to every other at its address of the hosts file."""
    for (source, target), link in evidence.links.items():
        if link.error:
            address = evidence.host(target).address
            if others := _others(evidence, target, address):
                problem = f"{address} of the hosts file is not an address of {target}, which has {others}"
                findings.fail(f"{source} -> {target}", problem, "put one that both machines reach into `ips` of the hosts file")
                continue
            withheld = LOCAL_NETWORK in link.error
            look = evidence.on(source, f"open '{LOCAL_NETWORK_PANE}'" if withheld else f"ping -c 3 {address}")
            then = "" if withheld else f"   (then see firewall of {target})"
            findings.fail(f"{source} -> {target}", f"{address}: {link.error}", look + then)
    return f"each machine connects to each other ({len(evidence.links)} tries)"


def _others(evidence: Evidence, target: str, address: str) -> str:
    """Return the addresses of `target`; empty if `address` is one of them or no IPv4 address, or if they are unknown."""
    found = interfaces(evidence.facts[target]) if target in evidence.facts and is_ipv4(address) else []
    own = [network.ip for interface in found for network in interface.networks]
    return "" if address in map(str, own) else ", ".join(str(ip) for ip in own if not ip.is_loopback)


def no_link(evidence: Evidence) -> str:
    """Return why speed is not measured; empty if any link works."""
    return "" if any(not link.error for link in evidence.links.values()) else "there is no link to measure"


def speed(evidence: Evidence, findings: Findings) -> str:
    """Check bandwidth and latency of each link, measured by a transfer."""
    links = {ends: link for ends, link in evidence.links.items() if not link.error}
    for (source, target), link in links.items():
        if link.bandwidth < SLOW_WARN or link.latency_s > LATE_WARN_S:
            bad = link.bandwidth < SLOW_FAIL or link.latency_s > LATE_FAIL_S
            look = "route -n get" if source in evidence.macs else "ip route get"
            remedy = evidence.on(source, f"{look} {evidence.host(target).address}") + "   (is that the fast interface?)"
            found = _speed(link.bandwidth, link.latency_s)
            findings.add("fail" if bad else "warn", f"{source} -> {target}", found, remedy)
    worst = min(link.bandwidth for link in links.values()), max(link.latency_s for link in links.values())
    return f"at least {_speed(*worst)}"


def _speed(bandwidth: float, latency_s: float) -> str:
    return f"{bandwidth / 1e6:.0f} MB/s, {latency_s * 1e3:.2f} ms one way"


def no_sum(evidence: Evidence) -> str:
    """Return why no all_sum was run; empty if one was."""
    if evidence.several and evidence.backend not in TRIED:
        return f"is not tried over {evidence.backend}; --backend ring is"
    if evidence.several and not evidence.collected:
        return "not tried: it would hang until what is above is mended"
    return several(evidence)


def collective(evidence: Evidence, findings: Findings) -> str:
    """Check that an all_sum over all machines succeeds, and report its latency by message size."""
    remedy = "see `reachable` and `firewall` above; then run this again"
    if evidence.backend.startswith("jaccl"):
        remedy = "wait 30 s and run this again; if it stays, restart the machines (RDMA resources may be stuck)"
    slowest: dict[int, float] = {}
    over = "" if evidence.backend == "ring" else f" ({evidence.backend})"
    for name, times in evidence.collected.items():
        if times.error:
            findings.fail(name, f"no sum over all machines{over}: {times.error}", remedy)
        for size, seconds in times.latency_s.items():
            slowest[int(size)] = max(slowest.get(int(size), 0.0), seconds)
    shown = ", ".join(f"{size >> 10} KiB {seconds * 1e3:.2f} ms" for size, seconds in sorted(slowest.items()))
    return f"sums that {len(evidence.collected)} machines make together{over} are right: {shown}"
