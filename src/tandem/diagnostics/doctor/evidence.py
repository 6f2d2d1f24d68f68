"""Evidence of the doctor, and the checks that judge it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tandem.diagnostics.doctor.probe_messages import Facts, Transferred
from tandem.diagnostics.tasks import RankTimes
from tandem.launchers.agent.link import agent_name
from tandem.launchers.ray.nodes import RayNode

Verdict = Literal["ok", "warn", "fail", "skip"]
"""`warn` does not change the exit code; `skip` means not checked."""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table."""

    check: str
    verdict: Verdict
    where: str
    """Hosts concerned; empty for all."""
    detail: str
    remedy: str = ""
    """Command to run, or a step in words where there is none."""


@dataclass(frozen=True)
class Host:
    """A machine of the hosts file or Ray cluster."""

    name: str
    """Entry `ssh` of the hosts file, or the Ray node's address."""
    address: str = ""
    """Address at which the other hosts reach this one: `address` of the hosts file, else the first of `ips`."""
    rdma: tuple[str | tuple[str, ...] | None, ...] = ()
    """RDMA device towards each host, as in MLX's hosts file."""
    ranks: int = 1
    """Number of ranks; 0 for a machine that runs only the engine."""
    python: str | None = None
    """Path of the Python interpreter; None for the default."""
    command: tuple[str, ...] = ()
    """Command that starts a probe there; empty to use ssh."""
    ips: tuple[str, ...] = ()
    """Addresses of the host's collectives over a ring, as in MLX's hosts file; empty for `address`."""

    @property
    def ring_addresses(self) -> tuple[str, ...]:
        """Return the addresses of a ring over this host: one connection to both neighbours for each."""
        return self.ips or (self.address,)


@dataclass(frozen=True)
class Clock:
    """Offset of a host's clock to this machine's: `ahead` seconds, with an error of at most `within` seconds."""

    ahead: float
    within: float


@dataclass(frozen=True)
class Need:
    """Memory of the planned layout on one machine: `needed` and `budget`, in bytes."""

    needed: int
    budget: int


@dataclass(frozen=True)
class PlannedMemory:
    """Planned memory of the layout that is checked."""

    label: str
    """Subject of `needs 3 GiB`: the layout that was asked for, or what a machine holds without one."""
    needs: dict[str, Need]
    """Memory by host, without hosts that hold no rank."""
    command: str = "tandem plan"
    """Command that shows the layouts for these machines."""
    remedies: tuple[str, ...] = ()
    """Changes that would make the model fit; empty if it fits."""


@dataclass
class Evidence:
    """Everything gathered, keyed by host name; `links` by (source, target)."""

    hosts: list[Host]
    here: str
    """Name of this machine among the hosts."""
    backend: str = "ring"
    model: str | None = None
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables for all ranks, from the hosts file."""
    weights_from_head: bool = False
    """True if ranks get their weights from this machine, so that the others need no copy."""
    own_port: int | None = None
    """HTTP port of the server of Tandem that runs on this machine; None without one."""
    planned: PlannedMemory | str | None = None
    """Memory plan, the reason why there is none, or None without a model."""
    ray: list[RayNode] | None = None
    """Nodes of the Ray cluster; None without Ray."""
    unreachable: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Hosts without a working probe -> (reason, remedy)."""
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
        """Return the hosts with ranks."""
        return [host for host in self.hosts if host.ranks]

    @property
    def macs(self) -> dict[str, Facts]:
        """Return the facts of the Macs."""
        return {name: facts for name, facts in self.facts.items() if facts.system == "Darwin"}

    def host(self, name: str) -> Host:
        """Return the host of that name. Raises StopIteration if there is none."""
        return next(host for host in self.hosts if host.name == name)

    def host_with(self, values: Mapping[str, str | None], wanted: str) -> str:
        """Return a host whose entry in `values` is `wanted`: this machine if it is one, else the first."""
        return min((name for name, value in values.items() if value == wanted), key=lambda name: name != self.here)

    def on(self, name: str, command: str) -> str:
        """Return a shell command for this machine that runs `command` on the machine `name`, over ssh unless local.

        For the machine of an agent, return `on NAME: COMMAND`.
        """
        if name == self.here:
            return command
        if (agent := agent_name(name)) is not None:
            return f"on {agent}: {command}"
        quoted = command.replace('"', '\\"')
        return f'ssh {name} "{quoted}"'


@dataclass(frozen=True)
class Findings:
    """Collector of one check's findings."""

    check: str
    lines: list[Finding] = field(default_factory=list)

    def add(self, verdict: Verdict, where: str, detail: str, remedy: str = "") -> None:
        """Add a finding."""
        self.lines.append(Finding(self.check, verdict, where, detail, remedy))

    def fail(self, where: str, detail: str, remedy: str) -> None:
        """Add a finding with verdict `fail`."""
        self.add("fail", where, detail, remedy)

    def warn(self, where: str, detail: str, remedy: str) -> None:
        """Add a finding with verdict `warn`."""
        self.add("warn", where, detail, remedy)


@dataclass(frozen=True)
class DoctorCheck:
    """One check: when it applies, which hosts it covers, and how it judges."""

    name: str
    judge: Callable[[Evidence, Findings], str]
    """Adds findings; returns the detail line for the case that it adds none."""
    looked: Callable[[Evidence], Collection[str]]
    """Returns the hosts that the evidence covers; if empty, the check is skipped instead of passed."""
    excuse: Callable[[Evidence], str] = lambda _: ""
    """Returns why the check does not apply; empty if it does."""

    def findings(self, evidence: Evidence) -> list[Finding]:
        """Run the check; return at least one finding."""
        if reason := self.excuse(evidence):
            return [Finding(self.name, "skip", "", reason)]
        findings = Findings(self.name)
        fine = self.judge(evidence, findings)
        return findings.lines or [self._passed(evidence, fine)]

    def _passed(self, evidence: Evidence, fine: str) -> Finding:
        """Return `ok` and name the hosts not covered, or `skip` if none was."""
        seen = self.looked(evidence)
        lacking = [host.name for host in evidence.carriers if host.name not in seen]
        if seen and not (lacking and len(lacking) == len(evidence.carriers)):
            return Finding(self.name, "ok", "", fine + (f"; not looked at: {', '.join(lacking)}" if lacking else ""))
        if any(name in evidence.facts for name in lacking):
            reason = "could not be checked: the machine does not tell"
        else:
            reason = f"no machine of the {'hosts file' if evidence.ray is None else 'Ray cluster'} answered"
        return Finding(self.name, "skip", ", ".join(lacking), reason)


def several(evidence: Evidence) -> str:
    """Return why checks between machines are skipped; empty with several hosts."""
    return "" if evidence.several else "matters with several machines only"


def macs(evidence: Evidence) -> str:
    """Return why checks of Macs are skipped; empty if there are Macs."""
    return "" if evidence.macs else "matters on Macs only"
