"""What KV on disk saves: time to the first token after a restart, and a stream's pause after a rank is killed, or when
its replica is drained; and the gaps of running streams while long prompts come, with roles and without.

usage: python benchmarks/kv.py [--model DIR] [--tokens 2000 6000] [--layout 1|pp] [--drain | --roles]

Each figure is a ratio with the disk to without it, taken side by side in one run; with --roles of two replicas with
roles to two without.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
from harness import table, tandem_server

from tandem import LLM, SamplingParams
from tandem.processes.interpreter import module_command

LAYOUTS = {"1": {}, "pp": {"pipeline_parallel_size": 2}}
END = SamplingParams(max_tokens=1, temperature=0.0)


def first_token(llm: LLM, prompt: list[int]) -> float:
    """Seconds."""
    began = time.monotonic()
    llm.generate([prompt], END)
    return time.monotonic() - began


def pause(llm: LLM, prompt: list[int]) -> float:
    """Seconds from the death of a rank to the next token of a stream."""
    stream = llm.stream(prompt, SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True))
    for number, _ in enumerate(stream):
        if number == 8:
            began = time.monotonic()
            os.kill(llm.engine.executor.pids[-1], signal.SIGKILL)
        if number == 12:  # what was under way has come
            break
    took = time.monotonic() - began
    stream.close()
    return took


def drained(model: str, prompt: list[int], **flags: object) -> float:
    """Seconds without a token, of a stream whose replica is drained; without a disk it is not finished there either."""
    with tandem_server(Path(model), 1, data_parallel_size=2, **{"dequantize": "auto", **flags}) as server:
        body = {"model": "default", "prompt": prompt, "temperature": 0, "max_tokens": 60, "ignore_eos": True,
                "stream": True}
        times: list[float] = []
        with httpx.Client(timeout=900) as client, client.stream(
                "POST", f"http://127.0.0.1:{server.port}/v1/completions", json=body) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                times.append(time.monotonic())
                if len(times) == 20:
                    home = next(one["replica"] for one in server.get("/health")["replicas"] if one["running"])
                    subprocess.Popen(module_command("tandem", "replica", "drain", str(home), "--port",
                                                    str(server.port)), stdout=subprocess.DEVNULL)
    return max(later - earlier for earlier, later in pairwise(times[20:]))


@dataclass
class Stream:
    """A streamed completion, read by a thread: when each of its tokens came."""

    times: list[float] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def read(self, port: int, prompt: list[int], max_tokens: int) -> None:
        """Until it ends, or `over`."""
        body = {"model": "default", "prompt": prompt, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True,
                "stream": True}
        with httpx.Client(timeout=900) as client, client.stream(
                "POST", f"http://127.0.0.1:{port}/v1/completions", json=body) as reply:
            for line in reply.iter_lines():
                if self.over.is_set():
                    return
                if line.startswith("data: {"):
                    self.times.append(time.monotonic())

    def gaps(self, since: float) -> list[float]:
        """Seconds between its tokens from then on."""
        return [later - earlier for earlier, later in pairwise(self.times) if later > since]


def disturbed(model: str, length: int, directory: str, roles: tuple[str, ...]) -> dict[str, float]:
    """Gaps of four streams while four prompts of so many tokens come one after the other, and how long each took to its
    first token."""
    rng = random.Random(length)
    prompts = [[rng.randrange(100, 20_000) for _ in range(count)] for count in (*[40] * 4, *[length] * 4)]
    with tandem_server(Path(model), 1, data_parallel_size=2, dequantize="auto", threads_per_rank=1, kv_disk=directory,
                       roles=",".join(roles)) as server:
        Stream().read(server.port, prompts[-1][:-1], 8)  # both paces are known, and all code has run
        running = [Stream() for _ in range(4)]
        readers = [start(one.read, server.port, prompt, 7000) for one, prompt in zip(running, prompts, strict=False)]
        while min(len(one.times) for one in running) < 20:
            time.sleep(0.05)
        began, waits = time.monotonic(), list[float]()
        for prompt in prompts[4:]:
            asked, one = time.monotonic(), Stream()
            one.read(server.port, [7, *prompt], 16)
            waits.append(one.times[0] - asked)
        gaps = sorted(gap for one in running for gap in one.gaps(began))
        for one in running:
            one.over.set()
        for reader in readers:
            reader.join()
    return {"p50_gap_s": gaps[len(gaps) // 2], "p99_gap_s": gaps[len(gaps) * 99 // 100], "max_gap_s": gaps[-1],
            "gaps": len(gaps), "first_token_s": sorted(waits)[len(waits) // 2]}


def start(work: Callable[..., None], *arguments: object) -> threading.Thread:
    """Do it in a thread."""
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    return thread


def compare_roles(model: str, lengths: list[int]) -> None:
    """Print a table: two replicas that do both, and two with roles."""
    rows = []
    for length in lengths:
        found = {}
        for roles in (("both", "both"), ("prefill", "decode")):
            with tempfile.TemporaryDirectory() as directory:
                found[roles] = disturbed(model, length, directory, roles)
            ratio = found[roles]["p99_gap_s"] / found["both", "both"]["p99_gap_s"]
            rows.append({"tokens": length, "roles": ",".join(roles), **found[roles], "ratio": ratio})
    table(list(rows[0]), [list(row.values()) for row in rows])


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 6000], help="lengths of prompts")
    parser.add_argument("--layout", choices=LAYOUTS, default="1")
    parser.add_argument("--drain", action="store_true", help="only the pause when a replica is drained")
    parser.add_argument("--roles", action="store_true", help="only gaps of streams while prompts come")
    given = parser.parse_args()
    if given.roles:
        compare_roles(given.model, given.tokens)
        return
    model, layout = given.model, LAYOUTS[given.layout]
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for length in given.tokens:
            rng = random.Random(length)
            prompt = [rng.randrange(100, 20_000) for _ in range(length)]
            if given.drain:
                moved = drained(model, prompt, kv_disk=directory)
                again = drained(model, prompt, drain_timeout=0)
                rows.append({"tokens": length, "computed_again_s": again, "moved_s": moved, "ratio": moved / again})
                continue
            disk = {"kv_disk": directory, **layout}
            with LLM(model, **disk) as llm:
                computed = first_token(llm, prompt)
                count = (length - 1) // 256 * max(len(llm.engine.executor.pids), 1)
                while len(list(Path(directory).glob("*/*.kv"))) < count:
                    time.sleep(0.1)
            with LLM(model, **disk) as llm:
                read = first_token(llm, prompt)
            row = {"tokens": length, "computed_s": computed, "read_s": read, "ratio": read / computed}
            if given.layout != "1":
                with LLM(model, **disk) as llm:
                    with_disk = pause(llm, prompt)
                with LLM(model, **layout) as llm:
                    without = pause(llm, prompt)
                row |= {"pause_s": without, "pause_disk_s": with_disk, "pause_ratio": with_disk / without}
            rows.append(row)
            for path in Path(directory).glob("*/*.kv"):
                path.unlink()
    table(list(rows[0]), [list(row.values()) for row in rows])


if __name__ == "__main__":
    main()
