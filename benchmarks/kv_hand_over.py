"""A prompt that one rank computes and another goes on with: bytes moved a second, and how much of it nobody waits for.

What moving takes is what the ranks spend on writing and on reading. What a client sees of it is the longest gap between
its first tokens, less that of a prompt that stays where it is computed. The rest is hidden behind computing, if that
was not slower for it: "prompt ratio" is the time to the first token over that of one that stays.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from harness import Server, metric, middle, table
from kv_roles import SPLIT, WARM, Stream, place

from tandem.protocol.kv_blocks import DISK_BLOCK_SIZE

ANSWER = 96
"""Tokens of an answer, unless --answer says otherwise: so many that it is not done before its prompt is written."""
TRIES = 20
"""Prompts that are asked for one that is handed over: every sixteenth goes whatever the paces."""
TOLD_S = 2.5
"""Within so many seconds engines tell their metrics."""
AT_HOME = {"prompt_cache_retention": "in_memory"}
"""Fields of a request that is not handed over."""
COUNTED = {
    "read": "tandem_kv_disk_read_bytes_total",
    "read_s": "tandem_kv_disk_read_seconds_total",
    "brought": "tandem_kv_disk_brought_bytes_total",
    "written_s": "tandem_kv_disk_write_seconds_total",
    "written": "tandem_kv_disk_written_bytes_total",
    "handed": "tandem_requests_handed_over_total",
}


def counts(server: Server) -> dict[str, float]:
    """Of all replicas."""
    return {name: sum(metric(server, found).values()) for name, found in COUNTED.items()}


def waits(server: Server, prompt: list[int], answer: int, **fields: object) -> tuple[float, float]:
    """Seconds to the first token, and the longest gap between those after it."""
    asked, stream = time.monotonic(), Stream()
    stream.read(server.port, prompt, answer, **fields)
    return stream.times[0] - asked, max(stream.gaps(asked))


def handed_over(server: Server, fresh: Callable[[], list[int]], answer: int) -> tuple[tuple[float, float], dict[str, float]]:
    """What a client waited for one that was handed over, of new prompts, and what was counted meanwhile."""
    for _ in range(TRIES):
        before = counts(server)
        found = waits(server, fresh(), answer)
        time.sleep(TOLD_S)
        after = counts(server)
        if after["handed"] > before["handed"]:
            return found, {name: after[name] - before[name] for name in COUNTED}
    raise SystemExit(f"none of {TRIES} prompts was handed over; the server's log ends with:\n{server.log()}")


def compare(given: argparse.Namespace) -> None:
    """Print a table, a row for each length."""
    rows, answer = [], given.answer or ANSWER

    def fresh(length: int) -> list[int]:
        return [random.randrange(100, given.vocabulary) for _ in range(length)]

    flags = {"kv_disk_gb": 200, "kv_dtype": given.kv_dtype, "kv_tokens": 4 * (max(*given.tokens, WARM) + DISK_BLOCK_SIZE)}
    with place(given, SPLIT, **flags) as server:
        for _ in range(2):  # machines are connected, kernels compiled
            handed_over(server, lambda: fresh(WARM), answer)
        for length in given.tokens:
            whole, stays, goes, moved = length // DISK_BLOCK_SIZE * DISK_BLOCK_SIZE + 1, [], [], []
            for _ in range(given.prompts):
                stays.append(waits(server, fresh(whole), answer, **AT_HOME))
                found, counted = handed_over(server, lambda whole=whole: fresh(whole), answer)
                goes.append(found)
                moved.append(counted)
            took = {name: middle([one[name] for one in moved]) for name in COUNTED}
            work = took["read_s"] + took["written_s"]
            (first_stays, gap_stays), (first_goes, gap_goes) = (
                (middle([one[0] for one in found]), middle([one[1] for one in found])) for found in (stays, goes)
            )
            pause = max(gap_goes - gap_stays, 0.0)
            rows.append(
                {
                    "tokens": length,
                    "MB": took["read"] / 1e6,
                    "way": "network" if took["brought"] else "disk",
                    "prompt_s": first_goes,
                    "prompt ratio": first_goes / first_stays,
                    "written MB/s": took["written"] / max(took["written_s"], 1e-9) / 1e6,
                    "fetched MB/s": took["read"] / max(took["read_s"], 1e-9) / 1e6,
                    "moving_s": work,
                    "pause_s": pause,
                    "MB/s seen": took["read"] / max(pause, 1e-9) / 1e6,
                    "hidden": max(0.0, 1 - pause / work),
                }
            )
    table(list(rows[0]), [list(row.values()) for row in rows])
