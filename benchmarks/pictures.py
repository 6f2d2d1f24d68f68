"""What pictures cost text that is answered beside them, and what a second question about a picture costs.

With a random model of the shape of Qwen3-VL-8B, in bfloat16, on a GPU (`--shape qwen3-vl-tiny` tries it out on a CPU):

- The pace of one text stream while new pictures of 1,024 x 1,024 come one after the other, over its pace alone. Beside it
  the pace while prompts of text as long come as often: the difference is what the encoder takes.
- The time to the first token of a second question about a picture, over that of the first question.
- The p99 gap of a text stream while damaged pictures come one after the other, over that alone. Damaged pictures that can
  be read are answered, so that their gaps are those of prompts; the others are refused, and are judged.

For both places of the encoder (`--vision-rank`). Needs the extra `vision`.
"""

from __future__ import annotations

import argparse
import base64
import collections
import contextlib
import io
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import harness
import httpx
import random_model

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # for its pictures

PACE, SECOND, GAP = 0.9, 0.2, 1.2
"""Goals of the three ratios."""
ALONE = 2000
"""Gaps of a stream alone."""
STREAM = 200
"""Tokens of each text of a stream beside damaged pictures."""


class Streamed(NamedTuple):
    """Streams of text, one after the other."""

    tokens: int
    """After the first of each stream."""
    gaps: list[tuple[float, float]]
    """When each token came, and seconds since the one before."""

    @property
    def pace(self) -> float:
        """Tokens per second."""
        return self.tokens / sum(gap for _, gap in self.gaps)

    def p99(self, apart: list[tuple[float, float]] = []) -> float:  # noqa: B006 - is not changed
        """The longest gap but 1 % of those that do not overlap with the times `apart`."""
        left = [gap for end, gap in self.gaps if not any(start < end and end - gap < stop for start, stop in apart)]
        return sorted(left)[len(left) * 99 // 100] if left else float("nan")


def main() -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-vl-8b", choices=sorted(random_model.SEEING), help="(default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"), help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, help="of the text model, other than that shape's")
    parser.add_argument("--vision-rank", nargs="+", default=["own", "first"], choices=("own", "first"), help="(default: both)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "gpu"), help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="BLAS threads of each process on a CPU (default: %(default)s)")
    parser.add_argument("--side", type=int, default=1024, help="pixels of a side of the pictures (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="of each stream of text (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of streams alone and beside; 0: damaged pictures alone (default: %(default)s)"
    )
    parser.add_argument("--every", type=float, default=0.0, help="least seconds from one picture to the next (default: at once)")
    parser.add_argument("--questions", type=int, default=7, help="pictures that are asked about twice (default: %(default)s)")
    parser.add_argument("--damaged", type=int, default=500, help="damaged pictures (default: %(default)s)")
    parser.add_argument("--log", type=Path, help="folder for the servers' logs")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers to FILE")
    args = parser.parse_args()
    results: dict[str, Any] = {"verdicts": []}
    with tempfile.TemporaryDirectory(prefix="tandem-pictures-") as directory:
        began = time.monotonic()
        random_model.write(args.shape, Path(directory), dtype=args.dtype, layers=args.layers)
        print(f"{args.shape} written in {time.monotonic() - began:.0f} s", flush=True)
        for place in args.vision_rank:
            log = (args.log or Path(directory)) / f"pictures-{place}.log"
            options = {"vision_rank": place, "device": args.device, "dtype": args.dtype, "log": log, "start_timeout": 300}
            with (
                harness.heading(f"--vision-rank {place}"),
                harness.tandem_server(Path(directory), args.threads, max_model_len=8192, **options) as server,
            ):
                if args.rounds:
                    results["verdicts"] += [beside_pictures(server, args), second_question(server, args)]
                gap, odd = damaged_beside(server, args.damaged)
                results["verdicts"].append(gap)
                odd += ended_badly(server, log)
                print("\n".join([*odd[:10], f"{len(odd)} answers that should not be"]), flush=True)
                results.setdefault("odd", []).extend(odd)
    harness.write_json(args.json, args, results)
    return 0 if all(one["met"] for one in results["verdicts"]) and not results["odd"] else 1


def question(text: str, *pictures: bytes, before: str = "", **options: Any) -> dict[str, Any]:
    """Return the body of a chat: a text `before` the pictures, if any, these, and a text behind them."""
    urls = [f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in pictures]
    parts = [
        *([{"type": "text", "text": before}] if before else []),
        *({"type": "image_url", "image_url": {"url": url}} for url in urls),
        {"type": "text", "text": text},
    ]
    return {"messages": [{"role": "user", "content": parts}], "temperature": 0, **options}


def large_picture(side: int, seed: int) -> bytes:
    """Return a PNG with the smooth colours of a photograph."""
    from processors import noise

    file = io.BytesIO()
    noise(side // 16, side // 16, seed).resize((side, side)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def streamed(server: harness.Server, tokens: int, over: Callable[[Streamed], bool] = lambda found: bool(found.gaps)) -> Streamed:
    """Stream texts of so many tokens until it is `over`, which is asked between two of them; one text by default."""
    found = Streamed(0, [])
    while not over(found):
        last = 0.0
        body = question("the red sea", max_tokens=tokens, ignore_eos=True, stream=True)
        with httpx.stream("POST", _url(server), json=body, timeout=240) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {") and '"content":""' not in line:
                    now = time.monotonic()
                    found.gaps.extend([(now, now - last)] if last else [])
                    last = now
        found = found._replace(tokens=found.tokens + tokens - 1)
    return found


def first_token(client: httpx.Client, server: harness.Server, body: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds until the answer has begun, and those of them since the api handed it to the engine."""
    began, took = time.monotonic(), 0.0
    with client.stream("POST", _url(server), json={**body, "stream": True, "stream_options": {"include_usage": True}}) as reply:
        for line in reply.iter_lines():
            if '"error":{' in line:
                raise RuntimeError(line)
            chunk = json.loads(line[6:]) if line.startswith("data: {") else {"choices": []}
            for choice in chunk["choices"]:
                if not took and (choice["delta"].get("content") or choice["finish_reason"]):
                    took = time.monotonic() - began
            if "performance" in chunk:
                return took, chunk["performance"]["ttft_seconds"]
    raise RuntimeError(f"{reply.status_code}: no answer")


def _url(server: harness.Server) -> str:
    return f"http://127.0.0.1:{server.port}/v1/chat/completions"


@contextlib.contextmanager
def coming(server: harness.Server, bodies: Iterator[dict[str, Any]], every: float = 0.0) -> Iterator[list[float]]:
    """Send requests inside, one after the other and at most one in `every` seconds; yields how long each took."""
    ended, first, took = threading.Event(), threading.Event(), list[float]()

    def send() -> None:
        with httpx.Client(timeout=240) as client:
            while not ended.is_set():
                began = time.monotonic()
                client.post(_url(server), json=next(bodies)).raise_for_status()
                took.append(time.monotonic() - began)
                first.set()
                ended.wait(every - took[-1])

    sending = threading.Thread(target=send)
    sending.start()
    first.wait()
    try:
        yield took
    finally:
        ended.set()
        sending.join()


def beside_pictures(server: harness.Server, args: argparse.Namespace) -> dict[str, Any]:
    """Print a text stream's pace alone, beside pictures, and beside prompts of text; return the verdict."""
    shown = [large_picture(args.side, 1000 + seed) for seed in range(24)]
    # A number comes first, so that no prompt begins as another did.
    pictures = (question("x", shown[at % len(shown)], before=f"{at:04d} ", max_tokens=1) for at in itertools.count())
    texts = (question(" the" * ((args.side // 32) ** 2 // 2), before=f"{at:04d} ", max_tokens=1) for at in itertools.count())
    with httpx.Client(timeout=240) as client:
        whole, part = first_token(client, server, next(pictures))
        print(f"first picture, with which the encoder is loaded: {whole:.2f} s, {part:.2f} of them in the engine", flush=True)
    rows = []
    for number in range(args.rounds + 1):
        sides, every = [streamed(server, args.tokens)], [args.every]
        for bodies in (pictures, texts):
            with coming(server, bodies, every[-1]) as took:
                sides.append(streamed(server, args.tokens))
            every.append(max(statistics.mean(took), args.every))
        pace, p99 = [side.pace for side in sides], [1000 * side.p99() for side in sides]
        if number:  # the first one warms up
            rows.append([number, *pace, pace[1] / pace[0], pace[2] / pace[0], *p99, *every[1:]])
    names = ("alone tok/s", "pictures", "texts", "pictures/alone", "texts/alone", "p99 ms alone", "pictures", "texts")
    harness.table(("round", *names, "s a picture", "s a text"), rows)
    return harness.verdict("pace of a text stream beside pictures", harness.middle([float(row[4]) for row in rows]), PACE)


def second_question(server: harness.Server, args: argparse.Namespace) -> dict[str, Any]:
    """Print the time to the first token of two questions about each of some pictures; return the verdict."""
    found = []
    with httpx.Client(timeout=240) as client:
        for number in range(args.questions):
            shown = large_picture(args.side, number)
            asked = [question(text, shown, max_tokens=4) for text in ("what is this", "is there a stone")]
            found.append([first_token(client, server, body) for body in asked])
    first, second = (harness.middle([one[at][0] for one in found]) for at in range(2))
    engine = [harness.middle([one[at][1] for one in found]) for at in range(2)]
    for name, whole, part in (("first", first, engine[0]), ("second", second, engine[1])):
        print(f"first token of the {name} question: {1000 * whole:.0f} ms, {1000 * part:.0f} of them in the engine", flush=True)
    return harness.verdict("first token of a second question", second / first, SECOND, at_most=True)


def damaged_beside(server: harness.Server, count: int) -> tuple[dict[str, Any], list[str]]:
    """Send `count` damaged pictures beside a text stream, and print what came of them and of the stream's gaps.

    Return the verdict on its gaps, and answers that should not be.
    """
    from processors import encoded, mutants, noise

    found: collections.Counter[str] = collections.Counter()
    odd, read, beside = list[str](), list[tuple[float, float]](), list[Streamed]()
    with httpx.Client(timeout=240) as client:

        def send(raw: bytes) -> httpx.Response:
            return client.post(_url(server), json=question("x", raw, max_tokens=1))

        send(encoded(noise())).raise_for_status()  # the tower and a worker process are loaded
        alone = streamed(server, STREAM, lambda found: len(found.gaps) > ALONE)
        ended = threading.Event()
        streaming = threading.Thread(target=lambda: beside.append(streamed(server, STREAM, lambda _: ended.is_set())))
        streaming.start()
        for kind, raw in mutants(count):
            began = time.monotonic()
            got = send(raw)
            found[f"{kind} {got.status_code}"] += 1
            if got.status_code == 200:
                read.append((began, time.monotonic()))
            elif got.status_code != 400 or "message" not in got.json().get("error", {}):
                odd.append(f"{kind}: {got.status_code} {got.text[:200]}")
        ended.set()
        streaming.join()
    harness.table(("kind and status", "pictures"), sorted(found.items()))
    p99 = [alone.p99(), beside[0].p99(read), beside[0].p99()]
    alone_ms, refused_ms, all_ms = (1000 * one for one in p99)
    print(
        f"p99 gap of a text stream: {alone_ms:.2f} ms alone, {refused_ms:.2f} beside refused pictures, {all_ms:.2f} beside all "
        f"({all_ms / alone_ms:.2f}; {len(read)} of {count} can be read; {len(beside[0].gaps)} gaps)"
    )
    return harness.verdict("p99 gap beside damaged pictures that are refused", p99[1] / p99[0], GAP, at_most=True), odd


def ended_badly(server: harness.Server, log: Path) -> list[str]:
    """End the server; return what is wrong with that, and with its log."""
    codes = server.end()
    return [f"ended with {codes}, or a traceback: see {log}"] * ("Traceback" in log.read_text(errors="replace") or codes != [0])


if __name__ == "__main__":
    sys.exit(main())
