"""Gathered evidence, and the checks that judge it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

from tandem.diagnostics.doctor.probe_messages import Facts, Transferred
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
    """Entry `ssh` of the hosts file."""
    address: str = ""
    """First of `ips`, where the others reach the machine."""
    rdma: tuple[str | tuple[str, ...] | None, ...] = ()
    """RDMA device for each host, as in MLX's hosts file."""
    ranks: int = 1
    """Ranks that it carries; 0 for a machine that has the engine and no rank."""
    python: str | None = None
    """Interpreter, where the hosts file names one."""
    command: tuple[str, ...] = ()
    """Command that starts a probe there, in place of ssh."""


@dataclass(frozen=True)
class Clock:
    """A machine's clock against this one's: seconds ahead, known to within `within`."""

    ahead: float
    within: float


@dataclass(frozen=True)
class Need:
    """Memory that the planned layout takes on a machine, and may take, in bytes."""

    needed: int
    budget: int


@dataclass(frozen=True)
class PlannedMemory:
    """The layout that memory is checked against."""

    label: str
    needs: dict[str, Need]
    """By host; hosts that hold no rank are left out."""
    command: str = "tandem plan"
    """Command that shows the layouts for these machines."""
    remedies: tuple[str, ...] = ()
    """Changes that would make the model fit, if it does not."""


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
    planned: PlannedMemory | str | None = None
    """Memory plan, or the reason why there is none."""
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
        """True for more than one host."""
        return len(self.hosts) > 1

    @property
    def carriers(self) -> list[Host]:
        """Hosts that carry ranks."""
        return [host for host in self.hosts if host.ranks]

    @property
    def macs(self) -> dict[str, Facts]:
        """Facts of the Macs."""
        return {name: facts for name, facts in self.facts.items() if facts.system == "Darwin"}

    def host(self, name: str) -> Host:
        """Return the host of that name."""
        return next(host for host in self.hosts if host.name == name)

    def on(self, name: str, command: str) -> str:
        """Return the command for the machine `name` as one types it on this machine."""
        if name == self.here:
            return command
        quoted = command.replace('"', '\\"')
        return f'ssh {name} "{quoted}"'


@dataclass(frozen=True)
class Findings:
    """Findings of one check."""

    check: str
    lines: list[Finding] = field(default_factory=list)

    def add(self, verdict: Verdict, where: str, detail: str, remedy: str = "") -> None:
        """Add a line."""
        self.lines.append(Finding(self.check, verdict, where, detail, remedy))

    def fail(self, where: str, detail: str, remedy: str) -> None:
        """Add a fault."""
        self.add("fail", where, detail, remedy)

    def warn(self, where: str, detail: str, remedy: str) -> None:
        """Add a warning."""
        self.add("warn", where, detail, remedy)


@dataclass(frozen=True)
class DoctorCheck:
    """A check of the doctor."""

    name: str
    judge: Callable[[Evidence, Findings], str]
    """Adds findings; returns the line for evidence that has none."""
    looked: Callable[[Evidence], Collection[str]]
    """Returns the hosts that the evidence has facts about; without one the check does not pass."""
    excuse: Callable[[Evidence], str] = lambda _: ""
    """Returns why the check does not apply; empty if it does."""

    def findings(self, evidence: Evidence) -> list[Finding]:
        """Judge the evidence."""
        if reason := self.excuse(evidence):
            return [Finding(self.name, "skip", "", reason)]
        findings = Findings(self.name)
        fine = self.judge(evidence, findings)
        return findings.lines or [self._passed(evidence, fine)]

    def _passed(self, evidence: Evidence, fine: str) -> Finding:
        """Return `ok` for what was looked at, and name the hosts that were not."""
        seen = self.looked(evidence)
        lacking = [host.name for host in evidence.carriers if host.name not in seen]
        if seen and not (lacking and len(lacking) == len(evidence.carriers)):
            return Finding(self.name, "ok", "", fine + (f"; not looked at: {', '.join(lacking)}" if lacking else ""))
        if any(name in evidence.facts for name in lacking):
            reason = "not looked at: what this check reads is not there"
        else:
            reason = f"no machine of the {'hosts file' if evidence.ray is None else 'Ray cluster'} answered"
        return Finding(self.name, "skip", ", ".join(lacking), reason)


def several(evidence: Evidence) -> str:
    """Excuse checks of what lies between machines."""
    return "" if evidence.several else "matters with several machines only"


def macs(evidence: Evidence) -> str:
    """Excuse checks of Macs."""
    return "" if evidence.macs else "matters on Macs only"
