"""One engine process of `tandem serve`: its settings, start, end and restarts."""

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
from tandem.config.settings import Role, SchedulerSettings, Settings
from tandem.config.sizes import memory_size
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
"""Window in seconds for deaths of a replica; more than `max_restarts` in it make the replica fail."""
LATELY_S = 30.0
"""Seconds within which repeated deaths delay the restart by an exponential backoff."""
REST_S, MAX_REST_S = 60.0, 900.0
"""Seconds until a failed replica is retried, doubled each time, and their maximum."""
SILENT_S = 10.0
"""Seconds without an answer after which an engine is replaced."""
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
MOST_WORDS = 500
"""Most characters of the reason shown for a replica that does not run."""


@dataclass(eq=False)
class ReplicaProcess(SupervisedChild):
    """Supervisor of one engine process and its successors. Used by one thread."""

    index: int
    settings: Settings
    place: int
    """Index among the replicas of its model."""
    model: str = ""
    """Name of its model in a pool; empty for a single model."""
    named: bool = False
    """True to show the replica's number in logs, since several engines run."""
    lending: ClusterKeys | None = None
    """Keys with which ranks of all replicas fetch remote KV; None unless `--kv-disk` spans several machines."""
    lends: list[tuple[str, str]] = field(default_factory=list)
    """Addresses at which its ranks serve remote KV, as of the last status."""
    draining: bool = False
    drain_until: float = math.inf
    hurry_at: float = math.inf
    """Monotonic time at which a draining process drops its requests, which go on at its successor."""
    restarts: int = 0
    given_up: int = 0
    """Consecutive failures beyond `max_restarts`; 0 while it is not failed."""
    detail: str = ""
    """Reason why it does not run, and when it is retried; empty while it runs."""
    status: EngineStatus | None = None
    """Last status of the current process; None before it answers."""
    asked_at: float = 0.0
    """Monotonic time of that status."""

    def launch(self, gpus: str | None) -> None:
        """Start the process with `gpus` as CUDA_VISIBLE_DEVICES (None: unchanged). If that fails, schedule the next try."""
        threads = self.settings.parallel.threads_per_rank if self.named else None
        # An engine with a single rank computes in its own process, so it needs the thread limits.
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
        """Process name in logs."""
        return f"engine {self.index}" if self.named else "engine"

    def ended(self) -> str:
        """Discard the ended process and its socket file. Return why it ended."""
        self.remove_socket()
        self.lends, self.status = [], None
        return super().ended()

    def died(self, why: str, *, most: int, mistake: bool) -> bool:
        """Schedule the restart of a process that exited by itself, for the reason `why`.

        Return True when it failed more than `most` times in `WINDOW_S`: it is then retried only at long intervals. A
        `mistake` (`EXIT_USAGE`, such as a missing file) also delays the restart, since its cause may take longer to
        disappear.
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
        """Record that the engine accepts requests."""
        self.given_up = 0
        super().serves()

    def _wait(self, seconds: float, why: str) -> None:
        self.restart_at = time.monotonic() + seconds
        self.detail = f"{why[:MOST_WORDS]}; it is started again" + (f" in {seconds:.0f} s" if seconds >= 1 else "")
        log.error("the %s does not run: %s", self.name, self.detail)

    def remove_socket(self) -> None:
        """Delete the socket file of an ended process, which a killed process cannot do itself."""
        path = self.settings.process.engine_socket or ""
        if "://" not in path:
            Path(path).unlink(missing_ok=True)

    @property
    def endpoint(self) -> str:
        """ZeroMQ address of the engine's socket for API servers."""
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
    """Return the ZeroMQ address of a socket file; a ZeroMQ address is returned unchanged."""
    return path if "://" in path else f"ipc://{path}"


def gpus_of(settings: Settings, index: int) -> str | None:
    """Return CUDA_VISIBLE_DEVICES for a replica's ranks: its own GPUs if there are enough, else GPUs shared in rotation.

    None for a single replica, with fewer GPUs than its ranks or than two, or when ranks run elsewhere.
    """
    ranks, count = ranks_of(settings.parallel), settings.parallel.data_parallel_size
    count = count if count > 1 else index + 1  # replicas may have been added to a single one
    gpus = visible_gpus() if count > 1 and launcher_kind(settings.parallel).here else []
    if len(gpus) < max(ranks, 2):
        return None
    places = len(gpus) // ranks * ranks if len(gpus) >= count * ranks else len(gpus)
    return ",".join(gpus[(index * ranks + rank) % places] for rank in range(ranks))


def _sharing_memory(settings: Settings, index: int) -> int:
    """Return the number of replicas that share the memory of replica `index`: a GPU's or the machine's."""
    parallel = settings.parallel
    if gpus_of(settings, index) is None:
        return sharing(parallel, index)
    return -(-parallel.data_parallel_size * ranks_of(parallel) // len(visible_gpus()))


def divided(scheduler: SchedulerSettings, count: int) -> SchedulerSettings:
    """Return the settings of one of `count` engines that share the memory of these."""
    most = scheduler.max_memory and str(memory_size(scheduler.max_memory, "--max-memory", "max_memory") // count)
    return dataclasses.replace(scheduler, memory_fraction=scheduler.memory_fraction / count, max_memory=most)


def replica_settings(settings: Settings, index: int, number: int | None = None, role: Role | None = None) -> Settings:
    """Return the settings of one engine: its socket and role, and its hosts or its share of cores and memory.

    `index` counts a model's replicas; `number` (default: `index`) is unique over all models. `role` None means the
    configured role of that index. A single replica keeps the settings unchanged. Replicas added later get the same shares as
    the first.
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
    scheduler = divided(settings.scheduler, _sharing_memory(settings, index))
    server = dataclasses.replace(settings.server, api_key=(), api_key_file=None)  # an engine needs no API keys
    return dataclasses.replace(
        settings,
        parallel=parallel,
        scheduler=scheduler,
        server=server,
        process=dataclasses.replace(settings.process, engine_socket=str(path)),
    )
