"""What machine this is, in the figures that reports begin with. No mlx in this process."""

from __future__ import annotations

import os
import platform
import sys

from tandem.env import machine_memory, variables
from tandem.firstlight.check import Figures
from tandem.launchers.facts import chip, installed
from tandem.processes.device import this_device
from tandem.system.tools import output_of

VARIABLES = ("MLX_", "TANDEM_", "CUDA_", "OMP_", "OPENBLAS_", "METAL_")
"""How the names of those begin that change what is computed, and how fast."""


def facts() -> Figures:
    """The machine in figures that reports begin with."""
    device = this_device()
    set_here = sorted(name for name in variables() if name.startswith(VARIABLES))
    return {
        "system": f"{platform.system()} {_system_version()}".strip(),
        "processor": chip() or platform.machine(), "cores": os.cpu_count() or 1, "device": device.name,
        "gpu": device.gpu, "memory GiB": round(machine_memory() / 2**30, 1),
        "GPU memory GiB": round(device.memory_bytes / 2**30, 1) if device.gpu else 0.0,
        **{name: found or "missing" for name, found in installed().items() if name != "tandem"},
        "variables that are set": ", ".join(set_here)}


def _system_version() -> str:
    if sys.platform == "darwin":
        words = [(output_of(["sw_vers", f"-{name}"]) or "").strip() for name in ("productVersion", "buildVersion")]
        return " ".join(words)
    return platform.release().split("-")[0]
