"""What KV on disk saves: time to the first token after a restart, and a stream's pause after a rank is killed, or when
its replica is drained.

usage: python benchmarks/kv.py [--model DIR] [--tokens 2000 6000] [--layout 1|pp] [--drain]

Each figure is a ratio with the disk to without it, taken side by side in one run.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import tempfile
import time
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


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 6000], help="lengths of prompts")
    parser.add_argument("--layout", choices=LAYOUTS, default="1")
    parser.add_argument("--drain", action="store_true", help="only the pause when a replica is drained")
    given = parser.parse_args()
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
