"""Warm-up of ranks before they serve: the shapes that a burst meets run once, and the prefill chunk size is measured.

The first use of a GPU kernel compiles it, and the first grammar loads the vocabulary. The plans go to all ranks, so each
warms its own part. The runs are ordered by how often a first burst needs them, and end with the time limit.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from msgspec import structs

from tandem.config.settings import SchedulerSettings
from tandem.engine.build_layout import RankGroupLayout
from tandem.engine.result_collector import run_offline
from tandem.executors.executor import Executor
from tandem.models.footprint import rank_activations
from tandem.protocol.control import Ready
from tandem.protocol.request import EngineRequest, SamplingParams, StructuredOutputs
from tandem.protocol.step import padded_width
from tandem.scheduler.limits import Limits

log = logging.getLogger(__name__)

GPU_SECONDS, CPU_SECONDS = 40.0, 0.0
"""Default time limits. A CPU compiles nothing: its first burst is as fast as later ones."""
AGAIN_S = 1.0
"""Maximum seconds of a warm-up after ranks are replaced, as requests wait."""
PROMPT, NEW_TOKENS = 2, 3
"""Prompt tokens of each row, and minimum output tokens."""
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLED = [
    SamplingParams(ignore_eos=True, temperature=0.7),
    SamplingParams(ignore_eos=True, top_p=0.9),
    SamplingParams(ignore_eos=True, top_k=20, top_p=0.9),
    SamplingParams(ignore_eos=True, min_p=0.05),
    SamplingParams(ignore_eos=True, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5),
    SamplingParams(ignore_eos=True, temperature=0.0, logprobs=5),
]
"""Variants of the sampler, as rows of one batch."""
GRAMMAR = SamplingParams(temperature=0.0, structured_outputs=StructuredOutputs(json_object=True))
LENGTH = 4096
"""Prompt tokens for which the chunk size is chosen."""
GAIN, LONGEST_S = 0.95, 0.5
"""A chunk size is chosen over the default only if a prompt takes less than `GAIN` of the time, and a larger one only if a
chunk passes all stages within `LONGEST_S`."""


def seconds_of(settings: SchedulerSettings, ready: Sequence[Ready]) -> float:
    """Return the time limit of a warm-up in seconds: the setting, or the device's default."""
    chosen = settings.warm_up_seconds
    return chosen if chosen is not None else GPU_SECONDS if ready[0].gpu else CPU_SECONDS


def warm_up(
    executor: Executor, layout: RankGroupLayout, limits: Limits, seconds: float, first_step: int, sizes: Sequence[int] = ()
) -> tuple[int, int]:
    """Run the shapes of a burst on started ranks, for about `seconds`; measure the prefill chunk `sizes`.

    Return the next step id and the fastest size, 0 if none was measured. All sequences are removed from the ranks, and no
    prefixes are saved. Raises RankFailure.
    """
    started, times, done = time.monotonic(), dict[int, float](), list[str]()
    for name, here, requests in _runs(layout, limits, sizes):
        chunk, until = here.prefill_chunk, started + seconds
        run = run_offline(executor, here, requests, layout.ranks, first_step=first_step, until=until)
        first_step = run.next_step
        if time.monotonic() >= until:
            done.append(f"stopped by --warm-up-seconds at {name}")
            break
        done.append(name)
        if len(requests[0].prompt) == 2 * chunk:
            times[chunk] = min(times.get(chunk, math.inf), *run.prefill_s)
    best = chosen_chunk(times, limits, layout.ranks[0].stages)
    words, chunk = ", ".join(dict.fromkeys(done)), best or limits.prefill_chunk
    log.info("Warm-up: %s (%.1f s; prefill chunk %d)", words, time.monotonic() - started, chunk)
    return first_step, best


