"""MLX process groups: variables and files that MLX's backends need in the ranks' environment."""

from __future__ import annotations

import glob
import json
import random
import re
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import combinations, takewhile
from pathlib import Path

from tandem.env import variables
from tandem.errors import LayoutError
from tandem.launchers.base import ProcessGroup
from tandem.processes.leftovers import temporary_prefix

BASE_PORT = 32323
"""First port of MLX's groups in the documentation of MLX and vllm-metal, hence in firewalls' rules."""
LOWEST, HIGHEST = 20000, 61000
"""Lower bound, above the ports of most services; first port above Linux's default ephemeral range."""
OTHERS_FIRST = 29600
"""First of Tandem's fixed ports. Ephemeral ports are above by default (Linux: from 32768, macOS: from 49152)."""
ENOUGH = 1000
ATTEMPTS = 20
JACCL_MESH = 8
"""Largest number of ranks in a jaccl mesh."""
Devices = list[str | list[str] | None]
"""RDMA devices of a rank towards every rank of its group, None for itself."""
_GPU = re.compile(r"[0-9]+|(GPU|MIG)-.+")
"""Pattern of a GPU's index or UUID."""


def make_process_group(backend: str, size: int, first_rank: int) -> ProcessGroup:
    """Make a group of `size` local ranks that starts at the rank group's rank `first_rank`; ranks take GPUs in order. Raises
    LayoutError."""
    if backend in ("ring", "any"):
        return written_process_group(ring_process_group([[f"127.0.0.1:{port}"] for port in free_ports(size)]))
    if backend == "nccl":
        gpus = visible_gpus()
        if len(gpus) < first_rank + size:
            raise LayoutError(
                f"the layout needs {first_rank + size} GPUs, there are {len(gpus)}; use fewer ranks, or --backend ring",
                param="backend",
            )
        group = nccl_process_group(size, f"127.0.0.1:{free_ports(1)[0]}")
        owned = zip(group.environment, gpus[first_rank:], strict=False)
        return replace(group, environment=[{**own, "CUDA_VISIBLE_DEVICES": gpu} for own, gpu in owned])
    if backend == "mpi":
        raise LayoutError(
            "--backend mpi: ranks that mpirun did not start have no MPI; use ring, or start them with "
            "`mlx.launch --backend mpi -- tandem rank ...` for a head with --launcher manual",
            param="backend",
        )
    raise LayoutError(
        f"--backend {backend} needs each host's RDMA devices: give --hostfile with `rdma`; on one "
        "machine use ring (or nccl on GPUs)",
        param="backend",
    )


def ring_process_group(listeners: Sequence[Sequence[str]]) -> ProcessGroup:
    """Make a ring. `listeners` has the IP:port addresses of each rank; each additional address adds a connection to both
    neighbours."""
    content = json.dumps([list(addresses) for addresses in listeners])
    return ProcessGroup(
        "ring", [{"MLX_RANK": str(i)} for i in range(len(listeners))], [{"MLX_HOSTFILE": content}] * len(listeners)
    )


def jaccl_process_group(backend: str, hosts: Sequence[str], devices: Sequence[Devices], coordinator: str) -> ProcessGroup:
    """Make a group over RDMA (Thunderbolt). `hosts` are names for messages, `coordinator` is IP:port of the first rank.

    Raises LayoutError for a missing or one-sided device in the mesh (jaccl) or ring (jaccl-ring), one of a host for itself, or a
    mesh of over 8 ranks.
    """
    if trouble := _device_trouble(backend, hosts, devices):
        raise LayoutError(f"--backend {backend}: {trouble}", param="backend")
    size, ring = len(hosts), {"MLX_JACCL_RING": "1"} if backend == "jaccl-ring" else {}
    return ProcessGroup(
        backend,
        [{"MLX_RANK": str(i), "MLX_JACCL_COORDINATOR": coordinator, **ring} for i in range(size)],
        [{"MLX_IBV_DEVICES": json.dumps([list(row) for row in devices])}] * size,
    )


