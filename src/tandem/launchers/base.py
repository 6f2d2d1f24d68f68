"""Interface of launchers, which place and start rank processes."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

OnWait = Callable[[], None]
"""Callback during waits, about every 0.1 s."""


class RankProcess(Protocol):
    """A started rank process, local or remote."""

    @property
    def pid(self) -> int:
        """Process id on its host; 0 if unknown."""

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""

    @property
    def stopped(self) -> bool:
        """True if the process is known to be suspended (SIGSTOP)."""

    def describe_exit(self) -> str:
        """Return how the process ended, as text for messages."""

    def kill(self) -> None:
        """Kill the process immediately."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for the process to exit; return False after `timeout_s` seconds."""


@dataclass(frozen=True)
class ProcessGroup:
    """An MLX process group, with fresh ports for each rank group. Variables and files are by rank."""

    backend: str
    """MLX's name of the backend, as for `StageGroup`."""
    environment: list[dict[str, str]]
    contents: list[dict[str, str]] = field(default_factory=list)
    directory: Path | None = None
    """Directory of the group's files on this machine; None if they are elsewhere."""

    def variables(self, index: int) -> dict[str, str]:
        """Return the environment variables of the group's rank `index`."""
        return self.environment[index]

    def files(self, index: int) -> dict[str, str]:
        """Return files for the machine of rank `index`: environment variable for the path -> content."""
        return self.contents[index] if self.contents else {}

    def remove(self) -> None:
        """Delete the directory, if any."""
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A place for one rank."""

    host: str
    """Hostname, for messages."""
    machine: str
    """Id of the machine, equal for all places on it."""
    address: str
    """Address at which other ranks reach the machine."""
    engine_address: str
    """Address at which the machine reaches the engine."""
    memory_bytes: int = 0
    """Share of the machine's memory for this rank, in bytes; 0 if unknown."""
    own_gpu: bool = False
    """True if the rank has a GPU to itself on a machine with several."""


class Launcher(ABC):
    """Places the ranks of one rank group after the other. Not thread-safe."""

    @property
    @abstractmethod
    def bus_host(self) -> str:
        """Address of this machine to which the engine's sockets bind; 0.0.0.0 for all."""

    @abstractmethod
    def recruit(
        self, count: int, deadline: float, on_wait: OnWait | None = None, slots: Sequence[int] | None = None
    ) -> list[Place]:
        """Return a place for each of `count` ranks; places of the last rank group are reused.

        With `slots` only those places are recruited, for ranks in that order. `deadline` is a reading of the monotonic clock.
        Raises UsageError for errors that the user must fix, RankFailure (cause `host`) if places are missing that may return.
        """

    def present(self, count: int) -> list[int] | None:
        """Return which of `count` places are available, and restart lost ones in the background. None if the launcher cannot run
        with fewer places."""
        return None

    @abstractmethod
    def process_group(self, backend: str, ranks: Sequence[int]) -> ProcessGroup:
        """Make an MLX group of the recruited `ranks` over `backend` (`auto`: the launcher's choice).

        Raises LayoutError and RankFailure.
        """

    @abstractmethod
    def start(self, rank: int, world_size: int, payload: bytes, extra_env: dict[str, str]) -> RankProcess:
        """Start one of the recruited ranks with its payload. Raises UsageError and RankFailure."""

    @abstractmethod
    def keep_standby(self, rank: int, world_size: int, spec: bytes) -> None:
        """Start a standby process on the rank's machine, for the rank with the specification `spec` of the next rank group."""

    @abstractmethod
    def drop_standbys(self) -> None:
        """Stop the standby processes, since the next rank group has another layout."""

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release the machines. Idempotent."""
