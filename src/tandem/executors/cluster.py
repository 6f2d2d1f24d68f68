"""Cluster executor: ranks in their own processes, started by any launcher and connected by the bus."""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq
from msgspec.structs import replace

from tandem.errors import RankFailure, SpawnError, TandemError, TransportError, UsageError
from tandem.executors.executor import Executor, Progress, Report
from tandem.executors.failure_cause import rank_failure, usage_error
from tandem.executors.watchdog import SILENT_S, Watchdog
from tandem.executors.weight_source import serve_adapter, serve_model
from tandem.launchers.base import Launcher, Place, ProcessGroup, RankProcess
from tandem.log import Seldom
from tandem.protocol.adapters import LoadAdapter
from tandem.protocol.codec import encode
from tandem.protocol.control import (
    Begin,
    Connect,
    Failure,
    Hello,
    LoadProgress,
    Ping,
    Plan,
    Pong,
    RankCommand,
    RankMessage,
    Ready,
    Stepped,
    Stop,
)
from tandem.protocol.keys import ClusterKeys
from tandem.protocol.kv_blocks import Fetch, Survey, UseRemoteStores
from tandem.protocol.layout import StageSpec
from tandem.protocol.payloads import WorkerPayload
from tandem.protocol.pictures import EncodePicture
from tandem.protocol.step import StepPlan
from tandem.transport.blobs import BlobServer
from tandem.transport.bus import EngineBus, rank_identity

log = logging.getLogger(__name__)
seldom = Seldom(log)

POLL_S = 0.1
"""Seconds between checks of the rank processes."""
STOP_GRACE_S = 2.0
"""Seconds for ranks to exit after `Stop`."""
KILL_S = 10.0
"""Seconds for killed ranks to exit; ranks on unreachable machines do not."""
DEATH_S = 0.3
"""Maximum seconds between other ranks' reports of a process's lost connections and its exit."""
LAST_PING = 2**31
"""Number of pings to the peers of a rank whose GPU timed out."""
SENT_BY_OTHERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
FAILED = 1
"""Exit code of a rank that has sent a `Failure`."""

ANY = "0.0.0.0"
"""All addresses of a machine. As an endpoint's host: the engine's machine, by the address that each rank uses."""

Fit = Callable[[list[StageSpec], list[Place]], list[StageSpec]]
"""Function that adapts the stages' specs to the places where their ranks will run."""


