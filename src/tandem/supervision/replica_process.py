"""One engine process of `tandem serve`: its settings, its start, its end and its restarts."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tandem.config.loading import to_json
from tandem.config.settings import Role, Settings
from tandem.env import engine_socket_path
from tandem.launchers.host_addresses import ranks_of, replica_hosts, role_of
from tandem.launchers.process_groups import visible_gpus
from tandem.launchers.registry import launcher_kind, sharing
from tandem.protocol.control import EngineStatus
from tandem.protocol.keys import ClusterKeys
from tandem.protocol.payloads import EnginePayload
from tandem.protocol.supervisor_messages import ReplicaInfo
from tandem.supervision.children import SupervisedChild, backoff

log = logging.getLogger("tandem.cli")

WINDOW_S = 300.0
"""Seconds within which a replica may die `max_restarts` times; then it is given up."""
LATELY_S = 30.0
"""Seconds within which a second death delays the restart, doubled each time."""
REST_S, MAX_REST_S = 60.0, 900.0
"""Seconds until a replica that was given up is tried again, doubled each time, and their maximum."""
SILENT_S = 10.0
"""Seconds without an answer after which an engine is replaced."""
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
MOST_WORDS = 500
"""Most characters of the reason shown for a replica that does not run."""


@dataclass(eq=False)
class ReplicaProcess(SupervisedChild):
    """One engine. Used by one thread."""

    index: int
    settings: Settings
    place: int
    """Position among the replicas of its model."""
    model: str = ""
    """Name of its model, where there are several."""
    named: bool = False
    """Show the number in logs, as there are others."""
    lending: ClusterKeys | None = None
    """Keys shared by the ranks of all replicas of the model, where KV is kept on disks of several machines."""
    lends: list[tuple[str, str]] = field(default_factory=list)
    """Addresses at which its ranks serve their KV, as the engine last told."""
    draining: bool = False
    drain_until: float = math.inf
    restarts: int = 0
    given_up: int = 0
    """Consecutive times that it was given up."""
    detail: str = ""
    """Reason why it does not run, and what follows."""
    status: EngineStatus | None = None
    """The last status of its process."""
    asked_at: float = 0.0
    """When that was answered."""

    def launch(self, gpus: str | None) -> None:
        """Start its process on these of the machine's GPUs (None: any). If none starts, set when to try again."""
        threads = self.settings.parallel.threads_per_rank if self.named else None
        # An engine of one rank computes in its own process.
        changes: dict[str, str | None] = dict.fromkeys(THREAD_VARIABLES, str(threads)) if threads else {}
        if gpus:
            changes["CUDA_VISIBLE_DEVICES"] = gpus
        payload = EnginePayload(settings=msgspec.Raw(to_json(self.settings)), lending=self.lending)
        if (
            missing := self.spawn(
                "engine", payload, *([str(self.index)] if self.named else []), name=self.name, silent_s=SILENT_S, changes=changes
            )
        ) is not None:
            self._wait(*missing)
            return
        self.restarts += bool(self.deaths)
        self.detail = ""

    @property
    def name(self) -> str:
        """Name in logs."""
        return f"engine {self.index}" if self.named else "engine"

    def ended(self) -> str:
        """Forget the process, which has ended. Returns why it did."""
        self.remove_socket()
        self.lends, self.status = [], None
        return super().ended()

    def died(self, why: str, *, most: int, mistake: bool) -> bool:
        """Set when the process, which ended by itself, is restarted. Returns True when it is given up for now, as that
        happened more than `most` times.

        `mistake`: it found something amiss, such as a missing file, which may take longer to come back.
        """
        now = self.count_death(WINDOW_S)
        if self.given_up or len(self.deaths) > most:
            self.given_up += 1
            self._wait(min(REST_S * 2 ** (self.given_up - 1), MAX_REST_S), f"given up for now: {why}")
            return True
        lately = len(self.deaths) + 2 if mistake else sum(now - at < LATELY_S for at in self.deaths)
        self._wait(backoff(lately - 2) if lately > 1 else 0.0, why)
        return False

    def serves(self) -> None:
        """Record that the engine takes requests now."""
        self.given_up = 0
        super().serves()

    def _wait(self, seconds: float, why: str) -> None:
        self.restart_at = time.monotonic() + seconds
        self.detail = f"{why[:MOST_WORDS]}; it is started again" + (f" in {seconds:.0f} s" if seconds >= 1 else "")
        log.error("the %s does not run: %s", self.name, self.detail)

    def remove_socket(self) -> None:
        """Remove the socket of a process that has ended: a killed one could not."""
        path = self.settings.process.engine_socket or ""
        if "://" not in path:
            Path(path).unlink(missing_ok=True)

    @property
    def endpoint(self) -> str:
        """Return the zmq address of its socket for apis."""
        return endpoint(self.settings.process.engine_socket or "")

    def info(self) -> ReplicaInfo:
        """Return the replica as the control socket lists it."""
        state = "draining" if self.draining else "running" if self.child else "failed" if self.given_up else "restarting"
        return ReplicaInfo(
            self.index,
            self.endpoint,
            state,
            self.child.pid if self.child else None,
            self.restarts,
            self.model,
            self.detail,
            role_of(self.settings.parallel),
        )


