"""What quantised KV costs and saves: log probabilities of real text, perplexity, bytes of a token; time of attention.

usage: python benchmarks/kv_types.py [--model DIR] [--tokens 512] [--texts 6] [--dtype auto]

Each type is held against the type of computation, in one run. The text is this project's documentation. A token of a
text counts from the 33rd on, when there is something to attend to.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import table

from tandem import LLM, SamplingParams
from tandem.engine.engine import Engine
from tandem.models.kv_types import group_for, group_size

TYPES = ("auto", "8bit", "4bit")
DOCS = Path(__file__).parents[1] / "docs"
FIRST = 32
"""Tokens of a text that do not count."""
SHAPES = ((1, 3, 64, 1024), (8, 3, 64, 1024), (8, 8, 128, 2048))
"""Rows, kv heads, their width, positions."""


def texts(llm: LLM, count: int, length: int) -> list[list[int]]:
    """So many pieces of so many tokens, from as many pages."""
    pieces = [llm.tokenizer.encode(page.read_text("utf-8"))[:length] for page in sorted(DOCS.glob("*.md"))]
    return [piece for piece in pieces if len(piece) == length][:count]


def scores(llm: LLM, pieces: list[list[int]]) -> tuple[list[float], list[int]]:
    """Of each token that counts its log probability, and which token would have been the most likely."""
    found, best = [], []
    for piece in pieces:
        [out] = llm.generate([piece], SamplingParams(max_tokens=0, prompt_logprobs=1))
        for token, place in list(zip(piece, out.prompt_logprobs, strict=True))[FIRST:]:
            found.append(place[token].logprob)
            best.append(max(place, key=lambda one: place[one].logprob))
    return found, best


def attention(bits: int, rows: int, kv_heads: int, width: int, positions: int) -> float:
    """Time of decode attention over quantised keys and values, as a multiple of that over full ones."""
    import mlx.core as mx  # after the first LLM, which loads the BLAS before it

    from tandem.loading.quantized_kv import Groups, attend, quantized

    queries = mx.random.normal((rows, 3 * kv_heads, 1, width))
    keys, values = (mx.random.normal((rows, kv_heads, positions, width)) for _ in range(2))
    packed = [quantized(side, Groups(bits, group_for(bits, group_size((width,))))) for side in (keys, values)]
    mx.eval(queries, keys, values, [side.parts for side in packed])

    def fastest(compute: Callable[[], Any]) -> float:
        times = []
        for _ in range(9):
            began = time.perf_counter()
            mx.eval(compute())
            times.append(time.perf_counter() - began)
        return min(times)

    full = fastest(lambda: mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.1))
    return fastest(lambda: attend(queries, *packed, scale=0.1, mask=None, sinks=None)) / full


def decode_steps(given: argparse.Namespace, kind: str, context: int) -> dict[str, float]:
    """Of rows with one prompt of `context` tokens, which is computed once: time of a decode step, and memory."""
    rng, room = random.Random(context), context + given.steps + 64
    prompt = [rng.randrange(100, given.vocabulary) for _ in range(context)]
    flags: dict[str, Any] = {
        "kv_tokens": (given.rows + 2) * room,
        "max_context": room,
        "max_batch_size": given.rows,
        "prefix_cache": 1.5 / (given.rows + 2),
        "self_check": False,
        "dequantize": "auto",
    }
    with LLM(given.model, kv_dtype=kind, **flags) as llm:
        began = time.monotonic()
        llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0))
        computed = time.monotonic() - began
        params = SamplingParams(max_tokens=given.steps + 32, temperature=0, ignore_eos=True)
        streams = [llm.stream([*prompt[:-1], 100 + row], params) for row in range(given.rows)]
        times: list[list[float]] = [[] for _ in streams]
        held: list[tuple[int, int]] = []

        def read(row: int) -> None:
            for _ in streams[row]:
                times[row].append(time.monotonic())
                if row == given.rows - 1 and len(times[row]) == 8:
                    [rank] = llm._session.engine.call(Engine.status).result().ranks
                    held.append((rank.kv_bytes, rank.used_bytes))

        threads = [threading.Thread(target=read, args=(row,)) for row in range(given.rows)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        [rank] = llm._session.engine.call(Engine.status).result().ranks
    together = max(one[4] for one in times), min(one[-1] for one in times)
    gaps = [
        later - earlier for one in times for earlier, later in pairwise(one) if earlier >= together[0] and later <= together[1]
    ]
    return {
        "prompt_s": computed,
        "step_ms": 1e3 * statistics.median(gaps),
        "kv_mb": held[0][0] / 1e6,
        "used_mb": held[0][1] / 1e6,
        "peak_mb": rank.peak_bytes / 1e6,
    }


def compare_steps(given: argparse.Namespace) -> None:
    """Print a table: each type, and its ratios to the first."""
    rows = []
    for context in given.tokens:
        full: dict[str, float] = {}
        for kind in given.types:
            found = decode_steps(given, kind, context)
            full = full or found
            rows.append(
                {
                    "tokens": context,
                    "rows": given.rows,
                    "KV": kind,
                    **found,
                    "step ratio": found["step_ms"] / full["step_ms"],
                    "KV ratio": found["kv_mb"] / full["kv_mb"],
                }
            )
            table(list(rows[0]), [list(rows[-1].values())])
    print()
    table(list(rows[0]), [list(row.values()) for row in rows])


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=512, help="length of a text")
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--dtype", default="auto", help="type of computation")
    given = parser.parse_args()
    rows, full = [], None
    for kind in TYPES:
        with LLM(given.model, kv_dtype=kind, dtype=given.dtype, max_context=2 * given.tokens) as llm:
            pieces = texts(llm, given.texts, given.tokens)
            found, best = scores(llm, pieces)
            size = llm.engine.status().kv_bytes_per_token
        full = full or (found, best, size)
        off = [abs(mine - theirs) for mine, theirs in zip(found, full[0], strict=True)]
        same = statistics.fmean(mine == theirs for mine, theirs in zip(best, full[1], strict=True))
        perplexity = math.exp(statistics.fmean(full[0]) - statistics.fmean(found))
        rows.append(
            [
                kind,
                f"{size} ({size / full[2]:.2f}x)",
                f"{statistics.fmean(off):.4f}",
                f"{sorted(off)[int(0.99 * len(off))]:.3f}",
                f"{max(off):.2f}",
                f"{same:.1%}",
                f"{perplexity:.4f}x",
            ]
        )
    print(f"{len(found)} tokens of {len(pieces)} texts")
    table(["KV", "bytes a token", "mean off", "99 %", "largest", "same best token", "perplexity"], rows)
    print()
    table(
        ["rows x kv heads x width x positions", "8bit", "4bit"],
        [[" x ".join(map(str, shape)), *(f"{attention(bits, *shape):.1f}x" for bits in (8, 4))] for shape in SHAPES],
    )


if __name__ == "__main__":
    main()
