"""Checks of what lies between machines: subnets, reachability, speed, and sums over all of them. Pure."""

from __future__ import annotations

import ipaddress
from dataclasses import replace
from itertools import combinations

from tandem.diagnostics.doctor.checks_software import on
from tandem.diagnostics.doctor.evidence import Evidence, Finding, alike
from tandem.diagnostics.doctor.messages import Facts
from tandem.diagnostics.doctor.parsing import Interface, gateways, interfaces
from tandem.diagnostics.doctor.topology import free_subnets, is_virtual
from tandem.system.privacy import LOCAL_NETWORK, LOCAL_NETWORK_PANE

SLOW_FAIL, SLOW_WARN = 10e6, 100e6
"""Bytes a second: a tenth of gigabit Ethernet, and gigabit Ethernet."""
TRIED = ("ring", "jaccl", "jaccl-ring", "nccl")
"""Backends that a test group can be made for."""
LATE_FAIL_S, LATE_WARN_S = 0.05, 0.005


def subnets(evidence: Evidence) -> list[Finding]:
    """No cable's subnet holds the default gateway, no two interfaces share a subnet, no two machines an address."""
    local = any(_is_link_local(host.address) for host in evidence.hosts)
    every = {name: _real(facts, local) for name, facts in evidence.facts.items()}
    fresh = free_subnets(network.network for found in every.values() for one in found for network in one.networks)
    found: list[Finding] = []
    for name, here in every.items():
        for one, problem in _clashes(evidence.facts[name], here):
            remedy = _readdress(evidence.facts[name], one, str(next(fresh)[1]))
            found.append(Finding("subnets", "fail", name, problem, on(evidence, name, remedy)))
    found += _twice(evidence, every)
    return alike("subnets", found, "no cable's subnet clashes with the default gateway or another")


def _real(facts: Facts, local: bool) -> list[Interface]:
    """Interfaces of cables and networks. Every cable without a router may have an address of the one link-local
    subnet, and for RDMA that is enough: those clash only if Tandem connects to them (`local`)."""
    found = [replace(one, networks=[network for network in one.networks if local or not network.ip.is_link_local])
             for one in interfaces(facts) if one.kind != "loopback" and not is_virtual(one.name)]
    return [one for one in found if one.networks]


