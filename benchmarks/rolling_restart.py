"""Streams over `tandem restart --rolling`: each must be whole and have the tokens of the undisturbed run.

Counts: whole (the same text), wrong (another text), cut (begun, and ended by an error or without [DONE]), lost (refused, or no
answer). Streams start until `--streams` are done and the restart has ended. The exit code is 1 unless all are whole.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from harness import table

from tandem.env import child_environment
from tandem.processes.interpreter import module_command
from tandem.testing import tiny_model

PROMPTS = 16


def stream(client: httpx.Client, url: str, prompt: int, tokens: int) -> tuple[str, str, float]:
    """Return how a stream ended (whole, cut or lost), its text or the reason, and its longest pause in seconds."""
    body = {
        "model": "default",
        "prompt": [10 + (prompt * 37 + i * 11) % 400 for i in range(48)],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text, begun, pause, last = "", False, 0.0, time.monotonic()
    try:
        with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return "lost", f"{answer.status_code}: {answer.read().decode()[:200]}", 0.0
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return "whole", text, pause
                if line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return "cut", json.dumps(event["error"])[:200], pause
                    begun, text = True, text + "".join(choice["text"] for choice in event["choices"])
                    pause, last = max(pause, time.monotonic() - last), time.monotonic()
    except httpx.HTTPError as error:
        return "cut" if begun else "lost", f"{type(error).__name__}: {error}", pause
    return "cut", "no [DONE]", pause


def main() -> int:
    """Run the streams over the restart and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model directory [a tiny random one]")
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("options", nargs="*", default=["-dp", "2"], help="options of `tandem up`, after -- [-dp 2]")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = args.model or str(tiny_model(Path(directory) / "tiny"))
        environment = child_environment({"TANDEM_STATE_DIR": f"{directory}/state"})

        def tandem(*words: str) -> str:
            done = subprocess.run(module_command("tandem", *words), env=environment, text=True, stdout=subprocess.PIPE)
            if done.returncode:
                log = subprocess.run(module_command("tandem", "logs"), env=environment, text=True, stdout=subprocess.PIPE)
                raise SystemExit(f"tandem {words[0]}: exit code {done.returncode}\n{done.stdout}{log.stdout}")
            return done.stdout

        try:
            url = tandem("up", model, "--port", "0", *args.options).split(" is ready: ")[1].split()[0]
            with httpx.Client(timeout=600) as client:
                expected = [stream(client, url, prompt, args.tokens)[1] for prompt in range(PROMPTS)]
            counts: collections.Counter[str] = collections.Counter()
            reasons: collections.Counter[str] = collections.Counter()
            pauses: list[float] = []
            over = threading.Event()

            def work(worker: int) -> None:
                with httpx.Client(timeout=600) as client:
                    while sum(counts.values()) < args.streams or not over.is_set():
                        prompt = (worker + sum(counts.values())) % PROMPTS
                        how, text, pause = stream(client, url, prompt, args.tokens)
                        if how == "whole" and text != expected[prompt]:
                            how = "wrong"
                        counts[how] += 1
                        pauses.append(pause)
                        if how in ("cut", "lost"):
                            reasons[text] += 1

            with ThreadPoolExecutor(args.at_once) as pool:
                working = [pool.submit(work, i) for i in range(args.at_once)]
                began = time.monotonic()
                try:
                    print(tandem("restart", "--rolling"), end="", flush=True)
                finally:
                    took = time.monotonic() - began
                    over.set()
                for one in working:
                    one.result()
            columns = ("streams", "whole", "wrong", "cut", "lost", "longest pause s", "restart s")
            numbers = [sum(counts.values()), *(counts[name] for name in columns[1:5]), round(max(pauses), 1), round(took, 1)]
            table(columns, [numbers])
            for reason, times in reasons.most_common(5):
                print(f"{times} x {reason}")
            return int(counts["whole"] < sum(counts.values()))
        finally:
            tandem("down", "--now")


if __name__ == "__main__":
    raise SystemExit(main())
