"""Processes that wait beside ranks, so that ranks which have to be replaced start sooner."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from tandem.env import child_environment
from tandem.errors import SpawnError
from tandem.processes.child import ChildProcess
from tandem.protocol.payloads import STANDBY, WORKER_MODULE

log = logging.getLogger(__name__)

END_S = 10.0
Variables = Mapping[str, str | None]


class Spares:
    """At most one for each rank, in an environment as the rank's. Where there is none, a rank starts as ever."""

    def __init__(self, module: str = WORKER_MODULE) -> None:
        """`module` is the ranks' entry point; those of another kind than Tandem's own have no spares."""
        self._module = module
        self._waiting: dict[int, tuple[ChildProcess, dict[str, str]]] = {}

    def keep(self, rank: int, spec: bytes, variables: Variables) -> None:
        """Have one wait for `rank`, which its specification describes, unless one does already."""
        env = child_environment(variables)
        if self._module != WORKER_MODULE or self._fits(rank, env):
            return
        self.drop(rank)
        try:
            process = ChildProcess(WORKER_MODULE, spec, env=env, name=f"rank {rank}", arguments=(STANDBY,))
            self._waiting[rank] = process, env
        except SpawnError as error:
            log.warning("no spare for rank %d: %s; it starts without", rank, error)

    def start(self, rank: int, payload: bytes, variables: Variables, late: Mapping[str, str]) -> ChildProcess:
        """A process for the rank: one that waits in an environment of these `variables`, else a new one. `late` are
        variables of this gang alone, which nothing reads while it is imported. Raises SpawnError."""
        env = child_environment(variables)
        if not self._fits(rank, env):
            self.drop(rank)
            return ChildProcess(self._module, payload, env={**env, **late}, name=f"rank {rank}")
        process, _ = self._waiting.pop(rank)
        process.tell(msgspec.json.encode(dict(late)))
        process.tell(payload)
        return process

    def drop(self, rank: int) -> None:
        """End the one that waits for `rank`, if there is one."""
        if rank in self._waiting:
            process, _ = self._waiting.pop(rank)
            process.kill()
            process.wait(END_S)

    def clear(self) -> None:
        """End all of them."""
        for rank in list(self._waiting):
            self.drop(rank)

    def _fits(self, rank: int, env: dict[str, str]) -> bool:
        process, theirs = self._waiting.get(rank, (None, env))
        return process is not None and process.poll() is None and not process.stopped and theirs == env
