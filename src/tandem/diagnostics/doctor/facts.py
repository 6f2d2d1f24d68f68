"""Gathering facts on the probed machine. Command outputs are sent unparsed; `parsing` reads them in the doctor."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import socket
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from tandem.diagnostics.doctor.model_files import look_at
from tandem.diagnostics.doctor.probe_messages import Facts, GatherFacts
from tandem.env import machine_memory, variables
from tandem.errors import UsageError
from tandem.launchers.host_facts import chip, installed
from tandem.launchers.process_groups import visible_gpus
from tandem.processes.device import this_device
from tandem.system.origin import build
from tandem.system.ports import is_shadowed
from tandem.system.tools import output_of

FIREWALL = "/usr/libexec/ApplicationFirewall/socketfilterfw"
COMMANDS = {
    "Darwin": {
        "ifconfig": ["ifconfig", "-a"],
        "routes": ["netstat", "-rn", "-f", "inet"],
        "hardware_ports": ["networksetup", "-listallhardwareports"],
        "rdma_ctl": ["rdma_ctl", "status"],
        "ibv_devices": ["ibv_devices"],
        "ibv_devinfo": ["ibv_devinfo"],
        "firewall": [FIREWALL, "--getglobalstate"],
        "listeners": ["lsof", "-nP", "-iTCP", "-sTCP:LISTEN"],
        "os_version": ["sw_vers", "-productVersion"],
        "os_build": ["sw_vers", "-buildVersion"],
        "memory_pages": ["vm_stat"],
        "thunderbolt": ["system_profiler", "SPThunderboltDataType", "-json"],
        "power": ["pmset", "-g"],
        "battery": ["pmset", "-g", "batt"],
        "translated": ["sysctl", "-n", "sysctl.proc_translated"],
    },
    "Linux": {
        "os_version": ["uname", "-r"],
        "addresses": ["ip", "-j", "addr"],
        "routes": ["ip", "-j", "route"],
        "rdma_ctl": ["rdma_ctl", "status"],
        "ibv_devices": ["ibv_devices"],
        "ibv_devinfo": ["ibv_devinfo"],
        "nft": ["nft", "-j", "list", "ruleset"],
        "iptables": ["iptables-save"],
        "listeners": ["ss", "-ltnpH"],
    },
}


def gather(request: GatherFacts) -> Facts:
    """Return the facts of this machine."""
    system = platform.system()
    outputs = {name: text for name, words in COMMANDS.get(system, {}).items() if (text := output_of(words)) is not None}
    hostname = socket.gethostname()
    memory = machine_memory()
    available = memory
    if system == "Linux":
        memory, available = _meminfo(memory)
    return Facts(
        hostname=hostname,
        hostname_addresses=_resolve(hostname),
        system=system,
        executable=sys.executable,
        program=os.path.realpath(sys.executable),
        build=build(),
        root=os.geteuid() == 0,
        chip=chip() or platform.machine(),
        memory_bytes=memory,
        available_bytes=available,
        mlx_bytes=_mlx_bytes(system),
        versions=installed(),
        outputs=outputs,
        variables={name: value for name, value in variables().items() if name.startswith("MLX_")},
        busy_ports=[port for port in request.ports if _is_busy(port)],
        model=look_at(request.model, full_hash=request.full_hash, home=request.home) if request.model else None,
        mlx_tag=_mlx_tag(),
    )


def _mlx_tag() -> str:
    """Return the platform tag of the installed wheel of mlx-metal; empty without one, such as for a build from source."""
    with contextlib.suppress(PackageNotFoundError):
        for line in (distribution("mlx-metal").read_text("WHEEL") or "").splitlines():
            if line.startswith("Tag: "):
                return line.rpartition("-")[2]
    return ""


def _resolve(name: str) -> list[str]:
    """Return the addresses of a hostname, gethostbyname's (which most programs use) first; empty if it does not resolve."""
    try:
        first = socket.gethostbyname(name)
        return list(dict.fromkeys([first, *(str(entry[4][0]) for entry in socket.getaddrinfo(name, None))]))
    except OSError:
        return []


def _meminfo(installed: int) -> tuple[int, int]:
    """Return Linux's total and available memory in bytes."""
    fields = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields[name] = int(value.split()[0]) * 1024
    total = fields.get("MemTotal", installed)
    return total, fields.get("MemAvailable", total)


def _mlx_bytes(system: str) -> int | None:
    """Return the bytes that MLX may use on the GPU; None without a GPU."""
    if system != "Darwin" and not visible_gpus():
        return None
    try:
        device = this_device()
    except UsageError:
        return None
    return device.memory_bytes if device.gpu else None


def _is_busy(port: int) -> bool:
    if is_shadowed("", port):
        return True
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT counts as free
        try:
            listener.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
        return False
