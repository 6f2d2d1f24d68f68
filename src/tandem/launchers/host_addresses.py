"""Hosts of the hostfile that belong to an engine, by its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tandem.config.settings import ParallelSettings, Role
from tandem.errors import LayoutError
from tandem.launchers.hostfile import HostEntry, hosts_of, read_hostfile


def hosts_for(parallel: ParallelSettings) -> tuple[HostEntry, ...]:
    """Return the hosts of the hostfile that these settings select; empty without a hostfile. Raises ConfigError."""
    if parallel.hostfile is None:
        return ()
    return hosts_of(read_hostfile(parallel.hostfile), parallel.host_entries)


def named_backend(parallel: ParallelSettings) -> str | None:
    """Return the backend of the settings, or else of the hostfile; None if unspecified. Raises ConfigError."""
    if parallel.backend not in ("auto", "any"):
        return parallel.backend
    backend = None if parallel.hostfile is None else read_hostfile(parallel.hostfile).backend
    return None if backend == "any" else backend


def with_layout(parallel: ParallelSettings) -> ParallelSettings:
    """Return the settings; if a hostfile comes without a layout, add a pipeline over each replica's hosts.

    Raises LayoutError if there are too few hosts, or they do not divide evenly among the replicas.
    """
    hosts = hosts_for(parallel)
    if not hosts:
        return parallel
    replicas = parallel.data_parallel_size
    if parallel.parallel is None and parallel.pipeline_parallel_size == parallel.tensor_parallel_size == 1:
        if len(hosts) % replicas:
            raise LayoutError(
                f"--data-parallel-size {replicas}: {parallel.hostfile} has {len(hosts)} hosts, which "
                "cannot be shared out evenly; say how many ranks each has with "
                "--pipeline-parallel-size or --tensor-parallel-size",
                param="data_parallel_size",
            )
        parallel = replace(parallel, pipeline_parallel_size=len(hosts) // replicas)
    if ranks_of(parallel) * replicas > len(hosts):
        copies = f"{replicas} times " if replicas > 1 else ""
        raise LayoutError(
            f"the layout has {copies}{ranks_of(parallel)} ranks and {parallel.hostfile} has {len(hosts)} "
            "hosts; add hosts, or name one several times to run several ranks there",
            param="hostfile",
        )
    return parallel


def replica_hosts(parallel: ParallelSettings, index: int) -> ParallelSettings:
    """Return the settings of replica `index`, with its own hosts.

    Replica i has the i-th group of hosts, also if added later. Raises LayoutError if the hostfile has too few.
    """
    hosts = hosts_for(parallel)
    if not hosts:
        return parallel
    parallel = with_layout(parallel)
    entries = parallel.host_entries or tuple(range(len(hosts)))
    ranks = ranks_of(parallel)
    mine = entries[index * ranks : (index + 1) * ranks]
    if len(mine) < ranks:
        raise LayoutError(
            f"replica {index} needs {ranks} hosts, and {parallel.hostfile} has no more; add hosts to it", param="hostfile"
        )
    return replace(parallel, host_entries=mine)


def ranks_of(parallel: ParallelSettings) -> int:
    """Return the number of ranks of one replica."""
    return sum(parallel.parallel) if parallel.parallel else (parallel.pipeline_parallel_size * parallel.tensor_parallel_size)


def role_of(parallel: ParallelSettings) -> Role:
    """Return the role of one replica, from its own settings."""
    return parallel.roles[0] if parallel.roles else "both"


def told_memory(parallel: ParallelSettings) -> list[int]:
    """Return each host's memory in bytes; empty unless the hostfile has it for all hosts."""
    known = [host.memory_bytes for host in hosts_for(parallel)]
    return [] if None in known else [size or 0 for size in known]


def stage_memory(parallel: ParallelSettings, sizes: Sequence[int]) -> list[int]:
    """Return each stage's weight for the layer split: its hosts' memory in bytes if the hostfile has it, else its number of
    ranks."""
    memory = told_memory(parallel)[: sum(sizes)]
    if not memory:
        return list(sizes)
    return [sum(memory[sum(sizes[:stage]) : sum(sizes[: stage + 1])]) for stage in range(len(sizes))]
