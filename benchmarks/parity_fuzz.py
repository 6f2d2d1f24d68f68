"""Ragged batches of prompts against each prompt alone, over kinds of caches and layouts: `parity_fuzz.py --prompts 2000`.

Tiny random models in float32. A batch has too little KV memory for all, so that sequences are preempted, and prompts that share
beginnings. Some requests are aborted, and in layouts of processes a rank is killed amid each round, so that all is computed
again. The reference is the model's own forward pass over one prompt by itself. Tokens must be equal up to a tie: there the
reference's logits of both tokens lie within twice 1e-4 of its largest logit (the rule of `tandem parity`).
Exit code 1 where anything else differs.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tandem import LLM
from tandem.checkpoints.resolve import resolve
from tandem.errors import TandemError
from tandem.loading.stage import StageModel, load_stage
from tandem.models.description import describe
from tandem.protocol.control import Output
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.testing import tiny_model

FAMILIES = [
    "llama",
    "gemma3_text",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v32",
    "qwen3_next",
    "kimi_linear",
    "granitemoehybrid",
    "mamba2",
    "nemotron_h",
    "lfm2",
    "baichuan_m1",
    "rwkv7",
    "recurrent_gemma",
    "longcat_flash",
    "llama4",
    "gemma2",
    "step3p5",
    "mistral4",
    "ministral3",
    "jamba",
    "falcon_h1",
    "longcat_flash_ngram",
    "kimi_k3",
    "gemma4",
    "bailing_hybrid",
    "mimo_v2_flash",
    "minimax_m3_vl",
]
"""One or more for each kind of cache (tests/runner/test_runner_cache_kinds.py), and plain keys and values."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "8bit": {"kv_dtype": "8bit"},
    "drafts": {"speculative_method": "ngram"},
    "draft model": {"draft_model": "itself"},
    "pp2": {"pipeline_parallel_size": 2},
    "pp3": {"pipeline_parallel_size": 3, "layer_split": (1, 2, 1)},
    "tp2": {"tensor_parallel_size": 2},
}
TIE = 2e-4
PATIENCE_S = 300.0


@dataclass
class Tally:
    """What came of prompts."""

    prompts: int = 0
    equal: int = 0
    ties: int = 0
    aborted: int = 0
    preempted: int = 0
    kills: int = 0
    off: float = 0.0
    """Largest difference of a log probability, in tokens before a tie."""
    differences: list[str] = field(default_factory=list)


class Alone:
    """The model over one sequence at a time."""

    def __init__(self, directory: Path, kv_dtype: str = "") -> None:
        files = resolve(str(directory))
        description = describe(files)
        self.stage: StageModel = load_stage(files, description, range(description.num_layers), dtype="float32")
        self.vocab = description.vocab_size
        if kv_dtype:
            self.stage.quantize_kv(kv_dtype)

    def logits(self, prompt: list[int], output: list[int]) -> np.ndarray:
        """Logits [output, vocab] that each token of the output was chosen from, fed one by one."""
        caches, rows = self.stage.make_caches(), []
        for fed in [prompt, *([token] for token in output[:-1])]:
            hidden = self.stage.forward(mx.array([fed], dtype=mx.int32), caches)
            rows.append(self.stage.head(hidden[:, -1:])[0, -1].astype(mx.float32))
            mx.eval(rows[-1], [cache.state for cache in caches])
        return np.array(mx.stack(rows))


def compare(
    request: EngineRequest, tokens: list[int], logprobs: list[float], logits: np.ndarray, tally: Tally, where: str
) -> None:
    """Count an answer as equal, a tie or a difference. The answer is followed, so that all its tokens count."""
    tally.prompts += 1
    tie = False
    for i, token in enumerate(tokens):
        row = logits[i]
        gap = float(row.max() - row[token]) / float(np.abs(row).max())
        likely = float(row[token] - np.logaddexp.reduce(row))
        tally.off = max(tally.off, abs(likely - logprobs[i]))
        if not gap <= TIE:
            tally.differences.append(
                f"{where} {request.request_id}: token {i + 1} of {len(tokens)} is {gap:.2g} from the likeliest"
            )
            return
        tie |= gap > 0
    if len(tokens) != request.params.max_tokens:
        tally.differences.append(f"{where} {request.request_id}: {len(tokens)} of {request.params.max_tokens} tokens")
    tally.ties += tie
    tally.equal += not tie


def requests_of(rng: random.Random, count: int, vocab: int, name: str) -> list[EngineRequest]:
    """Ragged prompts, some alike in length and some with a beginning in common."""
    beginnings = [[rng.randrange(3, vocab) for _ in range(length)] for length in (32, 70)]
    alike, made = rng.randrange(5, 40), []
    for i in range(count):
        length = rng.choice([1, 2, alike, alike + 1, alike + 2, rng.randrange(1, 90), rng.randrange(1, 20)])
        start = rng.choice([[], [], *beginnings])
        prompt = start + [rng.randrange(3, vocab) for _ in range(length)]
        if rng.random() < 0.2:
            prompt = (prompt * 4)[: len(prompt) + 30]  # repeats itself, for drafts
        params = SamplingParams(max_tokens=rng.choice([1, 4, 12, 40, 110]), temperature=0.0, ignore_eos=True, logprobs=0)
        made.append(EngineRequest(request_id=f"{name}-{i}", prompt=prompt, params=params))
    return made