class ClusterExecutor(Executor):
    """Executor of one rank group at a time. If a rank fails all end, and `start` creates a new group with new keys and ports."""

    def __init__(
        self,
        specs: list[StageSpec],
        launcher: Launcher,
        *,
        start_timeout_s: float,
        step_timeout_s: float,
        rejoin_timeout_s: float,
        fit: Fit | None = None,
        standbys: bool = False,
        lending: ClusterKeys | None = None,
    ) -> None:
        """Store the collaborators; `start` launches ranks.

        `start_timeout_s`: seconds until all ranks are connected, and maximum seconds without loading progress.
        `step_timeout_s`: maximum seconds without progress of a step. `rejoin_timeout_s`: seconds to wait for lost machines at
        later starts. `fit`: called once when the first places are known. `standbys`: start a standby process beside each
        rank. `lending`: keys for KV transfers between rank groups; None limits them to the ranks of one group, if they have
        several disks.
        """
        self._specs = specs
        self._fit = fit
        self._standbys = standbys
        self._lending = lending
        self._places = len(specs)
        self._recruited: list[Place] = []
        self._slots: list[int] | None = None
        self._launcher = launcher
        self._start_timeout = start_timeout_s
        self._rejoin_timeout = rejoin_timeout_s
        self._started = False
        self._step_timeout = step_timeout_s
        self.watchdog = Watchdog(len(specs), step_timeout_s)
        self._processes: list[RankProcess] = []
        self._bus: EngineBus | None = None
        self._process_groups: list[ProcessGroup] = []
        self._blobs: BlobServer | None = None
        self._inputs: BlobServer | None = None
        self._keys = ClusterKeys.generate()
        self._adapter_files: dict[int, BlobServer] = {}
        """Servers of LoRA adapters' files, by index."""
        self._generation = ""
        self._connected = False
        """True once all ranks have sent `Hello` and can be pinged."""
        self._failed = False
        self._looked_at = 0.0

    # --- start ---

    def start(self, progress: Progress | None = None) -> list[Ready]:
        """Launch, connect and load all ranks; return their `Ready`. Ends the rank group before raising."""
        self._generation, self._connected, self._failed = secrets.token_hex(8), False, False
        self.watchdog.begin(time.monotonic())
        keys = self._keys = ClusterKeys.generate()
        try:
            deadline = time.monotonic() + self._start_timeout
            soon = min(deadline, time.monotonic() + self._rejoin_timeout) if self._started else deadline
            places = self._launcher.recruit(self._places, soon, self.on_wait, self._slots)
            self._started = True
            if self._fit is not None:
                self._specs, self._fit = self._fit(self._specs, places), None
            self._bus = EngineBus(keys, self._launcher.bus_host)
            if self._specs[0].weights_from == "head":
                self._blobs = serve_model(Path(self._specs[0].model_path), keys, self._launcher.bus_host)
            self._launch(places, keys)
            hellos = self._gather_hellos(deadline)
            self._broadcast(Connect([hello.endpoint for hello in hellos]))
            self._connected = True
            ready = self._gather_ready(progress)
            self._broadcast(Begin())
            self._stop_serving()
            return ready
        except (OSError, zmq.ZMQBaseError, TransportError, SpawnError) as error:
            self.close()
            raise RankFailure(f"the ranks cannot be started: {error}", cause="start") from error
        except BaseException:
            self.close()
            raise

    def present(self) -> list[int] | None:
        """Return the slots whose machines are present, from the launcher."""
        return self._launcher.present(self._places)

    def relay(self, specs: Sequence[StageSpec], slots: Sequence[int] | None) -> None:
        """Use another layout from the next `start` on, and reset the learnt pace."""
        self._specs = list(specs)
        self._slots = None if slots is None else list(slots)
        self.watchdog = Watchdog(len(self._specs), self._step_timeout)
        if self._standbys:
            self._launcher.drop_standbys()

    def keep_apart(self, kv_space: str) -> None:
        """Set the KV namespace in all specifications."""
        self._specs = [replace(spec, kv_space=kv_space) for spec in self._specs]

    def keep_standbys(self) -> None:
        """Have the launcher start standby processes, if configured."""
        for spec in self._specs if self._standbys else ():
            self._launcher.keep_standby(spec.rank, len(self._specs), msgspec.json.encode(spec))

    def load_adapter(self, order: LoadAdapter) -> None:
        """Send the order to every rank; with `weights_from` head, serve the adapter's files until it is unloaded."""
        head = self._specs[0].weights_from == "head"
        served = serve_adapter(order, self._adapter_files, self._keys, self._launcher.bus_host) if head else ""
        for spec, place in zip(self._specs, self._recruited, strict=True):
            self._send(spec.rank, replace(order, weights_endpoint=seen_from(place, served)) if served else order)

    def _stop_serving(self) -> None:
        for server in (self._blobs, self._inputs, *self._adapter_files.values()):
            if server is not None:
                server.close()
        self._blobs, self._inputs, self._adapter_files = None, None, {}

    def _launch(self, places: list[Place], keys: ClusterKeys) -> None:
        """Start all ranks. Ranks on one machine divide its usable memory."""
        assert self._bus is not None
        process_groups = self._make_process_groups()
        self._recruited = places
        machines = Counter(place.machine for place in places)
        several = len({(place.machine, spec.kv_disk) for place, spec in zip(places, self._specs, strict=True)}) > 1
        lending = self._lending or (keys if several else None)
        for spec, place, process_group in zip(self._specs, places, process_groups, strict=True):
            whole = spec.memory_share * len(self._specs)
            variables = {} if process_group is None else process_group[0].variables(process_group[1])
            sharing = machines[place.machine]
            spec = replace(
                spec,
                memory_share=whole / sharing,
                gpu_share=whole if place.own_gpu else None,
                machine=place.machine,
                sharing=1 if place.own_gpu else sharing,
                backend=process_group[0].backend if process_group else spec.backend,
            )
            payload = WorkerPayload(
                spec=spec,
                keys=keys,
                bus_endpoint=seen_from(place, self._bus.endpoint),
                channel_host=place.address,
                generation=self._generation,
                weights_endpoint=seen_from(place, self._blobs.endpoint) if self._blobs else "",
                lending=lending if spec.kv_disk else None,
                # Other machines may reach the engine's machine by several addresses.
                lending_host=ANY if self._lending and place.engine_address.startswith("127.") else place.address,
            )
            self._processes.append(self._launcher.start(spec.rank, len(self._specs), msgspec.json.encode(payload), variables))

    def _make_process_groups(self) -> list[tuple[ProcessGroup, int] | None]:
        """Return each rank's MLX group and index: one group per stage with several ranks, or one over all stages for
        `--channel mlx`. None for ranks without a group."""
        first = self._specs[0]
        one_ring = first.channel == "mlx" and first.stages > 1
        sizes = (len(self._specs),) if one_ring else first.stage_sizes
        places: list[tuple[ProcessGroup, int] | None] = []
        for size in sizes:
            ranks = range(len(places), len(places) + size)
            if size == 1:
                places.append(None)
                continue
            process_group = self._launcher.process_group("ring" if one_ring else first.backend, ranks)
            self._process_groups.append(process_group)
            places += [(process_group, index) for index in range(size)]
        return places

    def _gather_hellos(self, deadline: float) -> list[Hello]:
        hellos: dict[int, Hello] = {}
        while len(hellos) < len(self._specs):
            message = self._next_before(deadline, "say hello", set(range(len(self._specs))) - set(hellos))
            if isinstance(message, Hello):
                hellos[message.rank] = message
        first = hellos[0]
        for rank, hello in hellos.items():
            for name, version in hello.versions.items():
                if version != first.versions.get(name):
                    raise UsageError(
                        f"rank {rank} on {hello.host} runs {name} {version}, rank 0 on {first.host} "
                        f"{first.versions.get(name)}; install the same on all hosts (over ssh: `tandem hosts sync`)"
                    )
        return [hellos[rank] for rank in sorted(hellos)]

    def _gather_ready(self, progress: Progress | None) -> list[Ready]:
        """Wait for `Ready` of all ranks. The timeout restarts with any progress, as large downloads may take hours."""
        ready: dict[int, Ready] = {}
        furthest: dict[tuple[int, str], int] = {}
        deadline = time.monotonic() + self._start_timeout
        while len(ready) < len(self._specs):
            message = self._next_before(deadline, "load", set(range(len(self._specs))) - set(ready))
            if isinstance(message, LoadProgress):
                key = (message.rank, message.phase)
                if message.done > furthest.get(key, 0):
                    furthest[key] = message.done
                    deadline = time.monotonic() + self._start_timeout
                if progress is not None:
                    progress(message.rank, message.done, message.total, message.phase)
            elif isinstance(message, Ready):
                ready[message.rank] = message
        self.watchdog.loaded(
            time.monotonic(), gpu=any(one.gpu for one in ready.values()), hosts=len({one.host for one in ready.values()})
        )
        return [ready[rank] for rank in sorted(ready)]

    def _next_before(self, deadline: float, what: str, missing: set[int]) -> RankMessage:
        while True:
            message = self._receive(POLL_S)
            # Check also while messages arrive continuously, as during loading.
            if message is None or time.monotonic() - self._looked_at >= POLL_S:
                self._look()
                self.on_wait()
                self._looked_at = time.monotonic()
            if message is not None:
                return message
            if time.monotonic() > deadline:
                raise RankFailure(
                    f"ranks {sorted(missing)} did not {what} within {self._start_timeout:.0f} s (start_timeout)", cause="start"
                )

    def submit(self, plan: StepPlan) -> None:
        """Send the plan to every rank."""
        self.watchdog.planned(plan, time.monotonic())
        self._broadcast(Plan(plan))

    def fetch(self, order: Fetch | UseRemoteStores | Survey) -> None:
        """Send the order to every rank, with remote endpoints as each rank reaches them."""
        if not isinstance(order, UseRemoteStores):
            self._broadcast(order)
            return
        for spec, place in zip(self._specs, self._recruited, strict=True):
            seen = [(store, seen_from(place, at) if at.startswith(f"tcp://{ANY}:") else at) for store, at in order.remote_stores]
            self._send(spec.rank, UseRemoteStores(seen))

    def encode(self, order: EncodePicture) -> None:
        """Send the order to the ranks of the first stage, and serve its inputs beside the bus, where plans would wait."""
        try:
            self._inputs = self._inputs or BlobServer((), self._keys, self._launcher.bus_host)
        except TransportError as error:
            raise RankFailure(f"the inputs of pictures cannot be served: {error}", blame=False) from error
        self._inputs.data, size = {order.key: memoryview(order.inputs)}, len(order.inputs)
        first = [spec for spec in self._specs if spec.layers[0] == 0]
        self.watchdog.encodes(first, time.monotonic())
        for spec in first:
            endpoint = seen_from(self._recruited[spec.rank], self._inputs.endpoint)
            self._send(spec.rank, replace(order, inputs=b"", endpoint=endpoint, size=size))

    def collect(self, timeout_s: float) -> list[Report]:
        """Return the ranks' reports; check processes and progress if there are none. Waits at most 0.1 s."""
        reports: list[Report] = []
        message = self._receive(min(timeout_s, POLL_S))
        while message is not None:
            if isinstance(message, Report):
                reports.append(message)
                self.watchdog.take(message, time.monotonic())
            message = self._receive(0.0)
        if not reports:
            self._look()
        return reports

    def _look(self) -> None:
        """Ping the ranks if due. Raises RankFailure for ranks that have died, do not answer or are stuck."""
        self._check_processes()
        now = time.monotonic()
        if self._connected and (number := self.watchdog.ping(now)) is not None:
            self._broadcast(Ping(number))
        try:
            self.watchdog.look(now, lambda rank: self._processes[rank].stopped)
        except RankFailure:
            self._failed = True
            raise

    # --- the bus ---

    def _broadcast(self, command: RankCommand) -> None:
        encoded = msgspec.Raw(encode(command))  # once, as a plan may hold a long prompt
        for spec in self._specs:
            self._send(spec.rank, encoded)

    def _send(self, rank: int, command: RankCommand | msgspec.Raw) -> None:
        assert self._bus is not None
        try:
            self._bus.send(rank_identity(rank, self._generation), command)
        except TransportError as error:
            self._hear_last_words()
            self._check_processes()
            raise RankFailure(f"rank {rank} {error}", rank=rank, cause="link") from error

    def _receive(self, timeout_s: float) -> RankMessage | None:
        """Return the next message of this rank group, None without any. Unreadable ones are logged. Raises a `Failure`."""
        if self._bus is None:
            raise RankFailure("the executor is not started")
        try:
            received = self._bus.receive(timeout_s)
        except TransportError as error:
            seldom.warning("Dropping a rank's unreadable message: %s", error)
            return None
        if received is None or not received[0].endswith(self._generation.encode()):
            return None
        message = received[1]
        rank = message.step.rank if isinstance(message, Stepped) else message.rank
        if received[0] != rank_identity(rank, self._generation):
            seldom.warning("%r sends a message of rank %d; dropped", received[0], rank)
            return None
        if isinstance(message, Failure):
            raise self._translate(message)
        if isinstance(message, Pong):
            self.watchdog.answered(message, time.monotonic())
        return message

    def _translate(self, failure: Failure) -> TandemError:
        """Return the exception for a rank's `failure`: usage errors keep their type, others become RankFailure."""
        if (mistake := usage_error(failure)) is not None:
            return mistake
        log.debug("%s", failure.traceback)
        deadline = time.monotonic() + DEATH_S
        while time.monotonic() < deadline:
            for rank, process in enumerate(self._processes):
                if rank != failure.rank and process.poll() not in (None, 0, FAILED):
                    # This rank only reports the effect of the other rank's death.
                    return self._death(rank, process)
            time.sleep(DEATH_S / 10)
        found = rank_failure(failure.rank, failure.kind, failure.message, failure.traceback)
        return (self._absent_peer(failure.rank) if found.cause == "timeout" else None) or found

    def _absent_peer(self, waiting: int) -> RankFailure | None:
        """Return the failure of a peer that the GPU of rank `waiting` waited for: one that is stopped or answers no ping.
        None if all answer."""
        assert self._bus is not None
        stage = self._specs[waiting].stage
        peers = {spec.rank for spec in self._specs if spec.stage == stage} - {waiting}
        deadline = time.monotonic() + SILENT_S
        with contextlib.suppress(TransportError):
            for rank in peers:
                self._bus.send(rank_identity(rank, self._generation), Ping(LAST_PING))
        while peers and time.monotonic() < deadline:
            if stopped := [rank for rank in peers if self._processes[rank].stopped]:
                return self._kept_waiting(stopped[0], waiting, "stopped", "stands still: its process is stopped")
            with contextlib.suppress(TransportError):
                received = self._bus.receive(POLL_S)  # any message, even a report of this failure, shows that the peer runs
                peers = {one for one in peers if not received or received[0] != rank_identity(one, self._generation)}
        silent = min(peers, default=None)
        return None if silent is None else self._kept_waiting(silent, waiting, "silent", "does not answer")

    @staticmethod
    def _kept_waiting(rank: int, waiting: int, cause: str, words: str) -> RankFailure:
        return RankFailure(
            f"rank {rank} {words}; the GPU of rank {waiting} waited for it until macOS ended that", rank=rank, cause=cause
        )

    def _check_processes(self) -> None:
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                # Its last message may still be in transit.
                if process.poll() == FAILED:
                    self._hear_last_words()
                raise self._death(rank, process)

    def _death(self, rank: int, process: RankProcess) -> RankFailure:
        """Return the failure of a dead rank. No request is blamed for signals that only others send, nor if the rank was idle."""
        blame = self.watchdog.works(rank) and -(process.poll() or 0) not in SENT_BY_OTHERS
        return RankFailure(f"rank {rank} (pid {process.pid}) {process.describe_exit()}", rank=rank, cause="died", blame=blame)

    def _hear_last_words(self) -> None:
        """Raise the last `Failure` that an exited rank reported, if any."""
        while (received := self._bus.receive(0.2) if self._bus else None) is not None:
            if isinstance(received[1], Failure):
                raise self._translate(received[1])

    @property
    def wait_socket(self) -> object | None:
        """Socket of the bus; None before `start`."""
        return self._bus.socket if self._bus else None

    @property
    def specs(self) -> list[StageSpec]:
        """Specifications, adapted to the places."""
        return self._specs

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """Ask ranks to stop, then kill the rest, as a stuck collective cannot be ended otherwise."""
        if self._bus is not None:
            for spec in self._specs:
                try:
                    self._bus.send(rank_identity(spec.rank, self._generation), Stop())
                except TransportError:
                    continue
        calm = not (self.watchdog.busy or self._failed)
        self._wait_for_ends(STOP_GRACE_S if calm else 0.0)
        for process in self._processes:
            process.kill()
        # Wait for all with one deadline: each rank on an absent machine would use it up.
        self._wait_for_ends(KILL_S)
        self._processes = []
        self._stop_serving()
        if self._bus is not None:
            self._bus.close()
            self._bus = None
        for process_group in self._process_groups:
            process_group.remove()
        self._process_groups.clear()

    def _wait_for_ends(self, seconds: float) -> None:
        """Wait for all ranks to exit, at most `seconds`."""
        deadline = time.monotonic() + seconds
        for process in self._processes:
            while not process.wait(max(min(deadline - time.monotonic(), POLL_S), 0.0)):
                if time.monotonic() >= deadline:
                    break
                self.on_wait()

    def shutdown(self) -> None:
        """Close permanently, and release the machines."""
        self.close()
        self._launcher.close()


def seen_from(place: Place, endpoint: str) -> str:
    """Return an endpoint of the engine with the address at which `place` reaches the engine."""
    return f"tcp://{place.engine_address}:{endpoint.rpartition(':')[2]}"