def _is_link_local(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_link_local
    except ValueError:
        return False  # empty, or a name


def _clashes(facts: Facts, here: list[Interface]) -> list[tuple[Interface, str]]:
    """Interfaces to give another subnet, and why. Two ways to the same router (cable and Wi-Fi) are no clash."""
    outward = gateways(facts)
    routers = {one.interface for one in outward}
    found: dict[str, tuple[Interface, str]] = {}
    for one in here:
        for gateway in outward:
            if one.name not in routers and any(gateway.address in network.network for network in one.networks):
                found[one.name] = one, (f"the subnet of {one.name} ({one.networks[0]}) holds the default gateway "
                                        f"{gateway.address} of {gateway.interface}")
    for one, other in combinations(here, 2):
        if {one.name, other.name} <= routers or one.name in found or other.name in found:
            continue
        if any(a.network.overlaps(b.network) for a in one.networks for b in other.networks):
            loser = other if one.name in routers or other.point_to_point else one
            found[loser.name] = loser, (f"{one.name} ({one.networks[0]}) and {other.name} ({other.networks[0]}) share "
                                        "a subnet")
    return list(found.values())


def _readdress(facts: Facts, one: Interface, address: str) -> str:
    old = one.networks[0]
    if facts.system == "Darwin":
        return (f"sudo ifconfig {one.name} inet {old.ip} delete && "
                f"sudo ifconfig {one.name} inet {address} netmask 255.255.255.252")
    return f"sudo ip addr del {old} dev {one.name} && sudo ip addr add {address}/30 dev {one.name}"


def _twice(evidence: Evidence, every: dict[str, list[Interface]]) -> list[Finding]:
    """Addresses that two machines have. One machine may be there under two names."""
    owners: dict[str, str] = {}
    found = []
    seen: list[tuple[str, list[Interface]]] = []
    for name, here in every.items():
        if (evidence.facts[name].hostname, here) in seen:
            continue
        seen.append((evidence.facts[name].hostname, here))
        for one in here:
            for network in one.networks:
                owner = owners.setdefault(str(network.ip), name)
                if owner != name:
                    remedy = on(evidence, name, _remove(evidence.facts[name], one, str(network)))
                    problem = f"{network.ip} of {one.name} is {owner}'s too"
                    found.append(Finding("subnets", "fail", name, problem, remedy))
    return found


def _remove(facts: Facts, one: Interface, network: str) -> str:
    if facts.system == "Darwin":
        return f"sudo ifconfig {one.name} inet {network.split('/')[0]} delete"
    return f"sudo ip addr del {network} dev {one.name}"


def reachable(evidence: Evidence) -> list[Finding]:
    """Every machine can open a connection to every other, at the address that the hosts file gives."""
    if not evidence.several:
        return [Finding("reachable", "skip", "", "matters with several machines only")]
    found = []
    for (source, target), link in evidence.links.items():
        if link.error:
            address = evidence.host(target).address
            remedy = (on(evidence, source, f"open '{LOCAL_NETWORK_PANE}'") if LOCAL_NETWORK in link.error else
                      on(evidence, source, f"ping -c 3 {address}") + f"   (then see firewall of {target})")
            found.append(Finding("reachable", "fail", f"{source} -> {target}", f"{address}: {link.error}", remedy))
    return alike("reachable", found, f"{len(evidence.links)} ways, each tried on a fresh port")


def speed(evidence: Evidence) -> list[Finding]:
    """Bandwidth and latency of each way, by a real transfer."""
    open_links = {ends: link for ends, link in evidence.links.items() if not link.error}
    if not open_links:
        return [Finding("speed", "skip", "", "there is no link to measure")]
    found = []
    for (source, target), link in open_links.items():
        slow, late = link.bandwidth < SLOW_WARN, link.latency_s > LATE_WARN_S
        if slow or late:
            bad = link.bandwidth < SLOW_FAIL or link.latency_s > LATE_FAIL_S
            address = evidence.host(target).address
            mac = evidence.facts[source].system == "Darwin"
            remedy = f"route -n get {address}" if mac else f"ip route get {address}"
            found.append(Finding("speed", "fail" if bad else "warn", f"{source} -> {target}", _speed(link.bandwidth,
                                 link.latency_s), on(evidence, source, remedy) + "   (is that the fast interface?)"))
    worst = min(one.bandwidth for one in open_links.values()), max(one.latency_s for one in open_links.values())
    return alike("speed", found, f"at least {_speed(*worst)}")


def _speed(bandwidth: float, latency_s: float) -> str:
    return f"{bandwidth / 1e6:.0f} MB/s, {latency_s * 1e6:.0f} us one way"


def collective(evidence: Evidence) -> list[Finding]:
    """An all_sum over all machines gives the right sum; its latency."""
    check = "all_sum"
    if not evidence.several:
        return [Finding(check, "skip", "", "matters with several machines only")]
    if evidence.backend not in TRIED:
        return [Finding(check, "skip", "", f"is not tried over {evidence.backend}; --backend ring is")]
    if not evidence.collected:
        return [Finding(check, "skip", "", "not tried: it would hang until what is above is mended")]
    failed = {name: one.error for name, one in evidence.collected.items() if one.error}
    if failed:
        return [Finding(check, "fail", name, f"{evidence.backend}: {error}", _collective_remedy(evidence))
                for name, error in failed.items()]
    slowest: dict[int, float] = {}
    for one in evidence.collected.values():
        for size, seconds in one.latency_s.items():
            slowest[int(size)] = max(slowest.get(int(size), 0.0), seconds)
    shown = ", ".join(f"{size >> 10} KiB {seconds * 1e3:.2f} ms" for size, seconds in sorted(slowest.items()))
    return [Finding(check, "ok", "", f"{evidence.backend} over {len(evidence.collected)} ranks: {shown}")]


def _collective_remedy(evidence: Evidence) -> str:
    if evidence.backend.startswith("jaccl"):
        return "wait 30 s and run this again; if it stays, restart the machines (RDMA resources may be stuck)"
    return "see `reachable` and `firewall` above; then run this again"
