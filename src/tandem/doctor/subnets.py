"""Subnets for cables between two machines, which must clash with nothing. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator

POOLS = ("10.254.0.0/16", "172.30.0.0/16", "10.200.0.0/16")
"""Private ranges that home and office routers rarely use; 192.168.0.x and 192.168.1.x are theirs."""
VIRTUAL = ("docker", "br-", "virbr", "podman", "veth", "cni", "utun", "tailscale", "vmnet", "bridge1")
"""Beginnings of interface names whose addresses are alike on many machines, and harmless."""


def free_subnets(used: Iterable[ipaddress.IPv4Network]) -> Iterator[ipaddress.IPv4Network]:
    """Subnets of two addresses that overlap none of `used`, nor one another."""
    taken = list(used)
    for pool in POOLS:
        for subnet in ipaddress.IPv4Network(pool).subnets(new_prefix=30):
            if not any(subnet.overlaps(one) for one in taken):
                yield subnet


def is_virtual(interface: str) -> bool:
    """True for interfaces of containers, virtual machines and tunnels."""
    return interface.startswith(VIRTUAL)
