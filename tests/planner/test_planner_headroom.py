"""What ranks take for a moment, beside what they hold: the plan against what two stages of published models took."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tandem.models.description import ModelDescription
from tandem.models.footprint import RUNTIME_BYTES
from tandem.planner.cost import Costs, RankShare
from tandem.planner.hardware import Machine
from tandem.planner.presets import Planned, planned, presets
from tandem.planner.types import Request

MIB = 2**20
CUDA = 520
"""MiB that CUDA takes for a process, by nvidia-smi."""
MEASURED = {
    "deepseek-ai/DeepSeek-V3.2": ((0, 3, 4), (2267, 1034)),
    "moonshotai/Kimi-K2.5": ((0, 1, 2), (1360, 577)),
    "zai-org/GLM-5": ((0, 3, 4), (1509, 765)),
    "Qwen/Qwen3.5-397B-A17B": ((0, 1, 2, 3), (991, 365)),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": ((0, 1, 2, 3), (310, 239)),
    "google/gemma-4-26B-A4B": ((0, 1, 2, 5), (345, 419)),
    "MiniMaxAI/MiniMax-M2.5": ((0, 1, 2, 3), (317, 270)),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": ((0, 1, 2, 3), (486, 417)),
}
"""Of an H200: layers, and MiB at most beside weights and cache in each stage, with prompts of 2,000 tokens in chunks of
512 (docs/performance.md, benchmarks/real_widths.py)."""
GPU = Machine(name="gpu", memory=2**40, bandwidth=4e12, flops=1e15)
WHOLE = RankShare(0, 1.0, 1.0)


def some_layers(name: str, layers: tuple[int, ...]) -> Planned:
    preset = presets()[name]
    each = [row[1:] for row in preset.layers for _ in range(row[0])]
    caches = [row[1:] for row in preset.cache for _ in range(row[0])]
    return planned(
        name,
        msgspec.structs.replace(preset, layers=[(1, *each[i]) for i in layers], cache=[(1, *caches[i]) for i in layers]),
        "4bit",
    )


def costs(description: ModelDescription, known: Planned | None = None, *, gpu: bool = True, context: int = 2048) -> Costs:
    request = Request(context=context, prefill_chunk=512, dequantize="no")
    return Costs(description, [replace(GPU, gpu=gpu)], [], request, known.experts if known else None)


@pytest.mark.parametrize("name", MEASURED)
def test_the_plan_is_what_a_gpu_took(name: str) -> None:
    layers, taken = MEASURED[name]
    known = some_layers(name, layers)
    model = costs(known.description, known)
    for (start, stop), beside in zip(((0, 2), (2, len(layers))), taken, strict=True):
        held = model.weights(WHOLE, start, stop) + model.kv(WHOLE, start, stop, 1)
        room = model.headroom(WHOLE, 1, last=stop == len(layers), alone=stop - start == 1)
        assert (held + (beside + CUDA) * MIB) / (held + room) == pytest.approx(1, abs=0.1)


def test_pictures_take_room_on_the_first_stage_alone() -> None:
    blind = some_layers("google/gemma-4-26B-A4B", (0, 1)).description
    seeing = replace(blind, vision_bytes=10 * MIB)
    for start, tower, features in ((0, 10, 320), (1, 0, 0)):
        weights = [costs(one).weights(WHOLE, start, 2) for one in (blind, seeing)]
        room = [costs(one).headroom(WHOLE, 1, first=start == 0, last=True) for one in (blind, seeing)]
        assert (weights[1] - weights[0], room[1] - room[0]) == (tower * MIB, features * MIB)


def test_what_stores_scores_takes_more_with_the_context() -> None:
    plain = some_layers("Qwen/Qwen3-8B", (0, 1)).description
    indexed = replace(plain, index_heads=8)

    def room(model: ModelDescription, context: int) -> float:
        return costs(model, context=context).headroom(WHOLE, 1, last=False, alone=True)

    assert room(plain, 4096) == room(plain, 8192)  # MLX's attention for a GPU stores none of this head's
    assert room(indexed, 8192) - room(indexed, 4096) == 3 * 8 * 512 * 4096 * 2


def test_a_gpu_is_given_a_layer_ahead() -> None:
    model = some_layers("Qwen/Qwen3-8B", (0, 1)).description
    alone, two = (costs(model).headroom(WHOLE, 1, last=False, alone=alone) for alone in (True, False))
    assert two - alone == alone - RUNTIME_BYTES > 0
    assert costs(model, gpu=False).headroom(WHOLE, 1, last=False) == costs(model, gpu=False).headroom(
        WHOLE, 1, last=False, alone=True
    )
    wide = replace(model, index_heads=64)
    ahead = [
        costs(wide, context=context).headroom(WHOLE, 1, last=False)
        - costs(wide, context=context).headroom(WHOLE, 1, last=False, alone=True)
        for context in (65536, 131072)
    ]
    assert ahead == [2**30, 2**30]
