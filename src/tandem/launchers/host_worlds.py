"""What MLX's backends need in the environment of ranks on several machines: variables, and content of files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.errors import LayoutError
from tandem.launchers.base import World

Devices = list[str | list[str] | None]
"""A rank's RDMA devices towards every rank of its group, null for itself."""

JACCL_MESH = 8
"""Most ranks of a jaccl mesh."""


@dataclass(frozen=True)
class HostWorld(World):
    """A group of ranks; variables and files by the rank's number in it."""

    backend: str
    environment: list[dict[str, str]]
    contents: list[dict[str, str]] = field(default_factory=list)

    def variables(self, index: int) -> dict[str, str]:
        """Environment of the group's rank `index`."""
        return self.environment[index]

    def files(self, index: int) -> dict[str, str]:
        """Content of files that variables of the same names must point to, on the machine of rank `index`."""
        return self.contents[index] if self.contents else {}


def ring_world(listeners: Sequence[Sequence[str]]) -> HostWorld:
    """`listeners` are the addresses (IP:port) of each rank; several make as many connections to each neighbour."""
    content = json.dumps([list(one) for one in listeners])
    return HostWorld("ring", [{"MLX_RANK": str(i)} for i in range(len(listeners))],
                     [{"MLX_HOSTFILE": content}] * len(listeners))


def jaccl_world(backend: str, hosts: Sequence[str], devices: Sequence[Devices], coordinator: str) -> HostWorld:
    """RDMA over Thunderbolt. `hosts` are names for messages, `coordinator` is IP:port of the first rank.

    Raises LayoutError when a device is missing that a mesh (jaccl) or ring (jaccl-ring) needs.
    """
    size = len(hosts)
    if backend == "jaccl" and size > JACCL_MESH:
        raise LayoutError(f"--backend jaccl connects at most {JACCL_MESH} ranks with one another, this group has "
                          f"{size}; use jaccl-ring, or more stages", param="backend")
    for i, row in enumerate(devices):
        if len(row) != size:
            raise LayoutError(f"--backend {backend}: the hostfile lists {len(row)} RDMA devices for {hosts[i]}, and "
                              f"the group has {size} ranks; `rdma` needs one entry for each host", param="backend")
        needed = ((i - 1) % size, (i + 1) % size) if backend == "jaccl-ring" else range(size)
        for j in needed:
            if j != i and not row[j]:
                raise LayoutError(f"--backend {backend}: the hostfile lists no RDMA device of {hosts[i]} for "
                                  f"{hosts[j]}; complete `rdma` of {hosts[i]}, or use ring", param="backend")
    ring = {"MLX_JACCL_RING": "1"} if backend == "jaccl-ring" else {}
    return HostWorld(backend, [{"MLX_RANK": str(i), "MLX_JACCL_COORDINATOR": coordinator, **ring}
                               for i in range(size)],
                     [{"MLX_IBV_DEVICES": json.dumps([list(row) for row in devices])}] * size)


def nccl_world(size: int, coordinator: str) -> HostWorld:
    """NCCL; `coordinator` is IP:port of the first rank."""
    host, _, port = coordinator.rpartition(":")
    return HostWorld("nccl", [{"MLX_RANK": str(i), "MLX_WORLD_SIZE": str(size), "NCCL_HOST_IP": host,
                               "NCCL_PORT": port} for i in range(size)])


def any_world(ring: HostWorld, rdma: HostWorld | None) -> HostWorld:
    """Everything that MLX may choose from by itself."""
    worlds = [ring] if rdma is None else [rdma, ring]
    size = range(len(ring.environment))
    return HostWorld("any", [{k: v for one in worlds for k, v in one.variables(i).items()} for i in size],
                     [{k: v for one in worlds for k, v in one.files(i).items()} for i in size])
