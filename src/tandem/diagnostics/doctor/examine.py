"""The doctor's examination: probes on all machines, the evidence that they gather, and the order of checks."""

from __future__ import annotations

import secrets
import shlex
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import TypeVar

from msgspec import structs

from tandem.checkpoints.resolve import resolve
from tandem.diagnostics.doctor import checks_apple, checks_hosts, checks_links, checks_software, looked, probe_messages
from tandem.diagnostics.doctor.checks_links import TRIED
from tandem.diagnostics.doctor.evidence import Clock, DoctorCheck, Evidence, Finding, Host, Need, PlannedMemory, macs, several
from tandem.diagnostics.doctor.parsing import firewalls, interfaces
from tandem.diagnostics.doctor.probe_messages import Facts
from tandem.diagnostics.doctor.probe_session import ProbeLink, ProbeLost, Probes, local_probe, probe_command
from tandem.diagnostics.tasks import LATE, RankTimes, TimingTask
from tandem.errors import UsageError
from tandem.launchers.host_facts import address_towards
from tandem.launchers.hostfile import LOCAL_NAMES, Hostfile
from tandem.launchers.ray.driver import ray_variables
from tandem.launchers.ray.nodes import RayNode
from tandem.launchers.ssh import named_machine
from tandem.planner.hardware import CHIPS, LINKS, Machine, chip_of, machine
from tandem.planner.layouts import parse_layout
from tandem.planner.plan import plan
from tandem.planner.presets import planned_files
from tandem.planner.types import NothingFits, Request
from tandem.system.metal import gpu_memory

HERE = "this machine"
RAY = DoctorCheck("ray", checks_hosts.ray, lambda seen: [node.address for node in seen.ray or []], checks_hosts.no_ray)
SSH = DoctorCheck("ssh", checks_hosts.ssh, looked.answered, checks_hosts.no_ssh)
RDMA = DoctorCheck("rdma", checks_apple.rdma, looked.answered, checks_apple.no_rdma)
CHECKS = (
    RAY,
    SSH,
    DoctorCheck("versions", checks_software.versions, looked.answered),
    DoctorCheck("model", checks_software.model, looked.having(lambda facts: facts.model is not None)),
    DoctorCheck(
        "memory", checks_software.memory, lambda seen: seen.planned.needs if isinstance(seen.planned, PlannedMemory) else ()
    ),
    DoctorCheck("hostname", checks_hosts.hostname, looked.answered, several),
    DoctorCheck("clock", checks_hosts.clock, lambda seen: {seen.here, *seen.clocks} if seen.clocks else (), several),
    # This machine's HTTP port is always tried, ports on other machines only on request.
    DoctorCheck(
        "ports",
        checks_hosts.ports,
        lambda seen: [host.name for host in seen.hosts] if seen.here in seen.facts else seen.facts.keys(),
    ),
    DoctorCheck("firewall", checks_hosts.firewall, looked.having(firewalls)),
    DoctorCheck("subnets", checks_links.subnets, looked.having(interfaces)),
    DoctorCheck("reachable", checks_links.reachable, looked.linked, several),
    DoctorCheck("speed", checks_links.speed, looked.linked, checks_links.no_link),
    DoctorCheck("thunderbolt", checks_apple.thunderbolt, looked.read_on_macs("ifconfig"), checks_apple.single_mac),
    DoctorCheck("macos", checks_apple.macos, looked.read_on_macs("os_build"), checks_apple.no_rdma_macs),
    RDMA,
    DoctorCheck("accelerators", checks_apple.accelerators, looked.read_on_macs("os_version"), macs),
    DoctorCheck("fences", checks_apple.fences, looked.read_on_macs(), macs),
    DoctorCheck("power", checks_apple.power, looked.read_on_macs("battery", "power"), macs),
    DoctorCheck("all_sum", checks_links.collective, lambda seen: seen.collected.keys(), checks_links.no_sum),
)
"""All checks, in the order in which faults should be fixed."""
GATHER_S, HASH_S, TRANSFER_S, COLLECTIVE_S = 90.0, 3600.0, 30.0, 60.0
CLOCK_ROUNDS = 5
SIZES, ROUNDS = (4096, 65536, 1 << 20), 20
"""Array sizes of the all_sum in bytes, and repetitions of each."""
T = TypeVar("T")


