"""Checks of single machines: Ray's nodes, ssh, name, clock, ports, firewall. Pure."""

from __future__ import annotations

import ipaddress

from tandem.diagnostics.doctor.checks_software import on
from tandem.diagnostics.doctor.evidence import Evidence, Finding, Verdict, alike
from tandem.diagnostics.doctor.messages import Facts
from tandem.diagnostics.doctor.parsing import FirewallState, firewalls, interfaces, port_owner
from tandem.errors import UsageError
from tandem.launchers.ray.nodes import UNIT, check_addresses

CLOCK_WARN_S, CLOCK_FAIL_S = 0.5, 5.0
RESTART = "ray stop -f, then ray start ... --node-ip-address=ADDRESS"


def ray(evidence: Evidence) -> list[Finding]:
    """Every node is there at the address that it advertises, and some carry ranks."""
    nodes = evidence.ray
    if nodes is None:
        return [Finding("ray", "skip", "", "--ray looks at a Ray cluster")]
    found = [Finding("ray", "fail", one.address, one.trouble, RESTART) for one in nodes if one.trouble]
    there = [one for one in nodes if not one.trouble]
    try:
        check_addresses(there, there[0].address if there else "")
    except UsageError as error:
        found.append(Finding("ray", "fail", "", error.message, RESTART))
    units = sum(one.units(one.total) for one in there)
    start = f"ray stop -f, then ray start ... --resources='{{\"{UNIT}\": 1}}'"
    for one in there:
        if not one.bundle:
            found.append(Finding("ray", "warn" if units else "fail", one.address, f"no `{UNIT}` resource, so no rank",
                                 f"on {one.address}: {start}"))
    free = sum(one.units(one.free) for one in there)
    return alike("ray", found, f"{len(nodes)} node(s), {units} device(s) for ranks, {free} of them free")


def ssh(evidence: Evidence) -> list[Finding]:
    """A probe runs on every machine, without a password."""
    found = [Finding("ssh", "fail", name, why, remedy) for name, (why, remedy) in evidence.unreachable.items()]
    if evidence.ray is not None and not found:
        return [Finding("ssh", "skip", "", "Ray's nodes are reached through Ray")]
    if not evidence.several:
        return [Finding("ssh", "skip", "", "only this machine is looked at; --hostfile names others")]
    return alike("ssh", found, f"{len(evidence.facts)} machines answer without a password")


def hostname(evidence: Evidence) -> list[Finding]:
    """No machine's own name means loopback: Ray and gloo tell others that address. Tandem itself does not look."""
    if not evidence.several:
        return [Finding("hostname", "skip", "", "matters with several machines only")]
    verdict: Verdict = "warn" if evidence.ray is None else "fail"
    found = []
    for name, facts in evidence.facts.items():
        addresses = [ipaddress.ip_address(one.split("%")[0]) for one in facts.hostname_addresses]
        address = evidence.host(name).address or _own_address(facts)
        line = f"{address} {facts.hostname}"
        if not addresses:
            found.append(Finding("hostname", "warn", name, f"its name {facts.hostname} resolves to nothing",
                                 on(evidence, name, f"echo '{line}' | sudo tee -a /etc/hosts")))
        elif addresses[0].is_loopback:
            found.append(Finding("hostname", verdict, name, f"its name {facts.hostname} resolves to {addresses[0]}",
                                 on(evidence, name, _fix_name(facts, line))))
    return alike("hostname", found, "each machine's name resolves to an address that others can use")


def _own_address(facts: Facts) -> str:
    return next((str(network.ip) for one in interfaces(facts) if one.kind != "loopback" for network in one.networks),
                "ADDRESS")


def _fix_name(facts: Facts, line: str) -> str:
    if facts.system == "Darwin":
        return (f"sudo scutil --set HostName {facts.hostname.split('.')[0]} && "
                f"echo '{line}' | sudo tee -a /etc/hosts")
    name = facts.hostname.replace(".", r"\.")
    return f"sudo sed -i -E '/^127\\..*\\b{name}\\b/d' /etc/hosts && echo '{line}' | sudo tee -a /etc/hosts"


def clock(evidence: Evidence) -> list[Finding]:
    """Clocks agree, so that logs of several machines can be read together."""
    found = []
    for name, one in evidence.clocks.items():
        off = abs(one.ahead) - one.within
        if off > CLOCK_WARN_S:
            mac = evidence.facts[name].system == "Darwin"
            found.append(Finding(
                "clock", "fail" if off > CLOCK_FAIL_S else "warn", name,
                f"{abs(one.ahead):.1f} s {'ahead of' if one.ahead > 0 else 'behind'} {evidence.here}",
                on(evidence, name, "sudo sntp -sS time.apple.com" if mac else "sudo timedatectl set-ntp true")))
    if not evidence.several:
        return [Finding("clock", "skip", "", "there is no other clock to compare with")]
    most = max((abs(one.ahead) for one in evidence.clocks.values()), default=0.0)
    return alike("clock", found, f"within {most:.3f} s")


def ports(evidence: Evidence) -> list[Finding]:
    """The ports that were asked for are free."""
    found = []
    for name, facts in evidence.facts.items():
        for port in facts.busy_ports:
            owner = port_owner(facts, port)
            look = f"lsof -nP -iTCP:{port}" if facts.system == "Darwin" else f"sudo ss -ltnp sport = :{port}"
            found.append(Finding("ports", "fail", name, f"port {port} is taken{f' by {owner}' if owner else ''}",
                                 on(evidence, name, look) + "   (end that, or choose another --port)"))
    return alike("ports", found, "those asked for are free")


def firewall(evidence: Evidence) -> list[Finding]:
    """No firewall drops what machines send one another."""
    found = []
    for name, facts in evidence.facts.items():
        blocked = sorted(source for (source, target), link in evidence.links.items() if target == name and link.error)
        seen = firewalls(facts)
        for one in seen:
            if one.blocks:
                found.append(_blocking(evidence, name, facts, one, blocked))
            elif one.blocks is None:
                found.append(Finding("firewall", "skip", name, f"{one.kind}: {one.detail}",
                                     on(evidence, name, "sudo nft list ruleset")))
    return alike("firewall", found, "none drops what comes in")


def _blocking(evidence: Evidence, name: str, facts: Facts, one: FirewallState, blocked: list[str]) -> Finding:
    peers = [host.address for host in evidence.hosts if host.name != name and host.address]
    note = ""
    if facts.system == "Darwin":
        note = "   (again after each upgrade of that Python; over ssh macOS asks nobody)"
        tool = "/usr/libexec/ApplicationFirewall/socketfilterfw"
        remedy = f"sudo {tool} --add {facts.executable} --unblockapp {facts.executable}"
    elif one.kind == "nftables":
        remedy = f"sudo nft insert rule {one.chain} ip saddr {{ {', '.join(peers)} }} accept"
    else:
        remedy = "; ".join(f"sudo iptables -I INPUT -s {peer} -j ACCEPT" for peer in peers)
    if not evidence.several:
        return Finding("firewall", "warn", name, f"{one.kind}: {one.detail}", "let the cluster's machines in")
    if blocked:
        return Finding("firewall", "fail", name, f"{one.kind}: {one.detail}; nothing arrives from {', '.join(blocked)}",
                       on(evidence, name, remedy) + note)
    return Finding("firewall", "warn", name, f"{one.kind}: {one.detail}; the test's ports got through",
                   on(evidence, name, remedy) + note)
