"""Device that MLX uses on this machine, determined in a child process so that this process need not load MLX."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.errors import UsageError
from tandem.processes.sandbox import SandboxTask, TaskDone, run_once

MODULE = "tandem.loading.device"


@dataclass(frozen=True)
class Device:
    """Device that MLX selects on this machine."""

    gpu: bool
    memory_bytes: int
    """Memory for weights and KV, in bytes."""
    name: str
    """`CPU`, or MLX's name of the GPU."""


def this_device(device: str = "auto") -> Device:
    """Start MLX in a child process and return its device; `device` is the value of `--device`.

    Raises UsageError with MLX's last line of output when it does not start.
    """
    reply = run_once(SandboxTask(MODULE, "describe_device", {"device": device}))
    if isinstance(reply, TaskDone):
        return reply.decoded(Device)
    raise UsageError(f"MLX does not start on this machine: {reply.why}")
