"""Choice of the addresses by which machines reach each other, and of subnets for cables without one. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tandem.diagnostics.doctor.parsing import Interface
from tandem.errors import ConfigError, LayoutError
from tandem.json_types import JsonObject

RANK = {"thunderbolt": 0, "ethernet": 1, "": 1, "wifi": 2}
"""Preference of interface kinds; lower is faster."""
POOLS = ("10.254.0.0/16", "172.30.0.0/16", "10.200.0.0/16")
"""Private ranges that home and office routers rarely use, unlike 192.168.0.x and 192.168.1.x."""
VIRTUAL = ("docker", "br-", "virbr", "podman", "veth", "cni", "utun", "tailscale", "vmnet", "bridge1")
"""Prefixes of virtual interfaces, whose addresses may repeat across machines without harm."""


Cable = list[tuple[str, str]]
"""A cable's two ends, each a host and its interface."""


def parse_cable(text: str, hosts: Sequence[str]) -> Cable:
    """Parse HOST:INTERFACE=HOST:INTERFACE. Raises ConfigError."""
    ends = []
    for end in text.split("="):
        host, _, interface = end.rpartition(":")
        if host not in hosts or not interface:
            raise ConfigError(
                f"--cable {text}: write HOST:INTERFACE=HOST:INTERFACE with hosts of {', '.join(hosts)}", param="cable"
            )
        ends.append((host, interface))
    if len(ends) != 2 or ends[0][0] == ends[1][0]:
        raise ConfigError(f"--cable {text}: a cable has two ends, on two hosts", param="cable")
    return ends


def address_cables(
    cables: Sequence[Cable], machines: Mapping[str, Sequence[Interface]]
) -> dict[str, list[tuple[str, ipaddress.IPv4Interface]]]:
    """Return host -> (interface, address) of each cable's end, with one free /30 subnet per cable.

    Raises ConfigError for an interface that is named twice.
    """
    named = [end for cable in cables for end in cable]
    if twice := [end for end in named if named.count(end) > 1]:
        raise ConfigError(f"--cable: {':'.join(twice[0])} is named twice", param="cable")
    fresh = free_subnets(networks_of(machines))
    addresses: dict[str, list[tuple[str, ipaddress.IPv4Interface]]] = {}
    for cable in cables:
        subnet = next(fresh)
        for number, (host, interface) in enumerate(cable, start=1):
            addresses.setdefault(host, []).append((interface, ipaddress.IPv4Interface(f"{subnet[number]}/30")))
    return addresses


def networks_of(machines: Mapping[str, Sequence[Interface]]) -> list[ipaddress.IPv4Network]:
    """Return all subnets of the machines' interfaces."""
    return [network.network for there in machines.values() for interface in there for network in interface.networks]


def choose_addresses(order: Sequence[str], machines: Mapping[str, Sequence[Interface]]) -> dict[str, str]:
    """Choose for each host an address that its predecessor in the ring of `order` can reach.

    Prefers cables if every pair of neighbours has one, else the fastest subnet that all share. Raises LayoutError without
    either.
    """
    if len(order) == 1:
        return {order[0]: "127.0.0.1"}
    cabled = {name: _cabled(machines[name], machines[order[index - 1]]) for index, name in enumerate(order)}
    if None not in cabled.values():
        return {name: str(address) for name, address in cabled.items()}
    if not (shared := _shared(order, machines)):
        raise LayoutError(
            f"there is no subnet that {', '.join(order)} all are in, nor a cable between every two "
            "neighbours; see `tandem doctor`, or name cables with --cable",
            param="hosts",
        )
    return shared[0]


def _shared(order: Sequence[str], machines: Mapping[str, Sequence[Interface]]) -> list[dict[str, str]]:
    """Return host -> address for each subnet that all hosts share, the fastest subnet first."""
    ways = {name: {network: speed for speed, network in reversed(_subnets(machines[name]))} for name in order}
    common = [network for network in ways[order[0]] if all(network in ways[name] for name in order)]
    common.sort(key=lambda network: (max(ways[name][network] for name in order), str(network)))
    every = {name: [network for there in physical(machines[name]) for network in there.networks] for name in order}
    return [{name: str(next(own.ip for own in every[name] if own.network == best)) for name in order} for best in common]


def add_meeting_addresses(hosts: Sequence[JsonObject], machines: Mapping[str, Sequence[Interface]]) -> None:
    """Add `address` to the hosts of a hosts file whose `ips` are cables, so that every host can reach every other.

    Two hosts, and those whose `ips` already share a subnet, stay as they are. Raises LayoutError where the hosts share no
    subnet.
    """
    names = [entry["ssh"] for entry in hosts]
    shared = _shared(names, machines)
    if (
        len(names) < 3
        or not all(entry.get("ips") for entry in hosts)
        or any(all(entry["ips"][0] == found[entry["ssh"]] for entry in hosts) for found in shared)
    ):
        return
    if not shared:
        raise LayoutError(
            f"{', '.join(names)} share no network beside their cables: each cable reaches one of them, "
            "and the engine must reach all; join them by Ethernet or Wi-Fi too",
            param="hosts",
        )
    for entry in hosts:
        entry["address"] = shared[0][entry["ssh"]]


def physical(there: Iterable[Interface]) -> list[Interface]:
    """Return the interfaces but for loopback and those of containers, virtual machines and tunnels."""
    return [interface for interface in there if interface.kind != "loopback" and not interface.name.startswith(VIRTUAL)]


def _subnets(there: Iterable[Interface]) -> list[tuple[int, ipaddress.IPv4Network]]:
    return [(RANK.get(interface.kind, 1), network.network) for interface in physical(there) for network in interface.networks]


def _cabled(here: Sequence[Interface], there: Sequence[Interface]) -> ipaddress.IPv4Address | None:
    """Return the address of `here` on a cable to `there`; None without a cable."""
    own, others = ([end for one in physical(ends) if one.point_to_point for end in one.networks] for ends in (here, there))
    return next((end.ip for end in own if end.network in {other.network for other in others}), None)


def readdress(commands: str, hostfile: str, used: Iterable[ipaddress.IPv4Network]) -> tuple[str, str]:
    """Replace the cables' addresses in the commands and hosts file written by mlx.distributed_config.

    That tool numbers subnets from 192.168.0.0/30, which many routers use. Each is replaced by one that overlaps nothing in
    `used`. With jaccl the hosts file has Ethernet addresses, which are kept.
    """
    fresh = free_subnets(used)
    moved: dict[ipaddress.IPv4Network, ipaddress.IPv4Network] = {}
    addresses: dict[str, str] = {}
    for old in dict.fromkeys(re.findall(r"ifconfig \S+ inet (\d+\.\d+\.\d+\.\d+) netmask", commands)):
        subnet = ipaddress.IPv4Network(f"{old}/30", strict=False)
        if subnet not in moved:
            moved[subnet] = next(fresh)
        addresses[old] = str(moved[subnet][int(ipaddress.IPv4Address(old)) - int(subnet[0])])

    def replace(text: str) -> str:
        return re.sub(r"\d+\.\d+\.\d+\.\d+", lambda match: addresses.get(match[0], match[0]), text)

    return replace(commands), hostfile if '"jaccl' in hostfile else replace(hostfile)


def free_subnets(used: Iterable[ipaddress.IPv4Network]) -> Iterator[ipaddress.IPv4Network]:
    """Generate /30 subnets that overlap neither `used` nor each other."""
    taken = list(used)
    for pool in POOLS:
        for subnet in ipaddress.IPv4Network(pool).subnets(new_prefix=30):
            if not any(subnet.overlaps(other) for other in taken):
                yield subnet
