"""Client side of the probes."""

from __future__ import annotations

import queue
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self, TypeVar

import msgspec

from tandem.diagnostics.doctor.evidence import Host
from tandem.diagnostics.doctor.probe_messages import MARK, ProbeError, Reply, Request, Reserve, ReservedPorts, RunRank
from tandem.diagnostics.tasks import RankTimes, TimingTask, timing_group
from tandem.errors import TandemError
from tandem.launchers.agent.link import agent_name, link_command
from tandem.launchers.base import ProcessGroup
from tandem.launchers.hostfile import LOCAL_NAMES
from tandem.launchers.process_groups import Devices, jaccl_process_group, nccl_process_group, ring_process_group
from tandem.launchers.ssh import HostProcess, diagnose, remote_command, ssh_command
from tandem.processes.interpreter import module_command
from tandem.protocol.codec import UNREADABLE

PROBE = "tandem.diagnostics.doctor.probe"
ANSWER_S = 60.0
"""Default timeout in seconds for quick requests, start of the probe's Python included."""
T = TypeVar("T")
K = TypeVar("K")


class ProbeLost(TandemError):
    """Raised when a machine's probe does not answer. `remedy` names a fix; may be empty."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class ProbeLink(HostProcess):
    """A running probe. Not thread-safe: one request at a time."""

    def __init__(self, name: str, command: Sequence[str], variables: Mapping[str, str | None] | None = None) -> None:
        """Start `command`, which runs a probe on the machine `name`, with `variables` in its environment."""
        super().__init__(command, variables, stderr=subprocess.PIPE)
        self.name = name
        self._replies: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._late = 0
        """Number of requests that timed out and whose replies may still arrive."""
        self._complaints: list[str] = []
        self._follow(self._process.stdout, self._take, "answers", lambda: self._replies.put(None))
        self._follow(self._process.stderr, self._keep, "errors")

    def _take(self, line: bytes) -> None:
        if line.startswith(MARK):
            self._replies.put(line.removeprefix(MARK))

    def _keep(self, line: bytes) -> None:
        self._complaints += [line.decode(errors="replace").strip()] if line.strip() else []

    def ask(self, request: Request, kind: type[T], timeout_s: float) -> T:
        """Send a request and return the reply. Raises ProbeLost after `timeout_s` seconds, if the probe failed, or if the reply
        is not a `kind`."""
        deadline = time.monotonic() + timeout_s
        self.tell(msgspec.json.encode(request))  # errors of an exited probe are raised below
        try:
            while (line := self._replies.get(timeout=max(deadline - time.monotonic(), 0.0))) is not None and self._late:
                self._late -= 1  # the probe replies in order
        except queue.Empty:
            self._late += 1
            raise ProbeLost(f"no answer within {timeout_s:g} s") from None
        if line is None:
            self._replies.put(None)
            raise self._explain()
        try:
            reply: Reply = msgspec.json.decode(line, type=Reply)
        except UNREADABLE as error:
            raise ProbeLost(f"its answer cannot be read: {error}; has it the same version of Tandem?") from None
        if isinstance(reply, ProbeError):
            raise ProbeLost(reply.message)
        if not isinstance(reply, kind):
            raise ProbeLost("another version of Tandem answers there", "install the same on all machines")
        return reply

    def _explain(self) -> ProbeLost:
        self._process.wait()
        self._join()
        return explain(self.name, self._process.returncode, self._complaints)

    def close(self) -> None:
        """Stop the probe."""
        self.end(2.0)


class Probes:
    """Probes by name, with parallel requests to different machines. A context manager that stops them."""

    def __init__(self, most: int) -> None:
        """Store `most`, the maximum number of parallel requests; starts no probe."""
        self.links: dict[str, ProbeLink] = {}
        self._pool = ThreadPoolExecutor(most)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.each(ProbeLink.close, self.links.values())
        self._pool.shutdown()

    def each(self, act: Callable[[K], T], things: Iterable[K]) -> list[T]:
        """Call `act` on all items in parallel; return the results in order."""
        return list(self._pool.map(act, list(things)))

    def ask(self, name: str, request: Request, kind: type[T], timeout_s: float = ANSWER_S) -> T:
        """Return the reply of the probe `name`. Raises ProbeLost, with the machine's name, also if the reply is not a `kind`."""
        link = self.links[name]
        try:
            return link.ask(request, kind, timeout_s)
        except ProbeLost as error:
            raise ProbeLost(f"{link.name}: {error.message}{f'; {error.remedy}' if error.remedy else ''}") from None

    def time_ranks(self, task: TimingTask, hosts: Sequence[Host], variables: Mapping[str, str], timeout_s: float
                   ) -> list[RankTimes]:  # fmt: skip
        """Time a group with one rank on each host; return the times by rank. Raises ProbeLost, and LayoutError if the hosts
        cannot use the backend."""

        def reserve(host: Host) -> list[int]:
            return self.ask(host.name, Reserve(1 + len(host.ring_addresses)), ReservedPorts).ports

        ports = self.each(reserve, hosts)
        group = process_group(task.backend, hosts, [own[1:] for own in ports])
        tasks = timing_group(task, [host.address for host in hosts], [own[0] for own in ports])

        def run(rank: int) -> RankTimes:
            request = RunRank(tasks[rank], {**variables, **group.variables(rank)}, group.files(rank), timeout_s)
            return self.ask(hosts[rank].name, request, RankTimes, timeout_s + ANSWER_S)

        return self.each(run, range(len(hosts)))


def local_probe() -> list[str]:
    """Return the command of a probe on this machine."""
    return module_command(PROBE)


def probe_command(host: str, python: str | None = None) -> list[str]:
    """Return the command of a probe on a host of a hosts file: on this machine, or over a node agent or ssh as for its ranks."""
    if host in LOCAL_NAMES:
        return local_probe()
    if (agent := agent_name(host)) is not None:
        return link_command(agent, "probe")
    return ssh_command(host, remote_command(python, PROBE, "doctor --probe"))


def explain(host: str, code: int, complaints: Sequence[str]) -> ProbeLost:
    """Return the error for a probe's command that exited with `code` after printing `complaints`. Pure."""
    said = complaints[-1] if complaints else f"ended with code {code}"
    look = f"ssh {host} hostname" if agent_name(host) is None else "look at what `tandem agent` prints there"
    return ProbeLost(*(diagnose(host, code, complaints) or (said, look)))


def process_group(backend: str, hosts: Sequence[Host], ports: Sequence[Sequence[int]]) -> ProcessGroup:
    """Return an MLX process group with one rank on each host; `ports` has one for each of a host's `ring_addresses`.

    A ring goes over `ips`, as it does when serving; the coordinator of other backends is at the first host's `address`.
    Raises LayoutError. Pure.
    """
    coordinator = f"{hosts[0].address}:{ports[0][0]}"
    if backend in ("jaccl", "jaccl-ring"):
        devices: list[Devices] = [[list(x) if isinstance(x, tuple) else x for x in host.rdma] for host in hosts]
        return jaccl_process_group(backend, [host.name for host in hosts], devices, coordinator)
    if backend == "nccl":
        return nccl_process_group(len(hosts), coordinator)
    pairs = [zip(host.ring_addresses, own, strict=True) for host, own in zip(hosts, ports, strict=True)]
    return ring_process_group([[f"{address}:{port}" for address, port in listeners] for listeners in pairs])
