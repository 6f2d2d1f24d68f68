"""LoRA products of rows with different adapters: one CUDA kernel for few rows, gathered products else (mlx)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from tandem.loading.memory import CUDA_TYPES, on_cuda
from tandem.loading.shard_modules import Around

THREADS = 512
"""Threads of a block, and outputs that it computes."""
MOST_ROWS = 64
"""Rows up to which the kernel is used. Each block reads A again, so that longer prompts are faster as products."""
WIDTH = 8
"""Numbers in one read of the kernel. Ranks are padded to a multiple."""

_SOURCE = r"""
    struct alignas(16) Read { T at[8]; };
    constexpr int ENDS[] = {END_OF_PARTS}, PARTS = sizeof(ENDS) / sizeof(int);
    const int row = blockIdx.y, inputs = a_shape[3], outputs = b_shape[1];
    const long adapter = index[row / (gridDim.y / index_shape[0])];
    int part = 0, start = 0, tile = blockIdx.x;
    while (tile * THREADS >= ENDS[part] - start) {
        tile -= (ENDS[part] - start + THREADS - 1) / THREADS;
        start = ENDS[part++];
    }
    __shared__ float low[R];
    const T* in = x + (long)row * inputs;
    const bool aligned = !(reinterpret_cast<size_t>(in) % 16);
    if (adapter) for (int r = threadIdx.x / 32; r < R; r += THREADS / 32) {
        const T* line = a + ((adapter * PARTS + part) * R + r) * inputs;
        float sum = 0.f;
        #pragma unroll 4
        for (int i = threadIdx.x % 32 * 8; i < inputs; i += 256) {
            const Read w = *reinterpret_cast<const Read*>(line + i);
            Read v;
            if (aligned) v = *reinterpret_cast<const Read*>(in + i);
            else for (int j = 0; j < 8; j++) v.at[j] = in[i + j];
            for (int j = 0; j < 8; j++) sum += float(w.at[j]) * float(v.at[j]);
        }
        for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, o);
        if (threadIdx.x % 32 == 0) low[r] = float(T(sum));
    }
    __syncthreads();
    const int o = start + tile * THREADS + threadIdx.x;
    if (o >= ENDS[part]) return;
    const T base = y[(long)row * outputs + o];
    float sum = 0.f;
    if (adapter) for (int r = 0; r < R; r += 8) {
        const Read w = *reinterpret_cast<const Read*>(b + (adapter * outputs + o) * R + r);
        for (int j = 0; j < 8; j++) sum += float(w.at[j]) * low[r + j];
    }
    T* const outs[] = {OUTPUTS};
    outs[part][(long)row * (ENDS[part] - start) + o - start] = adapter ? T(float(base) + float(T(sum))) : base;
