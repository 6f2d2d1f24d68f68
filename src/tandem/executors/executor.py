"""Interface between the engine and the executors of its plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from tandem.protocol.control import Ready, Stepped
from tandem.protocol.kv_blocks import Fetch, Fetched, Survey, Surveyed, UseRemoteStores, Written
from tandem.protocol.layout import StageSpec
from tandem.protocol.step import GrammarReady, StepPlan

Report = Stepped | GrammarReady | Fetched | Written | Surveyed
"""Messages of ranks while they serve."""
Progress = Callable[[int, int, int, str], None]
"""Called with (rank, bytes of weights done, bytes in all, phase); phases are those of `LoadProgress`."""


def do_nothing() -> None:
    """Stand where no callback has been set."""


class Executor(ABC):
    """A rank group, or one in this process. Used by one thread."""

    on_wait: Callable[[], None] = staticmethod(do_nothing)
    """Called about every 0.1 s while `start` and `close` wait for ranks."""

    @abstractmethod
    def start(self, progress: Progress | None = None) -> list[Ready]:
        """Bring all ranks up, loaded and connected. Raises UsageError for what the user must mend, else RankFailure."""

    @abstractmethod
    def submit(self, plan: StepPlan) -> None:
        """Send a plan to all ranks; returns before it is done. Raises RankFailure."""

    def fetch(self, order: Fetch | UseRemoteStores | Survey) -> None:
        """Have all ranks read a prefix from their disks, or look what is there. Raises RankFailure."""
        raise NotImplementedError

    @abstractmethod
    def collect(self, timeout_s: float) -> Sequence[Report]:
        """Return the reports of ranks since the last call; waits up to `timeout_s` seconds for one.

        Raises RankFailure when a rank has died, failed, or makes no progress.
        """

    @abstractmethod
    def close(self) -> None:
        """End all ranks, whatever their state, and release sockets. Idempotent; `start` may follow."""

    def shutdown(self) -> None:
        """Close for good: `start` does not follow. Idempotent."""
        self.close()

    @property
    def wait_socket(self) -> object | None:
        """A socket, ZeroMQ's or plain, that turns readable when `collect` has something; None before `start`."""
        return None

    def present(self) -> list[int] | None:
        """Places of the layout whose machines are there now; None where machines do not come and go by themselves."""
        return None

    def relay(self, specs: Sequence[StageSpec], slots: Sequence[int] | None) -> None:
        """Let the next `start` lay out `specs` over these of the first layout's places; None: over all."""
        raise NotImplementedError

    def keep_apart(self, kv_space: str) -> None:  # noqa: B027 - tests' have no disk
        """Let the next `start` keep KV on disk under this name (`StageSpec.kv_space`)."""

    def keep_standbys(self) -> None:  # noqa: B027 - one in this process has none
        """The ranks serve: have a process wait beside each, if that was asked for."""

    @property
    def slowdowns(self) -> list[float]:
        """Slowdown of each rank: recent seconds for a unit of work over the usual; empty if not measured."""
        return []

    @property
    def specs(self) -> list[StageSpec]:
        """Specifications of the last start; empty if they are those that the executor was made with."""
        return []

    @property
    def pids(self) -> list[int]:
        """Process id of each rank."""
        return []
