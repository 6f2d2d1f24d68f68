"""What choosing a step's tokens costs, beside mlx-lm's sampler for each row: `sampler.py [--device gpu]`.

Logits fall off like Zipf's law (peaked: 95 % of the mass in about 250 tokens) or hardly at all (flat: top-p must look
at the whole vocabulary). mlx-lm's side is what its BatchGenerator does: log-softmax over everything, then one sampler
object and one set of logits processors a row, as its server makes them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from tandem.protocol.request import SamplingParams
from tandem.runner.sampler import Sampler

CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.7),
    "top-p .95": SamplingParams(temperature=1.0, top_p=0.95),
    "top-k 20, top-p .8": SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
    "min-p .05": SamplingParams(temperature=1.0, min_p=0.05),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1),
    "greedy, 5 logprobs": SamplingParams(temperature=0.0, logprobs=5),
}
PROMPT = 200


def make_logits(rows: int, vocab: int, peaked: bool, seed: int = 0) -> mx.array:
    """Random logits [rows, vocab]."""
    rng = np.random.default_rng(seed)
    falling = np.log(np.arange(1, vocab + 1)) * (-1.5 if peaked else -0.1)
    return mx.array(np.stack([rng.permutation(falling) for _ in range(rows)]).astype(np.float32))


def tandem_step(params: SamplingParams, rows: int, vocab: int) -> Callable[[mx.array], None]:
    """A function that samples one step of a batch."""
    sampler, ids = Sampler(vocab, (0,)), [str(i) for i in range(rows)]
    for i, name in enumerate(ids):
        sampler.add(name, params, i, list(range(PROMPT)), PROMPT)

    def step(logits: mx.array) -> None:
        sampled = sampler.sample(logits, ids)
        mx.eval(sampled.arrays)
        sampled.logprobs()

    return step


def mlx_lm_step(params: SamplingParams, rows: int, vocab: int) -> Callable[[mx.array], None]:
    """The same with mlx-lm's parts, in the order of its BatchGenerator."""
    samplers = [
        make_sampler(temp=params.temperature, top_p=params.top_p, min_p=params.min_p, top_k=params.top_k) for _ in range(rows)
    ]
    processors = [
        make_logits_processors(
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
        )
        if params.penalised
        else []
        for _ in range(rows)
    ]
    history = mx.arange(PROMPT)

    def step(logits: mx.array) -> None:
        if params.penalised:
            parts = []
            for row in range(rows):
                part = logits[row : row + 1]
                for process in processors[row]:
                    part = process(history, part)
                parts.append(part)
            logits = mx.concatenate(parts)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        tokens = mx.concatenate([samplers[row](logprobs[row : row + 1]) for row in range(rows)])
        mx.eval(tokens, logprobs)

    return step


def milliseconds(step: Callable[[mx.array], None], logits: mx.array, repeats: int) -> float:
    """Of the fastest call: what others do on the machine only adds."""
    step(logits)
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        step(logits)
        best = min(best, time.perf_counter() - started)
    return best * 1e3


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--repeats", type=int, default=4)
    args = parser.parse_args()
    mx.set_default_device(mx.gpu if args.device == "gpu" else mx.cpu)
    print(f"{'vocab':>7} {'rows':>4} {'logits':7} {'case':20} {'mlx-lm ms':>10} {'tandem ms':>10} {'ratio':>6}")
    for vocab in args.vocab:
        for rows in args.rows:
            for kind in ("peaked", "flat"):
                logits = make_logits(rows, vocab, kind == "peaked")
                for name, params in CASES.items():
                    if kind == "flat" and name != "top-p .95":
                        continue
                    theirs = milliseconds(mlx_lm_step(params, rows, vocab), logits, args.repeats)
                    ours = milliseconds(tandem_step(params, rows, vocab), logits, args.repeats)
                    print(f"{vocab:7} {rows:4} {kind:7} {name:20} {theirs:10.2f} {ours:10.2f} {ours / theirs:6.2f}", flush=True)


if __name__ == "__main__":
    main()