"""


@dataclass
class Rows:
    """Adapters of the rows of the next forward pass, shared by all layers of a stage."""

    index: int | mx.array = 0
    """Index of the adapter of all rows, 0 for none; int32 [B] if rows differ."""
    each: mx.array = field(default_factory=lambda: mx.zeros(1, mx.int32))
    """Index of the adapter of each row, int32 [B]."""


class LoRA:
    """Adapters of the linear layers that one product computes (the parts): stacks of A [N, parts, R, I] and B [N, O, R], in
    which index 0 is zeros.

    Both are stored transposed: MLX's CUDA kernel gathers only products of one row with such matrices.
    """

    def __init__(self, rows: Rows, slots: int, widths: Sequence[int]) -> None:
        """Adapt layers with `widths` outputs. `slots` is N, one more than the most adapters."""
        self._rows, self._slots, self._widths = rows, slots, widths
        self._ends = tuple(sum(widths[: i + 1]) for i in range(len(widths)))
        self._held: frozenset[tuple[int, int]] = frozenset()
        """Indices of adapters, with the parts that each adapts."""
        self._numbers: frozenset[int] = frozenset()
        self._add: Callable[[mx.array, mx.array, mx.array, mx.array, mx.array], Sequence[mx.array]] | None = None
        """The kernel, where it can be used."""
        self._a: mx.array = mx.zeros(0)
        self._b: mx.array = mx.zeros(0)

    def put(self, number: int, parts: Mapping[int, tuple[mx.array, mx.array]]) -> None:
        """Set the adapter `number` to A [I, r] and B [r, O] of each of its `parts`. Smaller ranks are padded with zeros."""
        self._stack(self._pairs() | {(number, part): (a.T, b.T) for part, (a, b) in parts.items()})

    def drop(self, number: int) -> bool:
        """Drop the adapter `number`; return True if others remain."""
        held = {key: pair for key, pair in self._pairs().items() if key[0] != number}
        if number in self._numbers and held:
            self._stack(held)  # zeros in its place, as the next adapter of this number may leave this layer alone
        return bool(held)

    def _pairs(self) -> dict[tuple[int, int], tuple[mx.array, mx.array]]:
        return {(i, p): (self._a[i, p], self._b[i, self._ends[p] - self._widths[p] : self._ends[p]]) for i, p in self._held}

    def _stack(self, held: dict[tuple[int, int], tuple[mx.array, mx.array]]) -> None:
        first = next(iter(held.values()))[0]
        rank = -(-max(a.shape[0] for a, _ in held.values()) // WIDTH) * WIDTH
        no_a, no_b = mx.zeros((0, first.shape[1]), first.dtype), [mx.zeros((width, 0), first.dtype) for width in self._widths]
        pairs = [[held.get((i, p), (no_a, no_b[p])) for p in range(len(self._widths))] for i in range(self._slots)]
        a = mx.stack([mx.stack([mx.pad(a, [(0, rank - a.shape[0]), (0, 0)]) for a, _ in parts]) for parts in pairs])
        b = mx.stack([mx.concatenate([mx.pad(b, [(0, 0), (0, rank - b.shape[1])]) for _, b in parts]) for parts in pairs])
        mx.eval(a, b)  # before anything changes, as memory may be full
        self._a, self._b, self._held, self._numbers = a, b, frozenset(held), frozenset(i for i, _ in held)
        self._add = kernel(self._ends) if on_cuda() and first.shape[1] % WIDTH == 0 else None

    def __call__(self, x: mx.array, outputs: mx.array) -> Sequence[mx.array] | None:
        """Return the parts of `outputs` [B, ..., O] plus the adapters' products of the inputs `x` [B, ..., I]; None if no row
        has an adapter of these layers."""
        index, inputs = self._rows.index, x.shape[-1]
        if isinstance(index, int) and index not in self._numbers:
            return None
        rows = x.size // inputs
        if self._add is not None and rows <= MOST_ROWS and x.dtype == outputs.dtype == self._a.dtype:
            return self._add(x, outputs, self._a, self._b, self._rows.each)
        each = mx.repeat(index, rows // index.shape[0]) if isinstance(index, mx.array) and rows > index.shape[0] else index
        found: list[mx.array] = []
        for part, (end, width) in enumerate(zip(self._ends, self._widths, strict=True)):
            a, b = self._a[:, part].swapaxes(-1, -2), self._b[:, end - width : end].swapaxes(-1, -2)
            own = outputs[..., end - width : end]
            if isinstance(each, int):
                product = (x @ a[each]) @ b[each]
            else:
                low = mx.gather_mm(x.reshape(rows, 1, inputs), a, rhs_indices=each)
                product = mx.gather_mm(low, b, rhs_indices=each).reshape(own.shape)
            found.append(own + product.astype(outputs.dtype))
        return found


class LoRALinear(Around):
    """Linear layer plus each row's LoRA adapter."""

    def __init__(self, linear: nn.Module, lora: LoRA) -> None:
        super().__init__(linear)
        self.lora = lora

    def __call__(self, x: mx.array) -> mx.array:
        """Map inputs [B, ..., I] to outputs [B, ..., O]."""
        outputs: mx.array = self.module(x)
        found = self.lora(x, outputs)
        return outputs if found is None else found[0]


@cache
def kernel(ends: tuple[int, ...]) -> Callable[[mx.array, mx.array, mx.array, mx.array, mx.array], Sequence[mx.array]]:
    """Return a function of x [..., I], y [..., O], a [N, parts, R, I], b [N, O, R] and index int32 [B] that computes what
    `LoRA` does in one CUDA kernel: y plus B[i] A[i, part] x, split into parts with these `ends`.

    `index` holds the adapter i of each row, or of as many successive rows as there are for each; 0 adds nothing. Rounds as
    the products one by one.
    """
    names, widths = [f"out{i}" for i in range(len(ends))], [end - start for start, end in zip((0, *ends), ends, strict=False)]
    source = _SOURCE.replace("END_OF_PARTS", ", ".join(map(str, ends))).replace("OUTPUTS", ", ".join(names))
    made: Any = mx.fast.cuda_kernel(
        name=f"tandem_lora_{'_'.join(map(str, ends))}",
        input_names=["x", "y", "a", "b", "index"],
        output_names=names,
        source=source.replace("THREADS", str(THREADS)),
        header=CUDA_TYPES,
    )

    def add(x: mx.array, y: mx.array, a: mx.array, b: mx.array, index: mx.array) -> Sequence[mx.array]:
        found: Sequence[mx.array] = made(
            inputs=[x, y, a, b, index],
            template=[("T", x.dtype), ("R", a.shape[2])],
            grid=(sum(-(-width // THREADS) for width in widths) * THREADS, x.size // x.shape[-1], 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(*y.shape[:-1], width) for width in widths],
            output_dtypes=[y.dtype] * len(widths),
        )
        return found

    return mx.compile(add)  # a call of the kernel alone assembles its source again