@dataclass(frozen=True)
class PlanRequest:
    """Load for which memory is planned."""

    layout: str | None = None
    """Layout in the syntax of `tandem plan --layout`; None for one pipeline stage per machine."""
    context: int | None = None
    streams: int = 1


@dataclass(frozen=True, kw_only=True)
class Question:
    """Machines and settings to examine."""

    hosts: list[Host]
    """Machines to examine; empty for this one alone."""
    backend: str = "ring"
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables for the ranks of the all_sum, from the hosts file."""
    model: str | None = None
    weights_from_head: bool = False
    full_hash: bool = False
    plan: PlanRequest = field(default_factory=PlanRequest)
    port: int = 8000
    """Port of the HTTP server, checked on this machine."""
    own_server: bool = False
    """True if a server of Tandem answers at `port`."""
    ports: list[int] = field(default_factory=list)
    """Ports that must be free on every machine."""
    ray: list[RayNode] | None = None
    """Nodes of the Ray cluster that `hosts` come from; None without Ray."""
    seconds: float = 0.3
    """Duration of each bandwidth test."""


def examine(question: Question, on_progress: Callable[[str], None] = lambda text: None) -> Evidence:
    """Gather all evidence, including a list of unreachable machines. Call `on_progress` with a line for each phase."""
    with Probes(len(question.hosts) + 1) as probes:
        return _Examination(question, probes, on_progress).run()


def findings(evidence: Evidence) -> list[Finding]:
    """Return the findings of all checks; only `ray` and `ssh` run if no machine answered."""
    checks = CHECKS if evidence.facts else (RAY, SSH)
    return [finding for check in checks for finding in check.findings(evidence)]


class _Examination:
    def __init__(self, question: Question, probes: Probes, on_progress: Callable[[str], None]) -> None:
        self._question = question
        self._say = on_progress
        self._probes, self._links = probes, probes.links
        hosts, variables, from_head = list(question.hosts) or [Host(HERE)], question.variables, question.weights_from_head
        self._evidence = Evidence(hosts, HERE, question.backend, question.model, variables, from_head, ray=question.ray)
        self._evidence.own_port = question.port if question.own_server else None

    def run(self) -> Evidence:
        evidence = self._evidence
        self._say("asking every machine")
        self._start()
        self._gather()
        self._find_here()
        self._say("planning memory")
        evidence.planned = planned_for(evidence, self._question.plan)
        if evidence.several and len(evidence.facts) > 1:
            self._tell_times()
            evidence.hosts = addressed(evidence.hosts, [evidence.here])
            self._connect()
            self._collective()
        return evidence

    def _start(self) -> None:
        """Start a probe on this machine and on every machine of the hosts file."""
        hosts = self._evidence.hosts
        self._evidence.here = here = next((host.name for host in hosts if host.name in LOCAL_NAMES), HERE)
        self._links[here] = ProbeLink(here, local_probe())
        self._links |= {host.name: _link(host) for host in hosts if host.name != here}

    def _gather(self) -> None:
        question = self._question
        slow = HASH_S if question.full_hash else GATHER_S

        def ask(name: str) -> Facts:
            extra = [question.port] if name == self._evidence.here else []
            request = probe_messages.GatherFacts(question.model, question.full_hash, [*extra, *question.ports], str(Path.home()))
            return self._links[name].ask(request, Facts, slow)

        self._evidence.facts = self._each(ask, self._links)

    def _find_here(self) -> None:
        """Find this machine among the hosts by hostname and addresses; otherwise add it as a host without ranks."""
        evidence = self._evidence
        if evidence.here != HERE or HERE not in evidence.facts or not self._question.hosts:
            return
        mine = _identity(evidence.facts[HERE])
        twin = next((name for name, facts in evidence.facts.items() if name != HERE and _identity(facts) == mine), None)
        if twin is None:
            evidence.hosts.append(Host(HERE, ranks=0))
            return
        busy = sorted({*evidence.facts.pop(HERE).busy_ports, *evidence.facts[twin].busy_ports})
        self._links.pop(HERE).close()
        evidence.here = twin
        evidence.facts[twin] = structs.replace(evidence.facts[twin], busy_ports=busy)

    def _tell_times(self) -> None:
        """Compare each clock with this machine's. Of several rounds, the one with the shortest round trip counts."""

        def ask(name: str) -> Clock:
            best = Clock(0.0, float("inf"))
            for _ in range(CLOCK_ROUNDS):
                sent = time.time()
                now = self._links[name].ask(probe_messages.TellTime(), probe_messages.Time, TRANSFER_S).now
                back = time.time()
                if back - sent < 2 * best.within:
                    best = Clock(now - (sent + back) / 2, (back - sent) / 2)
            return best

        self._evidence.clocks = self._each(ask, [name for name in self._links if name != self._evidence.here])

    def _connect(self) -> None:
        """Test links between all machines: connections in parallel, then the bandwidth of each link in turn."""
        evidence = self._evidence
        token = secrets.token_hex(16)
        listen, opened = probe_messages.Listen(token), probe_messages.ReservedPorts
        ports = self._each(lambda name: self._links[name].ask(listen, opened, TRANSFER_S).ports[0], self._links)
        address = {host.name: host.address for host in evidence.hosts}

        def ask(source: str, target: str, seconds: float) -> probe_messages.Transferred:
            transfer = probe_messages.Transfer(address[target], ports[target], token, seconds)
            return self._links[source].ask(transfer, probe_messages.Transferred, TRANSFER_S)

        def ask_all(source: str) -> dict[str, probe_messages.Transferred]:
            return {target: ask(source, target, 0.0) for target in ports if target != source}

        self._say("connecting every machine with every other")
        for source, links in self._each(ask_all, self._links).items():
            evidence.links |= {(source, target): link for target, link in links.items()}
        for source, target in permutations(ports, 2):
            if {source, target} <= self._links.keys() and not evidence.links[source, target].error:
                self._say(f"measuring {source} -> {target}")
                measured = self._each(partial(ask, target=target, seconds=self._question.seconds), [source])
                evidence.links |= {(name, target): link for name, link in measured.items()}
        evidence.links = {ends: link for ends, link in evidence.links.items() if self._links.keys() >= set(ends)}

    def _collective(self) -> None:
        """Time an all_sum over the ranks. Skipped unless every link works, every host has mlx, RDMA passed and `TRIED` has the
        backend."""
        evidence, question = self._evidence, self._question
        ranks = evidence.carriers
        names = {host.name for host in ranks}
        blocked = any(link.error for (a, b), link in evidence.links.items() if {a, b} <= names)
        if blocked or len(ranks) < 2 or not names <= self._links.keys() or question.backend not in TRIED:
            return
        lacking = any(evidence.facts[name].versions.get("mlx") is None for name in names)
        if lacking or any(finding.verdict == "fail" for finding in RDMA.findings(evidence)):
            return
        self._say(f"adding up over {len(ranks)} machines ({question.backend})")
        task = TimingTask(backend=question.backend, operations=["all_sum"], sizes=list(SIZES), iterations=ROUNDS)
        try:
            times = self._probes.time_ranks(task, ranks, question.variables, COLLECTIVE_S)
        except ProbeLost as error:
            times = [RankTimes(error=error.message)] * len(ranks)
        late = f"no sum within {COLLECTIVE_S:g} s"
        evidence.collected = {
            host.name: structs.replace(answer, error=late) if answer.error == LATE else answer
            for host, answer in zip(ranks, times, strict=True)
        }

    def _each(self, ask: Callable[[str], T], names: Iterable[str]) -> dict[str, T]:
        """Call `ask` for each machine in parallel; return the results by name. Record machines whose probe is lost as
        unreachable, and close their links."""

        def attempt(name: str) -> T | ProbeLost:
            try:
                return ask(name)
            except ProbeLost as error:
                return error

        order, results = list(names), {}
        for name, result in zip(order, self._probes.each(attempt, order), strict=True):
            if isinstance(result, ProbeLost):
                self._evidence.unreachable[name] = result.message, result.remedy
                self._links.pop(name).close()
            else:
                results[name] = result
        return results


