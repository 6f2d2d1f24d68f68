"""What MLX computes on here, asked of a process of its own, so that the one that asks need not load MLX."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

import msgspec

from tandem.env import child_environment
from tandem.errors import UsageError
from tandem.processes.interpreter import module_command
from tandem.protocol.codec import UNREADABLE

MODULE = "tandem.loading.device"


@dataclass(frozen=True)
class Device:
    """The device that MLX chooses on this machine."""

    gpu: bool
    memory_bytes: int
    """Size of the memory for weights and KV."""
    name: str
    """`CPU`, or what MLX calls the GPU."""


def this_device(device: str = "auto") -> Device:
    """Start MLX in a child process and ask it; `device` is what `--device` says.

    Raises UsageError with MLX's last words when it does not start.
    """
    done = subprocess.run(module_command(MODULE, device), capture_output=True, text=True, check=False,
                          env=child_environment())
    if done.returncode:
        words = done.stderr.strip() or f"exit code {done.returncode}"
        raise UsageError(f"MLX does not start on this machine: {words.splitlines()[-1]}")
    try:
        return msgspec.json.decode(done.stdout, type=Device)
    except UNREADABLE as error:
        raise UsageError(f"what MLX prints on this machine cannot be read: {error}") from None
