"""Storm of random layouts, features, faults and bad neighbours combined: nothing may be lost, wrong, twice, or hang.

A seed decides every round: its layout, features, bad neighbours, and faults with their times (soak_schedule.py). Every
answer is compared with the undisturbed one of the same server. After some rounds, which the first line names, every
pair of parts has met. A round that fails is played again with `--round N` and the other options as they were.

Counts: identical; tied (another text, as rounding decided a draw: soak_ties.py); wrong (another text); twice (said
again, or another answer to the same Idempotency-Key); lost (a failure that nobody caused); hung; refused (429 or 503
with Retry-After) by reason; broken (connections of an api that was killed or stopped). The exit code is 1 where an
answer was wrong, twice, lost or hung, a process printed a traceback or outlived its server, or the server had work
left, or ended with another code than 0.

In the evidence folder, by rounds: the server's log, faults and bad deeds with their times, and each request that went
wrong with what was expected. With --evidence on a small file system (mount -t tmpfs -o size=24m) that is also filled.
"""

from __future__ import annotations

import argparse
import collections
import json
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from harness import table
from soak_adapters import adapters
from soak_bad_clients import KINDS
from soak_budgets import budgets, thinking_model
from soak_measure import flat, good_client
from soak_round import Known, Models, Pace, Result, play
from soak_schedule import LAYOUTS, Round, allowed_pairs, chosen, rounds, rounds_to_meet
from soak_tally import BAD

from tandem.testing import tiny_model

CONTEXT = 4096
"""Positions that a model must have."""
LAYERS = 4
OVERHEAD_S = 30.0
"""Estimate of what a round takes beside its storm: start, undisturbed answers, and the end."""


sys.path.append(str(Path(__file__).parents[1] / "tests"))  # for its adapters


def models(args: argparse.Namespace, directory: Path) -> Models:
    """Tiny random models and an adapter, or the model that was given."""
    if args.model:
        return Models(args.model, args.model, None)
    from adapters import tiny_adapter

    made = [
        tiny_model(directory / name, dtype="float32", layers=LAYERS, seed=seed, config={"max_position_embeddings": CONTEXT})
        for seed, name in enumerate(("main", "second"))
    ]
    return Models(made[0], made[1], tiny_adapter(made[0], directory / "tuned", layers=LAYERS))


def planned(args: argparse.Namespace) -> Iterator[Round]:
    """Rounds that are asked for by number, or as many as there is time for."""
    if args.round:
        yield from chosen(args.seed, args.storm, args.every, args.round)
        return
    ends, longest = time.monotonic() + args.minutes * 60, 0.0
    for made in rounds(args.seed, args.storm, args.every):
        began = time.monotonic()
        yield made
        longest = max(longest, time.monotonic() - began)
        if time.monotonic() + longest > ends:
            return


def storm(args: argparse.Namespace, offered: Models, folder: Path) -> bool:
    """Play rounds and print a line for each and a table at the end; True when all is well."""
    every, needed = allowed_pairs(), rounds_to_meet(args.seed)
    minutes = needed * (args.storm + OVERHEAD_S) / 60
    print(
        f"seed {args.seed}: each of {len(every)} pairs of parts has met after {needed} rounds, in about "
        f"{minutes:.0f} minutes; evidence in {folder}",
        flush=True,
    )
    pace = Pace(
        args.storm,
        args.clients,
        args.pause,
        args.requests,
        {**KINDS, **{kind: int(count) for kind, count in (text.split("=") for text in args.neighbours)}},
        args.device,
    )
    known, results, met = Known(), list[Result](), set()
    for made in planned(args):
        result = play(made, args.seed, pace, offered, known, folder / f"round-{made.number}")
        results.append(result)
        met |= made.pairs() & every
        print(f"{time.strftime('%X')} {result}; pairs {len(met)} of {len(every)}", flush=True)
        if not result.well:
            print(f"again: {again(args, made)}", flush=True)
    report(results)
    if args.summary:
        args.summary.write_text(json.dumps([facts(result) for result in results], indent=1) + "\n")
    return all(result.well for result in results)


def again(args: argparse.Namespace, made: Round) -> str:
    """Return the command that plays a round again."""
    words = [f"--{name} {getattr(args, name)}" for name in ("seed", "storm", "every", "clients", "pause", "requests")]
    given = f" --neighbours {' '.join(args.neighbours)}" if args.neighbours else ""
    return f"benchmarks/soak.py {' '.join(words)}{given} --round {made.number}"


def facts(result: Result) -> dict[str, object]:
    """Return what the summary says of a round."""
    return {
        "round": result.made.number,
        "parts": sorted(result.made.parts),
        "seconds": round(result.seconds),
        "sent": result.sent,
        **result.counts,
        "refused_by_reason": result.refused,
        "faults": result.faults,
        "asked_again": result.replayed,
        "disk_tokens": result.disk_tokens,
        "bad_deeds": result.deeds,
        "problems": result.problems,
    }