def addressed(hosts: Sequence[Host], here: Collection[str]) -> list[Host]:
    """Return the hosts with the addresses at which the others reach them.

    An address comes from the hosts file, else from ssh's resolution of the name. For this machine (one of the names `here`) it
    is the source address of a route to another host.
    """
    there = [host.address or ("" if host.name in here else _resolved(host.name)) for host in hosts]
    other = next((address for address in there if address), None)
    return [replace(host, address=address or _own_address(other)) for host, address in zip(hosts, there, strict=True)]


def _resolved(name: str) -> str:
    """Return the IP address that ssh would connect to, its configuration included; the hostname if it does not resolve."""
    machine_name = named_machine(name)
    try:
        return socket.gethostbyname(machine_name)
    except OSError:
        return machine_name


def _own_address(other: str | None) -> str:
    try:
        return address_towards(other) if other else "127.0.0.1"
    except OSError:
        return "127.0.0.1"


def _link(host: Host) -> ProbeLink:
    if host.command:
        return ProbeLink(host.name, host.command, ray_variables())
    return ProbeLink(host.name, probe_command(host.name, host.python))


def _identity(facts: Facts) -> tuple[str, list[str]]:
    return facts.hostname, sorted(str(network) for interface in interfaces(facts) for network in interface.networks)


