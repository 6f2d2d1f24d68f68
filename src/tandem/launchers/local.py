"""All ranks on this machine."""

from __future__ import annotations

import os

from tandem.env import child_environment
from tandem.launchers.base import Launcher
from tandem.launchers.process import ChildProcess
from tandem.launchers.worlds import visible_gpus

WORKER_MODULE = "tandem.executors.worker"


class LocalLauncher(Launcher):
    """Starts ranks as child processes, with the machine's cores shared out among them, and a GPU for each if there are
    enough."""

    def __init__(self, threads_per_rank: int | None, module: str = WORKER_MODULE) -> None:
        """`module` is the ranks' entry point, run as `python -m`."""
        self._threads = threads_per_rank
        self._module = module

    @property
    def bus_host(self) -> str:
        """Loopback: nothing off this machine can connect."""
        return "127.0.0.1"

    def start(self, rank: int, world_size: int, payload: bytes, extra_env: dict[str, str]) -> ChildProcess:
        """Start one rank."""
        threads = str(self._threads or max(1, (os.cpu_count() or 1) // world_size))
        gpus = visible_gpus()
        device = {"CUDA_VISIBLE_DEVICES": gpus[rank]} if len(gpus) >= world_size > 1 else {}
        env = child_environment({"OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads,
                                 "MKL_NUM_THREADS": threads, **device, **extra_env})
        return ChildProcess(self._module, payload, env=env, name=f"rank {rank}")
