"""Interface between the engine and the executors of its plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from tandem.executors.watchdog import Watchdog
from tandem.protocol.adapters import LoadAdapter
from tandem.protocol.control import Answer, Ready, Stepped
from tandem.protocol.kv_blocks import Fetch, Survey, UseRemoteStores
from tandem.protocol.layout import StageSpec
from tandem.protocol.pictures import EncodePicture
from tandem.protocol.step import StepPlan

Report = Stepped | Answer
"""Messages that ranks send while serving."""
Progress = Callable[[int, int, int, str], None]
"""Callback for loading progress: (rank, bytes done, total bytes, phase), with the phases of `LoadProgress`."""


def do_nothing() -> None:
    """Do nothing: the default callback."""


class Executor(ABC):
    """Executor of plans on a rank group in processes, or on one rank in this process. Not thread-safe."""

    on_wait: Callable[[], None] = staticmethod(do_nothing)
    """Callback, called about every 0.1 s while `start` and `close` wait for ranks."""
    watchdog = Watchdog(0, 0.0)
    """Judge of the ranks' steps; by default of no rank."""

    @abstractmethod
    def start(self, progress: Progress | None = None) -> list[Ready]:
        """Start all ranks, loaded and connected; return their `Ready` in rank order. Raises UsageError for mistakes of the
        user, else RankFailure."""

    @abstractmethod
    def submit(self, plan: StepPlan) -> None:
        """Send a plan to all ranks without waiting for its result. Raises RankFailure."""

    def fetch(self, order: Fetch | UseRemoteStores | Survey) -> None:
        """Send an order about disks to all ranks: fetch a prefix, use remote stores, or list disk blocks. Raises RankFailure."""
        raise NotImplementedError

    def load_adapter(self, order: LoadAdapter) -> None:
        """Send an order to load or unload a LoRA adapter to all ranks, which answer with `AdapterLoaded`. Raises RankFailure."""
        raise NotImplementedError

    def encode(self, order: EncodePicture) -> None:
        """Send a picture to the ranks of the first stage, which answer with `PictureEncoded`. Raises RankFailure."""
        raise NotImplementedError

    @abstractmethod
    def collect(self, timeout_s: float) -> Sequence[Report]:
        """Return the ranks' reports since the last call; wait up to `timeout_s` seconds for the first.

        Raises RankFailure if a rank has died, failed, or makes no progress.
        """

    @abstractmethod
    def close(self) -> None:
        """End all ranks in any state, and release sockets. Idempotent; `start` may be called again."""

    def shutdown(self) -> None:
        """Close permanently, and release machines. Idempotent."""
        self.close()

    @property
    def wait_socket(self) -> object | None:
        """Socket (ZeroMQ or plain) that is readable when `collect` has reports; None before `start`."""
        return None

    def present(self) -> list[int] | None:
        """Return the slots of the layout whose machines are present; None if the set of machines is fixed."""
        return None

    def relay(self, specs: Sequence[StageSpec], slots: Sequence[int] | None) -> None:
        """Use `specs` from the next `start` on, over these slots of the first layout; None: over all."""
        raise NotImplementedError

    def keep_apart(self, kv_space: str) -> None:  # noqa: B027 - tests' have no disk
        """Use this KV namespace on disk from the next `start` on (`StageSpec.kv_space`)."""

    def keep_standbys(self) -> None:  # noqa: B027 - one in this process has none
        """Start a standby process beside each rank, if configured. Called once the ranks serve."""

    @property
    def specs(self) -> list[StageSpec]:
        """Specifications of the last start; empty if unchanged since construction."""
        return []

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return []
