"""Rank hosts on the nodes of a Ray cluster. A process of its own speaks to Ray (driver_process.py)."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.config.settings import Settings
from tandem.errors import RankFailure, UsageError
from tandem.launchers.host_addresses import ranks_of
from tandem.launchers.hosts import HostsLauncher, copy_line
from tandem.launchers.ray.driver import RayDriver, connected_driver
from tandem.protocol.placement import HostEnded, HostOutput, Placed, PlaceRanks

log = logging.getLogger(__name__)

FIRST_PATIENCE_S = 5.0
"""Seconds until a shortage for the first rank group is reported: a cluster without room will hardly get any."""
PATIENCE_S = 15.0
"""Seconds until a shortage is reported after a node was lost: it may return, or another be added."""
JOIN_S = 10.0
"""Seconds for which a node agent tries to join."""
START_S = 60.0
"""Seconds from the reservation until all node agents have joined."""


@dataclass
class _Placement:
    """Rank hosts that are placed together; lists are by rank."""

    number: int
    tickets: list[str]
    nodes: list[str] = field(default_factory=list)
    """Node ids; empty until devices are reserved."""
    places: list[str] = field(default_factory=list)
    """Addresses and names of the nodes."""
    deadline: float = 0.0
    """Time of the monotonic clock by which all must have joined."""
    served: bool = False
    """True once all have joined: a host that is missing then was lost."""
    ended: dict[int, str] = field(default_factory=dict)
    words: dict[int, str] = field(default_factory=dict)
    """The last line of each node agent."""


class RayLauncher(HostsLauncher):
    """Places each rank on a device of the cluster. When a node agent is lost, all are placed anew: the other places may
    have to change, and the ranks restart in any case."""

    def __init__(self, settings: Settings) -> None:
        """Connect to the cluster (see `RayDriver`). Raises UsageError and RankFailure."""
        parallel = settings.parallel
        self._cluster = parallel.ray_address
        self._ranks = ranks_of(parallel)
        self._placements = 0
        self._current: _Placement | None = None
        self._driver: RayDriver | None = None
        here = self._connect()
        try:
            if (wanted := parallel.head_address) not in (None, here):
                raise UsageError(
                    f"--head-address {wanted}: the Ray node on this machine advertises {here}, and "
                    "ranks go by the addresses of nodes; run `ray start` here with "
                    f"--node-ip-address={wanted}, or leave --head-address out",
                    param="head_address",
                )
            self._here = here
            super().__init__(parallel, bind=here, log_level=settings.process.log_level)
        except BaseException:
            self.release()
            raise

    def _connect(self) -> str:
        """Start a driver, and return the address of this machine's node."""
        self._driver, connected = connected_driver(self._cluster, self._ranks, self._on_host)
        log.info("Ray cluster at %s; this machine is its node %s", connected.cluster, connected.here)
        return connected.here

    def recruited(self, slots: Sequence[int]) -> None:
        """Take a missing node agent for a lost one."""
        if self._current is not None:
            self._current.served = True

    def present(self, count: int) -> list[int] | None:
        """Return None: all ranks or none are placed, wherever Ray has room."""
        return None

    def bring(self, missing: list[int], *, first: bool) -> None:
        """Have devices reserved and node agents started, and check the progress."""
        kind = UsageError if first else RankFailure
        try:
            if self._driver is None or self._driver.poll() is not None:
                self.release()
                self._connect()
            if self._current is None or self._current.served:
                self._current = self._ask(missing, first=first)
            self._listen(self._current)
            self._check(self._current, missing, kind)
        except (UsageError, RankFailure) as error:
            self._current = None
            raise kind(error.message) from error

    def _ask(self, missing: list[int], *, first: bool) -> _Placement:
        lost = [self._current.nodes[rank] for rank in missing] if self._current is not None else []
        self._placements += 1
        payloads = [self.invite(slot, self._here, join_timeout=JOIN_S) for slot in range(self._ranks)]
        placement = _Placement(self._placements, [payload.ticket for payload in payloads])
        assert self._driver is not None
        self._driver.place(PlaceRanks(placement.number, payloads, lost, FIRST_PATIENCE_S if first else PATIENCE_S))
        return placement

    def _listen(self, placement: _Placement) -> None:
        """Take the driver's messages."""
        assert self._driver is not None
        while (message := self._driver.next(0.0)) is not None:
            if isinstance(message, Placed):
                placement.nodes, placement.places = message.nodes, message.places
                placement.deadline = time.monotonic() + START_S
                log.info("ranks go to Ray nodes %s", ", ".join(message.places))

    def _check(self, placement: _Placement, missing: list[int], kind: type[UsageError | RankFailure]) -> None:
        """Raise when a node agent has ended before it joined, or takes too long."""
        for rank in missing:
            if rank in placement.ended:
                said = self.membership.refusal(rank) or placement.words.get(rank, "").removeprefix("tandem: ")
                raise kind(
                    f"the node agent on Ray node {placement.places[rank]} {placement.ended[rank]}{': ' if said else ''}{said}"
                )
        if placement.nodes and time.monotonic() > placement.deadline:
            raise kind(self.describe_missing(missing))

    def _on_host(self, news: HostOutput | HostEnded) -> None:
        """Take a line of a node agent, or its end, in the driver's thread."""
        placement = self._current
        if isinstance(news, HostOutput):
            copy_line(news.place, news.line)
        if placement is None or news.placement != placement.number:
            return
        if isinstance(news, HostOutput):
            placement.words[news.rank] = news.line
        else:
            placement.ended[news.rank] = news.reason
            self.membership.leave(placement.tickets[news.rank], news.reason)

    def describe_missing(self, missing: list[int]) -> str:
        """Return a line that names the nodes whose node agents did not join."""
        places = self._current.places if self._current is not None else []
        where = ", ".join(places[rank] for rank in missing if rank < len(places))
        return (
            f"the node agents on Ray nodes {where} did not join in time; see Ray's logs there (session_latest/logs/worker-*.err)"
            if where
            else "Ray did not reserve devices in time"
        )

    def release(self) -> None:
        """End the driver and what it placed."""
        if self._driver is not None:
            self._driver.close()
            self._driver = None
