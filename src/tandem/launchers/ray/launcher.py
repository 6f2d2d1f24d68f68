"""Launcher that starts node agents on the nodes of a Ray cluster, through the Ray driver (driver_process.py)."""

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
from tandem.protocol.payloads import HostEnded, HostOutput, Placed, PlaceRanks

log = logging.getLogger(__name__)

FIRST_PATIENCE_S = 5.0
"""Seconds to wait for room for the first rank group; a full cluster rarely changes."""
PATIENCE_S = 15.0
"""Seconds to wait for room after a node was lost, which may return or be replaced."""
JOIN_S = 10.0
"""Seconds for which a node agent tries to join."""
START_S = 60.0
"""Timeout in seconds from the reservation until all node agents have joined."""


@dataclass
class _Placement:
    """Node agents that are placed together; lists are by rank."""

    number: int
    tickets: list[str]
    nodes: list[str] = field(default_factory=list)
    """Node ids; empty until devices are reserved."""
    places: list[str] = field(default_factory=list)
    """Addresses and names of the nodes, for messages."""
    deadline: float = 0.0
    """Reading of the monotonic clock by which all must have joined."""
    served: bool = False
    """True once all have joined; a node agent missing after that is lost."""
    ended: dict[int, str] = field(default_factory=dict)
    words: dict[int, str] = field(default_factory=dict)
    """Last line of each node agent's output, by rank."""


class RayLauncher(HostsLauncher):
    """Places each rank on a device of the cluster. After the loss of a node agent all are placed again: other places may have to
    change, and the ranks restart anyway."""

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
            super().__init__(parallel, bind=here, process=settings.process)
        except BaseException:
            self.release()
            raise

    def _connect(self) -> str:
        """Start a driver; return the address of this machine's node."""
        self._driver, connected = connected_driver(self._cluster, self._ranks, self._on_host)
        log.info("Ray cluster at %s; this machine is its node %s", connected.cluster, connected.here)
        return connected.here

    def recruited(self, slots: Sequence[int]) -> None:
        """Mark the placement as complete; node agents missing from now on are lost."""
        if self._current is not None:
            self._current.served = True

    def present(self, count: int) -> list[int] | None:
        """Return None: this launcher places all ranks again, never single ones."""
        return None

    def bring(self, missing: list[int], *, first: bool) -> None:
        """Request placement if needed, and check its progress."""
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
        """Process the driver's pending messages."""
        assert self._driver is not None
        while (message := self._driver.next(0.0)) is not None:
            if isinstance(message, Placed):
                placement.nodes, placement.places = message.nodes, message.places
                placement.deadline = time.monotonic() + START_S
                log.info("ranks go to Ray nodes %s", ", ".join(message.places))

    def _check(self, placement: _Placement, missing: list[int], kind: type[UsageError | RankFailure]) -> None:
        """Raise `kind` if a missing node agent has ended or the deadline has passed."""
        for rank in missing:
            if rank in placement.ended:
                said = self.membership.refusal(rank) or placement.words.get(rank, "").removeprefix("tandem: ")
                raise kind(
                    f"the node agent on Ray node {placement.places[rank]} {placement.ended[rank]}{': ' if said else ''}{said}"
                )
        if placement.nodes and time.monotonic() > placement.deadline:
            raise kind(self.describe_missing(missing))

    def _on_host(self, news: HostOutput | HostEnded) -> None:
        """Log a line of a node agent, or record its end. Called in the driver's thread."""
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
        """Return an error message with the nodes whose node agents did not join."""
        places = self._current.places if self._current is not None else []
        where = ", ".join(places[rank] for rank in missing if rank < len(places))
        return (
            f"the node agents on Ray nodes {where} did not join in time; see Ray's logs there (session_latest/logs/worker-*.err)"
            if where
            else "Ray did not reserve devices in time"
        )

    def release(self) -> None:
        """Stop the driver and everything that it placed."""
        if self._driver is not None:
            self._driver.close()
            self._driver = None
