"""Checks of the KV buffer on this machine's device, against mlx-lm on the CPU (mlx)."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.models import gemma3_text
from mlx_lm.models.cache import KVCache

from tandem.diagnostics.collectives.steps import random_llama
from tandem.diagnostics.selftest.check import Differs, NotApplicable, judged
from tandem.diagnostics.tasks import Figures, Task
from tandem.loading.memory import choose_device, on_gpu
from tandem.loading.quantized_kv import Groups, Quantized, quantized
from tandem.models.kv_types import group_for, group_size
from tandem.runner.kv_store import KVStore
from tandem.runner.ragged_attention import decode_attention

VOCAB = 61
CLOSE = 0.02
"""Tolerance of logits, as a share of the largest logit; an off-by-one position exceeds it by far."""
Logits = npt.NDArray[np.float32]


def small_llama() -> nn.Module:
    """Return a tiny model with full attention."""
    return random_llama(hidden=128, layers=3, mlp=256, heads=4, kv_heads=2, head_dim=64, vocabulary=VOCAB)


def small_gemma() -> nn.Module:
    """Return a tiny model with a sliding window of 16 positions in every other layer."""
    return gemma3_text.Model(
        gemma3_text.ModelArgs(
            model_type="gemma3_text",
            hidden_size=128,
            num_hidden_layers=4,
            intermediate_size=256,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=64,
            query_pre_attn_scalar=64,
            vocab_size=VOCAB,
            sliding_window=16,
            sliding_window_pattern=2,
        )
    )


class Compared:
    """A model that computes each sequence twice: batched in a `KVStore`, and alone on the CPU without a cache."""

    def __init__(self, model: nn.Module, drafts: int = 0) -> None:
        mx.random.seed(7)
        mx.eval(model.parameters())
        self.model = model
        self.store = KVStore(self._caches, drafts, decode_attention())
        self.tokens: dict[str, list[int]] = {}
        self.largest = 0.0
        """Largest difference of a logit so far, as a share of the largest logit."""
        self._rng = random.Random(11)
        self._steps: list[tuple[str, str, int, Logits]] = []

    def _caches(self) -> list[KVCache]:
        if hasattr(self.model, "make_cache"):
            return list(self.model.make_cache())
        return [KVCache() for _ in self.model.layers]

    def _alone(self, name: str, positions: int) -> Logits:
        """Return the logits [positions, V] of a sequence's last positions, computed from all of its tokens in one call."""
        with mx.stream(mx.cpu):
            logits: mx.array = self.model(mx.array([self.tokens[name]]))[0, -positions:]
            return np.array(logits)

    def _see(self, what: str, expected: Logits, seen: Logits) -> None:
        share = float(np.abs(expected - seen).max() / np.abs(expected).max())
        self.largest = max(self.largest, share) if np.isfinite(share) else share
        if not share <= CLOSE:
            raise Differs(f"{what}: logits within {CLOSE:.0%} of mlx-lm's, expected; {share:.2%} apart, seen")

    def join(self, name: str, length: int) -> None:
        """Add a sequence with a random prompt of `length` tokens, prefilled in chunks."""
        self.tokens[name] = [self._rng.randrange(VOCAB) for _ in range(length)]
        caches = self._caches()
        for start in range(0, length, 16):
            self.model(mx.array([self.tokens[name][start : start + 16]]), cache=caches)
        mx.eval([cache.state for cache in caches])
        self.store.join(name, caches)

    def step(self, what: str) -> None:
        """Compute one random token per row; `settle` compares the logits."""
        ids = self.store.ids
        tokens = [self._rng.randrange(VOCAB) for _ in ids]
        seen = np.array(self.model(mx.array(tokens)[:, None], cache=self.store.batch())[:, -1].astype(mx.float32))
        for row, (name, token) in enumerate(zip(ids, tokens, strict=True)):
            self._steps.append((what, name, len(self.tokens[name]), seen[row]))
            self.tokens[name].append(token)

    def settle(self) -> None:
        """Compare the logits of all steps so far. Raises Differs."""
        expected = {name: self._alone(name, len(tokens)) for name, tokens in self.tokens.items()}
        for what, name, position, seen in self._steps:
            self._see(what, expected[name][position], seen)
        self._steps.clear()

    def draft(self, what: str, counts: list[int], taken: list[int]) -> None:
        """Compute `counts[row]` tokens per row and keep the first `taken[row]`; compare the logits. Raises Differs."""
        ids, width = self.store.ids, max(counts)
        tokens = [[self._rng.randrange(VOCAB) for _ in range(width)] for _ in ids]
        seen = np.array(self.model(mx.array(tokens), cache=self.store.batch(counts)).astype(mx.float32))
        for row, name in enumerate(ids):
            before = len(self.tokens[name])
            self.tokens[name] += tokens[row][: counts[row]]
            self._see(what, self._alone(name, counts[row]), seen[row, : counts[row]])
            del self.tokens[name][before + taken[row] :]
            self.store.cut(name, before + taken[row])


