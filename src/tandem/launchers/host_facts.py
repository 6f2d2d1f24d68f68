"""Facts about a machine, which its node agent reports when joining."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from tandem.env import machine_memory, variable
from tandem.errors import ConfigError
from tandem.launchers.process_groups import visible_gpus
from tandem.protocol.hosts import HostFacts, MlxProcessGroup
from tandem.system.files import read_text
from tandem.system.identity import machine_id
from tandem.system.metal import usable_memory
from tandem.system.tools import sysctl
from tandem.version import __version__


def installed() -> dict[str, str | None]:
    """Return the installed versions of Python, Tandem, mlx and mlx-lm; None for a missing package."""
    numbers: dict[str, str | None] = {"python": platform.python_version(), "tandem": __version__}
    for name in ("mlx", "mlx-lm"):
        try:
            numbers[name] = version(name)
        except PackageNotFoundError:
            numbers[name] = None
    return numbers


def versions() -> dict[str, str]:
    """Return the versions that must agree on all machines; Python's is major.minor."""
    return {
        name: number or "missing"
        for name, number in {**installed(), "python": f"{sys.version_info.major}.{sys.version_info.minor}"}.items()
    }


def host_facts(address: str) -> HostFacts:
    """Return the facts of this machine, which others reach at `address`."""
    return HostFacts(
        name=socket.gethostname(),
        machine=machine_id(),
        pid=os.getpid(),
        address=address,
        versions=versions(),
        system=f"{platform.system()} {platform.machine()}",
        chip=chip(),
        cores=os.cpu_count() or 1,
        memory_bytes=machine_memory(),
        usable_bytes=usable_memory(),
        gpus=visible_gpus(),
    )


def chip() -> str:
    """Return the processor's name; empty if unknown."""
    if sys.platform == "darwin":
        return sysctl("machdep.cpu.brand_string")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def address_towards(host: str) -> str:
    """Return this machine's IPv4 address on the route to `host`; sends no packets. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def is_own(address: str) -> bool:
    """True if `address` belongs to this machine."""
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except (OSError, UnicodeError):  # UnicodeError: no name of a host, such as a..b
            return False
    return True


def launched_process_group() -> MlxProcessGroup:
    """Return the process group that `mlx.launch` put into the environment; empty without it. Raises ConfigError."""
    rank = variable("MLX_RANK") or variable("OMPI_COMM_WORLD_RANK")
    host, port = variable("NCCL_HOST_IP"), variable("NCCL_PORT")
    try:
        return msgspec.convert(
            {
                "rank": int(rank) if rank is not None else None,
                "hostfile": _listed("MLX_HOSTFILE"),
                "devices": _listed("MLX_IBV_DEVICES"),
                "coordinator": variable("MLX_JACCL_COORDINATOR") or "",
                "prefers_ring": variable("MLX_JACCL_RING") is not None,
                "nccl": f"{host}:{port}" if host and port else "",
                "mpi": variable("OMPI_COMM_WORLD_SIZE") is not None,
            },
            MlxProcessGroup,
        )
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"MLX_RANK is {str(rank)[:20]}, but what comes with it cannot be read: {error}; start with mlx.launch, or unset it"
        ) from error


def _listed(name: str) -> object:
    """Return the JSON list (one entry per rank) in the file that a variable names; empty for an empty or unset one."""
    path = variable(name)
    text = read_text(path).strip() if path else ""
    return json.loads(text) if text else []
