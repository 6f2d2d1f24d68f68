"""The CUDA kernel of LoRA adapters against products one by one."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tandem.loading import lora
from tandem.loading.lora import LoRA, Rows


@pytest.mark.skipif(not mx.cuda.is_available(), reason="the kernel is CUDA's")
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize(
    ("widths", "inputs"), [((2048, 512, 512), 2048), ((8192, 8192), 2048), ((2048,), 8192), ((520, 8), 264), ((7,), 72)]
)
@pytest.mark.parametrize(("rows", "tokens", "offset"), [(10, 1, 0), (1, 1, 0), (3, 4, 0), (5, 1, 1), (64, 1, 0)])
def test_the_kernel_computes_what_products_compute(monkeypatch, dtype, widths, inputs, rows, tokens, offset):
    """Ranks that differ, parts that an adapter leaves alone, rows without one, and inputs that start anywhere."""
    mx.random.seed(rows)
    state = Rows()
    adapters = LoRA(state, 11, widths)
    for number in range(1, 11):
        rank = 16 if number % 2 else 6
        parts = {
            part: tuple(mx.random.normal(shape, scale=0.05).astype(dtype) for shape in ((inputs, rank), (rank, width)))
            for part, width in enumerate(widths)
            if (number + part) % 4
        }
        if parts:
            adapters.put(number, parts)
    given = mx.random.normal((rows * tokens * inputs + offset,)).astype(dtype)[offset:].reshape(rows, tokens, inputs)
    outputs = mx.random.normal((rows, tokens, sum(widths))).astype(dtype)
    state.each = mx.array([1 + row % 10 if row % 3 else 0 for row in range(rows)] if rows > 1 else [3], mx.int32)
    state.index = state.each if rows > 1 else 3
    found = adapters(given, outputs)
    monkeypatch.setattr(lora, "MOST_ROWS", 0)
    apart = adapters(mx.contiguous(given + 0), outputs)
    assert found is not None and apart is not None
    got, want = (mx.concatenate([*parts], axis=-1).astype(mx.float32) for parts in (found, apart))
    added = mx.linalg.norm((want - outputs.astype(mx.float32)).reshape(-1))
    assert (mx.linalg.norm((got - want).reshape(-1)) / added).item() < (2e-3 if dtype != mx.bfloat16 else 2e-2)  # TF32
