"""The first burst after the server is ready against later ones: `first_burst.py --model DIR`. Each round starts a server anew.

`--clients` prompts arrive at once, each with the first token's time; then two more bursts like it. Then, on the same server,
as asked for: many short prompts at once, 64 clients for the tokens per second, and the gaps of four streams while one long
prompt is computed. `--against REV` has an older commit (or a directory with its `src`) serve too, in turns.
"""

from __future__ import annotations

import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import harness
import load

SHORT = 32
"""Tokens of a short prompt."""


def main() -> None:
    """Command line."""
    parser = harness.arguments(__doc__, rounds=2)
    parser.add_argument("--clients", type=int, default=8, help="prompts of a burst")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each on average, half to twice as many")
    parser.add_argument("--short", type=int, default=0, help=f"then so many prompts of {SHORT} tokens at once, and one alone")
    parser.add_argument("--loads", type=int, nargs="*", default=[], help="then 64 clients with prompts of so many tokens, twice")
    parser.add_argument("--long", type=int, default=0, help="then one prompt of so many tokens beside four streams")
    parser.add_argument("--against", help="an older commit, or a directory with its src, that serves in turns with this tree")
    parser.add_argument("--settings", nargs="*", default=[], help="settings of the server, NAME=VALUE")
    args = parser.parse_args()
    model = harness.prepared(args.model, args.dtype, harness.on_gpu())
    prompts, rows, more = load.PromptSource(model), list[list[object]](), list[list[object]]()
    settings: dict[str, Any] = dict(one.split("=", 1) for one in args.settings)
    with (
        harness.heading(f"Bursts of {args.clients} prompts of {args.tokens} tokens, from the start on"),
        harness.sources(args.against) as trees,
    ):
        for number in range(args.rounds):
            for name, tree in trees.items():
                began = harness.now()
                with harness.tandem_server(model, args.threads, name, tree=tree, **settings) as server:
                    started = harness.now() - began
                    rng = random.Random(number)
                    last = []
                    for _ in range(3):
                        sizes = [rng.randint(args.tokens // 2, 2 * args.tokens) for _ in range(args.clients)]
                        jobs = [load.BenchRequest(prompts.make(size), 16) for size in sizes]
                        last.append(_slowest(server, jobs))
                    rows.append([number, name, started, *(1e3 * one for one in last), last[0] / last[2]])
                    print(*rows[-1], flush=True)
                    print(*(line for line in server.log().splitlines() if "Warm-up:" in line), sep="\n", flush=True)
                    new: list[list[object]] = []
                    if args.short:
                        new.append([f"first of {args.short} x {SHORT} / alone", *_short(server, prompts, args.short)])
                    for size in args.loads * 2:
                        new.append([f"64 clients, {size} + 128", _rate(server, prompts, size), "tok/s"])
                    if args.long:
                        new.append([f"gap of streams beside a prompt of {args.long}, p99", *_gap(server, prompts, args.long)])
                    more += [[number, name, *row] for row in new]
                    print(*new, sep="\n", flush=True)
        harness.table(["round", "source", "start s", "first ms", "second ms", "third ms", "first / third"], rows)
        print()
        harness.table(["round", "source", "", "", ""], more)
    ratio = harness.middle([float(str(row[6])) for row in rows if row[1] == "now"])
    verdict = harness.verdict("first burst / third, slowest first token", ratio, 1.5, at_most=True)
    harness.write_json(args.json, args, {"rows": rows, "more": more, "verdicts": [verdict]})


def _slowest(server: harness.Server, jobs: list[load.BenchRequest]) -> float:
    """Seconds until the last of these, sent at once, has its first token."""
    return max(answer.ttft for answer in load.closed_loop(server, jobs, len(jobs)))


def _short(server: harness.Server, prompts: load.PromptSource, count: int) -> tuple[float, str]:
    """The last first token of `count` short prompts at once over that of one alone, and both in words; medians of five."""
    found = []
    for number in range(6):
        both = [_slowest(server, [load.BenchRequest(prompts.make(SHORT), 1) for _ in range(many)]) for many in (1, count)]
        found += [both] * (number > 0)
    alone, all_ = (harness.middle([one[at] for one in found]) for at in range(2))
    return harness.middle([after / before for before, after in found]), f"({1e3 * alone:.1f} and {1e3 * all_:.1f} ms)"


def _rate(server: harness.Server, prompts: load.PromptSource, size: int) -> float:
    jobs = [load.BenchRequest(prompts.make(size), 128) for _ in range(128)]
    return load.rate(load.closed_loop(server, jobs, 64))


def _gap(server: harness.Server, prompts: load.PromptSource, size: int) -> tuple[float, str]:
    """Milliseconds of the streams' gaps (99 of 100 are shorter) while the prompt is computed, and the median in words."""
    with ThreadPoolExecutor() as pool:
        streams = [pool.submit(load.one, server, load.BenchRequest(prompts.make(64), 400)) for _ in range(4)]
        time.sleep(1.0)
        prompt = load.one(server, load.BenchRequest(prompts.make(size), 1))
        pieces = [[at for at in one.result().pieces if prompt.sent <= at <= prompt.ended] for one in streams]
    gaps = sorted(after - before for one in pieces for before, after in itertools.pairwise(one))
    return 1e3 * gaps[int(0.99 * len(gaps))], f"ms (median {1e3 * gaps[len(gaps) // 2]:.1f} ms)"


if __name__ == "__main__":
    main()
