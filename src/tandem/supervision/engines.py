"""The engine processes of `tandem serve`: started, watched, started again, added and drained."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tandem.config.loading import to_json
from tandem.config.settings import Settings
from tandem.engine.machines import chosen_launcher, ranks_of, replica_hosts, sharing
from tandem.env import child_environment, engine_socket_path, variable
from tandem.errors import UsageError
from tandem.processes.child import ChildProcess
from tandem.protocol.control import EngineStatus
from tandem.protocol.supervisor import ReplicaInfo
from tandem.supervision.children import LAST_WORDS, MODULE
from tandem.supervision.probe import StatusProbe
from tandem.supervision.vigil import Vigil

log = logging.getLogger("tandem.cli")

EXIT_USAGE, EXIT_FAILED = 2, 3
WINDOW_S = 300.0
"""A replica that dies more than `max_restarts` times within so long is given up."""
GRACE_S = 10.0
"""Seconds beyond `drain_timeout` that a draining engine gets to end by itself."""
BACKOFF_S = 0.5
LATELY_S = 30.0
"""Seconds until a replica that dies again within `LATELY_S` is started; twice as long each time after."""
SILENT_S, HUNG_S = 10.0, 20.0
"""Seconds after which an engine is replaced that does not answer, or whose main loop stands still."""
ASK_S = 1.0
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass
class _Replica:
    index: int
    """Its number."""
    settings: Settings
    place: int
    """Which of its model's replicas it is."""
    child: ChildProcess | None = None
    draining: bool = False
    drain_until: float = math.inf
    restarts: int = 0
    deaths: list[float] = field(default_factory=list)
    restart_at: float = 0.0
    vigil: Vigil | None = None
    asked_at: float = 0.0
    words: int | None = None
    """Reading end of the pipe for its last words."""

    def last_words(self) -> str:
        """Why the process that has ended did so, as far as it said."""
        if self.words is None:
            return ""
        text = os.read(self.words, LAST_WORDS).decode(errors="replace")
        os.close(self.words)
        self.words = None
        return text

    def remove_socket(self) -> None:
        """Of a process that has ended: a killed one could not."""
        path = self.settings.process.engine_socket or ""
        if "://" not in path:
            Path(path).unlink(missing_ok=True)

    @property
    def endpoint(self) -> str:
        return endpoint(self.settings.process.engine_socket or "")


def endpoint(path: str) -> str:
    """zmq address of a socket file; an address stays what it is."""
    return path if "://" in path else f"ipc://{path}"