def batch(llm: LLM, requests: list[EngineRequest], rng: random.Random, tally: Tally) -> dict[str, tuple[list[int], list[float]]]:
    """Answers of requests that arrive in bursts, without those that are aborted. One rank is killed, if ranks are processes."""
    engine = llm._session.engine
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    answers: dict[str, tuple[list[int], list[float]]] = {one.request_id: ([], []) for one in requests}
    waiting, live, seen = list(requests), set(answers), 0
    doomed = {one.request_id for one in requests if rng.random() < 0.08}
    kill_at = rng.randrange(3, 5 * len(requests)) if engine.engine.executor.pids else -1
    while live:
        if waiting and (seen % 7 == 0 or len(live) == len(waiting)):
            some, waiting = waiting[: (n := rng.choice([1, 3, 8]))], waiting[n:]
            engine.submit(some, events.put).result()
        event = events.get(timeout=PATIENCE_S)
        if isinstance(event, Exception):
            raise event
        assert isinstance(event, Output)
        seen += 1
        if event.request_id not in live:
            continue
        tokens, logprobs = answers[event.request_id]
        tokens += event.tokens
        logprobs += [one.logprob for one in event.logprobs]
        if event.finish_reason:
            live.remove(event.request_id)
        elif event.request_id in doomed and len(tokens) > 2:
            engine.abort([event.request_id])
            live.remove(event.request_id)
            del answers[event.request_id]
            tally.aborted += 1
        if seen == kill_at:
            os.kill(rng.choice(engine.engine.executor.pids), signal.SIGKILL)
            tally.kills += 1
    return answers


def play(family: str, layout: str, seed: int, prompts: int, tally: Tally, directory: Path) -> None:
    """One family in one layout: a round of `prompts` prompts. Raises TandemError where they do not go together."""
    rng = random.Random(f"{family} {layout} {seed}")
    model = tiny_model(directory / f"{family}-{seed}", family, dtype="float32", seed=seed)
    alone = Alone(model, LAYOUTS[layout].get("kv_dtype", ""))
    settings = {"kv_tokens": 600, "max_batch_size": 12, "prefill_chunk": 48, "prefix_cache": 0.3, "dtype": "float32"}
    settings |= {name: str(model) if name == "draft_model" else value for name, value in LAYOUTS[layout].items()}
    with LLM(str(model), **settings) as llm:
        requests = requests_of(rng, prompts, min(alone.vocab, 500), f"{family}-{layout}-{seed}")
        answers = batch(llm, requests, rng, tally)
        tally.preempted += llm._session.engine.call(lambda engine: engine.scheduler.batches.preemptions).result(
            timeout=PATIENCE_S
        )
    for request in requests:
        if request.request_id in answers:
            tokens, logprobs = answers[request.request_id]
            logits = alone.logits(request.prompt, tokens)
            compare(request, tokens, logprobs, logits, tally, f"{family} {layout}")


def main() -> None:
    """Play rounds until enough prompts are compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2000, help="prompts in all")
    parser.add_argument("--round", type=int, default=24, help="prompts of a family in a layout")
    parser.add_argument("--families", nargs="*", default=FAMILIES)
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no round after so long")
    args = parser.parse_args()
    tally, began, seed, refused = Tally(), time.monotonic(), args.seed, set()
    while tally.prompts < args.prompts and time.monotonic() - began < args.seconds:
        cells = [(family, layout) for family in args.families for layout in args.layouts if (family, layout) not in refused]
        random.Random(seed).shuffle(cells)
        for family, layout in cells:
            if tally.prompts >= args.prompts or time.monotonic() - began > args.seconds:
                break
            with tempfile.TemporaryDirectory() as directory:
                known = len(tally.differences)
                try:
                    play(family, layout, seed, args.round, tally, Path(directory))
                except TandemError as error:
                    refused.add((family, layout))
                    print(f"{family} {layout}: left out: {str(error).splitlines()[0][:160]}", flush=True)
                    continue
            for difference in tally.differences[known:]:
                print(f"DIFFERENT {difference}", flush=True)
            print(f"{time.monotonic() - began:.0f} s, {family} {layout}: {tally.prompts} prompts so far", flush=True)
        seed += 1
    print(
        f"{tally.prompts} prompts: {tally.equal} equal, {tally.ties} with a tie, {len(tally.differences)} different; "
        f"{tally.aborted} aborted, {tally.preempted} preemptions, {tally.kills} kills; "
        f"log probabilities at most {tally.off:.1e} apart"
    )
    sys.exit(bool(tally.differences))


if __name__ == "__main__":
    main()