def report(results: list[Result]) -> None:
    """Print the table."""
    names = ("identical", "tied", *BAD, "refused", "broken")
    sums: collections.Counter[str] = collections.Counter()
    refused: collections.Counter[str] = collections.Counter()
    rows: list[list[object]] = []
    for result in results:
        more = {"faults": sum(result.faults.values()), "deeds": result.deeds, "again": result.replayed}
        sums.update({**result.counts, **more, "seconds": round(result.seconds)})
        refused += result.refused
        rows.append(
            [
                str(result.made.number),
                str(result.made),
                round(result.seconds),
                more["faults"],
                more["deeds"],
                *(result.counts[name] for name in names),
                more["again"],
                "yes" if result.well else "NO",
            ]
        )
    rows.append(
        [
            "sum",
            "",
            sums["seconds"],
            sums["faults"],
            sums["deeds"],
            *(sums[name] for name in names),
            sums["again"],
            "yes" if all(result.well for result in results) else "NO",
        ]
    )
    table(("round", "layout, features, neighbours", "s", "faults", "deeds", *names, "asked again", "well"), rows)
    print(f"refused by reason: {', '.join(f'{count} x {reason}' for reason, count in refused.most_common()) or '-'}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"processor seconds of servers and bad clients: {used.ru_utime + used.ru_stime:.0f}")
    print("all is well" if all(result.well for result in results) else "NOT all is well", flush=True)


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="begin rounds as long as they end within it (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of all rounds (default: %(default)s)")
    parser.add_argument("--round", type=int, nargs="+", metavar="N", help="play these rounds of the seed alone")
    parser.add_argument("--storm", type=float, default=60.0, help="seconds of each storm (default: %(default)s)")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between faults (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=6, help="good clients in the end (default: %(default)s)")
    parser.add_argument(
        "--pause",
        type=float,
        default=0.0,
        metavar="S",
        help="mean pause of a good client between requests (default: %(default)s)",
    )
    parser.add_argument("--requests", type=int, default=20, help="requests of a round's set (default: %(default)s)")
    parser.add_argument(
        "--neighbours",
        nargs="+",
        default=[],
        metavar="KIND=N",
        help=f"bad clients of a kind, where a round has it (default: "
        f"{' '.join(f'{kind}={count}' for kind, count in KINDS.items())})",
    )
    parser.add_argument("--model", type=Path, help="a model directory; by default tiny random ones are made")
    parser.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "gpu"), help="where ranks compute (default: %(default)s)"
    )
    parser.add_argument("--evidence", type=Path, metavar="DIR", help="folder to keep; by default a new temporary one")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="also write counts of all rounds (JSON) there")
    parser.add_argument(
        "--flat", type=int, metavar="N", help="in place of a storm: memory and descriptors of each process over N requests"
    )
    parser.add_argument(
        "--good-client",
        action="store_true",
        help="in place of a storm: a good client's latency beside bad ones, within --minutes",
    )
    parser.add_argument(
        "--budgets",
        type=int,
        metavar="N",
        help="in place of a storm: N answers with thinking budgets over all layouts, with kills: none thinks for longer, and "
        "all are as undisturbed",
    )
    parser.add_argument(
        "--adapters",
        type=int,
        metavar="N",
        help="in place of a storm: N answers of ten adapters over all layouts, with kills, loads and unloads: all as undisturbed",
    )
    parser.add_argument(
        "--pictures",
        type=int,
        metavar="N",
        help="in place of a storm: N answers to text, one and three pictures over all layouts, with kills: all as undisturbed "
        "(needs the extra vision)",
    )
    parser.add_argument(
        "--damaged-pictures",
        type=int,
        metavar="N",
        help="in place of a storm: N damaged pictures beside a text stream: no error but 400, no crash; prints the stream's gaps",
    )
    parser.add_argument("--layout", choices=LAYOUTS, default="pp", help="of --flat and --good-client (default: %(default)s)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are ended
    with tempfile.TemporaryDirectory(prefix="tandem-soak-") as directory:
        offered = models(args, Path(directory))
        if args.flat:
            return 0 if flat(offered.main, args.layout, args.flat, args.device) else 1
        if args.good_client:
            good_client(offered.main, args.layout, args.minutes, args.device, args.seed)
            return 0
        folder = args.evidence or Path(tempfile.mkdtemp(prefix="tandem-soak-evidence-"))
        folder.mkdir(parents=True, exist_ok=True)
        if args.budgets:
            return 0 if budgets(thinking_model(Path(directory)), args.budgets, args.seed, args.device, folder) else 1
        if args.adapters:
            from adapters import tiny_adapter

            return 0 if adapters(Path(directory), tiny_adapter, args.adapters, args.seed, args.device, folder) else 1
        if args.pictures or args.damaged_pictures:
            from soak_pictures import damaged, pictures

            if args.damaged_pictures:
                return 0 if damaged(Path(directory), args.damaged_pictures, args.device, folder) else 1
            return 0 if pictures(Path(directory), args.pictures, args.seed, args.device, folder) else 1
        return 0 if storm(args, offered, folder) else 1


if __name__ == "__main__":
    sys.exit(main())
