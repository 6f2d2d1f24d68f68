"""Device that MLX computes on here, found by another process, so that this one need not load MLX."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.errors import UsageError
from tandem.processes.sandbox import SandboxTask, TaskDone, run_once

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
    reply = run_once(SandboxTask(MODULE, "describe_device", {"device": device}))
    if isinstance(reply, TaskDone):
        return reply.decoded(Device)
    raise UsageError(f"MLX does not start on this machine: {reply.why}")
