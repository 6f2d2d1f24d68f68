"""The table of launchers and their properties. No other module compares their names; what a launcher needs is
imported when it is made."""

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
    """Properties of a kind of launcher, for other packages, before one is made."""

    make: Callable[[Settings], Launcher]
    """Raises UsageError."""
    here: bool = False
    """Ranks run on the engine's machine, and share its cores, memory and GPUs with those of other engines."""
    by_hostfile: bool = False
    """Ranks run on the hosts of the hostfile, which may tell their memory."""
    by_hand: bool = False
    """People start the ranks, which come to a port of their engine and stay with it."""
    own_devices: bool = False
    """Each rank gets a device that no other rank has, of whichever engine."""


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
"""By their names in settings. Paired machines (`tandem agent`) are hosts of a hostfile that ssh's launcher reaches."""


def launcher_kind(parallel: ParallelSettings) -> LauncherKind:
    """Return the kind of the launcher that these settings choose."""
    return LAUNCHERS[parallel.chosen_launcher]


def make_launcher(settings: Settings) -> Launcher:
    """Make the launcher that the settings choose. Raises UsageError."""
    return launcher_kind(settings.parallel).make(settings)


def on_several_machines(parallel: ParallelSettings) -> bool:
    """True if the ranks of all replicas may be on more machines than this one, as far as is known. Raises
    ConfigError."""
    kind = launcher_kind(parallel)
    return not (kind.here or (kind.by_hostfile and all(host.is_here for host in hosts_for(parallel))))


def sharing(parallel: ParallelSettings, index: int) -> int:
    """Count the replicas that share the machines of replica `index`, as far as is known. Replicas share a machine by
    the hostfile, or run on this one; what joins by hand has a machine of its own."""
    count, kind = parallel.data_parallel_size, launcher_kind(parallel)
    if not kind.by_hostfile:
        return count if kind.here else 1
    hosts = hosts_for(parallel)
    ranks = ranks_of(with_layout(parallel))
    groups = [{host.ssh for host in hosts[i * ranks : (i + 1) * ranks]} for i in range(max(count, index + 1))]
    return max(sum(name in group for group in groups) for name in groups[index])
