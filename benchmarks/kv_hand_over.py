"""A prompt that one rank computes and another goes on with: bytes moved a second, and how much of it nobody waits for.

What moving takes is what the ranks spend on writing and on reading. What a client sees of it is the longest gap between
its first tokens, less that of a prompt that stays where it is computed. The rest is hidden behind computing, if that
was not slower for it: "prompt ratio" is the time to the first token over that of one that stays.
"""

from __future__ import annotations

import argparse
import random
import time

from harness import Server, metric, middle, table
from kv_roles import SPLIT, WARM, Stream, place

from tandem.protocol.pieces import PIECE

ANSWER = 96
"""Tokens of an answer: so many that it is not done before its prompt is written."""
TOLD_S = 2.5
"""Within so many seconds engines tell their metrics."""
AT_HOME = {"prompt_cache_retention": "in_memory"}
"""Fields of a request that is not handed over."""
COUNTED = {"read": "tandem_kv_disk_read_bytes_total", "read_s": "tandem_kv_disk_read_seconds_total",
           "brought": "tandem_kv_disk_brought_bytes_total", "written_s": "tandem_kv_disk_write_seconds_total",
           "written": "tandem_kv_disk_written_bytes_total", "handed": "tandem_requests_handed_over_total"}


def counts(server: Server) -> dict[str, float]:
    """Of all replicas."""
    return {name: sum(metric(server, found).values()) for name, found in COUNTED.items()}


def waits(server: Server, prompt: list[int], **fields: object) -> tuple[float, float]:
    """Seconds to the first token, and the longest gap between those after it."""
    asked, stream = time.monotonic(), Stream()
    stream.read(server.port, prompt, ANSWER, **fields)
    return stream.times[0] - asked, max(stream.gaps(asked))


def compare(given: argparse.Namespace) -> None:
    """Print a table, a row for each length."""
    rows = []
    flags = {"kv_disk_gb": 200, "kv_dtype": given.kv_dtype,
             "kv_tokens": 4 * (max(*given.tokens, WARM) + PIECE)}
    with place(given, SPLIT, **flags) as server:
        while counts(server)["handed"] < 2:  # machines are connected, kernels compiled
            waits(server, [random.randrange(100, given.vocabulary) for _ in range(WARM)])
        for length in given.tokens:
            rng, stays, goes, moved = random.Random(length), [], [], []
            for _ in range(given.prompts):
                first, second = ([rng.randrange(100, given.vocabulary) for _ in range(length // PIECE * PIECE + 1)]
                                 for _ in range(2))
                stays.append(waits(server, first, **AT_HOME))
                before = counts(server)
                goes.append(waits(server, second))
                time.sleep(TOLD_S)
                after = counts(server)
                moved.append({name: after[name] - before[name] for name in COUNTED})
            if sum(one["handed"] for one in moved) < given.prompts:
                raise SystemExit(f"of {given.prompts} prompts of {length} tokens not all were handed over")
            took = {name: middle([one[name] for one in moved]) for name in COUNTED}
            work = took["read_s"] + took["written_s"]
            (first_stays, gap_stays), (first_goes, gap_goes) = (
                (middle([one[0] for one in found]), middle([one[1] for one in found])) for found in (stays, goes))
            pause = max(gap_goes - gap_stays, 0.0)
            rows.append({"tokens": length, "MB": took["read"] / 1e6, "way": "network" if took["brought"] else "disk",
                         "prompt_s": first_goes, "prompt ratio": first_goes / first_stays,
                         "written MB/s": took["written"] / max(took["written_s"], 1e-9) / 1e6,
                         "fetched MB/s": took["read"] / max(took["read_s"], 1e-9) / 1e6,
                         "moving_s": work, "pause_s": pause, "MB/s seen": took["read"] / max(pause, 1e-9) / 1e6,
                         "hidden": max(0.0, 1 - pause / work)})
    table(list(rows[0]), [list(row.values()) for row in rows])
