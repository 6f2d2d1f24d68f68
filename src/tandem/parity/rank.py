"""Entry point of a rank that records: `python -m tandem.parity.rank`. Otherwise it is the worker that serves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from tandem.executors.worker import run_rank
from tandem.launchers.local import LocalLauncher
from tandem.processes.child import ChildProcess, receive_payload
from tandem.protocol.payloads import WorkerPayload

if TYPE_CHECKING:
    from tandem.loading.stage import StageModel

MODULE = "tandem.parity.rank"


class RecordingPayload(Struct, frozen=True, kw_only=True):
    """A worker's payload, and where to write the logits."""

    worker: msgspec.Raw
    path: str


class RecordingLauncher(LocalLauncher):
    """Starts ranks on this machine that record to `path`; the one that samples writes."""

    def __init__(self, threads_per_rank: int, path: Path, cuda: bool) -> None:
        super().__init__(threads_per_rank, MODULE, cuda)
        self._path = path

    def start(self, rank: int, world_size: int, payload: bytes, extra_env: dict[str, str]) -> ChildProcess:
        """Start one rank."""
        wrapped = msgspec.json.encode(RecordingPayload(worker=msgspec.Raw(payload), path=str(self._path)))
        return super().start(rank, world_size, wrapped, extra_env)


def main() -> None:
    """Run a rank as the worker does."""
    payload = msgspec.json.decode(receive_payload(), type=RecordingPayload)
    worker = msgspec.json.decode(payload.worker, type=WorkerPayload)

    def wrap(stage: StageModel) -> StageModel:
        from tandem.parity.recording import recording  # imports mlx, which must come after the BLAS

        return recording(stage, Path(payload.path), keeps=worker.spec.samples)

    run_rank(worker, wrap)


if __name__ == "__main__":
    main()
