"""Timing of collectives, point-to-point hops and model steps, on this machine or on the hosts of a hosts file.

`profile_of` converts the times to the planner's profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from tandem.diagnostics.doctor.evidence import Host
from tandem.diagnostics.doctor.examine import addressed
from tandem.diagnostics.doctor.probe_messages import RunRank
from tandem.diagnostics.doctor.probe_session import ANSWER_S, ProbeLink, ProbeLost, Probes, probe_command
from tandem.diagnostics.tasks import LATE, RankTimes, Row, TimingTask, local_group, run_ranks, timing_group
from tandem.errors import ConfigError, RankFailure
from tandem.launchers.hostfile import LOCAL_NAMES, HostEntry, Hostfile
from tandem.launchers.local import LocalLauncher
from tandem.launchers.process_groups import free_ports
from tandem.planner.profile import VERSION, Backend, HostProfile, LinkProfile, Profile, Sum, Versions, rounded
from tandem.version import __version__

HERE = "127.0.0.1"
OPERATIONS = ("all_sum", "between", "tcp", "ring")


def measure(
    backend: str,
    ranks: int,
    sizes: list[int],
    iterations: int,
    *,
    timeout_s: float,
    fast_sync: bool = False,
    operations: Sequence[str] = OPERATIONS,
) -> RankTimes:
    """Time `ranks` processes on this machine; return the times of rank 0, in the order of `sizes` (bytes).

    Operations: `all_sum` sums an evaluated array over all ranks; `between` does so between two device operations. `tcp`, and
    `ring` on the ring backend, time one hop to the next rank, as pipeline stages send it.

    Raises LayoutError if the backend is unavailable here. Raises RankFailure when a rank fails, a sum is wrong or `timeout_s`
    seconds pass.
    """
    task = TimingTask(backend=backend, operations=list(operations), sizes=sizes, iterations=iterations, fast_sync=fast_sync)
    with local_group(backend, ranks) as variables:
        return _run(timing_group(task, [HERE] * ranks, free_ports(ranks)), variables, timeout_s)


def measure_here(timeout_s: float) -> RankTimes:
    """Time the model steps of this machine, using all of its cores. Raises RankFailure."""
    return _run([TimingTask()], [LocalLauncher(None).variables(0, 1)], timeout_s)


def _run(tasks: Sequence[TimingTask], variables: Sequence[Mapping[str, str]], timeout_s: float) -> RankTimes:
    times = run_ranks(tasks, variables, timeout_s)
    for rank, answer in enumerate(times):
        if answer.error not in (None, LATE):
            raise RankFailure(f"rank {rank}: {answer.error}", rank=rank)
    if late := [rank for rank, answer in enumerate(times) if answer.error]:
        raise RankFailure(f"ranks {late} have not ended in time (--timeout)")
    return times[0]


class HostsBench(Probes):
    """Timing runs on the machines of a hosts file, one group after the other. A context manager."""

    def __init__(self, hostfile: Hostfile, python: str | None, timeout_s: float) -> None:
        """Store the options; `python` is the remote interpreter where the file names none. Raises ConfigError for one host."""
        if len(hostfile.hosts) < 2:
            why = "has one host; name two or more, or leave it out to measure this machine"
            raise ConfigError(f"--hostfile {hostfile.path}: {why}", param="hostfile")
        super().__init__(3)  # two ranks run at once; the third thread closes probes
        self._file, self._python, self._timeout_s = hostfile, python, timeout_s

    @property
    def names(self) -> list[str]:
        """Return the distinct machine names."""
        return list(dict.fromkeys(entry.ssh for entry in self._file.hosts))

    def pairs(self) -> list[tuple[int, int]]:
        """Return one pair of indices into the hosts file per pair of machines, or per machine with several ranks."""
        ways: dict[frozenset[str], tuple[int, int]] = {}
        for a, b in combinations(range(len(self._file.hosts)), 2):
            ways.setdefault(frozenset((self._file.hosts[a].ssh, self._file.hosts[b].ssh)), (a, b))
        return list(ways.values())

    def steps(self, name: str) -> RankTimes:
        """Time the model steps of one machine. Raises RankFailure."""
        entry = next(entry for entry in self._file.hosts if entry.ssh == name)
        request = RunRank(TimingTask(), {}, {}, self._timeout_s)
        try:
            times = self.ask(self._probe(entry, 0), request, RankTimes, self._timeout_s + ANSWER_S)
        except ProbeLost as lost:
            raise RankFailure(lost.message) from None
        return self._whole(entry, times)

    def joined(self, pair: tuple[int, int], backend: str, sizes: list[int], iterations: int, fast_sync: bool
               ) -> RankTimes:  # fmt: skip
        """Time collectives and hops between two entries of the hosts file, as seen by the first. Raises RankFailure, and
        LayoutError if the backend is unavailable there."""
        entries = [self._file.hosts[index] for index in pair]
        devices = [tuple(entry.rdma[i] for i in pair) if entry.rdma else () for entry in entries]
        named = zip(entries, devices, strict=True)
        ends = addressed([Host(one.ssh, one.reached_at or "", rdma, ips=one.ips) for one, rdma in named], LOCAL_NAMES)
        hosts = [replace(host, name=self._probe(entry, end)) for end, (entry, host) in enumerate(zip(entries, ends, strict=True))]
        task = TimingTask(backend=backend, operations=list(OPERATIONS), sizes=sizes, iterations=iterations, fast_sync=fast_sync)
        try:
            times = self.time_ranks(task, hosts, dict(self._file.envs), self._timeout_s)
        except ProbeLost as lost:
            raise RankFailure(lost.message) from None
        return [self._whole(entry, answer) for entry, answer in zip(entries, times, strict=True)][0]

    def _probe(self, entry: HostEntry, end: int) -> str:
        """Return the name of the probe for rank `end` (0 or 1) of a pair; start the probe if there is none."""
        name = f"{entry.ssh} ({end})"
        if name not in self.links:
            self.links[name] = ProbeLink(entry.ssh, probe_command(entry.ssh, entry.python or self._python))
        return name

    def _whole(self, entry: HostEntry, times: RankTimes) -> RankTimes:
        if times.error:
            late = f"has not ended within {self._timeout_s:g} s (--timeout)"
            raise RankFailure(f"{entry.ssh}: {late if times.error == LATE else times.error}")
        return times


def profile_of(
    steps: Mapping[str, RankTimes], joined: Mapping[tuple[str, str], RankTimes], backend: Backend, fast_sync: bool
) -> Profile:
    """Make a planner profile from step times by machine and link times by pair. All links share one backend and fence mode."""
    hosts = [
        HostProfile(
            name=name, device=times.device, gpu=times.gpu, metal=times.metal, steps=times.steps, memory_bytes=times.memory_bytes
        )
        for name, times in steps.items()
    ]
    links = [_link(pair, times.rows, backend, fast_sync and times.metal) for pair, times in joined.items()]
    mlx = ", ".join(sorted({times.mlx for times in (*steps.values(), *joined.values())}))
    return Profile(tandem_profile=VERSION, versions=Versions(tandem=__version__, mlx=mlx), hosts=hosts, links=links)


def _link(pair: tuple[str, str], rows: Sequence[Row], backend: Backend, fast_sync: bool) -> LinkProfile:
    """Fit latency and bandwidth of a link from its smallest and largest message.

    The fence cost is the extra time of `between` over `all_sum` at the smallest size.
    """
    ordered = sorted(rows, key=lambda row: row.bytes)
    alone, between, hops = ([row for row in ordered if row.operation == name] for name in ("all_sum", "between", "tcp"))
    least = between[0].median_us
    return LinkProfile(
        hosts=pair,
        backend=backend,
        fast_sync=fast_sync,
        sum_us=rounded(least),
        fence_us=rounded(min(max(least - alone[0].median_us, 0.0), least)),
        sum_gb_per_s=rounded(_rate(between)),
        hop_us=rounded(hops[0].median_us),
        hop_gb_per_s=rounded(_rate(hops)),
        sums=[
            Sum(bytes=bare.bytes, alone_us=rounded(bare.median_us), between_us=rounded(chained.median_us))
            for bare, chained in zip(alone, between, strict=True)
        ],
    )


def _rate(rows: Sequence[Row]) -> float:
    """Return the bandwidth in 10**9 bytes a second, from the growth of times with size; without growth, the largest row's."""
    first, last = rows[0], rows[-1]
    more = last.median_us - first.median_us
    return (last.bytes - first.bytes) / more / 1e3 if more > 0 and last.bytes > first.bytes else last.gb_per_s
