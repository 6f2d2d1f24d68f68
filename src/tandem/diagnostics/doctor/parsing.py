"""Parsers for the output of macOS and Linux commands. Pure. Unexpected output is skipped rather than guessed."""

from __future__ import annotations

import ipaddress
import json
import re
from dataclasses import dataclass, field, replace

from tandem.diagnostics.doctor.probe_messages import Facts
from tandem.json_types import JsonObject
from tandem.launchers.hostfile import is_ipv4
from tandem.system.privacy import inet_addresses


@dataclass(frozen=True)
class Interface:
    """A network interface that is up."""

    name: str
    networks: list[ipaddress.IPv4Interface]
    """IPv4 addresses with their prefix lengths."""
    kind: str = ""
    """One of `loopback`, `wifi`, `thunderbolt`, `ethernet`; empty if unknown."""
    members: list[str] = field(default_factory=list)
    """Names of the interfaces in a bridge."""
    point_to_point: bool = False
    """True for a subnet of at most four addresses (/30), as for a cable between two machines."""


@dataclass(frozen=True)
class DefaultGateway:
    """A default route's gateway and interface."""

    address: ipaddress.IPv4Address
    interface: str


@dataclass(frozen=True)
class FirewallState:
    """State of a firewall for incoming packets. `blocks`: True if it drops some, None if it could not be read."""

    kind: str
    blocks: bool | None
    detail: str = ""
    chain: str = ""
    """Family, table and chain of nftables for an additional rule."""


def interfaces(facts: Facts) -> list[Interface]:
    """Return a machine's interfaces that are up, from `ip -j addr` or `ifconfig -a`."""
    if facts.system == "Darwin":
        kinds = _hardware_kinds(facts.outputs.get("hardware_ports", ""))
        return [
            replace(interface, kind=interface.kind or kinds.get(interface.name, ""), point_to_point=_is_pair(interface.networks))
            for interface in _ifconfig(facts.outputs.get("ifconfig", ""))
        ]
    return [_linux_interface(entry) for entry in _json_list(facts.outputs.get("addresses", "")) if "UP" in entry.get("flags", [])]


def gateways(facts: Facts) -> list[DefaultGateway]:
    """Return a machine's default gateways, from `ip -j route` or `netstat -rn`."""
    if facts.system != "Darwin":
        routes = _json_list(facts.outputs.get("routes", ""))
        return [
            DefaultGateway(ipaddress.IPv4Address(route["gateway"]), route.get("dev", ""))
            for route in routes
            if route.get("dst") == "default" and is_ipv4(route.get("gateway", ""))
        ]
    defaults = []
    for line in facts.outputs.get("routes", "").splitlines():
        words = line.split()
        if len(words) >= 4 and words[0] == "default" and is_ipv4(words[1]):
            defaults.append(DefaultGateway(ipaddress.IPv4Address(words[1]), words[3]))
    return defaults


def rdma_enabled(text: str | None) -> bool | None:
    """Return whether `rdma_ctl status` reports RDMA as enabled; None if unclear."""
    if text is None:
        return None
    said = text.lower()
    return False if "disabled" in said else True if "enabled" in said else None


def rdma_devices(text: str | None) -> list[str]:
    """Return the devices that `ibv_devices` lists."""
    lines = (text or "").splitlines()
    rule = next((i for i, line in enumerate(lines) if line.strip().startswith("---")), None)
    return [] if rule is None else [line.split()[0] for line in lines[rule + 1 :] if line.split()]


def rdma_port_states(text: str | None) -> dict[str, str]:
    """Return device -> port state (PORT_ACTIVE, PORT_DOWN) from `ibv_devinfo`."""
    states: dict[str, str] = {}
    device = None
    for line in (text or "").splitlines():
        if match := re.match(r"\s*hca_id:\s*(\S+)", line):
            device = match[1]
        elif device and (match := re.match(r"\s*state:\s*(\S+)", line)):
            states.setdefault(device, match[1])
    return states


def thunderbolt_ports(text: str | None) -> tuple[int, list[str]]:
    """Return the number of ports and a description of each cable, from `system_profiler SPThunderboltDataType -json`."""
    try:
        ports = [
            port
            for bus in json.loads(text or "{}")["SPThunderboltDataType"]
            for key, port in bus.items()
            if key.startswith("receptacle_")
        ]
        return len(ports), [
            f"port {port['receptacle_id_key']} at {port['current_speed_key']}"
            for port in ports
            if "no_devices" not in port["receptacle_status_key"]
        ]
    except (ValueError, AttributeError, TypeError, KeyError):
        return 0, []


def firewalls(facts: Facts) -> list[FirewallState]:
    """Return the state of a machine's firewalls; empty if none could be read."""
    if facts.system == "Darwin":
        return _application_firewall(facts.outputs.get("firewall"))
    states = []
    if (text := facts.outputs.get("nft")) is not None:
        states.append(_nft(text, facts.root))
    if (text := facts.outputs.get("iptables")) is not None and not any(state.blocks for state in states):
        states.append(_iptables(text, facts.root))
    return states


