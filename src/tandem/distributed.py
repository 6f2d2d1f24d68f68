"""Distributed programs under vllm-mlx's names: `launch_distributed` starts one, `MLXCommunicator` is for its ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from tandem.cli.main import main
from tandem.comm.group import join_group
from tandem.errors import LayoutError, TransportError
from tandem.launchers.process_groups import BASE_PORT, free_ports
from tandem.processes.interpreter import code_command
from tandem.protocol.codec import UNREADABLE, Decoder, encode
from tandem.protocol.step import StepPlan

__all__ = ["MLXCommunicator", "StepPlan", "launch_distributed"]

SERVERS = ("tandem.distributed", "vllm_mlx.distributed_launcher")
"""Names of the module that serves a model."""


def launch_distributed(script_or_module: str, args: Sequence[str] = (), backend: str = "", hostfile: str = "") -> None:
    """Run a program on all hosts of a hostfile, and wait until it ends on all of them. Call in the main thread.

    A name of `SERVERS` serves a model: `args` are vllm-mlx's, and there is a tensor-parallel rank for each host. Any other
    module, or a script whose path ends in `.py`, runs under `mlx.launch`, from the same paths on all hosts. Without `backend` it
    is that of the hostfile, without `hostfile` only this machine is used.

    Raises SystemExit with the exit code unless it is 0; 2 is a wrong argument or hostfile.
    """
    options = [word for name, value in (("--backend", backend), ("--hostfile", hostfile)) if value for word in (name, value)]
    if script_or_module in SERVERS:
        code = main(["distributed_launcher", *options, "--", *args])
    else:
        [port] = free_ports(1, wanted=[BASE_PORT])
        program = [script_or_module] if script_or_module.endswith(".py") else ["-m", script_or_module]
        code = _mlx_launch([*options, "--starting-port", str(port), "--", sys.executable, *program, *args])
    if code:
        raise SystemExit(code)


def _mlx_launch(words: Sequence[str]) -> int:
    """Run `mlx.launch` and return its exit code; 1 when it reports a failed rank, since its own code is 0 then."""
    command = code_command("from mlx._distributed_utils.launch import main; main()", *words)
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # mlx.launch polls standard input without a pause once it is closed.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    failed = False
    try:
        for line in process.stderr:
            sys.stderr.write(line)
            failed |= "[WARN] Node with rank" in line and "exited with code" in line
        return process.wait() or int(failed)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        signal.signal(signal.SIGTERM, before)


class MLXCommunicator:
    """Broadcasts among the ranks of an MLX group: sums over the ranks, to which all but `src` contribute zeros.

    Used by one thread, with the same calls in the same order on all ranks. Each call waits for all ranks, without a timeout.
    """

    def __init__(self, backend: str = "any", group: mx.distributed.Group | None = None) -> None:
        """Join the group that `mlx.launch` has prepared, or one of this process alone where no launcher has; `group` replaces
        it. `backend` as in `join_group`. Raises LayoutError."""
        try:
            self.group = group or join_group(backend)
        except (RuntimeError, ValueError) as error:
            raise LayoutError(
                f"backend {backend!r}: {error}; start this program with launch_distributed or mlx.launch"
            ) from error
        self.rank, self.world_size = self.group.rank(), self.group.size()

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.broadcast_int(0)

    def broadcast_int(self, value: int | None, src: int = 0) -> int:
        """Return the integer (64 bits, signed) of rank `src`; those of other ranks are ignored."""
        return int(np.array(self.broadcast_tensor(mx.array(value or 0, mx.int64), src)))

    def broadcast_tensor(self, tensor: mx.array, src: int = 0) -> mx.array:
        """Return the array of rank `src`. All ranks give one of the same shape and type. Raises LayoutError."""
        if not 0 <= src < self.world_size:
            raise LayoutError(f"src {src}: the group has ranks 0 to {self.world_size - 1}; give one of them")
        result = mx.distributed.all_sum(tensor if self.rank == src else mx.zeros_like(tensor), group=self.group)
        mx.eval(result)
        return result

    def broadcast_object(self, obj: object, src: int = 0, kind: object = Any) -> Any:
        """Return the value of rank `src`, through MessagePack: numbers, text, bytes, lists, dicts and msgspec structs.

        `kind` is the type to decode, such as a struct; without it tuples come as lists, and structs as dicts or lists. Raises
        TransportError on all ranks for another value.
        """
        try:
            data, problem = encode(obj) if self.rank == src else b"", ""
        except (TypeError, OverflowError, *UNREADABLE) as error:
            data, problem = b"", f" ({error})"
        size = self.broadcast_int(len(data), src)
        if not size:
            raise TransportError(f"rank {src}: the object is not of numbers, text, bytes, lists, dicts or structs{problem}")
        own = mx.array(np.frombuffer(data, np.uint8)) if data else mx.zeros(size, mx.uint8)
        return Decoder[Any](kind).decode(np.array(self.broadcast_tensor(own, src)).data)

    def broadcast_step_plan(self, plan: StepPlan | None) -> None:
        """Send a plan from rank 0 to the ranks that wait in `receive_step_plan`; None tells them that no more follow."""
        if self.rank:
            raise LayoutError(f"rank {self.rank} broadcasts a step plan: rank 0 does; call receive_step_plan")
        self.broadcast_object(plan)

    def receive_step_plan(self) -> StepPlan | None:
        """Wait for rank 0's next plan and return it; None if no more follow."""
        if not self.rank:
            raise LayoutError("rank 0 receives a step plan: other ranks do; call broadcast_step_plan")
        plan: StepPlan | None = self.broadcast_object(None, kind=StepPlan | None)
        return plan

    def broadcast_tokens(self, token_ids: mx.array | Sequence[int], src: int = 0) -> Any:
        """Return the token ids of rank `src`: an array if all ranks give arrays of the same shape and type, a list if all give
        lists, of any length."""
        if isinstance(token_ids, mx.array):
            return self.broadcast_tensor(token_ids, src)
        return self.broadcast_object(list(token_ids), src, kind=list[int])
