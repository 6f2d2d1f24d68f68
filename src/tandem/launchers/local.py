"""Rank processes on this machine: all ranks of the local launcher, and the rank of a node agent."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

import msgspec

from tandem.env import child_environment
from tandem.errors import LayoutError, SpawnError
from tandem.launchers.base import Launcher, OnWait, Place, ProcessGroup
from tandem.launchers.process_groups import make_process_group, visible_gpus
from tandem.processes.child import ChildProcess
from tandem.protocol.payloads import STANDBY, WORKER_MODULE
from tandem.system.identity import machine_id

log = logging.getLogger(__name__)

END_S = 10.0
Variables = Mapping[str, str | None]


def thread_variables(count: int) -> dict[str, str]:
    """Return environment variables that limit numerical libraries to `count` threads."""
    return dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(count))


class Standbys:
    """Standby processes, at most one per rank, with the rank's environment. A rank without one starts from scratch."""

    def __init__(self, module: str = WORKER_MODULE) -> None:
        """Store the ranks' entry point `module`; only `WORKER_MODULE` supports standby processes."""
        self._module = module
        self._waiting: dict[int, tuple[ChildProcess, dict[str, str]]] = {}

    def keep(self, rank: int, spec: bytes, variables: Variables) -> None:
        """Start a standby process for `rank` with its specification, unless a fitting one exists."""
        env = child_environment(variables)
        if self._module != WORKER_MODULE or self._fits(rank, env):
            return
        self.drop(rank)
        try:
            process = ChildProcess(WORKER_MODULE, spec, env=env, name=f"rank {rank}", arguments=(STANDBY,))
            self._waiting[rank] = process, env
        except SpawnError as error:
            log.warning("No standby process for rank %d: %s", rank, error)

    def start(self, rank: int, payload: bytes, variables: Variables, late: Mapping[str, str]) -> ChildProcess:
        """Start the rank in a standby process with equal `variables`, or else in a new one. `late` are variables of this rank
        group, which imports do not read. Raises SpawnError."""
        env = child_environment(variables)
        if not self._fits(rank, env):
            self.drop(rank)
            return ChildProcess(self._module, payload, env={**env, **late}, name=f"rank {rank}")
        process, _ = self._waiting.pop(rank)
        process.tell(msgspec.json.encode(dict(late)))
        process.tell(payload)
        return process

    def drop(self, rank: int) -> None:
        """Kill the standby process of `rank`, if any."""
        if rank in self._waiting:
            process, _ = self._waiting.pop(rank)
            process.kill()
            process.wait(END_S)

    def clear(self) -> None:
        """Kill all standby processes."""
        for rank in list(self._waiting):
            self.drop(rank)

    def _fits(self, rank: int, env: dict[str, str]) -> bool:
        process, theirs = self._waiting.get(rank, (None, env))
        return process is not None and process.poll() is None and not process.stopped and theirs == env


class LocalLauncher(Launcher):
    """Starts ranks as child processes, and divides the machine's cores and GPUs among them."""

    def __init__(self, threads_per_rank: int | None, module: str = WORKER_MODULE, cuda: bool = False) -> None:
        """Store the options. `module` is the ranks' entry point (`python -m`). With `cuda` ranks use NVIDIA GPUs if there are
        any."""
        self._threads = threads_per_rank
        self._standbys = Standbys(module)
        self._cuda = cuda

    @property
    def bus_host(self) -> str:
        """Loopback, which is closed to other machines."""
        return "127.0.0.1"

    def recruit(
        self, count: int, deadline: float, on_wait: OnWait | None = None, slots: Sequence[int] | None = None
    ) -> list[Place]:
        """Return places on this machine; there is no limit to their number."""
        count = count if slots is None else len(slots)
        here = Place(
            host="this machine",
            machine=machine_id(),
            address=self.bus_host,
            engine_address=self.bus_host,
            own_gpu=len(visible_gpus()) >= count > 1,
        )
        return [here] * count

    def process_group(self, backend: str, ranks: Sequence[int]) -> ProcessGroup:
        """Make a group on loopback; by default NCCL if each rank has its own NVIDIA GPU, else a ring.

        Raises LayoutError for ranks that share a GPU: their collectives deadlock on CUDA.
        """
        gpus = len(visible_gpus()) if self._cuda else 0
        if 0 < gpus < len(ranks):
            raise LayoutError(
                f"{len(ranks)} ranks that MLX joins (tensor-parallel ones, stages with --channel mlx) "
                f"need a GPU each, there are {gpus}; use pipeline stages with --channel tcp, which can "
                "share one (--pipeline-parallel-size), or --device cpu",
                param="tensor_parallel_size",
            )
        if backend == "auto":
            backend = "nccl" if gpus > max(ranks) else "ring"
        return make_process_group(backend, len(ranks), ranks[0])

    def start(self, rank: int, world_size: int, payload: bytes, extra_env: dict[str, str]) -> ChildProcess:
        """Start one rank."""
        return self._standbys.start(rank, payload, self.variables(rank, world_size), extra_env)

    def variables(self, rank: int, world_size: int) -> dict[str, str]:
        """Return environment variables with a rank's share of cores and GPUs."""
        threads = thread_variables(self._threads or max(1, (os.cpu_count() or 1) // world_size))
        gpus = visible_gpus() if world_size > 1 else []
        device = {"CUDA_VISIBLE_DEVICES": gpus[rank % len(gpus)]} if gpus else {}
        return {**threads, **device}

    def keep_standby(self, rank: int, world_size: int, spec: bytes) -> None:
        """Start a standby process as a child of this one."""
        self._standbys.keep(rank, spec, self.variables(rank, world_size))

    def drop_standbys(self) -> None:
        """Kill the standby processes."""
        self._standbys.clear()

    def close(self) -> None:
        """Kill the standby processes."""
        self._standbys.clear()
