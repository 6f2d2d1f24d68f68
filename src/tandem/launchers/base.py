"""What a launcher is: it places rank processes and knows nothing of tokens."""

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
        """Process id on its host; 0 while it is not known yet."""

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""

    @property
    def stopped(self) -> bool:
        """It lives but stands still (SIGSTOP), as far as that can be told."""

    def describe_exit(self) -> str:
        """How it ended, in words."""

    def kill(self) -> None:
        """End it at once."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False when `timeout_s` seconds pass first."""


@dataclass(frozen=True)
class World:
    """One MLX group of ranks; made anew, with fresh ports, for each gang. Variables and files by the rank's number."""

    backend: str
    """MLX's name for it, as `StageGroup` takes it."""
    environment: list[dict[str, str]]
    contents: list[dict[str, str]] = field(default_factory=list)
    directory: Path | None = None
    """Holds its files, where these are on this machine."""

    def variables(self, index: int) -> dict[str, str]:
        """Environment of the group's rank `index`."""
        return self.environment[index]

    def files(self, index: int) -> dict[str, str]:
        """Content of files that variables of the same names must point to, on the machine of rank `index`."""
        return self.contents[index] if self.contents else {}

    def remove(self) -> None:
        """Delete what it keeps on this machine's disk."""
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank will run."""

    host: str
    """Name of the machine, for people."""
    machine: str
    """What tells machines apart; the same for all places on one."""
    address: str
    """Address on which other ranks reach it."""
    engine_address: str
    """Address on which it reaches the engine."""
    memory_bytes: int = 0
    """Its share of the memory that the machine's ranks may use; 0 when that is not known."""
    own_gpu: bool = False
    """Of several GPUs of the machine one is this rank's alone."""


class Launcher(ABC):
    """Places the ranks of one gang after the other. Used by one thread."""

    @property
    @abstractmethod
    def bus_host(self) -> str:
        """Address of this machine to which the engine's sockets bind; all of them: 0.0.0.0."""

    @abstractmethod
    def recruit(self, count: int, deadline: float, on_wait: OnWait | None = None,
                slots: Sequence[int] | None = None) -> list[Place]:
        """Have a place for each of `count` ranks; what was there for the last gang and still is serves again.

        With `slots` only those of the places are wanted, for ranks in that order. `deadline` is in seconds of the
        monotonic clock. Raises UsageError for what the user must mend, and RankFailure (cause `host`) when places are
        missing that may come back.
        """

    def present(self, count: int) -> list[int] | None:
        """Which of `count` places could be had now; lost ones are sought again by and by. None where a place is no
        machine that one could do without."""
        return None

    @abstractmethod
    def world(self, backend: str, ranks: Sequence[int]) -> World:
        """An MLX group of some of the recruited ranks, over `backend` (auto: the launcher chooses).

        Raises LayoutError and RankFailure.
        """

    @abstractmethod
    def start(self, rank: int, world_size: int, payload: bytes, extra_env: dict[str, str]) -> RankProcess:
        """Start one of the recruited ranks with its payload. Raises UsageError and RankFailure."""

    @abstractmethod
    def keep_spare(self, rank: int, world_size: int, spec: bytes) -> None:
        """Have a process wait, beside one of the started ranks, for the rank that will be in its place in the next gang
        and has this specification."""

    @abstractmethod
    def drop_spares(self) -> None:
        """The next gang is another one: end what waits for it."""

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Let go of the machines; nothing follows. Idempotent."""
