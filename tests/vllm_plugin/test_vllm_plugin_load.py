"""Many requests at once, some aborted, with a cache too small for all of them."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_helpers import descendants, expected_tokens, gone

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

REQUESTS = 200
OUTPUT = 24


async def _one(llm: Any, request_id: str, prompt: list[int], stop_after: int | None) -> list[int]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, output_kind=RequestOutputKind.CUMULATIVE)
    tokens: list[int] = []
    async for output in llm.generate({"prompt_token_ids": prompt}, params, request_id):
        tokens = list(output.outputs[0].token_ids)
        if stop_after is not None and len(tokens) >= stop_after:
            break  # the generator's end aborts the request
    return tokens


async def _all(model: Path, prompts: list[list[int]], stops: list[int | None], **options: Any) -> tuple[list[list[int]], int]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(
        model=str(model), max_model_len=256, max_num_seqs=16, max_num_batched_tokens=128, num_gpu_blocks_override=33, **options
    )
    llm = AsyncLLM.from_engine_args(args)
    try:
        tasks = [_one(llm, f"r{i}", prompt, stop) for i, (prompt, stop) in enumerate(zip(prompts, stops, strict=True))]
        found = await asyncio.wait_for(asyncio.gather(*tasks), 400)
        from vllm.v1.metrics.reader import get_metrics_snapshot

        preempted = sum(int(one.value) for one in get_metrics_snapshot() if one.name == "vllm:num_preemptions")
        return found, preempted
    finally:
        llm.shutdown()


@pytest.mark.parametrize("options", [{}, {"pipeline_parallel_size": 2, "data_parallel_size": 2}], ids=["one", "dp2 x pp2"])
def test_two_hundred_requests_with_aborts_and_preemptions(tiny: Path, options: dict[str, Any]) -> None:
    rng = random.Random(7)
    shared = [rng.randrange(40, 400) for _ in range(96)]
    kinds = [shared[: rng.choice((0, 32, 96))] + [rng.randrange(40, 400) for _ in range(rng.randint(1, 60))] for _ in range(40)]
    prompts = [rng.choice(kinds) for _ in range(REQUESTS)]
    stops = [rng.randint(1, OUTPUT - 2) if rng.random() < 0.25 else None for _ in range(REQUESTS)]
    wanted = dict(zip(map(tuple, kinds), expected_tokens(tiny, kinds, OUTPUT)["served"], strict=True))
    before = descendants(os.getpid())
    found, preempted = asyncio.run(_all(tiny, prompts, stops, **options))
    assert gone([pid for pid in descendants(os.getpid()) if pid not in before], 15)
    for prompt, stop, tokens in zip(prompts, stops, found, strict=True):
        assert len(tokens) >= (stop or OUTPUT)
        assert tokens == wanted[tuple(prompt)][: len(tokens)]
    assert preempted > 0
