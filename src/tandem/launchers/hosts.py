"""Base class of launchers whose ranks are started by node agents, over ssh, by Ray or by hand."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar

from tandem.config.settings import ParallelSettings, ProcessSettings
from tandem.errors import LayoutError, RankFailure, TransportError, UsageError
from tandem.launchers.base import Launcher, OnWait, Place, ProcessGroup
from tandem.launchers.local import thread_variables
from tandem.launchers.membership import JoinedHost, Membership, RemoteRank
from tandem.launchers.process_groups import (
    Devices,
    any_process_group,
    jaccl_process_group,
    nccl_process_group,
    ring_process_group,
)
from tandem.printable import printable
from tandem.protocol.hosts import DropStandby, KeepStandby, StartRank
from tandem.protocol.keys import ClusterKeys
from tandem.protocol.payloads import HostPayload

log = logging.getLogger(__name__)
T = TypeVar("T")

JOIN_S = 30.0
"""Seconds for which a node agent tries to join."""
WAIT_S = 0.1
SEEK_S = 30.0
"""Seconds between two warnings about a lost machine."""


def copy_line(label: str, line: str) -> None:
    """Write a line of a node agent to standard error after `label`, unless it is JSON, which names its host itself.

    The line has its own time, level and rank.
    """
    sys.stderr.write(printable(f"{line}\n" if line.startswith("{") else f"[{label}] {line}\n"))
    sys.stderr.flush()


def _own(member: JoinedHost, rows: Sequence[Sequence[T]]) -> list[T]:
    """Return the host's row of what mlx.launch prepared for each rank; empty if there is none."""
    rank = member.mlx.rank
    return list(rows[rank]) if rank is not None and rank < len(rows) else []


