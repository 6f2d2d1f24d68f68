"""The same between the machines of a hosts file: probes, as the doctor has them, start the ranks there."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import TypeVar

import msgspec

from tandem.bench.comm import payloads
from tandem.bench.messages import CommPayload, RankTimes
from tandem.doctor.examine import own_address, resolved, world
from tandem.doctor.findings import Host
from tandem.doctor.messages import RankRan, Request, Reserve, ReservedPorts, RunRank
from tandem.doctor.session import ProbeLink, ProbeLost, local_probe, remote_probe
from tandem.errors import ConfigError, RankFailure
from tandem.launchers.hostfile import HostEntry, Hostfile

T = TypeVar("T")
ANSWER_S = 60.0
"""Seconds that a probe gets for what is quick, the start of its Python included."""


class HostsBench:
    """Ranks on the machines of a hosts file, one group after the other. A context manager."""

    def __init__(self, hostfile: Hostfile, python: str | None, timeout_s: float) -> None:
        """`python` is the interpreter on the other machines, where the file names none. Nothing is started."""
        if len(hostfile.hosts) < 2:
            raise ConfigError(f"--hostfile {hostfile.path}: has one host; name two or more, or leave it out to measure "
                              "this machine", param="hostfile")
        self._file = hostfile
        self._python = python
        self._timeout_s = timeout_s
        self._probes: dict[tuple[str, int], ProbeLink] = {}
        self._pool = ThreadPoolExecutor(2)

    def __enter__(self) -> HostsBench:
        return self

    def __exit__(self, *exc: object) -> None:
        for probe in self._probes.values():
            probe.close()
        self._pool.shutdown()

    @property
    def names(self) -> list[str]:
        """Of the machines, each once."""
        return list(dict.fromkeys(one.ssh for one in self._file.hosts))

    def pairs(self) -> list[tuple[int, int]]:
        """Two entries of the file for each way between two machines, or two ranks of one."""
        ways: dict[frozenset[str], tuple[int, int]] = {}
        for a, b in combinations(range(len(self._file.hosts)), 2):
            ways.setdefault(frozenset((self._file.hosts[a].ssh, self._file.hosts[b].ssh)), (a, b))
        return list(ways.values())

    def steps(self, name: str) -> RankTimes:
        """Of one machine. Raises RankFailure."""
        entry = next(one for one in self._file.hosts if one.ssh == name)
        return self._ran(entry, 0, CommPayload(), {}, {})

    def joined(self, pair: tuple[int, int], backend: str, sizes: list[int], iterations: int, fast_sync: bool
               ) -> RankTimes:  # fmt: skip
        """What joins two entries, as the first of them finds it. Raises RankFailure, and LayoutError for a backend that
        they cannot have."""
        entries = [self._file.hosts[index] for index in pair]
        addresses = _addresses(entries)
        ports = [self._asked(entry, end, Reserve(2), ReservedPorts, ANSWER_S).ports
                 for end, entry in enumerate(entries)]
        hosts = [Host(f"{entry.ssh} ({end})", address, tuple(entry.rdma[index] for index in pair) if entry.rdma else ())
                 for end, (entry, address) in enumerate(zip(entries, addresses, strict=True))]
        group = world(backend, hosts, {host.name: two[0] for host, two in zip(hosts, ports, strict=True)})
        orders = payloads(backend, addresses, [two[1] for two in ports], sizes, iterations, fast_sync)
        extra = dict(self._file.envs)

        def ran(end: int) -> RankTimes:
            return self._ran(entries[end], end, orders[end], {**extra, **group.variables(end)}, group.files(end))

        first, _ = self._pool.map(ran, range(2))
        return first

    def _ran(self, entry: HostEntry, end: int, payload: CommPayload, variables: dict[str, str], files: dict[str, str]
             ) -> RankTimes:  # fmt: skip
        """Raises RankFailure."""
        request = RunRank(msgspec.json.encode(payload).decode(), variables, files, self._timeout_s)
        answer = self._asked(entry, end, request, RankRan, self._timeout_s + ANSWER_S)
        if answer.error:
            raise RankFailure(f"{entry.ssh}: {answer.error}")
        return msgspec.json.decode(answer.answer, type=RankTimes)

    def _asked(self, entry: HostEntry, end: int, request: Request, kind: type[T], timeout_s: float) -> T:
        key = entry.ssh, end
        try:
            if key not in self._probes:
                command = local_probe() if entry.is_here else remote_probe(entry.ssh, entry.python or self._python)
                self._probes[key] = ProbeLink(entry.ssh, command)
            answer = self._probes[key].ask(request, timeout_s)
        except ProbeLost as lost:
            remedy = f"; {lost.remedy}" if lost.remedy else ""
            raise RankFailure(f"{entry.ssh}: {lost.message}{remedy}") from None
        if not isinstance(answer, kind):
            raise RankFailure(f"{entry.ssh}: another version of Tandem answers there; install the same on all machines")
        return answer


def _addresses(entries: Sequence[HostEntry]) -> list[str]:
    """Where each end is reached: as the file says, else what ssh makes of the name; this machine's is the one on the
    way to the other."""
    found = [entry.ips[0] if entry.ips else None if entry.is_here else resolved(entry.ssh) for entry in entries]
    others = [one for one in found if one]
    return [one or (own_address(others[0]) if others else "127.0.0.1") for one in found]
