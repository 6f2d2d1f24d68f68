"""Ragged batches of prompts against each prompt alone, over kinds of caches and layouts: `parity_fuzz.py --prompts 5000`.

Tiny random models in float32. A batch has too little KV memory for all, so that sequences are preempted, and prompts that share
beginnings. Some requests are aborted, and in layouts of processes a rank is killed amid each round, so that all is computed
again. Then the server ends, and one of another layout starts with its disk (`--kv-disk`). It takes over requests that the
first one had begun, and conversations are continued there. Before that some files on disk are cut, damaged, swapped or
deleted.

The reference is the model's own forward pass over one prompt by itself. Tokens must be equal up to a tie: there the
reference's logits of both tokens lie within twice 1e-4 of its largest logit (the rule of `tandem parity`; wider with 8-bit
KV). KV and checkpoints on disk must be those of the reference at their positions, within 1e-3 of their largest number.
Exit code 1 where anything else differs. `--plant` restores states of an earlier checkpoint, which must be found.
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from msgspec.structs import replace

from tandem import LLM
from tandem.checkpoints.resolve import resolve
from tandem.errors import TandemError
from tandem.kv.disk import DiskTier
from tandem.kv.files import DiskBlockFiles, Unusable
from tandem.kv.index import block_hashes, disk_block_names
from tandem.kv.parts import KVSlice
from tandem.kv.store import Layers, unsupported
from tandem.loading.memory import choose_device
from tandem.loading.prefix import Prefix, kinds_of
from tandem.loading.stage import StageModel, load_stage
from tandem.models.description import describe
from tandem.protocol.cached_prefixes import QueryCache
from tandem.protocol.control import EngineMessage, HandedOver, Output
from tandem.protocol.kv_blocks import DISK_BLOCK_SIZE, checkpoint_name
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.runner.prefix_store import PrefixStore
from tandem.speculation.proposers import StepCosts
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
    "pp2": {"pipeline_parallel_size": 2},
    "pp3": {"pipeline_parallel_size": 3, "layer_split": (1, 2, 1)},
    "tp2": {"tensor_parallel_size": 2},
    "draft": {"draft_model": "itself", "num_speculative_tokens": 3},
    "mtp": {"speculative_config": '{"method": "mtp", "num_speculative_tokens": 3}'},
}
HEADS = ("deepseek_v3",)
"""Families that get a draft head in layout `mtp`; the others leave that layout out."""
TIE = 2e-4
TIE_8BIT = 0.04
"""The same with 8-bit KV. There one code that float32 rounding takes to the next moves gemma4's logits by up to 0.016, from that
token on."""
STATE = 1e-3
"""Allowed difference of a stored array, as a part of its largest number."""
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
    moved: int = 0
    damaged: int = 0
    disk_tokens: dict[str, int] = field(default_factory=dict)
    """Prompt tokens read from disk, by family."""
    stored: int = 0
    """Checkpoints on disk that were compared with the reference's."""
    off: float = 0.0
    """Largest difference of a log probability, in tokens before a tie."""
    differences: list[str] = field(default_factory=list)


class Alone:
    """The model over one sequence at a time."""

    def __init__(self, directory: Path, kv_dtype: str = "") -> None:
        files = resolve(str(directory))
        description = describe(files)
        self.stage: StageModel = load_stage(files, description, range(description.num_layers), dtype="float32")
        self.description, self.vocab = description, description.vocab_size
        if kv_dtype:
            self.stage.quantize_kv(kv_dtype)

    def logits(self, prompt: list[int], output: list[int]) -> np.ndarray:
        """Logits [output, vocab] that each token of the output was chosen from, in one pass over all tokens."""
        hidden = self.stage.forward(mx.array([prompt + output[:-1]], dtype=mx.int32), self.stage.make_caches())
        rows = self.stage.head(hidden[:, len(prompt) - 1 :])[0].astype(mx.float32)
        mx.eval(rows)
        return np.array(rows)


def compare(
    request: EngineRequest, tokens: list[int], logprobs: list[float], logits: np.ndarray, tally: Tally, where: str, tie: float
) -> None:
    """Count an answer as equal, a tie or a difference. The answer is followed, so that all its tokens count."""
    tally.prompts += 1
    tied = False
    for i, token in enumerate(tokens):
        row = logits[i]
        gap = float(row.max() - row[token]) / float(np.abs(row).max())
        likely = float(row[token] - np.logaddexp.reduce(row))
        tally.off = max(tally.off, abs(likely - logprobs[i]))
        if not gap <= tie:
            tally.differences.append(
                f"{where} {request.request_id}: token {i + 1} of {len(tokens)} is {gap:.2g} from the likeliest"
            )
            return
        tied |= gap > 0
    if len(tokens) != request.params.max_tokens:
        tally.differences.append(f"{where} {request.request_id}: {len(tokens)} of {request.params.max_tokens} tokens")
    tally.ties += tied
    tally.equal += not tied


