"""Table of launchers and their properties. No other module compares launcher names. A launcher's module is imported only when
used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tandem.config.settings import ParallelSettings, Settings
from tandem.launchers.base import Launcher
from tandem.launchers.host_addresses import hosts_for, ranks_of, with_layout
from tandem.launchers.hostfile import read_hostfile
from tandem.system.cuda import uses_cuda


@dataclass(frozen=True, kw_only=True)
class LauncherKind:
    """Properties of a launcher, known before it is created."""

    make: Callable[[Settings], Launcher]
    """Create the launcher. Raises UsageError."""
    here: bool = False
    """True if ranks run on the engine's machine and share its cores, memory and GPUs with other engines' ranks."""
    by_hostfile: bool = False
    """True if ranks run on the hosts of the hostfile, which may state their memory."""
    by_hand: bool = False
    """True if the user starts the ranks; they join an engine's port and stay with that engine."""
    own_devices: bool = False
    """True if each rank has a device to itself, even across engines."""


def _local(settings: Settings) -> Launcher:
    from tandem.launchers.local import LocalLauncher

    return LocalLauncher(settings.parallel.threads_per_rank, cuda=uses_cuda(settings.parallel.device))


def _ssh(settings: Settings) -> Launcher:
    from tandem.launchers.ssh import SshLauncher

    assert settings.parallel.hostfile is not None  # settings are validated
    return SshLauncher(read_hostfile(settings.parallel.hostfile), settings)


def _ray(settings: Settings) -> Launcher:
    from tandem.launchers.ray.launcher import RayLauncher

    return RayLauncher(settings)


def _manual(settings: Settings) -> Launcher:
    from tandem.launchers.manual import ManualLauncher

    return ManualLauncher(settings.parallel)


LAUNCHERS = {
    "local": LauncherKind(make=_local, here=True),
    "ssh": LauncherKind(make=_ssh, by_hostfile=True),
    "ray": LauncherKind(make=_ray, own_devices=True),
    "manual": LauncherKind(make=_manual, by_hand=True),
}
"""Launchers by their names in settings. Paired machines (`tandem agent`) belong to `ssh`, as hosts of a hostfile."""


def launcher_kind(parallel: ParallelSettings) -> LauncherKind:
    """Return the properties of the launcher that the settings choose."""
    return LAUNCHERS[parallel.chosen_launcher]


def make_launcher(settings: Settings) -> Launcher:
    """Create the launcher that the settings choose. Raises UsageError."""
    return launcher_kind(settings.parallel).make(settings)


def on_several_machines(parallel: ParallelSettings) -> bool:
    """True if ranks of any replica may run on other machines. Raises ConfigError."""
    kind = launcher_kind(parallel)
    return not (kind.here or (kind.by_hostfile and all(host.is_here for host in hosts_for(parallel))))


def sharing(parallel: ParallelSettings, index: int) -> int:
    """Return the number of replicas that share the machines of replica `index`: by the hostfile, or all if ranks are local;
    otherwise 1."""
    count, kind = parallel.data_parallel_size, launcher_kind(parallel)
    if not kind.by_hostfile:
        return count if kind.here else 1
    hosts = hosts_for(parallel)
    ranks = ranks_of(with_layout(parallel))
    groups = [{host.ssh for host in hosts[i * ranks : (i + 1) * ranks]} for i in range(max(count, index + 1))]
    return max(sum(name in group for group in groups) for name in groups[index])
