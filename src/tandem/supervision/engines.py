"""The engine processes of `tandem serve`: started, health-checked, restarted, added and drained."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Iterator

import zmq

from tandem.config.settings import Role, Settings
from tandem.errors import TransportError, UsageError
from tandem.launchers.host_addresses import role_of
from tandem.launchers.registry import on_several_machines
from tandem.log import Seldom
from tandem.processes.child import ChildProcess
from tandem.protocol.control import EngineStatus, Neighbours
from tandem.protocol.events import History, Level
from tandem.protocol.keys import ClusterKeys
from tandem.protocol.supervisor_messages import ReplicaInfo
from tandem.supervision.children import EXIT_FAILED, EXIT_USAGE
from tandem.supervision.replica_process import ReplicaProcess, gpus_of, replica_settings
from tandem.supervision.status_probe import StatusProbe

log = logging.getLogger("tandem.cli")
seldom = Seldom(log)

GRACE_S = 10.0
"""Seconds after `drain_timeout` in which a draining engine must exit before it is killed."""
HUNG_S = 20.0
"""Seconds without progress of its main loop after which an engine is replaced."""
HURRY_S = 2.0
"""Seconds that the only replica gets in a rolling restart, until its requests wait for its successor."""
ASK_S = 1.0
REMEDY = "If this was the only time, nothing is needed; else see the server's log."


class EngineSet:
    """All replicas of one server, or of one of its models.

    A replica is restarted after it is killed or hangs, and after an `EXIT_USAGE` once it has served. One of several replicas
    is also restarted after `EXIT_FAILED`; for a server that never had more than one, this ends the server.
    """

    def __init__(
        self, settings: Settings, *, model: str = "", numbers: Iterator[int] | None = None, history: History | None = None
    ) -> None:
        """Store the collaborators; `start` starts the processes. `settings` contain the bound port.

        `model` is the model's name in a pool, else empty. `numbers` yields replica numbers, shared by all models of a pool.
        Events are recorded in `history`.
        """
        self.settings = settings
        self._history = history or History()
        self._model = model
        self._numbers = numbers or itertools.count()
        self._several = settings.parallel.data_parallel_size > 1
        self._replicas: dict[int, ReplicaProcess] = {}
        self._next = 0
        self._to_replace: list[ReplicaProcess] = []
        self._replaced: ReplicaProcess | None = None
        """Replica that a rolling restart replaces now: the old one while it drains, then its successor."""
        self.went_back = False
        """True if the last rolling restart ended early, as a successor did not start."""
        self.last_words = ""
        """Exit reason of the engine that ended last."""
        self._probes: dict[int, StatusProbe] = {}
        # Only ranks on several machines need keys to fetch remote KV: those of one machine share a directory.
        lend = settings.scheduler.kv_disk is not None and on_several_machines(settings.parallel)
        self._lending = ClusterKeys.generate() if lend else None
        # Create ZeroMQ's threads now: without free descriptors ZeroMQ aborts the process later.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._context.socket(zmq.PAIR).close()
        self.announced = False
        """True once all initial replicas have been ready. Before, an `EXIT_USAGE` ends the server."""

    def start(self) -> None:
        """Start the configured replicas."""
        parallel = self.settings.parallel
        for place in range(parallel.data_parallel_size):
            self._add(parallel.roles[place] if parallel.roles else "both")

    # --- requests of the control socket ---

    def add(self, role: Role = "both") -> int:
        """Start another replica and return its number.

        Raises UsageError when no machine is left, or for a role without `--kv-disk`, over which sequences migrate between
        roles.
        """
        if role != "both" and self.settings.scheduler.kv_disk is None:
            raise UsageError(
                f"--role {role}: prompts go from replica to replica over --kv-disk DIR, with which this server was not started",
                param="role",
            )
        self._several = True
        number = self._add(role)
        self._note(number, "replica_added", "a replica was added; it loads")
        return number

    def drain(self, index: int) -> int:
        """Start draining a replica, which exits after its requests; return its number. Raises UsageError if it cannot drain."""
        replica = self._replicas.get(index)
        if replica is None:
            numbers = ", ".join(str(one) for one in self._replicas)
            raise UsageError(f"there is no replica {index}; there are: {numbers}")
        if replica.draining:
            raise UsageError(f"replica {index} is draining already")
        if all(one.draining or one.given_up for one in self._replicas.values() if one is not replica):
            raise UsageError(f"replica {index} is the last one; add another first, or end the server")
        log.info("Draining replica %d", index)
        self._note(index, "replica_draining", "the replica takes nothing new, and ends when it has nothing left to do")
        self._drain(replica)
        return index

    def drain_all(self) -> None:
        """Start draining all replicas."""
        self._to_replace, self._replaced = [], None
        for replica in list(self._replicas.values()):
            if not replica.draining:
                self._drain(replica)

    def _drain(self, replica: ReplicaProcess) -> None:
        replica.draining = True
        replica.drain_until = time.monotonic() + self.settings.process.drain_timeout + GRACE_S
        if replica.child is None:
            self._remove(replica)
        else:
            replica.child.terminate()  # SIGTERM makes the engine refuse new requests, finish the others and exit

    def roll(self, settings: Settings) -> None:
        """Begin to replace all replicas, one at a time, by processes with `settings`; `roll_on` does it."""
        self._former_settings, self.settings = self.settings, settings
        self._to_replace, self._replaced, self.went_back = list(self._replicas.values()), None, False
        self._several = True  # a successor that fails does not end the server

    def roll_on(self) -> bool:
        """Drain the next replica once the last successor serves. Return True when all are replaced."""
        last = self._replaced
        if last is not None and last.index in self._replicas and (last.draining or last.serving_since is None):
            return False
        left = [one for one in self._to_replace if one.index in self._replicas and not one.draining]
        self._to_replace, self._replaced = left[1:], next(iter(left), None)
        if self._replaced is None:
            return True
        self._note(self._replaced.index, "rolling_replica", "the replica is replaced by a new process")
        if all(one.draining or one.given_up for one in self._replicas.values() if one is not self._replaced):
            self._replaced.hurry_at = time.monotonic() + HURRY_S
        self._drain(self._replaced)
        return False

    def _go_back(self, replica: ReplicaProcess) -> None:
        """End the rolling restart, as a successor did not start; it is tried again with the settings that served before."""
        self._to_replace, self._replaced, self.went_back = [], None, True
        self.settings = self._former_settings
        role = role_of(replica.settings.parallel)
        replica.settings, replica.served = replica_settings(self.settings, replica.place, replica.index, role), True
        self._note(
            replica.index,
            "rolling_failed",
            f"the new process did not start ({self.last_words}); replicas that were not replaced go on",
            level="error",
            remedy="Mend what is named, and restart again.",
        )

    def infos(self) -> list[ReplicaInfo]:
        """Return all replicas as the control socket lists them."""
        return [one.info() for one in self._replicas.values()]

    # --- health checks ---

    def look(self) -> int | None:
        """Start and replace processes as needed. Return an exit code when the server must end, else None."""
        for replica in list(self._replicas.values()):
            code = None
            if replica.child is None:
                if time.monotonic() >= replica.restart_at:
                    replica.launch(gpus_of(self.settings, replica.place))
            elif (ended := replica.child.poll()) is not None:
                code = self._ended(replica, replica.child, ended)
            elif time.monotonic() > replica.hurry_at:
                replica.hurry_at = math.inf
                replica.child.terminate()  # on its second signal it ends at once
            elif time.monotonic() > replica.drain_until:
                log.warning("Killing the %s, which did not end in time; its requests are lost", replica.child.name)
                replica.drain_until = math.inf
                replica.child.kill()
            elif (trouble := self._trouble(replica)) is not None:
                log.error("the %s %s; replacing it", replica.child.name, trouble)
                self._note(
                    replica.index, "replica_hung", f"the engine process {trouble}; it is replaced", level="error", remedy=REMEDY
                )
                replica.child.kill()
            if code is not None:
                return code
        return None if self._replicas else EXIT_FAILED

    def _trouble(self, replica: ReplicaProcess) -> str | None:
        """Return why a running process must be replaced, else None."""
        now = time.monotonic()
        if (not self.announced or now - replica.asked_at > ASK_S) and (status := self._ask(replica)) is not None:
            replica.status, replica.asked_at, replica.lends = status, now, status.lends
            self._history.take(status.events, replica=replica.index, model=self._model)
            if status.state == "ready":
                if replica.serving_since is None:
                    self._note(
                        replica.index,
                        "replica_ready",
                        f"{self._model or status.model} can be used in "
                        f"{len(status.ranks)} part(s); loading took {status.load_s:.0f} s",
                    )
                replica.serves()
            if self.announced:
                replica.health_check.heard()
                if status.state != "starting" and status.age_s > HUNG_S:
                    return f"answers, but its main loop has stood still for {status.age_s:.0f} s"
        return replica.health_check.verdict()

    def _ask(self, replica: ReplicaProcess) -> EngineStatus | None:
        """Return the engine's status if an answer has arrived, else None. Never blocks."""
        try:
            if replica.index not in self._probes:
                self._probes[replica.index] = StatusProbe(replica.endpoint, self._context)
            if self._lending is not None:
                others = [other for other in self._replicas.values() if other is not replica]
                self._probes[replica.index].tell(Neighbours([address for other in others for address in other.lends]))
            return self._probes[replica.index].ask()
        except TransportError as error:
            seldom.warning("Cannot query engine %d, trying again: %s", replica.index, error.message)
            return None

    def _note(self, index: int, kind: str, text: str, *, level: Level = "info", remedy: str = "") -> None:
        self._history.note(kind, text, level=level, remedy=remedy, replica=index, model=self._model)

    def _ended(self, replica: ReplicaProcess, child: ChildProcess, code: int) -> int | None:
        self.last_words = replica.ended()
        self._drop_probe(replica)
        if replica.draining:
            log.info("Replica %d removed", replica.index)
            self._note(replica.index, "replica_ended", "the replica has ended, as it was told to")
            self._remove(replica)
            return None
        if replica is self._replaced and not replica.served:
            self._go_back(replica)
        if code == EXIT_USAGE and not replica.served:
            if not self.announced:
                return code
            log.error("Replica %d cannot start: %s", replica.index, self.last_words)
            self._note(replica.index, "replica_failed", f"it cannot start: {self.last_words}", level="error")
            self._remove(replica)  # a replica that was added later
            return None
        if code == EXIT_FAILED and not self._several:
            return EXIT_FAILED
        if replica.died(self.last_words, most=self.settings.scheduler.max_restarts, mistake=code == EXIT_USAGE):
            log.error("Replica %d failed too often: restarting it at growing intervals", replica.index)
            self._note(
                replica.index,
                "replica_failed",
                f"given up for now, and tried again more and more seldom: {self.last_words}",
                level="error",
                remedy=REMEDY,
            )
            if all(one.given_up for one in self._replicas.values()):
                return EXIT_FAILED
        else:
            self._note(
                replica.index,
                "replica_lost",
                f"the engine process has ended: {self.last_words}; another is started, and its requests go on there",
                level="error",
                remedy=REMEDY,
            )
        return None

    def statuses(self) -> dict[int, EngineStatus | None]:
        """Return the last status by replica number, without failed replicas; None for a replica that has not answered."""
        return {index: replica.status for index, replica in self._replicas.items() if not replica.given_up}

    def close(self) -> None:
        """Remove the files of ended processes and close all sockets."""
        for replica in self._replicas.values():
            replica.remove_socket()
            replica.last_words()
        for probe in self._probes.values():
            probe.close()
        self._probes.clear()

    @property
    def children(self) -> list[ChildProcess]:
        """Processes that run or have not been reaped."""
        return [one.child for one in self._replicas.values() if one.child is not None]

    # --- processes ---

    def _add(self, role: Role, index: int | None = None) -> int:
        """Start a replica, at the place `index` of another or at a new one. Return its number."""
        if index is None:
            index, self._next = self._next, self._next + 1
        number = next(self._numbers)
        replica = ReplicaProcess(
            number,
            replica_settings(self.settings, index, number, role),
            index,
            self._model,
            named=self._several or bool(self._model),
            lending=self._lending,
        )
        self._replicas[number] = replica
        replica.launch(gpus_of(self.settings, replica.place))
        return number

    def _remove(self, replica: ReplicaProcess) -> None:
        del self._replicas[replica.index]
        self._drop_probe(replica)
        if replica is self._replaced:
            self._replaced = self._replicas[self._add(role_of(replica.settings.parallel), replica.place)]

    def _drop_probe(self, replica: ReplicaProcess) -> None:
        if (probe := self._probes.pop(replica.index, None)) is not None:
            probe.close()
