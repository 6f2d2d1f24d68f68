"""What MLX's backends need in the environment of the ranks of one group, for groups on this machine."""

from __future__ import annotations

import glob
import json
import os
import socket
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

from tandem.env import variable
from tandem.errors import LayoutError


class World:
    """One group of ranks; made anew, with fresh ports, for each gang."""

    def variables(self, index: int) -> dict[str, str]:
        """Environment of the group's rank `index`."""
        raise NotImplementedError

    def remove(self) -> None:
        """Delete what it keeps on disk."""


class RingWorld(World):
    """An `MLX_HOSTFILE` on loopback ports that nobody uses."""

    def __init__(self, size: int) -> None:
        handle, name = tempfile.mkstemp(prefix="tandem-ring-", suffix=".json")
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
    if backend == "ring":
        return RingWorld(size)
    if backend == "nccl":
        return NcclWorld(size, first_rank)
    raise LayoutError(f"--backend {backend} needs a host file that names each host's devices, which the local launcher "
                      "has not; use ring (or nccl on GPUs)", param="backend")


def visible_gpus() -> list[str]:
    """NVIDIA GPUs that processes started here may use, in CUDA's terms; empty on machines without."""
    named = variable("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return named.split(",")
    return [str(i) for i in range(len(glob.glob("/dev/nvidia[0-9]*")))]


def free_ports(count: int) -> list[int]:
    """Ports on loopback that were free a moment ago, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