class HostsLauncher(Launcher):
    """Accepts node agents and starts ranks through them. Subclasses start (`bring`) and stop (`release`) node agents."""

    def __init__(
        self,
        parallel: ParallelSettings,
        *,
        bind: str,
        port: int = 0,
        keys: ClusterKeys | None = None,
        tickets: bool = True,
        process: ProcessSettings | None = None,
    ) -> None:
        """Open the join socket at `bind` (0.0.0.0: all addresses) and `port` (0: any free one).

        With `tickets` each node agent must present the ticket of its latest invitation. `process`: for the node
        agents' logs. Raises UsageError when the port is taken.
        """
        self._bind = bind
        self._process = process or ProcessSettings()
        self._threads = parallel.threads_per_rank
        self.keys = keys or ClusterKeys.generate()
        try:
            self.membership = Membership(self.keys, bind, port, parallel.heartbeat_timeout, tickets=tickets)
        except TransportError as error:
            why = os.strerror(getattr(error.__cause__, "errno", None) or 0)
            raise UsageError(
                f"node agents cannot join at {bind}:{port}: {why}; choose another --join-port or --head-address",
                param="join_port",
            ) from error
        self._members: list[JoinedHost] = []
        """Hosts by rank."""
        self._slots: list[int] = []
        """Slot of each rank."""
        self._sought_at = 0.0
        self._trouble = ""
        """Message of the last failure to restart a lost node agent."""
        self._files: dict[int, dict[str, str]] = {}
        self._rank_groups = 0
        """Number of rank groups recruited so far."""

    @property
    def bus_host(self) -> str:
        """Address to which the engine's sockets bind, like the join socket."""
        return self._bind

    def invite(self, slot: int, head: str, address: str | None = None, join_timeout: float = JOIN_S) -> HostPayload:
        """Return the payload for a new node agent in `slot`, and remove the previous one. The node agent reaches this machine at
        `head`. `address` and `join_timeout` as in `HostPayload`."""
        ticket = secrets.token_hex(16)
        self.membership.issue(slot, ticket)
        return HostPayload(
            keys=self.keys,
            endpoints=[f"{head}:{self.membership.port}"],
            slot=slot,
            ticket=ticket,
            address=address,
            join_timeout=join_timeout,
            log_level=self._process.log_level,
            log_format=self._process.log_format,
        )

    # --- for subclasses ---

    @abstractmethod
    def bring(self, missing: list[int], *, first: bool) -> None:
        """Start a node agent for each slot in `missing`. Called repeatedly while any is missing.

        `first` is True until all have joined once. Raises UsageError or RankFailure if one cannot be started.
        """

    @abstractmethod
    def describe_missing(self, missing: list[int]) -> str:
        """Return an error message with the hosts that did not join in time, and the remedy."""

    def recruited(self, slots: Sequence[int]) -> None:
        """Called when the node agents of all `slots` have joined; one that is missing from now on is lost."""

    def release(self) -> None:
        """Stop what `bring` started; the node agents have already been told to exit."""

    def addresses(self, slot: int) -> list[str]:
        """Return the IP addresses for the rank's collectives; single-address backends use the first."""
        member = self._member(slot)
        return [end.rpartition(":")[0] for end in _own(member, member.mlx.hostfile)] or [self._address(member)]

    def meeting_address(self, slot: int) -> str:
        """Return the coordinator's address for a group that begins with this rank; all its ranks must reach it."""
        return self.addresses(slot)[0]

    def devices(self, slot: int) -> Devices:
        """Return the RDMA devices of the rank's machine towards each slot; empty if unknown."""
        member = self._member(slot)
        return _own(member, member.mlx.devices)

    def _member(self, slot: int) -> JoinedHost:
        return self._members[self._slots.index(slot)]

    def default_backend(self) -> str:
        """Return the backend for `auto`."""
        return next((member.mlx.backend for member in self._members if member.mlx.backend), "ring")

    # --- the launcher ---

    def recruit(
        self, count: int, deadline: float, on_wait: OnWait | None = None, slots: Sequence[int] | None = None
    ) -> list[Place]:
        """Start node agents, wait for them, and return their places; see `Launcher.recruit`."""
        first = self._rank_groups == 0
        wanted = list(range(count)) if slots is None else list(slots)
        while missing := [slot for slot in wanted if (joined := self.membership.fill(count))[slot] is None]:
            self._bring(missing, first=first)
            if time.monotonic() > deadline:
                words = self._trouble or self.describe_missing(missing)
                raise UsageError(words) if first else RankFailure(words, cause="host")
            self.membership.wait(WAIT_S)
            if on_wait is not None:
                on_wait()
        self._rank_groups += 1
        self._trouble = ""
        self._members = [member for slot in wanted if (member := joined[slot]) is not None]
        self._slots = wanted
        self._files.clear()
        self.recruited(wanted)
        return [self._place(member) for member in self._members]

    def _place(self, member: JoinedHost) -> Place:
        facts = member.facts
        together = self._together(member)
        memory = 0 if facts.gpus else facts.usable_bytes // len(together)  # a GPU's memory is unknown here
        shared_out = bool(facts.gpus) and len({tuple(other.facts.gpus) for other in together}) == len(together) > 1
        return Place(
            host=facts.name,
            machine=facts.machine,
            address=self._address(member),
            engine_address=member.join.head,
            memory_bytes=memory,
            own_gpu=shared_out or bool(self._gpu(member, together)),
        )

    def _together(self, member: JoinedHost) -> list[JoinedHost]:
        """Return the hosts on the member's machine, by rank."""
        return [other for other in self._members if other.facts.machine == member.facts.machine]

    def _bring(self, missing: list[int], *, first: bool) -> None:
        """Call `bring`. A RankFailure is logged and retried, since a lost machine may return in time."""
        try:
            self.bring(missing, first=first)
        except RankFailure as failure:
            self._trouble = failure.message
            if time.monotonic() - self._sought_at > SEEK_S:
                self._sought_at = time.monotonic()
                log.warning("%s; trying again", failure.message)

    def present(self, count: int) -> list[int] | None:
        """Return the slots whose node agents are connected; restart the others."""
        joined = self.membership.fill(count)
        missing = [slot for slot, member in enumerate(joined) if member is None]
        if missing:
            self._bring(missing, first=False)
        return [slot for slot in range(count) if slot not in missing]

    def _address(self, member: JoinedHost) -> str:
        """Return the member's address for other machines. A loopback address is the head's own machine, so use the head's."""
        own = member.facts.address
        if not own.startswith("127."):
            return own
        return next((other.join.head for other in self._members if not other.facts.address.startswith("127.")), own)

    def process_group(self, backend: str, ranks: Sequence[int]) -> ProcessGroup:
        """Make an MLX group. The first rank group uses the ports that mlx.launch prepared, if any; later ones use fresh ports."""
        chosen = self.default_backend() if backend == "auto" else backend
        process_group = self._make_process_group(chosen, ranks)
        for index, rank in enumerate(ranks):
            self._files[rank] = process_group.files(index)
        return process_group

    def _make_process_group(self, backend: str, ranks: Sequence[int]) -> ProcessGroup:
        if backend == "ring":
            return ring_process_group([self._listeners(rank) for rank in ranks])
        if backend in ("jaccl", "jaccl-ring"):
            return self._jaccl(backend, ranks)
        if backend == "nccl":
            return nccl_process_group(len(ranks), self._coordinator(ranks[0], self._members[ranks[0]].mlx.nccl))
        if backend == "mpi":
            return self._mpi(ranks)
        complete = all(self.devices(self._slots[rank]) for rank in ranks)
        return any_process_group(self._make_process_group("ring", ranks), self._jaccl("jaccl", ranks) if complete else None)

    def _jaccl(self, backend: str, ranks: Sequence[int]) -> ProcessGroup:
        names = [self._members[rank].facts.name for rank in ranks]
        slots = [self._slots[rank] for rank in ranks]
        rows = [self.devices(slot) for slot in slots]
        if all(len(row) > max(slots) for row in rows):
            rows = [[row[slot] for slot in slots] for row in rows]
        return jaccl_process_group(backend, names, rows, self._coordinator(ranks[0], self._members[ranks[0]].mlx.coordinator))

    def _mpi(self, ranks: Sequence[int]) -> ProcessGroup:
        """Make a group from the environment that mpirun gave the hosts; works once, since mpirun's ranks cannot be restarted."""
        if len(ranks) < len(self._members) or not all(member.mlx.mpi for member in self._members):
            raise LayoutError(
                "--backend mpi: every rank must be started by mpirun, as one stage: use --launcher "
                "manual here and `mlx.launch --backend mpi -- tandem rank --join ...`",
                param="backend",
            )
        if self._rank_groups > 1:
            raise UsageError("--backend mpi: ranks cannot be replaced, for mpirun starts each but once; start anew")
        return ProcessGroup("mpi", [{}] * len(ranks))

    def _listeners(self, rank: int) -> list[str]:
        member, addresses = self._members[rank], self.addresses(self._slots[rank])
        prepared = [*(end.rpartition(":")[2] for end in _own(member, member.mlx.hostfile)), *[""] * len(addresses)]
        return [self._listener(member, address, port) for address, port in zip(addresses, prepared, strict=False)]

    def _listener(self, member: JoinedHost, address: str, prepared: str) -> str:
        """Return the address with a free port: for the first rank group `prepared`, if that is free."""
        wanted = [int(prepared)] if prepared and self._rank_groups == 1 else []
        [port] = self.membership.reserve(member, address, 1, wanted)
        return f"{address}:{port}"

    def _coordinator(self, rank: int, prepared: str) -> str:
        """Return IP:port of the group's coordinator, on the machine of `rank`."""
        address, _, port = prepared.rpartition(":")
        if rank or not prepared:
            address, port = self.meeting_address(self._slots[rank]), ""
        return self._listener(self._members[rank], address, port)

    def start(self, rank: int, world_size: int, payload: bytes, extra_env: dict[str, str]) -> RemoteRank:
        """Ask the rank's host to start the rank."""
        member = self._members[rank]
        process, files, sharing = self.membership.begin(member), self._files.get(rank, {}), len(self._together(member))
        variables = self._variables(rank)
        self.membership.send(member, StartRank(process.number, rank, payload, variables, extra_env, files, sharing))
        return process

    def _variables(self, rank: int) -> dict[str, str]:
        member = self._members[rank]
        environment = {**self.environment(self._slots[rank]), **self._gpu(member, self._together(member))}
        return environment | thread_variables(self._threads) if self._threads else environment

    def keep_standby(self, rank: int, world_size: int, spec: bytes) -> None:
        """Ask the rank's host to start a standby process."""
        member = self._members[rank]
        self.membership.send(member, KeepStandby(rank, spec, self._variables(rank), len(self._together(member))))

    def drop_standbys(self) -> None:
        """Stop the standby processes of connected hosts; those of lost hosts stop by themselves."""
        for member in self._members:
            self.membership.send(member, DropStandby())

    def environment(self, slot: int) -> dict[str, str]:
        """Return the user's environment variables for ranks."""
        return {}

    @staticmethod
    def _gpu(member: JoinedHost, together: list[JoinedHost]) -> dict[str, str]:
        """Return the variables that give each rank of a machine its own GPU; empty if there are too few or they are already
        assigned."""
        gpus = member.facts.gpus
        if not 1 < len(together) <= len(gpus) or any(other.facts.gpus != gpus for other in together):
            return {}
        return {"CUDA_VISIBLE_DEVICES": gpus[together.index(member)]}

    def close(self) -> None:
        """Release the node agents and stop them."""
        self.membership.close()
        self.release()
