"""Speed of this machine's layers (mlx): decode and prefill steps of a small and a large random model."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs

from tandem.bench.summary import percentile
from tandem.loading.memory import memory_bytes
from tandem.planner.profile import Step, Weights, rounded

WARM_UP, STEPS, CHUNKS = 4, 24, 2
HEAD = 64
VOCABULARY = 256
GROUP = 64
SMALL = 128
"""Hidden size of the small model: reading its weights costs almost nothing, so its step time is per-layer overhead."""
GPU_SIZES, CPU_SIZES = (2048, 8, 512), (768, 4, 192)
"""Hidden size, layers and prefill chunk (tokens) of the large model."""
PART = 8
"""Divisor of the memory; the large model takes at most 1/8 of it."""


@dataclass(frozen=True)
class _Times:
    step: float
    """Seconds of one decode step."""
    chunk: float
    bytes: int
    parameters: int
    """Parameters of all layers, before quantisation."""


def random_llama(*, hidden: int, layers: int, mlp: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int
                 ) -> Model:  # fmt: skip
    """Return mlx-lm's llama of this shape with random weights; `mlp` is the intermediate size."""
    return Model(
        ModelArgs(
            model_type="llama",
            hidden_size=hidden,
            num_hidden_layers=layers,
            intermediate_size=mlp,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=1e-5,
            vocab_size=vocabulary,
            tie_word_embeddings=True,
        )
    )


def measure_steps(*, gpu: bool) -> list[Step]:
    """Measure each weight type that this device computes with; a CPU computes in float32 alone (`--dtype auto`).

    A decode step of L layers with B bytes takes B / bandwidth + L x overhead; two model sizes yield both unknowns. A chunk of t
    tokens through P parameters takes 2 t P / rate + L x overhead.
    """
    kinds: tuple[Weights, ...] = ("bfloat16", "8bit", "4bit") if gpu else ("float32",)
    hidden, layers, chunk = GPU_SIZES if gpu else CPU_SIZES
    while hidden > 4 * SMALL and 4 * layers * _parameters(hidden) > memory_bytes() // PART:
        hidden //= 2
    steps = []
    for kind in kinds:
        small, large = _measured(kind, SMALL, layers, 0), _measured(kind, hidden, layers, chunk)
        per_byte = max((large.step - small.step) / (large.bytes - small.bytes), 1e-15)
        overhead = max(small.step - small.bytes * per_byte, 0.0)
        rate = 2 * chunk * large.parameters / max(large.chunk - overhead, large.chunk / 10)
        speed, flops, layer = rounded(1e-9 / per_byte), rounded(rate / 1e12), rounded(1e6 * overhead / layers)
        steps.append(Step(weights=kind, gb_per_s=speed, tflops=flops, layer_us=layer))
        mx.clear_cache()
    return steps


def _parameters(hidden: int) -> int:
    """Return the parameters of one layer: four square projections, and a gated MLP (three matrices) four times as wide."""
    return (4 + 3 * 4) * hidden * hidden


def _measured(kind: Weights, hidden: int, layers: int, chunk: int) -> _Times:
    model = _model(kind, hidden, layers)
    weights = sum(array.nbytes for _, array in nn.utils.tree_flatten(model.layers))
    prompt, cache = mx.zeros((1, chunk), mx.int32), make_prompt_cache(model)
    chunks = [0.0]
    for _ in range(1 + CHUNKS if chunk else 0):
        cache = make_prompt_cache(model)
        began = time.perf_counter()
        mx.eval(model(prompt, cache=cache), [layer.state for layer in cache])
        chunks.append(time.perf_counter() - began)
    token = mx.zeros((1, 1), mx.int32)
    ended = []
    for _ in range(WARM_UP + STEPS):  # like mlx-lm's decoding: the next step is built while the device computes this one
        following = mx.argmax(model(token, cache=cache)[:, -1:], axis=-1)
        mx.async_eval(following)  # type: ignore[no-untyped-call]
        mx.eval(token)
        ended.append(time.perf_counter())
        token = following
    steps = [after - before for before, after in pairwise(ended[WARM_UP:])]
    return _Times(percentile(steps, 0.5), percentile(chunks[-CHUNKS:], 0.5), weights, layers * _parameters(hidden))


def _model(kind: Weights, hidden: int, layers: int) -> Model:
    heads = hidden // HEAD
    model = random_llama(
        hidden=hidden, layers=layers, mlp=4 * hidden, heads=heads, kv_heads=heads, head_dim=HEAD, vocabulary=VOCABULARY
    )
    model.set_dtype(mx.float32 if kind == "float32" else mx.bfloat16)
    if kind in ("4bit", "8bit"):
        nn.quantize(model, group_size=GROUP, bits=int(kind[0]))
    mx.eval(model.parameters())
    return model