def requests_of(
    rng: random.Random, count: int, vocab: int, name: str, continued: list[list[int]], *, leave: bool
) -> list[EngineRequest]:
    """Ragged prompts: some alike in length, some with a beginning in common, some that continue conversations."""
    beginnings = [[rng.randrange(3, vocab) for _ in range(length)] for length in (32, 70, 130)]
    alike, made = rng.randrange(5, 40), []
    for i in range(count):
        length = rng.choice([1, 2, alike, alike + 1, alike + 2, rng.randrange(1, 90), rng.randrange(1, 20)])
        start = rng.choice([[], [], *beginnings])
        if continued and rng.random() < 0.5:
            start = rng.choice(continued)[:300]
        prompt = start + [rng.randrange(3, vocab) for _ in range(length)]
        if rng.random() < 0.2:
            prompt = (prompt * 4)[: len(prompt) + 30]  # repeats itself, for drafts
        params = SamplingParams(max_tokens=rng.choice([1, 4, 12, 40, 110]), temperature=0.0, ignore_eos=True, logprobs=0)
        leaves = leave and rng.random() < 0.2  # as from a replica for prefill
        made.append(EngineRequest(request_id=f"{name}-{i}", prompt=prompt, params=params, leaves=leaves))
    return made


def batch(
    llm: LLM, requests: list[EngineRequest], rng: random.Random, tally: Tally, *, leave: bool
) -> tuple[dict[str, tuple[list[int], list[float]]], list[EngineRequest]]:
    """Answers of requests that arrive in bursts, without those that are aborted, and requests that another server is to
    continue (`leave`). One rank is killed, if ranks are processes."""
    engine = llm._session.engine
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    answers: dict[str, tuple[list[int], list[float]]] = {one.request_id: ([], []) for one in requests}
    waiting, live, seen = list(requests), set(answers), 0
    doomed = {one.request_id for one in requests if rng.random() < 0.08}
    leaving = {one.request_id: rng.randrange(1, 30) for one in requests if leave and rng.random() < 0.4}
    by_id, moved = {one.request_id: one for one in requests}, []
    kill_at = rng.randrange(3, 5 * len(requests)) if engine.engine.executor.pids else -1
    deliver = engine.deliver

    def deliver_moves(messages: Sequence[EngineMessage]) -> None:
        deliver(messages)
        for message in messages:
            if isinstance(message, HandedOver) and engine._sinks.pop(message.request_id, None) is not None:
                events.put(message)

    engine.deliver = deliver_moves  # type: ignore[method-assign]
    while live:
        if waiting and (seen % 7 == 0 or len(live) == len(waiting)):
            some, waiting = waiting[: (n := rng.choice([1, 3, 8]))], waiting[n:]
            engine.submit(some, events.put).result()
        event = events.get(timeout=PATIENCE_S)
        if isinstance(event, Exception):
            raise event
        seen += 1
        if event.request_id not in live:
            continue
        tokens, logprobs = answers[event.request_id]
        if isinstance(event, HandedOver):
            live.remove(event.request_id)
            moved.append(replace(by_id[event.request_id], produced=list(tokens), kept=event.positions, leaves=False))
            continue
        assert isinstance(event, Output)
        tokens += event.tokens
        logprobs += [one.logprob for one in event.logprobs]
        if event.finish_reason:
            live.remove(event.request_id)
        elif event.request_id in doomed and len(tokens) > 2:
            engine.abort([event.request_id])
            live.remove(event.request_id)
            del answers[event.request_id]
            tally.aborted += 1
        elif len(tokens) >= leaving.get(event.request_id, 1000):
            del leaving[event.request_id]
            engine.call(methodcaller("hand_over", event.request_id))
        if seen == kill_at:
            os.kill(rng.choice(engine.engine.executor.pids), signal.SIGKILL)
            tally.kills += 1
    return answers, moved