def gpus_of(settings: Settings, index: int) -> str | None:
    """A replica's part of CUDA_VISIBLE_DEVICES, when that lists a GPU for each rank of all replicas; None otherwise."""
    given = [name for name in (variable("CUDA_VISIBLE_DEVICES") or "").split(",") if name]
    count, ranks = settings.parallel.data_parallel_size, ranks_of(settings.parallel)
    if count < 2 or len(given) < count * ranks:
        return None
    start = index * ranks % (len(given) // ranks * ranks)
    return ",".join(given[start:start + ranks])


def replica_settings(settings: Settings, index: int, number: int | None = None) -> Settings:
    """Settings of one engine: its own socket, and with several replicas its hosts, or its share of cores and memory.

    `index` counts a model's replicas; `number`, by default the same, is unique over all models. A single one keeps the
    settings as they are. Replicas that are added later get the same shares as the first ones.
    """
    number = index if number is None else number
    count, parallel = settings.parallel.data_parallel_size, replica_hosts(settings.parallel, index)
    base = Path(settings.process.engine_socket or engine_socket_path(settings.server.port))
    path = base.with_name(f"{base.stem}-{number}{base.suffix}") if count > 1 or number else base
    if count > 1:
        parallel = dataclasses.replace(parallel, data_parallel_size=1)
        if chosen_launcher(parallel) == "local":
            threads = parallel.threads_per_rank or max(1, (os.cpu_count() or 1) // (count * ranks_of(parallel)))
            parallel = dataclasses.replace(parallel, threads_per_rank=threads)
    if index and parallel.launcher == "manual":
        parallel = dataclasses.replace(parallel, join_port=parallel.join_port + index)
    share = settings.scheduler.memory_fraction / (1 if gpus_of(settings, index) else sharing(settings.parallel, index))
    scheduler = dataclasses.replace(settings.scheduler, memory_fraction=share)
    server = dataclasses.replace(settings.server, api_key=(), api_key_file=None)  # not an engine's business
    return dataclasses.replace(settings, parallel=parallel, scheduler=scheduler, server=server,
                               process=dataclasses.replace(settings.process, engine_socket=str(path)))


class EngineSet:
    """All replicas of one server. A server that never had more than one ends with it when it ends by itself, as its
    engine knows best; one that is killed, or hangs, is replaced."""

    def __init__(self, settings: Settings, *, model: str = "", numbers: Iterator[int] | None = None) -> None:
        """`settings` with the port that is really bound. Nothing is started.

        `model` is the one that they serve where there are several, and `numbers` then gives the replicas of all models
        their numbers.
        """
        self._settings = settings
        self._model = model
        self._numbers = numbers or itertools.count()
        self._several = settings.parallel.data_parallel_size > 1
        self._replicas: dict[int, _Replica] = {}
        self._next = 0
        self.last_words = ""
        """Why an engine has ended, if it said so; of several, the last one that did."""
        self._probes: dict[int, StatusProbe] = {}
        self.announced = False
        """All first replicas have been ready; until then a mistake in the settings ends the server."""

    def start(self) -> None:
        """Start the replicas that the settings ask for."""
        for _ in range(self._settings.parallel.data_parallel_size):
            self._add()

    # --- the control socket's requests ---

    def add(self) -> int:
        """Start one more replica and return its number. Raises UsageError when there are no more machines."""
        self._several = True
        return self._add()

    def drain(self, index: int) -> int:
        """Have a replica finish what it has, and end. Raises UsageError when that cannot be."""
        replica = self._replicas.get(index)
        if replica is None:
            numbers = ", ".join(str(one) for one in self._replicas)
            raise UsageError(f"there is no replica {index}; there are: {numbers}")
        if replica.draining:
            raise UsageError(f"replica {index} is draining already")
        if all(one.draining for one in self._replicas.values() if one is not replica):
            raise UsageError(f"replica {index} is the last one; add another first, or end the server")
        log.info("replica %d drains", index)
        self._drain(replica)
        return index

    def drain_all(self) -> None:
        """Have all replicas finish what they have, and end."""
        for replica in list(self._replicas.values()):
            if not replica.draining:
                self._drain(replica)

    def _drain(self, replica: _Replica) -> None:
        replica.draining = True
        replica.drain_until = time.monotonic() + self._settings.process.drain_timeout + GRACE_S
        if replica.child is None:
            self._remove(replica)
        else:
            replica.child.terminate()  # the engine refuses new work from now on and ends when the old is done

    def infos(self) -> list[ReplicaInfo]:
        """All replicas."""
        return [ReplicaInfo(one.index, one.endpoint, "draining" if one.draining else "running" if one.child
                            else "restarting", one.child.pid if one.child else None, one.restarts, self._model)
                for one in self._replicas.values()]

    # --- watching ---

    def look(self) -> int | None:
        """See to the processes; an exit code when the server cannot go on."""
        for replica in list(self._replicas.values()):
            code = None
            if replica.child is None:
                if time.monotonic() >= replica.restart_at:
                    self._launch(replica)
            elif (ended := replica.child.poll()) is not None:
                code = self._ended(replica, replica.child, ended)
            elif time.monotonic() > replica.drain_until:
                log.warning("the %s did not end in time and is killed", replica.child.name)
                replica.child.kill()
            elif (trouble := self._trouble(replica)) is not None:
                log.error("the %s %s; replacing it", replica.child.name, trouble)
                replica.child.kill()
            if code is not None:
                return code
        return None if self._replicas else EXIT_FAILED

    def _trouble(self, replica: _Replica) -> str | None:
        """Why a process that runs must be replaced, in words."""
        assert replica.vigil is not None
        now = time.monotonic()
        if self.announced and now - replica.asked_at > ASK_S:
            status = self._probe(replica).ask()
            if status is not None:
                replica.asked_at = now
                replica.vigil.heard()
                if status.state != "starting" and status.age_s > HUNG_S:
                    return f"answers, but its main loop has stood still for {status.age_s:.0f} s"
        return replica.vigil.verdict()

    def _probe(self, replica: _Replica) -> StatusProbe:
        if replica.index not in self._probes:
            self._probes[replica.index] = StatusProbe(replica.endpoint)
        return self._probes[replica.index]

    def _ended(self, replica: _Replica, child: ChildProcess, code: int) -> int | None:
        child.wait(0.0)
        replica.remove_socket()
        self.last_words = replica.last_words() or child.describe_exit()
        if replica.draining:
            log.info("replica %d has ended", replica.index)
            self._remove(replica)
            return None
        if code not in (0, EXIT_USAGE, EXIT_FAILED) or self._several:
            log.error("the %s %s", child.name, child.describe_exit())
        gave_up = code in (0, EXIT_USAGE, EXIT_FAILED)
        if (gave_up and not self._several) or (code == EXIT_USAGE and not self.announced):
            return code or EXIT_FAILED
        replica.child = None
        self._drop_probe(replica)
        now = time.monotonic()
        replica.deaths = [at for at in replica.deaths if now - at < WINDOW_S] + [now]
        if code == EXIT_USAGE or len(replica.deaths) > self._settings.scheduler.max_restarts:
            log.error("replica %d is given up", replica.index)
            self._remove(replica)
        else:
            lately = sum(now - at < LATELY_S for at in replica.deaths)
            replica.restart_at = now + (BACKOFF_S * 2 ** (lately - 2) if lately > 1 else 0.0)
        return None

    def statuses(self) -> dict[int, EngineStatus]:
        """What engines say of themselves, as far as they have answered since the last call. Used until `announced`."""
        found = {}
        for index, replica in self._replicas.items():
            if (status := self._probe(replica).ask()) is not None:
                found[index] = status
        return found

    def close(self) -> None:
        """All processes have ended: remove what they may have left."""
        for replica in self._replicas.values():
            replica.remove_socket()
            replica.last_words()
        for probe in self._probes.values():
            probe.close()
        self._probes.clear()

    @property
    def running(self) -> dict[int, bool]:
        """Number of each replica, and whether its process runs."""
        return {index: replica.child is not None for index, replica in self._replicas.items()}

    @property
    def children(self) -> list[ChildProcess]:
        """The processes that run, or have just ended."""
        return [one.child for one in self._replicas.values() if one.child is not None]

    # --- processes ---

    def _add(self) -> int:
        index, self._next = self._next, self._next + 1
        number = next(self._numbers)
        self._replicas[number] = _Replica(number, replica_settings(self._settings, index, number), index)
        self._launch(self._replicas[number])
        return number

    def _launch(self, replica: _Replica) -> None:
        replica.restarts += bool(replica.deaths)
        name = f"engine {replica.index}" if self._several or self._model else "engine"
        arguments = ("engine", str(replica.index)) if self._several or self._model else ("engine",)
        ends: list[int] = []
        if self._model:
            replica.words, end = os.pipe()
            ends.append(end)
            arguments = (*arguments, str(end))
        threads = replica.settings.parallel.threads_per_rank if self._several else None
        # An engine of one rank computes in its own process.
        changes: dict[str, str | None] = dict.fromkeys(THREAD_VARIABLES, str(threads)) if threads else {}
        if gpus := gpus_of(self._settings, replica.place):
            changes["CUDA_VISIBLE_DEVICES"] = gpus
        replica.child = ChildProcess(MODULE, to_json(replica.settings), env=child_environment(changes), name=name,
                                     arguments=arguments, pass_fds=ends)
        for end in ends:
            os.close(end)
        replica.vigil = Vigil(replica.child, SILENT_S)

    def _remove(self, replica: _Replica) -> None:
        del self._replicas[replica.index]
        self._drop_probe(replica)

    def _drop_probe(self, replica: _Replica) -> None:
        if (probe := self._probes.pop(replica.index, None)) is not None:
            probe.close()
