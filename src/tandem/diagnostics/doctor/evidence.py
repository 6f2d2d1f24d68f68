"""What a check finds, and the evidence that checks look at. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tandem.diagnostics.doctor.messages import Facts, Transferred
from tandem.diagnostics.tasks import RankTimes
from tandem.launchers.ray.nodes import RayNode

Verdict = Literal["ok", "warn", "fail", "skip"]
"""`warn` does not change the exit code; `skip`: it could not or need not be looked at."""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table."""

    check: str
    verdict: Verdict
    where: str
    """Hosts that it is about; empty for all of them."""
    detail: str
    remedy: str = ""
    """A command, or the step to take where there is none."""


@dataclass(frozen=True)
class Host:
    """A machine of the cluster, as the hosts file names it."""

    name: str
    """Its `ssh` entry."""
    address: str = ""
    """Where the others reach it: the first of `ips`."""
    rdma: tuple[str | tuple[str, ...] | None, ...] = ()
    """Its RDMA device for each host, as in MLX's hosts file."""
    ranks: int = 1
    """Ranks that it carries; 0 for a machine that has the engine and no rank."""
    python: str | None = None
    """Its interpreter, where the hosts file names one."""
    command: tuple[str, ...] = ()
    """What starts a probe there, where that is not ssh."""


@dataclass(frozen=True)
class Clock:
    """A machine's clock against this one's: seconds ahead, known to within `within`."""

    ahead: float
    within: float


@dataclass(frozen=True)
class Need:
    """What the planned layout asks of a machine, in bytes."""

    needed: int
    budget: int


@dataclass(frozen=True)
class Planned:
    """The layout that memory is checked against."""

    label: str
    needs: dict[str, Need]
    """By host; hosts that hold no rank are left out."""
    command: str = "tandem plan"
    """What shows the layouts that these machines could carry."""
    remedies: tuple[str, ...] = ()
    """What would make the model fit, if it does not."""


@dataclass
class Evidence:
    """All that was gathered. Keys are host names; `links` has (from, to)."""

    hosts: list[Host]
    here: str
    """Name of this machine among the hosts, or the one that stands for it."""
    backend: str = "ring"
    model: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    """For all ranks, as the hosts file has them."""
    weights_from_head: bool = False
    """Ranks get their weights from this machine, so the others need no copy."""
    planned: Planned | str | None = None
    """A text says why there is no plan."""
    ray: list[RayNode] | None = None
    """Nodes of the Ray cluster that is looked at, if it is one."""
    unreachable: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Hosts that no probe runs on -> (why, remedy)."""
    facts: dict[str, Facts] = field(default_factory=dict)
    clocks: dict[str, Clock] = field(default_factory=dict)
    links: dict[tuple[str, str], Transferred] = field(default_factory=dict)
    collected: dict[str, RankTimes] = field(default_factory=dict)

    @property
    def several(self) -> bool:
        """There is more than one host."""
        return len(self.hosts) > 1

    @property
    def carriers(self) -> list[Host]:
        """Hosts that carry ranks."""
        return [one for one in self.hosts if one.ranks]

    def host(self, name: str) -> Host:
        """The host of that name."""
        return next(one for one in self.hosts if one.name == name)


def alike(check: str, findings: list[Finding], fine: str) -> list[Finding]:
    """`findings`, or one line that all is well when there is none."""
    return findings or [Finding(check, "ok", "", fine)]