def chunk_sizes(settings: SchedulerSettings, layout: RankGroupLayout, limits: Limits, ready: Sequence[Ready]) -> list[int]:
    """Return the prefill chunk sizes to measure, the default first: those whose activations fit into half of the memory that
    `--memory-fraction` leaves free. Empty if the setting names one."""
    room, default = (1 - settings.memory_fraction) / 2, limits.prefill_chunk

    def fits(size: int) -> bool:
        return 2 * size < min(limits.max_context, limits.kv_tokens) and all(
            spec.sharing * rank_activations(layout.description, spec, size, layout.max_context, gpu=one.gpu)
            <= room * one.memory_bytes
            for spec, one in zip(layout.ranks, ready, strict=True)
        )

    sizes = [default, 2 * default, 4 * default, *((default // 2,) if layout.ranks[0].stages > 1 else ())]
    return [] if settings.prefill_chunk else [size for size in sizes if size == default or fits(size)]


def chosen_chunk(times: dict[int, float], limits: Limits, stages: int) -> int:
    """Return the chunk size that computes a long prompt fastest; 0 without `times`: seconds of one chunk on the slowest rank,
    by size, the default first. A prompt of n chunks over s stages takes n + s - 1 times as long as one chunk."""
    best, longest = next(iter(times), 0), min(LONGEST_S, limits.prefill_time_s or math.inf)
    prompt_s = {one: (math.ceil(min(LENGTH, limits.max_context) / one) + stages - 1) * times[one] for one in times}
    for size in times:
        if prompt_s[size] < GAIN * prompt_s[best] and (size < best or stages * times[size] <= longest):
            best = size
    return best


def _runs(layout: RankGroupLayout, limits: Limits, sizes: Sequence[int]) -> Iterator[tuple[str, Limits, list[EngineRequest]]]:
    """Yield (name, limits, requests) of each run."""
    chunk, longest, rng = limits.prefill_chunk, min(limits.max_context, limits.kv_tokens), random.Random(1)
    pooling = None if layout.description.generates else layout.pooling or "last"

    def requests(count: int, length: int, new: int, variants: Sequence[SamplingParams]) -> list[EngineRequest]:
        prompts = [[rng.randrange(limits.vocab_size) for _ in range(length)] for _ in range(count)]
        params = [structs.replace(variants[i % len(variants)], max_tokens=0 if pooling else new) for i in range(count)]
        return [
            EngineRequest(request_id=f"warm-up-{i}", prompt=prompts[i], params=params[i], pooling=pooling) for i in range(count)
        ]

    if longest < PROMPT + NEW_TOKENS:
        return
    length = min(chunk + PROMPT, longest - NEW_TOKENS)
    yield f"a prompt of {length} tokens", limits, requests(1, length, NEW_TOKENS, [GREEDY])
    for rows in sorted({*(2**i for i in range(limits.rows.bit_length())), limits.rows}):
        # Those that join first still decode when the last have joined.
        new = min(NEW_TOKENS + rows * PROMPT // chunk, longest - PROMPT)
        for variants in ([GREEDY], SAMPLED)[: 1 if pooling else 2]:
            yield f"{rows} rows", limits, requests(rows * limits.micro_batches, PROMPT, new, variants)
    if limits.speculation and not pooling and longest > PROMPT + (new := limits.speculation.drafts + NEW_TOKENS):
        # Its last steps have fewer drafts, so that one sequence meets all widths.
        forced = replace(limits, speculation=replace(limits.speculation, forced=True))
        yield "steps with drafts", forced, requests(1, PROMPT, new, [GREEDY])
    for rows, width in _shapes(limits) if limits.pads_prompts else ():
        yield "prompts of all widths", limits, requests(rows * limits.micro_batches, min(width, longest - 1), 1, [GREEDY])
    for size in (*sizes, *sizes):  # the first time of a shape compiles
        if len(sizes) > 1 and 2 * size < longest:
            whole = replace(limits, prefill_chunk=size, prefill_doubling=0)  # two chunks of that size
            yield f"chunks of {size} tokens", whole, requests(1, 2 * size, 1, [GREEDY])
    if not pooling and (layout.files.path / "tokenizer.json").exists():
        yield "grammars", limits, requests(1, PROMPT, NEW_TOKENS, [GRAMMAR])


def _shapes(limits: Limits) -> Iterator[tuple[int, int]]:
    """Yield the (rows, positions) of padded prompt passes, those of single prompts first."""
    widths = sorted({padded_width(count) for count in range(1, limits.prefill_chunk + 1)})
    for rows in (1, 2, 4, 8):
        yield from ((rows, width) for width in widths if rows <= limits.rows and rows * width <= limits.prefill_chunk)