def port_owner(facts: Facts, port: int) -> str | None:
    """Return the program and process id that listen on a port, from `lsof` or `ss`; None if unknown."""
    for line in facts.outputs.get("listeners", "").splitlines():
        if facts.system == "Darwin":
            words = line.split()
            if len(words) >= 9 and any(word.endswith(f":{port}") for word in words[8:]):
                return f"{words[0]} (process {words[1]})"
        elif (match := re.search(r'users:\(\("([^"]+)",pid=(\d+)', line)) and re.search(rf":{port}\s", line):
            return f"{match[1]} (process {match[2]})"
    return None


def available_bytes(facts: Facts) -> int:
    """Return the available memory in bytes: on a Mac free, inactive, speculative and purgeable pages."""
    text = facts.outputs.get("memory_pages")
    if facts.system != "Darwin" or text is None:
        return facts.available_bytes
    size = re.search(r"page size of (\d+) bytes", text)
    pages = dict(re.findall(r"^Pages ([\w ]+):\s+(\d+)\.", text, re.MULTILINE))
    if size is None or "free" not in pages:
        return facts.available_bytes
    return int(size[1]) * sum(int(pages.get(name, 0)) for name in ("free", "inactive", "speculative", "purgeable"))


def _json_list(text: str) -> list[JsonObject]:
    try:
        entries = json.loads(text or "[]")
    except ValueError:
        return []
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _linux_interface(entry: JsonObject) -> Interface:
    name = str(entry.get("ifname", ""))
    networks = [
        ipaddress.IPv4Interface(f"{address['local']}/{address['prefixlen']}")
        for address in entry.get("addr_info", [])
        if address.get("family") == "inet"
    ]
    named = next((kind for prefix, kind in (("wl", "wifi"), ("thunderbolt", "thunderbolt")) if name.startswith(prefix)), "")
    kind = "loopback" if "LOOPBACK" in entry.get("flags", []) else named
    return Interface(name, networks, kind, point_to_point=_is_pair(networks))


def _is_pair(networks: list[ipaddress.IPv4Interface]) -> bool:
    return bool(networks) and all(network.network.prefixlen >= 30 for network in networks)


def _ifconfig(text: str) -> list[Interface]:
    there: list[Interface] = []
    for block in re.split(r"^(?=\S)", text, flags=re.MULTILINE):
        head = re.match(r"([\w.]+): flags=\w+<([^>]*)>", block)
        if head is None or "UP" not in head[2].split(",") or "status: inactive" in block:
            continue
        members = re.findall(r"^\s+member: (\S+)", block, re.MULTILINE)
        there.append(Interface(head[1], inet_addresses(block), "loopback" if "LOOPBACK" in head[2] else "", members))
    return there


def _hardware_kinds(text: str) -> dict[str, str]:
    """Return interface -> kind, from `networksetup -listallhardwareports`."""
    kinds = (("wifi", ".*(Wi-Fi|AirPort)"), ("thunderbolt", "Thunderbolt(?!.*Ethernet)"), ("ethernet", ""))
    ports = re.findall(r"Hardware Port: (.+)\nDevice: (\S+)", text)
    return {device: next(kind for kind, pattern in kinds if re.match(pattern, port)) for port, device in ports}


def _application_firewall(text: str | None) -> list[FirewallState]:
    match = re.search(r"State = (\d)", text or "")
    if match is None:
        return [FirewallState("application firewall", None, "its state could not be read")] if text is not None else []
    detail = {"0": "off", "1": "on", "2": "on, and blocks all incoming connections"}.get(match[1], f"state {match[1]}")
    return [FirewallState("application firewall", match[1] != "0", detail)]


def _nft(text: str, root: bool) -> FirewallState:
    try:
        entries = json.loads(text)["nftables"]
    except (ValueError, KeyError, TypeError):
        return FirewallState("nftables", None, "its rules could not be read" if root else "only root may see its rules")
    chains = {_chain(entry["chain"], "name"): entry["chain"] for entry in entries if "chain" in entry}
    inputs = sorted(key for key, chain in chains.items() if chain.get("hook") == "input")
    for key in inputs:
        if chains[key].get("policy") == "drop":
            return FirewallState("nftables", True, f"chain {key} drops what no rule accepts", key)
    for entry in entries:
        rule = entry.get("rule", {})
        if rule and _chain(rule, "chain") in inputs and any("drop" in part or "reject" in part for part in rule.get("expr", [])):
            key = _chain(rule, "chain")
            return FirewallState("nftables", True, f"a rule of chain {key} drops packets", key)
    return FirewallState("nftables", False, "drops nothing that comes in")


def _chain(entry: JsonObject, name: str) -> str:
    return f"{entry.get('family')} {entry.get('table')} {entry.get(name)}"


def _iptables(text: str, root: bool) -> FirewallState:
    if ":INPUT" not in text and not root:
        return FirewallState("iptables", None, "only root may see its rules")
    if re.search(r"^:INPUT DROP", text, re.MULTILINE):
        return FirewallState("iptables", True, "INPUT drops what no rule accepts")
    if re.search(r"^-A INPUT .*-j (DROP|REJECT)", text, re.MULTILINE):
        return FirewallState("iptables", True, "a rule of INPUT drops packets")
    return FirewallState("iptables", False, "drops nothing that comes in")