def damage(disk: Path, rng: random.Random) -> int:
    """Cut, damage, swap or delete some files; return how many."""
    files = sorted(disk.glob("*/*.kv"))
    chosen = rng.sample(files, min(len(files) // 3, rng.choice([0, 0, 1, 4])))
    for path in chosen:
        data, how = bytearray(path.read_bytes()), rng.randrange(5)
        if how == 0:
            path.unlink()
            continue
        if how == 1:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data[: rng.randrange(len(data))] if how == 2 else rng.choice(files).read_bytes() if how == 3 else data)
    return len(chosen)


def compare_stored(disk: Path, alone: Alone, known: list[list[int]], tally: Tally, where: str) -> None:
    """Compare keys, values and checkpoints on disk with those of the reference at the same positions."""
    stage, description = alone.stage, alone.description
    if unsupported(stage.cache_members, stage.dtype):
        return
    every = range(description.num_layers)
    heads = range(1 if description.replicated_cache else description.num_kv_heads)
    kinds = kinds_of(stage.make_caches())
    layers = Layers(kinds, stage.cache_members, len(every), len(heads), stage.dtype, as_bytes=False)
    for space in (path for path in disk.iterdir() if path.is_dir() and "-tp" not in path.name):
        files = DiskBlockFiles(disk, space.name, KVSlice(every, heads), 1 << 40, 1 << 30, layers.kind)
        done: set[bytes] = set()
        for tokens in known:
            names, caches, at = disk_block_names(block_hashes(tokens)), stage.make_caches(), 0
            for number, name in enumerate(names):
                wanted = [one for one in (name, checkpoint_name(name)) if one not in done and files.names([one])]
                if not wanted:
                    continue
                done.update(wanted)
                end = (number + 1) * DISK_BLOCK_SIZE
                stage.forward(mx.array([tokens[at:end]], dtype=mx.int32), caches)
                mx.eval([cache.state for cache in caches])
                at, prefix = end, Prefix.of(caches, end)
                for one in wanted:
                    blocks = one == name
                    made = layers.stored(prefix, slice(end - DISK_BLOCK_SIZE, end)) if blocks else layers.checkpoint(prefix, end)
                    try:
                        found = files.read(one)[0]
                    except Unusable:  # one that was damaged
                        continue
                    assert made is not None
                    tally.stored += not blocks
                    far = max(
                        (distance(x, y) for a, b in zip(made, found, strict=True) for x, y in zip(a, b, strict=True)), default=0
                    )
                    if not far <= STATE:
                        tally.differences.append(f"{where}: {'KV' if blocks else 'checkpoint'} at {end} is {far:.2g} off on disk")


def distance(expected: mx.array, found: np.ndarray) -> float:
    """Return the largest difference of two arrays of float32, or of their bytes, as a part of the largest number."""
    one = np.array(expected)
    one, other = (np.ascontiguousarray(each).view(np.float32) for each in (one, found))
    if one.shape != other.shape:
        return np.inf
    return float(np.abs(one - other).max() / max(np.abs(one).max(), 1e-6)) if one.size else 0.0  # values may be none wide


def play(family: str, layouts: list[str], seed: int, prompts: int, tally: Tally, directory: Path, *, disk: bool) -> None:
    """One family in two layouts after one another: a round of `prompts` prompts. Raises TandemError where they do not go
    together."""
    rng = random.Random(f"{family} {layouts} {seed}")
    model = tiny_model(directory / f"{family}-{seed}", family, dtype="float32", seed=seed)
    if "mtp" in layouts:
        sys.path.append(str(Path(__file__).parents[1] / "tests"))
        from planted_head import add_mtp_head

        add_mtp_head(model, right=rng.choice([0.7, None]))
    kv_dtype = next((LAYOUTS[layout]["kv_dtype"] for layout in layouts if "kv_dtype" in LAYOUTS[layout]), "")
    alone = Alone(model, kv_dtype)
    settings: dict[str, Any] = {"max_batch_size": 12, "prefill_chunk": 48, "prefix_cache": 0.5, "dtype": "float32"}
    settings |= {"kv_tokens": rng.choice([600, 1200]), "prefix_checkpoint_tokens": rng.choice([64, 128, 2048])}
    if disk:
        settings |= {"kv_disk": str(directory / "kv"), "kv_disk_gb": rng.choice([1.0, 0.004])}
    asked: dict[str, EngineRequest] = {}
    answers: dict[str, tuple[list[int], list[float]]] = {}
    moved: list[EngineRequest] = []
    for number, layout in enumerate(layouts):
        given = {**LAYOUTS[layout], **({"kv_dtype": kv_dtype} if kv_dtype else {})}
        if "draft_model" in given:
            given["draft_model"] = str(model)
        with LLM(str(model), **settings, **given) as llm:
            known, leave = (
                [asked[name].prompt + tokens for name, (tokens, _) in answers.items()],
                disk and number < len(layouts) - 1,
            )
            count = prompts // len(layouts)
            requests = requests_of(rng, count, min(alone.vocab, 500), f"{family}-{layout}-{seed}-{number}", known, leave=leave)
            asked |= {one.request_id: one for one in requests}
            some, leaving = batch(llm, [*moved, *requests], rng, tally, leave=leave)
            for name, (tokens, logprobs) in some.items():
                before = answers.get(name, ([], []))
                answers[name] = before[0] + tokens, before[1] + logprobs
            for one in moved:
                if one.request_id not in some:
                    del answers[one.request_id]  # aborted
            moved = leaving
            tally.moved += len(moved)
            engine = llm._session.engine
            tally.preempted += engine.call(lambda engine: engine.scheduler.batches.preemptions).result(timeout=PATIENCE_S)
            read = engine.call(lambda engine: engine.scheduler.disk.counts.hit_tokens).result(timeout=PATIENCE_S)
            tally.disk_tokens[family] = tally.disk_tokens.get(family, 0) + read
            listed: queue.SimpleQueue[object] = queue.SimpleQueue()
            engine.call(methodcaller("query_cache", QueryCache(1), listed.put)).result(timeout=PATIENCE_S)
            listed.get(timeout=PATIENCE_S)  # once all that waits is written
        if leave:
            tally.damaged += damage(directory / "kv", rng)
    where, tie = " then ".join([family, *layouts]), TIE_8BIT if kv_dtype else TIE
    for name, (tokens, logprobs) in answers.items():
        compare(asked[name], tokens, logprobs, alone.logits(asked[name].prompt, tokens), tally, where, tie)
    if (directory / "kv").exists() and not kv_dtype:
        known = [asked[name].prompt + tokens for name, (tokens, _) in answers.items()]
        compare_stored(directory / "kv", alone, known, tally, where)


def plant() -> None:
    """Make cached prefixes hold the states of an earlier one, where this process is the only rank."""
    original, earlier = PrefixStore.save, dict[str, Any]()

    def save(self: PrefixStore, key: str, caches: Any, held: int, length: int, takes: Any = ()) -> None:
        original(self, key, caches, held, length, takes)
        prefix = self._saved[key]
        if prefix.checkpoints[length] and any(state is None for state in prefix.states):
            prefix.checkpoints[length] = earlier.setdefault(str(prefix.kinds), prefix.checkpoints[length])

    PrefixStore.save = save  # type: ignore[method-assign]


def main() -> None:
    """Play rounds until enough prompts are compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2000, help="prompts in all")
    parser.add_argument("--round", type=int, default=48, help="prompts of a family in a layout")
    parser.add_argument("--families", nargs="*", default=FAMILIES)
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no round after so long")
    parser.add_argument("--no-disk", dest="disk", action="store_false", help="without a directory for KV, and one server a round")
    parser.add_argument("--plant", action="store_true", help="restore wrong states in layout `one`: all must not be well then")
    args = parser.parse_args()
    if args.plant:
        args.layouts = ["one"]
        plant()
    choose_device("auto")  # TANDEM_DEVICE goes for the reference too
    # Tiny models compute faster than disks read, and steps with drafts cost as much as others.
    DiskTier._pays = lambda *_: True  # type: ignore[method-assign]
    StepCosts.ratio = lambda *_: 1.0  # type: ignore[method-assign]
    tally, began, seed, refused = Tally(), time.monotonic(), args.seed, set[tuple[str, ...]]()
    while tally.prompts < args.prompts and time.monotonic() - began < args.seconds:
        rng = random.Random(seed)
        cells = [(family, layout) for family in args.families for layout in args.layouts if layout != "mtp" or family in HEADS]
        rng.shuffle(cells)
        for family, layout in cells:
            if tally.prompts >= args.prompts or time.monotonic() - began > args.seconds:
                break
            others = [one for one in args.layouts if one != "mtp" or family in HEADS]
            layouts = [layout, rng.choice(others)] if args.disk else [layout]
            if (family, *layouts) in refused:
                continue
            where = " then ".join([family, *layouts])
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
                known = len(tally.differences)
                try:
                    play(family, layouts, seed, args.round, tally, Path(directory), disk=args.disk)
                except TandemError as error:
                    refused.add((family, *layouts))
                    print(f"{where}: left out: {str(error).splitlines()[0][:160]}", flush=True)
                    continue
            for difference in tally.differences[known:]:
                print(f"DIFFERENT {difference} (seed {seed})", flush=True)
            print(f"{time.monotonic() - began:.0f} s, {where}: {tally.prompts} prompts so far", flush=True)
        seed += 1
    print(
        f"{tally.prompts} prompts: {tally.equal} equal, {tally.ties} with a tie, {len(tally.differences)} different; "
        f"{tally.aborted} aborted, {tally.preempted} preemptions, {tally.kills} kills, {tally.moved} moved to another server; "
        f"{tally.stored} checkpoints on disk compared, {tally.damaged} files damaged; "
        f"log probabilities at most {tally.off:.1e} apart"
    )
    print("prompt tokens read from disk:", ", ".join(f"{family} {count}" for family, count in sorted(tally.disk_tokens.items())))
    sys.exit(bool(tally.differences))


if __name__ == "__main__":
    main()
