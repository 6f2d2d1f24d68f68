"""From what ranks have found to a profile for the planner. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem.doctor.messages import RankTimes, Row
from tandem.planner.profile import VERSION, Backend, HostProfile, LinkProfile, Profile, Sum, Versions, rounded
from tandem.version import __version__


def profile_of(steps: Mapping[str, RankTimes], joined: Mapping[tuple[str, str], RankTimes], backend: Backend,
               fast_sync: bool) -> Profile:
    """`steps` by machine, and what joins two of them, measured with one backend and one kind of fences."""
    hosts = [HostProfile(name=name, device=one.device, gpu=one.gpu, metal=one.metal, memory_bytes=one.memory_bytes,
                         steps=one.steps) for name, one in steps.items()]
    links = [_link(pair, one.rows, backend, fast_sync and one.metal) for pair, one in joined.items()]
    mlx = ", ".join(sorted({one.mlx for one in (*steps.values(), *joined.values())}))
    return Profile(tandem_profile=VERSION, versions=Versions(tandem=__version__, mlx=mlx), hosts=hosts, links=links)


def _link(pair: tuple[str, str], rows: Sequence[Row], backend: Backend, fast_sync: bool) -> LinkProfile:
    """A straight line through the smallest and the largest size: latency, and bytes a second.

    What a sum between two operations of the device takes more than one of an array that is there is the fence.
    """
    by_name = {name: sorted((row for row in rows if row.operation == name), key=lambda row: row.bytes)
               for name in ("all_sum", "between", "tcp")}
    alone, between, hops = by_name["all_sum"], by_name["between"], by_name["tcp"]
    least = between[0].median_us
    return LinkProfile(
        hosts=pair, backend=backend, fast_sync=fast_sync, sum_us=rounded(least),
        fence_us=rounded(min(max(least - alone[0].median_us, 0.0), least)), sum_gb_per_s=rounded(_rate(between)),
        hop_us=rounded(hops[0].median_us), hop_gb_per_s=rounded(_rate(hops)),
        sums=[Sum(bytes=one.bytes, alone_us=rounded(one.median_us), between_us=rounded(two.median_us))
              for one, two in zip(alone, between, strict=True)])


def _rate(rows: Sequence[Row]) -> float:
    """10**9 bytes a second by which larger messages take longer; of the largest where they take no longer."""
    first, last = rows[0], rows[-1]
    more = last.median_us - first.median_us
    return (last.bytes - first.bytes) / more / 1e3 if more > 0 and last.bytes > first.bytes else last.gb_per_s