def _device_trouble(backend: str, hosts: Sequence[str], devices: Sequence[Devices]) -> str:
    """Return the first error in a group's devices; empty if there is none."""
    size = len(hosts)
    if backend == "jaccl" and size > JACCL_MESH:
        return f"connects at most {JACCL_MESH} ranks with one another, this group has {size}; use jaccl-ring, or more stages"
    for i, row in enumerate(devices):
        if len(row) != size:
            lists = f"the hostfile lists {len(row)} RDMA devices for {hosts[i]}, and the group has {size} ranks"
            return f"{lists}; `rdma` needs one entry for each host"
        if row[i] is not None:
            return f"`rdma` of {hosts[i]} lists {row[i]} for itself; put null there"
        needed = ((i - 1) % size, (i + 1) % size) if backend == "jaccl-ring" else range(size)
        if (lacking := next((j for j in needed if j != i and not row[j]), None)) is not None:
            lists = f"the hostfile lists no RDMA device of {hosts[i]} for {hosts[lacking]}"
            return f"{lists}; complete `rdma` of {hosts[i]}, or use ring"
    wires = [[len(cell) if isinstance(cell, list) else bool(cell) for cell in row] for row in devices]
    for i, j in combinations(range(size), 2):
        if wires[i][j] != wires[j][i]:
            lists = f"`rdma` of {hosts[i]} lists {wires[i][j]:d} devices for {hosts[j]}"
            return f"{lists}, and that of {hosts[j]} {wires[j][i]:d} for {hosts[i]}; list one for each cable at both ends"
    return ""


def nccl_process_group(size: int, coordinator: str) -> ProcessGroup:
    """Make a group over NCCL. `coordinator` is IP:port of the first rank."""
    host, _, port = coordinator.rpartition(":")
    return ProcessGroup(
        "nccl", [{"MLX_RANK": str(i), "MLX_WORLD_SIZE": str(size), "NCCL_HOST_IP": host, "NCCL_PORT": port} for i in range(size)]
    )


def any_process_group(ring: ProcessGroup, rdma: ProcessGroup | None) -> ProcessGroup:
    """Combine a ring and an optional RDMA group; MLX chooses between them."""
    process_groups = [ring] if rdma is None else [rdma, ring]
    size = range(len(ring.environment))
    return ProcessGroup(
        "any",
        [{k: v for process_group in process_groups for k, v in process_group.variables(i).items()} for i in size],
        [{k: v for process_group in process_groups for k, v in process_group.files(i).items()} for i in size],
    )


def written_process_group(process_group: ProcessGroup) -> ProcessGroup:
    """Write a group's files to a temporary directory, which `remove` deletes; return the group with their paths."""
    directory = Path(tempfile.mkdtemp(prefix=temporary_prefix(process_group.backend)))
    environment = []
    for index, own in enumerate(process_group.environment):
        (directory / str(index)).mkdir()
        environment.append({**own, **written_files(directory / str(index), process_group.files(index))})
    return replace(process_group, environment=environment, directory=directory)


def written_files(directory: Path, files: Mapping[str, str]) -> dict[str, str]:
    """Write each content to a file named like its variable; return the variables with the files' paths."""
    for name, content in files.items():
        (directory / name).write_text(content)
    return {name: str(directory / name) for name in files}


def visible_gpus() -> list[str]:
    """Return the NVIDIA GPUs that child processes may use, as indices or UUIDs for CUDA_VISIBLE_DEVICES."""
    named = variables().get("CUDA_VISIBLE_DEVICES")  # empty: no GPU
    if named is not None:
        # CUDA ignores everything from the first invalid entry on, such as -1.
        return list(takewhile(_GPU.fullmatch, map(str.strip, named.split(","))))
    return [str(i) for i in range(len(glob.glob("/dev/nvidia[0-9]*")))]


def free_ports(count: int, address: str = "127.0.0.1", wanted: Sequence[int] = ()) -> list[int]:
    """Return `count` distinct ports of `address` that are free now; `wanted` if all of those are.

    The ports are used seconds later, so the system's ephemeral range is avoided. Raises OSError if `address` is not this
    machine's.
    """
    if len(wanted) == count:
        with suppress(OSError):
            return _bound(address, wanted)
    for _ in range(ATTEMPTS):
        with suppress(OSError):  # one of the ports is taken
            return _bound(address, random.SystemRandom().sample(_lasting(), count))
    return _bound(address, [0] * count)


def _lasting() -> range:
    """Return a range of ports outside the system's ephemeral range."""
    first = OTHERS_FIRST
    with suppress(OSError, ValueError):
        first = min(first, int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]))
    return range(LOWEST, first) if first - LOWEST >= ENOUGH else range(HIGHEST, 65536)


def _bound(address: str, ports: Sequence[int]) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in ports]
        for listener, port in zip(sockets, ports, strict=True):
            if port:  # the last rank group may have just released the port
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
        return [int(listener.getsockname()[1]) for listener in sockets]