def endpoint(path: str) -> str:
    """Return the zmq address of a socket file; an address is returned as it is."""
    return path if "://" in path else f"ipc://{path}"


def gpus_of(settings: Settings, index: int) -> str | None:
    """Return GPUs for the ranks of a replica, as in CUDA_VISIBLE_DEVICES: its own while there are enough for all, then
    in turn with others. None where there is one replica, or fewer GPUs than it has ranks, or ranks run elsewhere."""
    ranks, count = ranks_of(settings.parallel), settings.parallel.data_parallel_size
    count = count if count > 1 else index + 1  # some may have been added to one
    gpus = visible_gpus() if count > 1 and launcher_kind(settings.parallel).here else []
    if len(gpus) < max(ranks, 2):
        return None
    places = len(gpus) // ranks * ranks if len(gpus) >= count * ranks else len(gpus)
    return ",".join(gpus[(index * ranks + rank) % places] for rank in range(ranks))


def _sharing_memory(settings: Settings, index: int) -> int:
    """Return how many replicas share the memory that replica `index` computes in: a GPU's or the machine's."""
    parallel = settings.parallel
    if gpus_of(settings, index) is None:
        return sharing(parallel, index)
    return -(-parallel.data_parallel_size * ranks_of(parallel) // len(visible_gpus()))


def replica_settings(settings: Settings, index: int, number: int | None = None, role: Role | None = None) -> Settings:
    """Return the settings of one engine: its own socket and role, and with several replicas its hosts, or its share of
    cores and memory. `role`: by default that of the first replicas, in order.

    `index` counts a model's replicas; `number`, by default the same, is unique over all models. A single one keeps the
    settings as they are. Replicas that are added later get the same shares as the first ones.
    """
    number = index if number is None else number
    count, parallel = settings.parallel.data_parallel_size, replica_hosts(settings.parallel, index)
    role = role or (parallel.roles[index] if parallel.roles else "both")
    parallel = dataclasses.replace(parallel, roles=None if role == "both" else (role,))
    base = Path(settings.process.engine_socket or engine_socket_path(settings.server.port))
    path = base.with_name(f"{base.stem}-{number}{base.suffix}") if count > 1 or number else base
    if count > 1:
        parallel = dataclasses.replace(parallel, data_parallel_size=1)
        if launcher_kind(parallel).here:
            threads = parallel.threads_per_rank or max(1, (os.cpu_count() or 1) // (count * ranks_of(parallel)))
            parallel = dataclasses.replace(parallel, threads_per_rank=threads)
    if index and launcher_kind(parallel).by_hand:
        parallel = dataclasses.replace(parallel, join_port=parallel.join_port + index)
    share = settings.scheduler.memory_fraction / _sharing_memory(settings, index)
    scheduler = dataclasses.replace(settings.scheduler, memory_fraction=share)
    server = dataclasses.replace(settings.server, api_key=(), api_key_file=None)  # not an engine's business
    return dataclasses.replace(
        settings,
        parallel=parallel,
        scheduler=scheduler,
        server=server,
        process=dataclasses.replace(settings.process, engine_socket=str(path)),
    )