def rows(task: Task) -> Figures:
    """Check rows of unequal length that join, leave, move and are extracted, with full attention."""
    choose_device("auto")
    return _rows(small_llama(), (5, 40, 17, 250))


def windows(task: Task) -> Figures:
    """Check rows of sliding windows, which are ring buffers."""
    choose_device("auto")
    return _rows(small_gemma(), (5, 15, 40, 16))


def _rows(model: nn.Module, lengths: tuple[int, ...]) -> Figures:
    compared = Compared(model)
    for i, length in enumerate(lengths):
        compared.join(str(i), length)
    for _ in range(3):
        compared.step("rows of unequal length")
    compared.store.leave("1")
    compared.step("after a row has left")
    caches, tokens = compared.store.extract("2"), compared.tokens["2"]
    compared.store.leave("2")
    compared.step("after a row was taken out")
    compared.store.join("2", caches, len(tokens))
    compared.join("4", 9)
    for _ in range(18):  # enough for windows to wrap around
        compared.step("after rows have joined")
    compared.settle()
    return {"largest difference, share of the largest logit": round(compared.largest, 6)}


def drafts(task: Task) -> Figures:
    """Check steps of several tokens per row of which some are dropped, as in speculative decoding."""
    choose_device("auto")
    figures: Figures = {}
    for name, model in (("all positions", small_llama()), ("windows", small_gemma())):
        compared = Compared(model, drafts=3)
        for i, length in enumerate((6, 19, 33)):
            compared.join(str(i), length)
        for _ in range(4):
            compared.draft(f"drafts, {name}", [4, 2, 3], [2, 2, 1])
        compared.step(f"a step after drafts, {name}")
        compared.settle()
        figures[f"{name}: largest difference, share of the largest logit"] = round(compared.largest, 6)
    return figures


ATTENTION_CLOSE = {mx.float32: 1e-3, mx.float16: 1e-2, mx.bfloat16: 3e-2}
"""Largest absolute difference from attention in float32, by dtype."""


class _Side(NamedTuple):
    """Keys or values: the kernel's input, and the same numbers in float32."""

    given: mx.array | Quantized
    numbers: mx.array


def _side(positions: int, dim: int, dtype: mx.Dtype, bits: int) -> _Side:
    """Return keys or values [3, 2, positions, dim], a strided view like those of a KV buffer; quantised if `bits`."""
    room = mx.random.normal((3, 2, positions + 64, dim)).astype(dtype)
    if not bits:
        part = room[:, :, :positions]
        return _Side(part, part.astype(mx.float32))
    whole = quantized(room, Groups(bits, group_for(bits, group_size((dim,)))))
    packed = Quantized._make((*(part[:, :, :positions] for part in whole.parts), whole.groups))
    return _Side(packed, packed.expanded().astype(mx.float32))


