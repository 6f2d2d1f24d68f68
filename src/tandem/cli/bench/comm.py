"""`tandem bench comm`: speed of the links between ranks, on this machine or between the machines of a hosts file."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import cast, get_args

from msgspec import to_builtins

from tandem.cli.bench.load import EXIT_OK, need, write_file
from tandem.diagnostics.collectives.measure import HostsBench, measure, measure_here, profile_of
from tandem.diagnostics.tasks import RankTimes, Row
from tandem.errors import UsageError
from tandem.launchers.hostfile import read_hostfile
from tandem.planner.hosts import this_name
from tandem.planner.profile import Backend, Profile, encode_profile, read_profile

_UNITS = {"K": 1024, "M": 1024**2, "G": 1024**3}
_MOST_DIGITS = 10
_MOST_RANKS = 64
_DAY_S = 86400


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Return 0. Raises UsageError and RankFailure."""
    need(arguments.ranks is None or 2 <= arguments.ranks <= _MOST_RANKS, "--ranks", arguments.ranks, f"2 to {_MOST_RANKS}")
    need(arguments.num_iters > 0, "--num-iters", arguments.num_iters, "at least 1")
    need(0 < arguments.timeout <= _DAY_S, "--timeout", arguments.timeout, f"above 0, and at most {_DAY_S} (a day)")
    sizes, fast = _sizes(arguments.sizes), arguments.fast_sync == "on"
    before = _profile_before(arguments, sizes)
    if arguments.hostfile is not None:
        return _comm_hosts(arguments, sizes, before)
    ranks, backend = arguments.ranks or 2, arguments.backend or "ring"
    times = measure(backend, ranks, sizes, arguments.num_iters, timeout_s=arguments.timeout, fast_sync=fast)
    _print_rows(times.rows)
    if arguments.output_json:
        facts = {"backend": backend, "ranks": ranks, "num_iters": arguments.num_iters}
        write_file(
            Path(arguments.output_json), json.dumps({**facts, "rows": to_builtins(times.rows)}, indent=2) + "\n", "--output-json"
        )
    if arguments.write_profile:
        name = this_name()
        steps = measure_here(arguments.timeout)
        _print_steps(name, steps)
        measured = profile_of({name: steps}, {(name, name): times}, cast("Backend", backend), fast)
        _write_profile(arguments, before, measured)
    return EXIT_OK


def _comm_hosts(arguments: argparse.Namespace, sizes: list[int], before: Profile | None) -> int:
    """Measure each pair of machines of a hosts file, and for `--write-profile` also each machine. Return 0."""
    if arguments.ranks is not None:
        raise UsageError("--ranks: with --hostfile each two of its hosts have one rank each; leave it out", param="ranks")
    file = read_hostfile(arguments.hostfile)
    backend = arguments.backend or file.backend or "ring"
    need(backend in get_args(Backend), "--backend", backend, f"one of {', '.join(get_args(Backend))}")
    fast = arguments.fast_sync == "on"
    joined: dict[tuple[str, str], RankTimes] = {}
    steps: dict[str, RankTimes] = {}
    with HostsBench(file, arguments.remote_python, arguments.timeout) as bench:
        for pair in bench.pairs():
            ends = file.hosts[pair[0]].ssh, file.hosts[pair[1]].ssh
            joined[ends] = bench.joined(pair, backend, sizes, arguments.num_iters, fast)
            print(f"=== {ends[0]} - {ends[1]} ({backend})")
            _print_rows(joined[ends].rows)
        for name in bench.names if arguments.write_profile else ():
            steps[name] = bench.steps(name)
            _print_steps(name, steps[name])
    if arguments.output_json:
        pairs = [{"hosts": ends, "rows": to_builtins(times.rows)} for ends, times in joined.items()]
        facts = {"backend": backend, "num_iters": arguments.num_iters, "pairs": pairs}
        write_file(Path(arguments.output_json), json.dumps(facts, indent=2) + "\n", "--output-json")
    if arguments.write_profile:
        _write_profile(arguments, before, profile_of(steps, joined, cast("Backend", backend), fast))
    return EXIT_OK


def _profile_before(arguments: argparse.Namespace, sizes: list[int]) -> Profile | None:
    """Read an existing profile file; None for a new file or without `--write-profile`.

    Raises UsageError for options that cannot give a profile.
    """
    path = arguments.write_profile
    if path is None:
        return None
    if len(set(sizes)) < 2:
        raise UsageError(
            f"--sizes {arguments.sizes}: --write-profile needs two sizes or more, a small and a large one", param="sizes"
        )
    if arguments.ranks not in (None, 2):
        raise UsageError(f"--ranks {arguments.ranks}: --write-profile measures two ranks at a time; leave it out", param="ranks")
    if not Path(path).exists():
        write_file(Path(path), "", "--write-profile")  # an unwritable file fails now, not after all measurements
        Path(path).unlink()
        return None
    return read_profile(path, "--write-profile")


def _write_profile(arguments: argparse.Namespace, before: Profile | None, profile: Profile) -> None:
    whole = profile if before is None else before.merged(profile)
    write_file(Path(arguments.write_profile), encode_profile(whole), "--write-profile")
    print(
        f"written to {arguments.write_profile}: {', '.join(host.name for host in whole.hosts)}; "
        f"use it with: tandem plan MODEL --profile {shlex.quote(arguments.write_profile)}"
    )


def _print_rows(rows: Sequence[Row]) -> None:
    print(f"{'operation':<10}{'bytes':>12}{'median us':>12}{'p99 us':>12}{'GB/s':>9}")
    for row in rows:
        print(f"{row.operation:<10}{row.bytes:>12}{row.median_us:>12.1f}{row.p99_us:>12.1f}{row.gb_per_s:>9.3f}", flush=True)


def _print_steps(name: str, times: RankTimes) -> None:
    for step in times.steps:
        print(
            f"=== {name}, {times.device}, weights of {step.weights}: {step.gb_per_s:.1f} GB/s, {step.tflops:.2f} "
            f"TFLOP/s, {step.layer_us:.0f} us a layer",
            flush=True,
        )


def _sizes(text: str) -> list[int]:
    sizes = []
    for item in text.split(","):
        unit = _UNITS.get(item[-1:].upper(), 1)
        number = item[:-1] if unit > 1 else item
        digits = number.isascii() and number.isdigit() and len(number) <= _MOST_DIGITS
        need(digits and 4 <= int(number) * unit <= _UNITS["G"], "--sizes", item, "bytes from 4 to 1G, such as 512, 64K or 4M")
        sizes.append(int(number) * unit)
    return sorted(sizes)
