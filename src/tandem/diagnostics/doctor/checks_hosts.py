"""Checks of single machines: Ray nodes, ssh, hostname, clock, ports, firewall. Pure."""

from __future__ import annotations

import ipaddress

from tandem.diagnostics.doctor.evidence import Evidence, Findings
from tandem.diagnostics.doctor.parsing import FirewallState, firewalls, interfaces, port_owner
from tandem.diagnostics.doctor.probe_messages import Facts
from tandem.errors import UsageError
from tandem.launchers.agent.link import agent_name
from tandem.launchers.ray.nodes import UNIT, check_addresses

CLOCK_WARN_S, CLOCK_FAIL_S = 0.5, 5.0
RESTART = "ray stop -f, then ray start ... --node-ip-address=ADDRESS"


def no_ray(evidence: Evidence) -> str:
    """Return why Ray's nodes are not checked; empty with --ray."""
    return "--ray looks at a Ray cluster" if evidence.ray is None else ""


def ray(evidence: Evidence, findings: Findings) -> str:
    """Check that every Ray node is reachable at its advertised address and that some have resources for ranks."""
    nodes = evidence.ray or []
    for node in nodes:
        if node.trouble:
            findings.fail(node.address, node.trouble, RESTART)
    there = [node for node in nodes if not node.trouble]
    try:
        check_addresses(there, there[0].address if there else "")
    except UsageError as error:
        findings.fail("", error.message, RESTART)
    units = sum(node.units(node.total) for node in there)
    start = f"ray stop -f, then ray start ... --resources='{{\"{UNIT}\": 1}}'"
    for node in there:
        if not node.bundle:
            problem, remedy = f"no `{UNIT}` resource, so no rank", f"on {node.address}: {start}"
            findings.add("warn" if units else "fail", node.address, problem, remedy)
    free = sum(node.units(node.free) for node in there)
    return f"{len(nodes)} node(s), {units} device(s) for ranks, {free} of them free"


def no_ssh(evidence: Evidence) -> str:
    """Return why ssh is not checked; empty if there are other machines to reach by it."""
    if evidence.ray is not None and not evidence.unreachable:
        return "Ray's nodes are reached through Ray"
    if evidence.several and all(host.name == evidence.here or agent_name(host.name) for host in evidence.hosts):
        return "" if evidence.unreachable else "agents are used; ssh is not needed"
    return "" if evidence.several else "only this machine is looked at; --hostfile names others"


def ssh(evidence: Evidence, findings: Findings) -> str:
    """Check that a probe runs on every machine without a password."""
    for name, (why, remedy) in evidence.unreachable.items():
        findings.fail(name, why, remedy)
    return f"{len(evidence.facts)} machines answer without a password"


def hostname(evidence: Evidence, findings: Findings) -> str:
    """Check that no hostname resolves to loopback, the address that Ray and gloo would advertise. Tandem does not use it."""
    for name, facts in evidence.facts.items():
        addresses = [ipaddress.ip_address(address.split("%")[0]) for address in facts.hostname_addresses]
        line = f"{evidence.host(name).address or _own_address(facts)} {facts.hostname}"
        if not addresses:
            remedy = evidence.on(name, f"echo '{line}' | sudo tee -a /etc/hosts")
            findings.warn(name, f"its name {facts.hostname} leads to no address", remedy)
        elif addresses[0].is_loopback:
            problem, remedy = f"its name {facts.hostname} leads to {addresses[0]}", evidence.on(name, _fix_name(facts, line))
            findings.add("warn" if evidence.ray is None else "fail", name, problem, remedy)
    return "each machine's name leads to an address that others can use"


def _own_address(facts: Facts) -> str:
    others = (interface for interface in interfaces(facts) if interface.kind != "loopback")
    return next((str(network.ip) for interface in others for network in interface.networks), "ADDRESS")


def _fix_name(facts: Facts, line: str) -> str:
    if facts.system == "Darwin":
        return f"sudo scutil --set HostName {facts.hostname.split('.')[0]} && echo '{line}' | sudo tee -a /etc/hosts"
    name = facts.hostname.replace(".", r"\.")
    return f"sudo sed -i -E '/^127\\..*\\b{name}\\b/d' /etc/hosts && echo '{line}' | sudo tee -a /etc/hosts"


def clock(evidence: Evidence, findings: Findings) -> str:
    """Check that clocks agree, so that logs of several machines can be merged."""
    for name, reading in evidence.clocks.items():
        off = abs(reading.ahead) - reading.within
        if off > CLOCK_WARN_S:
            remedy = "sudo sntp -sS time.apple.com" if name in evidence.macs else "sudo timedatectl set-ntp true"
            problem = f"{abs(reading.ahead):.1f} s {'ahead of' if reading.ahead > 0 else 'behind'} {evidence.here}"
            findings.add("fail" if off > CLOCK_FAIL_S else "warn", name, problem, evidence.on(name, remedy))
    return f"the same to {max((abs(reading.ahead) for reading in evidence.clocks.values()), default=0.0):.3f} s"


def ports(evidence: Evidence, findings: Findings) -> str:
    """Check that the requested ports are free."""
    for name, facts in evidence.facts.items():
        for port in facts.busy_ports:
            if (name, port) == (evidence.here, evidence.own_port):
                continue
            by = f" by {owner}" if (owner := port_owner(facts, port)) else ""
            look = f"lsof -nP -iTCP:{port}" if facts.system == "Darwin" else f"sudo ss -ltnp sport = :{port}"
            remedy = evidence.on(name, look) + "   (end that, or choose another --port)"
            findings.fail(name, f"port {port} is taken{by}", remedy)
    return f"Tandem serves at port {evidence.own_port}; others are free" if evidence.own_port else "those of Tandem are free"


def firewall(evidence: Evidence, findings: Findings) -> str:
    """Check that no firewall drops packets between the machines."""
    for name, facts in evidence.facts.items():
        for state in firewalls(facts):
            if state.blocks:
                _blocking(evidence, name, facts, state, findings)
            elif state.blocks is None:
                findings.add("skip", name, f"{state.kind}: {state.detail}", evidence.on(name, "sudo nft list ruleset"))
    return "none keeps the machines apart"


def _blocking(evidence: Evidence, name: str, facts: Facts, state: FirewallState, findings: Findings) -> None:
    detail = f"{state.kind}: {state.detail}"
    if not evidence.several:
        findings.warn(name, detail, "let the cluster's machines in")
        return
    peers = [host.address for host in evidence.hosts if host.name != name and host.address]
    note = ""
    if facts.system == "Darwin":
        note = "   (again after each upgrade of that Python; over ssh macOS asks nobody)"
        tool = "/usr/libexec/ApplicationFirewall/socketfilterfw"
        python = facts.program or facts.executable
        remedy = f"sudo {tool} --add {python} --unblockapp {python}"
    elif state.kind == "nftables":
        remedy = f"sudo nft insert rule {state.chain} ip saddr {{ {', '.join(peers)} }} accept"
    else:
        remedy = "; ".join(f"sudo iptables -I INPUT -s {peer} -j ACCEPT" for peer in peers)
    blocked = sorted(source for (source, target), link in evidence.links.items() if target == name and link.error)
    effect = f"nothing arrives from {', '.join(blocked)}" if blocked else "the test's ports got through"
    findings.add("fail" if blocked else "warn", name, f"{detail}; {effect}", evidence.on(name, remedy) + note)