def attention(task: Task) -> Figures:
    """Compare Tandem's decode attention with MLX's masked one, for all dtypes, head sizes and quantised KV."""
    from tandem.runner.ragged_attention import HEAD_DIMS, attend

    choose_device("auto")
    if decode_attention() is None:
        raise NotApplicable(
            "kernels of our own run on CUDA alone so far; MLX's attention is used here"
            if on_gpu()
            else "kernels of our own run on CUDA alone; this is a CPU"
        )
    worst = 0.0
    kinds = [(dtype, 0, close) for dtype, close in ATTENTION_CLOSE.items()]
    kinds += [(mx.bfloat16, bits, ATTENTION_CLOSE[mx.bfloat16]) for bits in (8, 4)]
    for dim, (dtype, bits, close), longest in itertools.product(HEAD_DIMS, kinds, (7, 300, 5000)):
        lengths = mx.array([longest, 0, longest // 2], dtype=mx.int32)
        queries = mx.random.normal((3, 8, 1, dim)).astype(dtype)
        keys, values = (_side(longest + 8, dim, dtype, bits) for _ in range(2))
        seen = attend(queries, keys.given, values.given, lengths, longest, dim**-0.5)
        assert seen is not None
        mask = (mx.arange(longest + 8) <= lengths[:, None])[:, None, None]
        want = mx.fast.scaled_dot_product_attention(
            queries.astype(mx.float32), keys.numbers, values.numbers, scale=dim**-0.5, mask=mask
        )
        apart = float(np.array(mx.abs(seen.astype(mx.float32) - want).max()))
        worst = max(worst, apart)
        if not apart <= close:
            kind = f"{dtype}, {bits} bits" if bits else f"{dtype}"
            raise Differs(
                f"heads of {dim}, {kind}, {longest} positions: within {close:g}, expected; {apart:g} apart, seen",
                {"largest difference": apart},
            )
    return {"largest difference": worst}


@dataclass(frozen=True)
class Shape:
    """Shape of a model to measure, with the number of rows and their context in tokens."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rows: int
    context: int


SMALL = Shape(576, 30, 9, 3, 64, 4, 1024)
MEDIUM = Shape(576, 30, 9, 3, 64, 4, 8192)
LARGE = Shape(1024, 36, 32, 8, 128, 4, 2048)
STEPS = 8
MODES = ("waiting", "ahead")
"""`waiting`: wait for each step before building the next. `ahead`: dispatch the next step, then wait for the last."""
IN_PLACE = 0.75
"""Extra memory that a step may take in each mode beyond the previous mode, as a share of one layer's keys. A copy takes at least
all of them."""


def donation(task: Task) -> Figures:
    """Check that steps write into the KV buffer in place, also while the previous step is being computed."""
    choose_device("auto")
    figures: Figures = {}
    problems = []
    for name, shape in ({"135M layers": MEDIUM, "8B layers": LARGE} if on_gpu() else {"135M layers": SMALL}).items():
        kv_buffer_bytes = beside = 0
        for mode in MODES:
            milliseconds, extra, kv_buffer_bytes = measured(shape, mode)
            figures[f"{name}, {mode}: ms a step"] = round(milliseconds, 2)
            figures[f"{name}, {mode}: MiB beside the KV buffer"] = round(extra / 2**20, 1)
            most = beside + IN_PLACE * kv_buffer_bytes / (2 * shape.layers)
            beside = extra
            if extra > most:
                problems.append(
                    f"{name}, {mode}: a step takes at most {most / 2**20:.1f} MiB beside the KV buffer, "
                    f"expected; {extra / 2**20:.1f}, seen, so that a layer's keys are copied"
                )
        figures[f"{name}: MiB of the KV buffer"] = round(kv_buffer_bytes / 2**20, 1)
    return judged(problems, figures)


def measured(shape: Shape, mode: str) -> tuple[float, int, int]:
    """Return the fastest step's milliseconds, its extra memory in bytes, and the KV buffer's bytes."""
    mx.clear_cache()
    sizes = {name: getattr(shape, name) for name in ("hidden", "layers", "heads", "kv_heads", "head_dim")}
    model = random_llama(**sizes, mlp=shape.hidden, vocabulary=512)
    dtype = mx.bfloat16 if on_gpu() else mx.float32
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    store = KVStore(lambda: [KVCache() for _ in range(shape.layers)], attention=decode_attention())
    for row in range(shape.rows):
        store.join(str(row), [_filled(shape, shape.context - 7 * row, dtype) for _ in range(shape.layers)])

    def build(tokens: mx.array) -> mx.array:
        return mx.argmax(model(tokens[:, None], cache=store.batch())[:, -1], axis=-1)

    tokens = build(mx.zeros((shape.rows,), dtype=mx.int32))
    tokens = _stepped(build, tokens, mode)  # compiles kernels and grows the KV buffer
    mx.eval(tokens)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    best = float("inf")
    for _ in range(STEPS):
        began = time.perf_counter()
        tokens = _stepped(build, tokens, mode)
        best = min(best, time.perf_counter() - began)
    mx.eval(tokens)
    mx.synchronize()
    return best * 1e3, max(mx.get_peak_memory() - before, 0), store.nbytes


def _stepped(build: Callable[[mx.array], mx.array], tokens: mx.array, mode: str) -> mx.array:
    following = build(tokens)
    mx.async_eval(following)  # type: ignore[no-untyped-call]
    mx.eval(following if mode == "waiting" else tokens)
    return following


def _filled(shape: Shape, length: int, dtype: mx.Dtype) -> KVCache:
    cache = KVCache()
    parts = [mx.random.normal((1, shape.kv_heads, length, shape.head_dim)).astype(dtype) for _ in range(2)]
    mx.eval(parts)
    cache.state = (parts[0], parts[1], length)
    return cache
