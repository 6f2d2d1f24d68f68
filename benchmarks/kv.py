"""What KV on disk saves: time to the first token after a restart, and a stream's pause after a rank is killed, or when
its replica is drained; and what handing prompts from rank to rank and quantised KV do.

usage: python benchmarks/kv.py [--model DIR] [--tokens 2000 6000] [--layout 1|pp]
       python benchmarks/kv.py --drain
       python benchmarks/kv.py --roles [--apart machines] [--mixed pp|one|dp]   gaps of streams while prompts come
       python benchmarks/kv.py --hand-over [--apart disks]                      bytes a second, and how much is hidden
       python benchmarks/kv.py --states [qwen3_next ...]                        second turns of tiny hybrid and windowed models
       python benchmarks/kv.py --decode --tokens 32000 --rows 8                 decode steps, 8-bit KV against 16

Without one of these, and with --drain, each figure is a ratio with the disk to without it, taken side by side in one
run; with --roles of two replicas with roles to the same cores without. --apart gives each replica a directory of its
own (disks), or a network of its own too (machines), on this machine; that needs root on Linux.
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
import kv_hand_over
import kv_roles
import kv_types
from harness import table, tandem_server

from tandem import LLM, SamplingParams
from tandem.processes.interpreter import module_command
from tandem.protocol.kv_blocks import DISK_BLOCK_SIZE, is_checkpoint
from tandem.testing import tiny_model

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
        body = {"model": "default", "prompt": prompt, "temperature": 0, "max_tokens": 60, "ignore_eos": True, "stream": True}
        times: list[float] = []
        with (
            httpx.Client(timeout=900) as client,
            client.stream("POST", f"http://127.0.0.1:{server.port}/v1/completions", json=body) as reply,
        ):
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                times.append(time.monotonic())
                if len(times) == 20:
                    home = next(one["replica"] for one in server.get("/health")["replicas"] if one["running"])
                    subprocess.Popen(
                        module_command("tandem", "replica", "drain", str(home), "--port", str(server.port)),
                        stdout=subprocess.DEVNULL,
                    )
    return max(later - earlier for earlier, later in pairwise(times[20:]))


def second_turn(family: str, length: int, directory: Path) -> dict[str, object]:
    """Return the seconds to the first token of a conversation's second turn of `length` tokens for a tiny model, the pause when
    the rank of one of two stages is killed after it, and what its checkpoints take on disk beside its blocks."""
    model = str(tiny_model(directory / family, family, layers=8, config={"max_position_embeddings": 2 * length}))
    rng = random.Random(length)
    first = [rng.randrange(3, 290) for _ in range(length - 100)]
    second = first + [rng.randrange(3, 290) for _ in range(100)]
    disk, short = {"kv_disk": str(directory / f"kv-{family}")}, first[:100]
    with LLM(model, prefix_cache=0.0) as llm:
        first_token(llm, short)
        computed = first_token(llm, second)
    with LLM(model, **disk) as llm:
        for prompt in (short[1:], short[1:] + second[-100:], first):  # a short conversation first, as a hit computes other shapes
            first_token(llm, prompt)
        in_memory = first_token(llm, second)
    with LLM(model, **disk) as llm:
        first_token(llm, short[1:])
        restarted = first_token(llm, second)
    sizes = {True: 0, False: 0}
    for path in Path(disk["kv_disk"]).glob("*/*.kv"):
        sizes[is_checkpoint(bytes.fromhex(path.name.partition(".")[0]))] += path.stat().st_size
    pauses = []
    for given in ({}, disk):
        with LLM(model, pipeline_parallel_size=2, **given) as llm:
            first_token(llm, second)
            pauses.append(pause(llm, second))
    return {
        "family": family,
        "tokens": length,
        "computed_s": computed,
        "in_memory": in_memory / computed,
        "restarted": restarted / computed,
        "pause": pauses[1] / pauses[0],
        "disk": 1 + sizes[True] / sizes[False],
    }


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 6000], help="lengths of prompts")
    parser.add_argument("--layout", choices=LAYOUTS, default="1")
    parser.add_argument("--drain", action="store_true", help="only the pause when a replica is drained")
    parser.add_argument("--roles", action="store_true", help="only gaps of streams while prompts come")
    parser.add_argument("--hand-over", action="store_true", help="only prompts that go from rank to rank")
    parser.add_argument("--states", nargs="*", metavar="FAMILY", help="only second turns, of tiny models of these families")
    parser.add_argument("--decode", action="store_true", help="only decode steps, for each type of KV")
    parser.add_argument("--apart", choices=("no", "disks", "machines"), default="no", help="what replicas do not share")
    parser.add_argument("--pin", action="store_true", help="with --apart, each replica computes on a core of its own")
    parser.add_argument("--mixed", choices=kv_roles.MIXED, default="pp", help="what roles are compared with")
    parser.add_argument("--streams", type=int, default=4, help="that run while prompts come")
    parser.add_argument("--answer", type=int, help="most tokens of a stream; by default 7000, of a hand-over 96")
    parser.add_argument("--prompts", type=int, default=1, help="one after the other")
    parser.add_argument("--rows", type=int, default=8, help="decoded together")
    parser.add_argument("--types", nargs="+", choices=kv_types.TYPES, default=["auto", "8bit"], help="of KV")
    parser.add_argument("--steps", type=int, default=32, help="decode steps that are timed")
    parser.add_argument("--kv-dtype", default="auto", help="type of what is handed over")
    parser.add_argument("--vocabulary", type=int, default=20_000, help="ids of prompts are below it")
    parser.add_argument("--directory", type=Path, help="for what is on disk; by default among temporary files")
    given = parser.parse_args()
    if given.roles:
        kv_roles.compare(given)
        return
    if given.hand_over:
        kv_hand_over.compare(given)
        return
    if given.states is not None:
        with tempfile.TemporaryDirectory() as directory:
            families = given.states or ["qwen3_next", "gpt_oss"]
            rows = [second_turn(family, length, Path(directory)) for family in families for length in given.tokens]
        table(list(rows[0]), [list(row.values()) for row in rows])
        return
    if given.decode:
        kv_types.compare_steps(given)
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
                count = (length - 1) // DISK_BLOCK_SIZE * max(len(llm.engine.executor.pids), 1)
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
