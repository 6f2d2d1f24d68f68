"""The interface of launchers, which place rank processes and know nothing of tokens."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

OnWait = Callable[[], None]
"""Called about every 0.1 s while a launcher waits."""


class RankProcess(Protocol):
    """A started rank, wherever it runs."""

    @property
    def pid(self) -> int:
        """Process id on its host; 0 while unknown."""

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""

    @property
    def stopped(self) -> bool:
        """True when it is suspended (SIGSTOP), as far as that is known."""

    def describe_exit(self) -> str:
        """Describe how it ended, for people."""

    def kill(self) -> None:
        """Kill it at once."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False when `timeout_s` seconds pass first."""


@dataclass(frozen=True)
class ProcessGroup:
    """A process group of MLX, made anew with fresh ports for each rank group. Variables and files are by rank."""

    backend: str
    """MLX's name of the backend, as `StageGroup` takes it."""
    environment: list[dict[str, str]]
    contents: list[dict[str, str]] = field(default_factory=list)
    directory: Path | None = None
    """Directory of its files, where these are on this machine."""

    def variables(self, index: int) -> dict[str, str]:
        """Return the environment of the group's rank `index`."""
        return self.environment[index]

    def files(self, index: int) -> dict[str, str]:
        """Return files for the machine of rank `index`: name of the variable that must point to the file -> content."""
        return self.contents[index] if self.contents else {}

    def remove(self) -> None:
        """Delete its directory."""
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A place for one rank."""

    host: str
    """The machine's name, for messages."""
    machine: str
    """Identity of the machine, the same for all places on it."""
    address: str
    """Address on which other ranks reach it."""
    engine_address: str
    """Address on which it reaches the engine."""
    memory_bytes: int = 0
    """Memory of the machine that this rank may use; 0 when unknown."""
    own_gpu: bool = False
    """True when the rank has a GPU of its own among several."""


class Launcher(ABC):
    """Places the ranks of one rank group after the other. Used by one thread."""

    @property
    @abstractmethod
    def bus_host(self) -> str:
        """Address of this machine to which the engine's sockets bind; all of them: 0.0.0.0."""

    @abstractmethod
    def recruit(
        self, count: int, deadline: float, on_wait: OnWait | None = None, slots: Sequence[int] | None = None
    ) -> list[Place]:
        """Find a place for each of `count` ranks; places of the last rank group are used again.

        With `slots` only those places are wanted, for ranks in that order. `deadline` is in seconds of the
        monotonic clock. Raises UsageError for what the user must mend, and RankFailure (cause `host`) when places are
        missing that may come back.
        """

    def present(self, count: int) -> list[int] | None:
        """Return which of `count` places are available now, and look for lost ones in the background. None where the
        launcher cannot do without single places."""
        return None

    @abstractmethod
    def process_group(self, backend: str, ranks: Sequence[int]) -> ProcessGroup:
        """Make an MLX group of some of the recruited ranks, over `backend` (auto: the launcher chooses).

        Raises LayoutError and RankFailure.
        """

    @abstractmethod
    def start(self, rank: int, world_size: int, payload: bytes, extra_env: dict[str, str]) -> RankProcess:
        """Start one of the recruited ranks with its payload. Raises UsageError and RankFailure."""

    @abstractmethod
    def keep_standby(self, rank: int, world_size: int, spec: bytes) -> None:
        """Start a standby process beside a started rank, for the rank with this specification in the next rank group."""

    @abstractmethod
    def drop_standbys(self) -> None:
        """End the standby processes: the next rank group has another layout."""

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release the machines. Idempotent."""
