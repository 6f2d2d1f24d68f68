"""Checks of sampling and digests on this machine's device, against NumPy (mlx)."""

from __future__ import annotations

import time

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from tandem.diagnostics.selftest.check import Differs
from tandem.diagnostics.tasks import Figures, Task
from tandem.loading.memory import choose_device
from tandem.protocol.request import SamplingParams
from tandem.runner.digest import digest
from tandem.runner.sampler import Sampler

VOCAB, LARGE_VOCAB = 5000, 151_936
DRAWS = 400
EDGE = 2
"""Tokens at the edge of top-p that float32 rounding may include or exclude."""
CASES = {
    "top-k": SamplingParams(temperature=0.8, top_k=20),
    "top-p": SamplingParams(temperature=1.0, top_p=0.9),
    "top-p, flat": SamplingParams(temperature=50.0, top_p=0.999),
    "min-p": SamplingParams(temperature=1.0, min_p=0.05),
    "all filters": SamplingParams(temperature=0.7, top_k=50, top_p=0.95, min_p=0.02),
}
PENALISED = SamplingParams(
    temperature=0.0,
    repetition_penalty=1.3,
    frequency_penalty=0.5,
    presence_penalty=0.4,
    logit_bias={7: 1.5, 9: -100.0},
    logprobs=5,
)
PROMPT = [3, 4, 5, 5, 9]


def sampler(task: Task) -> Figures:
    """Check filters, draws, penalties, bias and log probabilities; report milliseconds per step."""
    choose_device("auto")
    logits = logits_of(VOCAB)
    for name, params in CASES.items():
        _filtered(name, params, logits)
    _penalised(logits)
    _largest(logits)
    return {
        f"{name}, 8 rows of {LARGE_VOCAB} tokens, ms": round(_milliseconds(params), 2)
        for name, params in {"greedy": SamplingParams(temperature=0.0), "top-p": CASES["top-p"]}.items()
    }


def logits_of(vocab: int) -> npt.NDArray[np.float32]:
    """Return shuffled logits [vocab] that follow Zipf's law."""
    return np.random.default_rng(3).permutation(-1.5 * np.log(np.arange(1, vocab + 1))).astype(np.float32)


def kept(logits: npt.NDArray[np.float32], params: SamplingParams) -> npt.NDArray[np.bool_]:
    """Return a mask [vocab] of the tokens that the filters keep, in float64: top-k, then top-p of the rest, then min-p."""
    scaled = (logits.astype(np.float64) - logits.max()) / params.temperature
    keep = np.ones(len(scaled), dtype=np.bool_)
    if params.top_k:
        keep &= scaled >= np.sort(scaled)[-params.top_k]
    if params.top_p < 1:
        mass = np.where(keep, np.exp(scaled), 0.0)
        order = np.argsort(-scaled, kind="stable")
        before = np.cumsum(mass[order]) - mass[order]
        keep &= scaled >= scaled[order[np.flatnonzero(before < params.top_p * mass.sum())[-1]]]
    if params.min_p > 0:
        keep &= scaled >= np.log(params.min_p)
    return keep


def _sampler(vocab: int, params: SamplingParams, rows: int) -> tuple[Sampler, list[str]]:
    """Return a sampler with `rows` rows that differ only in their seeds, and the rows' names."""
    sampling, ids = Sampler(vocab), [str(i) for i in range(rows)]
    for seed, row in enumerate(ids):
        sampling.add(row, params, seed, list(PROMPT), len(PROMPT))
    return sampling, ids


def _filtered(name: str, params: SamplingParams, logits: npt.NDArray[np.float32]) -> None:
    """Check that no draw is a filtered token, and that the likeliest one has its expected frequency. Raises Differs."""
    sampling, ids = _sampler(VOCAB, params, DRAWS)
    sampled = sampling.sample(mx.array(np.tile(logits, (DRAWS, 1))), ids)
    drawn = np.array(sampled.tokens.tolist())
    keep = kept(logits, params)
    if drawn.min() < 0:
        raise Differs(f"{name}: a token for each row, expected; the mark {drawn.min()}, seen")
    if (dropped := int((~keep[drawn]).sum())) > EDGE:
        raise Differs(f"{name}: {keep.sum()} tokens can be drawn, expected; {dropped} of {DRAWS} draws of others, seen")
    scaled = (logits.astype(np.float64) - logits.max()) / params.temperature
    likely = float(1 / np.where(keep, np.exp(scaled), 0).sum())
    seen = float((drawn == logits.argmax()).mean())
    if abs(seen - likely) > 5 * np.sqrt(likely * (1 - likely) / DRAWS) + 2 / DRAWS:
        raise Differs(f"{name}: the likeliest token in {likely:.3f} of all draws, expected; {seen:.3f}, seen")