def planned_for(evidence: Evidence, request: PlanRequest) -> PlannedMemory | str | None:
    """Return the layout's memory by host, the reason why it is unknown, or None without a model."""
    if evidence.model is None:
        return None
    names = [host.name for host in evidence.carriers]
    if not set(names) <= evidence.facts.keys():
        return "the plan waits for the machines that do not answer"
    copy = evidence.facts[evidence.here].model if evidence.here in evidence.facts else None
    if copy is None or copy.path is None or copy.problem:
        return f"there is no copy of {evidence.model} on {evidence.here} to plan with"
    layout = request.layout or ("single" if len(names) == 1 else f"pp={len(names)}")
    try:
        model = planned_files(resolve(evidence.model if evidence.model == "demo" else copy.path))
        asked = Request(context=request.context, streams=request.streams, layouts=(parse_layout(layout),))
        machines = [machine_of(name, evidence.facts[name]) for name in names]
        answer = plan(model.description, machines, [LINKS["10gbe"]], asked, experts=model.experts)
    except NothingFits as refusal:
        answer = refusal.plan
    except UsageError as error:
        return error.message
    candidate = answer.chosen or answer.candidates[0]
    if candidate.prediction is None:
        return candidate.reason
    needs = {names[memory.machine]: Need(memory.needed, memory.budget) for memory in candidate.prediction.memory}
    hosts = " ".join(f"{one.name.replace(' ', '-')}={_memory(evidence.facts[one.name])}:{one.chip}" for one in machines)
    label = request.layout or ("the model" if len(names) == 1 else "its part of the model")
    return PlannedMemory(label, needs, f"tandem plan {shlex.quote(evidence.model)} --hosts {hosts}", answer.remedies)


def _memory(facts: Facts) -> str:
    return f"{facts.memory_bytes >> 20}MB"


def machine_of(name: str, facts: Facts) -> Machine:
    """Return the planner's description of a host; only its memory is exact."""
    chip = chip_of(facts.chip)
    if facts.system == "Darwin":
        assumed = machine(name, facts.memory_bytes, chip if chip in CHIPS else "m4")
        return replace(assumed, memory=facts.mlx_bytes or gpu_memory(facts.memory_bytes))
    assumed = machine(name, facts.memory_bytes, "h200" if facts.mlx_bytes else "cpu")
    return replace(assumed, memory=facts.mlx_bytes or facts.memory_bytes)


def hostfile_hosts(file: Hostfile, python: str | None = None) -> list[Host]:
    """Return the machines of a hosts file; the number of a machine's entries is its number of ranks."""
    ranks = Counter(entry.ssh for entry in file.hosts)
    first = {entry.ssh: entry for entry in reversed(file.hosts)}
    return [
        Host(name, entry.reached_at or "", entry.rdma, ranks[name], entry.python or python, ips=entry.ips)
        for name, entry in ((name, first[name]) for name in ranks)
    ]


def hosts_of(nodes: list[RayNode], commands: dict[str, tuple[str, ...]]) -> list[Host]:
    """Return the machines of a Ray cluster; `commands` maps a node id to the command that starts a probe there."""
    hosts: dict[str, Host] = {}
    for node in nodes:
        if not node.trouble and node.address not in hosts:
            hosts[node.address] = Host(node.address, node.address, ranks=node.units(node.total), command=commands[node.node_id])
    return list(hosts.values())
