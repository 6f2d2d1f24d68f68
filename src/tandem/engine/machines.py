"""From settings to machines: which hosts an engine has, and which launcher starts its ranks. No mlx."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from tandem.config.settings import ParallelSettings, Settings
from tandem.errors import LayoutError
from tandem.launchers.base import Launcher
from tandem.launchers.hostfile import HostEntry, hosts_of, read_hostfile

log = logging.getLogger(__name__)


def chosen_launcher(parallel: ParallelSettings) -> str:
    """The launcher that `auto` stands for."""
    if parallel.launcher != "auto":
        return parallel.launcher
    return "ssh" if parallel.hostfile is not None else "local"


def hosts_for(parallel: ParallelSettings) -> tuple[HostEntry, ...]:
    """Hosts of the hostfile that these settings use; empty without one. Raises ConfigError."""
    if parallel.hostfile is None:
        return ()
    return hosts_of(read_hostfile(parallel.hostfile), parallel.host_entries)


def with_layout(parallel: ParallelSettings) -> ParallelSettings:
    """With a hostfile and no layout: a pipeline over all its hosts, or as many as each replica gets.

    Raises LayoutError when there are too few hosts.
    """
    hosts = hosts_for(parallel)
    if not hosts:
        return parallel
    replicas = parallel.data_parallel_size
    if parallel.parallel is None and parallel.pipeline_parallel_size == parallel.tensor_parallel_size == 1:
        if len(hosts) % replicas:
            raise LayoutError(f"--data-parallel-size {replicas}: {parallel.hostfile} has {len(hosts)} hosts, which "
                              "cannot be shared out evenly; say how many ranks each has with "
                              "--pipeline-parallel-size or --tensor-parallel-size", param="data_parallel_size")
        parallel = replace(parallel, pipeline_parallel_size=len(hosts) // replicas)
    if ranks_of(parallel) * replicas > len(hosts):
        copies = f"{replicas} times " if replicas > 1 else ""
        raise LayoutError(f"the layout has {copies}{ranks_of(parallel)} ranks and {parallel.hostfile} has {len(hosts)} "
                          "hosts; add hosts, or name one several times to run several ranks there", param="hostfile")
    return parallel


def replica_hosts(parallel: ParallelSettings, index: int) -> ParallelSettings:
    """One replica's settings: the layout of each, and its own group of hosts.

    Replica i has the i-th group; one that is added later takes hosts that are left over, else it raises LayoutError.
    """
    hosts = hosts_for(parallel)
    if not hosts:
        return parallel
    parallel = with_layout(parallel)
    entries = parallel.host_entries or tuple(range(len(hosts)))
    ranks = ranks_of(parallel)
    mine = entries[index * ranks:(index + 1) * ranks]
    if len(mine) < ranks:
        raise LayoutError(f"replica {index} needs {ranks} hosts, and {parallel.hostfile} has no more; add hosts to it",
                          param="hostfile")
    return replace(parallel, host_entries=mine)


def sharing(parallel: ParallelSettings, index: int) -> int:
    """Replicas that share the machines of replica `index`, as far as can be known: the hostfile's hosts tell, ranks on
    this machine share it, and what joins by hand has a machine of its own."""
    count, kind = parallel.data_parallel_size, chosen_launcher(parallel)
    if kind != "ssh":
        return count if kind == "local" else 1
    hosts = hosts_for(parallel)
    ranks = ranks_of(with_layout(parallel))
    groups = [{host.ssh for host in hosts[i * ranks:(i + 1) * ranks]} for i in range(max(count, index + 1))]
    return max(sum(name in group for group in groups) for name in groups[index])


def ranks_of(parallel: ParallelSettings) -> int:
    """Ranks of one replica."""
    return sum(parallel.parallel) if parallel.parallel else (
        parallel.pipeline_parallel_size * parallel.tensor_parallel_size)


def told_memory(parallel: ParallelSettings) -> list[int]:
    """Memory of each host in bytes, if the hostfile tells that of all; else empty."""
    known = [host.memory_bytes for host in hosts_for(parallel)]
    return [] if None in known else [one or 0 for one in known]


def stage_memory(parallel: ParallelSettings, sizes: Sequence[int]) -> list[int]:
    """What each stage weighs in the layer split: its hosts' memory where the hostfile tells all, else its ranks."""
    memory = told_memory(parallel)[:sum(sizes)]
    if not memory:
        return list(sizes)
    return [sum(memory[sum(sizes[:stage]):sum(sizes[:stage + 1])]) for stage in range(len(sizes))]


def make_launcher(settings: Settings) -> Launcher:
    """The launcher that the settings ask for. Raises UsageError."""
    parallel, level = settings.parallel, settings.process.log_level
    kind = chosen_launcher(parallel)
    if kind == "ssh":
        from tandem.launchers.ssh import SshLauncher

        assert parallel.hostfile is not None  # settings are validated
        hostfile = read_hostfile(parallel.hostfile)
        return SshLauncher(hostfile, parallel.host_entries, remote_python=parallel.remote_python,
                           head_address=parallel.head_address, heartbeat_s=parallel.heartbeat_timeout,
                           threads_per_rank=parallel.threads_per_rank, log_level=level)
    if kind == "manual":
        from tandem.launchers.manual import ManualLauncher

        return ManualLauncher(port=parallel.join_port, token_file=parallel.token_file,
                              head_address=parallel.head_address, heartbeat_s=parallel.heartbeat_timeout,
                              threads_per_rank=parallel.threads_per_rank)
    if kind == "ray":
        from tandem.launchers.ray.hosts import RayLauncher

        return RayLauncher(parallel.ray_address, ranks_of(parallel), head_address=parallel.head_address,
                           heartbeat_s=parallel.heartbeat_timeout, threads_per_rank=parallel.threads_per_rank,
                           log_level=level)
    from tandem.launchers.local import LocalLauncher

    return LocalLauncher(parallel.threads_per_rank)
