"""What a launcher is: it places rank processes and knows nothing of tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol


class RankProcess(Protocol):
    """A started rank, wherever it runs."""

    @property
    def pid(self) -> int:
        """Process id on its host."""

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


class Launcher(ABC):
    """Places the ranks of one gang after the other."""

    @property
    @abstractmethod
    def bus_host(self) -> str:
        """Address on which ranks can reach the engine."""

    @abstractmethod
    def start(self, rank: int, world_size: int, payload: bytes, extra_env: dict[str, str]) -> RankProcess:
        """Start one rank with its payload. Raises UsageError when it cannot be placed."""
