"""What MLX's backends need in the environment of the ranks of one group, for groups on this machine."""

from __future__ import annotations

import glob
import json
import os
import random
import re
import socket
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import takewhile
from pathlib import Path

from tandem.env import variables
from tandem.errors import LayoutError
from tandem.launchers.base import World
from tandem.processes.leftovers import temporary_prefix

LOWEST, HIGHEST = 20000, 61000
"""Below it stand the ports of many services; from it on Linux gives none to outgoing connections, as it comes."""
OTHERS_FIRST = 29600
"""Tandem's own fixed ports begin here, and those that systems give to outgoing connections are above (Linux: from 32768
on, macOS: from 49152 on), unless their settings say otherwise."""
ENOUGH = 1000
ATTEMPTS = 20
_GPU = re.compile(r"[0-9]+|(GPU|MIG)-.+")
"""A GPU by its number or its UUID."""


class RingWorld(World):
    """An `MLX_HOSTFILE` on loopback ports that nobody uses."""

    backend = "ring"

    def __init__(self, size: int) -> None:
        handle, name = tempfile.mkstemp(prefix=temporary_prefix("ring"), suffix=".json")
        with os.fdopen(handle, "w") as file:
            json.dump([[f"127.0.0.1:{port}"] for port in free_ports(size)], file)
        self._path = Path(name)

    def variables(self, index: int) -> dict[str, str]:
        """The host file and the rank."""
        return {"MLX_HOSTFILE": str(self._path), "MLX_RANK": str(index)}

    def remove(self) -> None:
        """Delete the host file."""
        with suppress(FileNotFoundError):
            self._path.unlink()


class NcclWorld(World):
    """NCCL over the GPUs of this machine, one for each rank from `first_gpu` on."""

    backend = "nccl"

    def __init__(self, size: int, first_gpu: int) -> None:
        """Ranks take GPUs in order, `first_gpu` being that of the first. Raises LayoutError when there are too few."""
        self._size = size
        gpus = visible_gpus()
        if len(gpus) < first_gpu + size:
            raise LayoutError(f"the layout needs {first_gpu + size} GPUs, there are {len(gpus)}; use fewer ranks, or "
                              "--backend ring", param="backend")
        self._gpus = gpus[first_gpu:first_gpu + size]
        [self._port] = free_ports(1)

    def variables(self, index: int) -> dict[str, str]:
        """Rank, size, meeting point and GPU."""
        return {"MLX_RANK": str(index), "MLX_WORLD_SIZE": str(self._size), "NCCL_HOST_IP": "127.0.0.1",
                "NCCL_PORT": str(self._port), "CUDA_VISIBLE_DEVICES": self._gpus[index]}


def make_world(backend: str, size: int, first_rank: int) -> World:
    """The group of `size` ranks that starts at the gang's rank `first_rank`. Raises LayoutError."""
    if backend in ("ring", "any"):
        return RingWorld(size)
    if backend == "nccl":
        return NcclWorld(size, first_rank)
    if backend == "mpi":
        raise LayoutError("--backend mpi: ranks that mpirun did not start have no MPI; use ring, or start them with "
                          "`mlx.launch --backend mpi -- tandem rank ...` for a head with --launcher manual",
                          param="backend")
    raise LayoutError(f"--backend {backend} needs each host's RDMA devices: give --hostfile with `rdma`; on one "
                      "machine use ring (or nccl on GPUs)", param="backend")


def visible_gpus() -> list[str]:
    """NVIDIA GPUs that processes started here may use, in CUDA's terms; empty on machines without."""
    named = variables().get("CUDA_VISIBLE_DEVICES")  # empty: none
    if named is not None:
        # CUDA takes those before the first that names none, such as -1.
        return list(takewhile(_GPU.fullmatch, map(str.strip, named.split(","))))
    return [str(i) for i in range(len(glob.glob("/dev/nvidia[0-9]*")))]


def free_ports(count: int, address: str = "127.0.0.1", wanted: Sequence[int] = ()) -> list[int]:
    """Ports of `address` that were free a moment ago, all different; `wanted` if all of them are.

    They are used seconds later, so they are none of those that the system gives to outgoing connections. Raises OSError
    when this machine does not have the address.
    """
    if len(wanted) == count:
        with suppress(OSError):
            return _bound(address, wanted)
    for _ in range(ATTEMPTS):
        with suppress(OSError):  # somebody has one of them
            return _bound(address, random.SystemRandom().sample(_lasting(), count))
    return _bound(address, [0] * count)


def _lasting() -> range:
    """Ports that the system gives to nobody who does not ask for them by number."""
    first = OTHERS_FIRST
    with suppress(OSError, ValueError):
        first = min(first, int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]))
    return range(LOWEST, first) if first - LOWEST >= ENOUGH else range(HIGHEST, 65536)


def _bound(address: str, ports: Sequence[int]) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in ports]
        for one, port in zip(sockets, ports, strict=True):
            if port:  # one that a gang has just given up
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((address, port))
        return [int(one.getsockname()[1]) for one in sockets]