def _penalised(logits: npt.NDArray[np.float32]) -> None:
    """Check greedy decoding with penalties and bias, and its log probabilities. Raises Differs."""
    sampling = Sampler(VOCAB)
    sampling.add("a", PENALISED, 0, list(PROMPT), len(PROMPT))
    produced: list[int] = []
    for step in range(8):
        expected = edited(logits, produced)
        sampled = sampling.sample(mx.array(logits)[None], ["a"])
        token = int(np.array(sampled.tokens)[0])
        if token != int(expected.argmax()):
            raise Differs(f"penalties: token {expected.argmax()} in step {step + 1}, expected; {token}, seen")
        norm = float(np.log(np.exp(expected - expected.max()).sum()) + expected.max())
        [chosen] = sampled.logprobs()["a"]
        if abs(chosen.logprob - (float(expected[token]) - norm)) > 1e-3 or len(chosen.top) != PENALISED.logprobs:
            raise Differs(f"log probability {expected[token] - norm:.4f}, expected; {chosen.logprob:.4f}, seen")
        produced.append(token)


def edited(logits: npt.NDArray[np.float32], produced: list[int]) -> npt.NDArray[np.float64]:
    """Return the logits [vocab] after bias and penalties, as the API documents them."""
    values = logits.astype(np.float64)
    for token, bias in PENALISED.logit_bias.items():
        values[token] += bias
    seen = np.array(sorted({*PROMPT, *produced}))
    values[seen] = np.where(
        values[seen] > 0, values[seen] / PENALISED.repetition_penalty, values[seen] * PENALISED.repetition_penalty
    )
    counts = np.bincount(np.array(produced, dtype=np.int64), minlength=len(values))
    result: npt.NDArray[np.float64] = values - PENALISED.frequency_penalty * counts - PENALISED.presence_penalty * (counts > 0)
    return result


def _largest(logits: npt.NDArray[np.float32]) -> None:
    from tandem.runner.filters import largest

    values, places = largest(mx.array(logits)[None], 40)
    expected = np.sort(logits)[-40:]
    if not np.array_equal(np.sort(np.array(values)[0]), expected) or not np.array_equal(
        logits[np.array(places)[0]], np.array(values)[0]
    ):
        raise Differs("the 40 largest of a row, expected; others, seen")


def _milliseconds(params: SamplingParams) -> float:
    """Return the fastest step's milliseconds, for 8 rows."""
    sampling, ids = _sampler(LARGE_VOCAB, params, 8)
    logits = mx.array(np.tile(logits_of(LARGE_VOCAB), (8, 1)))
    best = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        mx.eval(sampling.sample(logits, ids).arrays)
        best = min(best, time.perf_counter() - began)
    return best * 1e3


def digests(task: Task) -> Figures:
    """Check that digests of arrays, by which machines compare results, equal NumPy's."""
    choose_device("auto")
    rng = np.random.default_rng(5)
    for size in (1, 33, 4096, 70_001):
        for dtype, kind in ((mx.float32, np.uint32), (mx.float16, np.uint16)):
            array = mx.array(rng.standard_normal(size).astype(np.float32)).astype(dtype)
            bits = np.array(array).view(kind).astype(np.uint64)
            weights = (np.arange(size, dtype=np.uint64) * 2654435761 % 2**32) | 1
            expected = int((bits * weights % 2**32).sum() % 2**32)
            if (seen := digest(array).item()) != expected:
                raise Differs(f"digest {expected} of {size} numbers of {dtype}, expected; {seen}, seen")
    return {}
