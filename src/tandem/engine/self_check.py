"""Self-check of a layout with several ranks over its real links, before it serves.

Links can corrupt data silently, often only with long prompts (docs/checks.md). So one prompt, slightly longer than a prefill
chunk, is computed twice: alone, then with other chunk boundaries and other sequences in all micro-batches. Greedy tokens and
log probabilities must agree within rounding errors. In every step the ranks' digests are compared too
(`tandem.engine.result_collector`).
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass, replace

from tandem.engine.build_layout import RankGroupLayout
from tandem.engine.result_collector import Disagreement, OfflineResult, OfflineRun, run_offline
from tandem.errors import RankFailure
from tandem.executors.executor import Executor
from tandem.protocol.control import Ready
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.scheduler.limits import Limits

log = logging.getLogger(__name__)

NEW_TOKENS = 4
TOP = 5
"""Number of most likely tokens whose log probabilities are compared."""
BEYOND = 2
"""Prompt tokens beyond the first chunk, so that a second chunk follows."""
NEIGHBOUR = 5
"""Prompt tokens of each other sequence; these decode during the prefill of the checked prompt."""
TOLERANCE = {"float32": 0.02, "float16": 0.3, "bfloat16": 1.0}
"""Allowed difference of log probabilities by dtype. Chunk boundaries and batch sizes change the order of sums. Corrupted
activations differ by several nats."""
QUANTIZED_KV = {"auto": 0.0, "8bit": 0.3, "4bit": 1.0}
"""Minimum tolerance by KV type: values near the border of two codes may round either way."""
REPEAT_S = 1.0
"""Maximum duration in seconds of a self-check that is repeated after ranks are replaced."""


@dataclass(frozen=True)
class Outcome:
    """Result of a passed self-check."""

    seconds: float
    next_step: int
    """Step id of the engine's next plan."""


def send_self_check(
    executor: Executor, layout: RankGroupLayout, limits: Limits, ready: list[Ready], first_step: int = 0
) -> Outcome:
    """Run the self-check on started ranks. Raises RankFailure with the mismatch and its size.

    All its sequences are removed from the ranks, and no prefixes are saved.
    """
    started = time.perf_counter()
    length = min(limits.prefill_chunk + BEYOND, min(limits.max_context, limits.kv_tokens // 2) - NEW_TOKENS)
    if length < 3:
        log.warning("Self-check skipped: a KV cache of %d tokens has no room for it (--kv-tokens)", limits.kv_tokens)
        return Outcome(0.0, first_step)
    chunk = max(1, length - BEYOND)
    log.info("self-check: %d ranks compute a prompt of %d tokens in two ways (--no-self-check leaves it out)", len(ready), length)
    alone = _run_offline(executor, layout, _limits(limits, 1, chunk), _requests(limits, length, 1), first_step)
    # Use twice as many sequences as micro-batches, so that the first shares its batch with another.
    crowd = _run_offline(
        executor,
        layout,
        _limits(limits, limits.micro_batches, max(1, 2 * chunk // 3)),
        _requests(limits, length, 2 * limits.micro_batches),
        alone.next_step,
    )
    worst = _compare(alone.answers["self-check-0"], crowd.answers["self-check-0"], tolerance(layout, ready), limits.vocab_size)
    seconds = time.perf_counter() - started
    log.info("self-check passed: %d ranks agree, log probabilities to %.1e (%.2f s)", len(ready), worst, seconds)
    return Outcome(seconds, crowd.next_step)


def tolerance(layout: RankGroupLayout, ready: list[Ready]) -> float:
    """Return the allowed difference of log probabilities, by the ranks' compute dtype and KV type."""
    chosen, least = layout.ranks[0].dtype, QUANTIZED_KV[layout.ranks[0].kv_dtype]
    if chosen != "auto":
        return max(TOLERANCE[chosen], least)
    return max(least, *(TOLERANCE.get(layout.description.dtype, 1.0) if one.gpu else TOLERANCE["float32"] for one in ready))


def _limits(limits: Limits, micro_batches: int, chunk: int) -> Limits:
    return replace(limits, micro_batches=micro_batches, prefill_chunk=chunk, max_batch_size=2 * micro_batches, digests=True)


def _requests(limits: Limits, length: int, count: int) -> list[EngineRequest]:
    """Return the checked request of `length` tokens, and `count` - 1 short ones that run longer than its prefill."""
    rng = random.Random(1)
    requests = []
    for i in range(count):
        prompt = [rng.randrange(limits.vocab_size) for _ in range(min(length, NEIGHBOUR) if i else length)]
        new = min(NEW_TOKENS * 2, length) if i else NEW_TOKENS
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, logprobs=min(TOP, limits.vocab_size))
        requests.append(EngineRequest(request_id=f"self-check-{i}", prompt=prompt, params=params))
    return requests


def _run_offline(
    executor: Executor, layout: RankGroupLayout, limits: Limits, requests: list[EngineRequest], first_step: int
) -> OfflineRun:
    try:
        return run_offline(executor, limits, requests, layout.ranks, first_step=first_step)
    except Disagreement as failure:
        raise _wrong(failure.difference) from failure


def _compare(alone: OfflineResult, crowd: OfflineResult, allowed: float, vocab: int) -> float:
    """Compare both runs token by token until a tie separates them; return the largest difference. Raises RankFailure."""
    largest = 0.0
    for answer, how in ((alone, "alone"), (crowd, "in a batch")):
        _check_sound(answer, how, allowed, vocab)
    for i, (one, other) in enumerate(zip(alone.logprobs, crowd.logprobs, strict=True)):
        theirs = {other.token: other.logprob, **dict(other.top)}
        mine = {one.token: one.logprob, **dict(one.top)}
        worst = max((abs(mine[token] - theirs[token]) for token in mine.keys() & theirs.keys()), default=float("inf"))
        if not worst <= allowed:
            raise _wrong(
                f"log probabilities of its token {i + 1} differ by {worst:.3g} between the prompt "
                f"alone and in other chunks beside other sequences (tolerance {allowed:g})"
            )
        largest = max(largest, worst)
        if alone.tokens[i] != crowd.tokens[i]:
            gap = abs(one.logprob - mine.get(crowd.tokens[i], -float("inf")))
            if not gap <= allowed:
                raise _wrong(
                    f"its token {i + 1} is {alone.tokens[i]} alone and {crowd.tokens[i]} in other "
                    f"chunks beside other sequences, {gap:.3g} apart in log probability (tolerance "
                    f"{allowed:g})"
                )
            break  # a tie: later tokens belong to different texts
    return largest


def _check_sound(answer: OfflineResult, how: str, allowed: float, vocab: int) -> None:
    """Check that tokens are in the vocabulary and the most likely by their log probabilities. Raises RankFailure."""
    for i, (token, entry) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
        if not 0 <= token < vocab or not -float("inf") < entry.logprob <= allowed:
            raise _wrong(f"its token {i + 1} {how} is {token} with log probability {entry.logprob}, of a vocabulary of {vocab}")
        if entry.token != token or entry.top[0][1] > entry.logprob + allowed:
            raise _wrong(f"its token {i + 1} {how} is {token}, where token {entry.top[0][0]} is the most likely")


def _wrong(what: str) -> RankFailure:
    return RankFailure(
        f"the self-check failed: {what}; the ranks would give wrong answers. Check the links, and that all "
        "hosts are alike; --no-self-check serves all the same"
    )
