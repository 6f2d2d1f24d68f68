"""A chunk of a recurrence that goes token by token takes the memory of a few states, and gives mlx-lm's numbers."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from tandem.loading import seams

WIDTH, HEADS, TOKENS = 128, 8, 192


def random(*shape: int) -> mx.array:
    return mx.random.normal(shape) * 0.1


def gated_delta(module: Any) -> Callable[[], tuple[mx.array, mx.array]]:
    q, k, v = (random(1, TOKENS, HEADS, WIDTH) for _ in range(3))
    gate, beta = mx.sigmoid(random(1, TOKENS, HEADS)), mx.sigmoid(random(1, TOKENS, HEADS))
    return lambda: module.gated_delta_ops(q, k, v, gate, beta, mx.zeros((1, HEADS, WIDTH, WIDTH)))


def kimi_delta(module: Any) -> Callable[[], tuple[mx.array, mx.array]]:
    """With a gate for every element, of a batch in which one sequence is shorter."""
    q, k, v, gate = (random(2, TOKENS, HEADS // 2, WIDTH) for _ in range(4))
    beta, mask = mx.sigmoid(random(2, TOKENS, HEADS // 2)), mx.arange(TOKENS)[None] >= mx.array([[0], [50]])
    return lambda: module.gated_delta_ops(q, k, v, mx.sigmoid(gate), beta, None, mask)


def rwkv7(module: Any) -> Callable[[], tuple[mx.array, mx.array]]:
    given = [random(1, TOKENS, HEADS, WIDTH) for _ in range(6)]
    layer = SimpleNamespace(num_heads=HEADS, head_dim=WIDTH)
    return lambda: module.Rwkv7TimeMixing._wkv7(layer, *given, None)


def mamba(module: Any) -> Callable[[], tuple[mx.array, mx.array]]:
    args = module.ModelArgs.from_dict(
        {
            "model_type": "mamba",
            "vocab_size": 8,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "state_size": 128,
            "num_hidden_layers": 1,
            "conv_kernel": 4,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_rank": 32,
        }
    )
    layer: nn.Module = module.MambaBlock(args)
    mx.eval(layer.parameters())
    x = random(1, TOKENS, 512)

    def run() -> tuple[mx.array, mx.array]:
        output, (_, state) = layer._process_sequence(x, None, None)
        return output, state

    return run


def lightning(module: Any) -> Callable[[], tuple[mx.array, mx.array]]:
    q, k, v = (random(1, HEADS, TOKENS, WIDTH) for _ in range(3))
    return lambda: module.recurrent_gla(q=q, k=k, v=v, g=-mx.ones(HEADS), scale=0.1)


CASES = {
    "gated_delta": ("gated_delta", gated_delta),
    "kimi_delta": ("gated_delta", kimi_delta),
    "rwkv7": ("rwkv7", rwkv7),
    "mamba": ("mamba", mamba),
    "lightning": ("bailing_moe_linear", lightning),
}


@pytest.fixture
def on_the_cpu() -> Iterator[None]:
    """Where no recurrence has a kernel."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


def theirs(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm's own functions, as long as the test takes."""
    for name, path in (*seams.STEPS, *seams.SCANS):
        if module.__name__ == f"mlx_lm.models.{name}":
            *parents, last = path.split(".")
            owner = getattr(module, parents[0]) if parents else module
            monkeypatch.setattr(owner, last, inspect.unwrap(getattr(owner, last)))


def by_mlx_lm(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Callable[[], tuple[mx.array, mx.array]]]:
    """A case's module, with mlx-lm's own functions, and its run."""
    place, case = CASES[name]
    module = importlib.import_module(f"mlx_lm.models.{place}")
    theirs(module, monkeypatch)
    mx.random.seed(0)
    return module, case(module)


def peak(run: Callable[[], tuple[mx.array, mx.array]]) -> tuple[int, mx.array, mx.array]:
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    output, state = run()
    mx.eval(output, state)
    return mx.get_peak_memory() - before, output, state


@pytest.mark.parametrize("name", CASES)
def test_states_of_tokens_that_are_done_are_let_go(name: str, on_the_cpu: None, monkeypatch: pytest.MonkeyPatch):
    _, run = by_mlx_lm(name, monkeypatch)
    unbound, output, state = peak(run)
    assert unbound > TOKENS * state.nbytes, "mlx-lm keeps every token's state until the outputs are computed"
    seams.bound_recurrences()
    bound, ours, last = peak(run)
    assert bound < unbound / 3
    assert mx.array_equal(ours, output) and mx.array_equal(last, state)


def test_the_seam_is_put_in_once():
    module = importlib.import_module("mlx_lm.models.gated_delta")
    seams.bound_recurrences()
    ours = module._gated_delta_step_ops
    seams.bound_recurrences()
    assert module._gated_delta_step_ops is ours and not hasattr(ours.__wrapped__, "__wrapped__")


@pytest.mark.parametrize("name", [name for name in CASES if name != "lightning"])
def test_a_gpu_is_given_a_few_tokens_at_a_time(name: str, on_the_cpu: None, monkeypatch: pytest.MonkeyPatch):
    module, run = by_mlx_lm(name, monkeypatch)
    expected = run()
    mx.eval(expected)
    waited: list[mx.array] = []
    with monkeypatch.context() as patched:
        patched.setattr(seams, "on_cuda", lambda: True)
        theirs(module, patched)
        seams.bound_recurrences()
        patched.setattr(mx, "eval", waited.append)
        found = [run(), run()]  # the second begins from the start again
    assert len(waited) == 2 * (TOKENS // seams.AHEAD - 1)
    assert all(mx.array_equal(mine, known) for pair in found for mine, known in zip(pair, expected, strict=True))
    waited.clear()
    run()
    assert not waited


@pytest.mark.skipif(not mx.cuda.is_available(), reason="the kernel is CUDA's")
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(
    "name", ["mlx_lm.models.gated_delta", "mlx_vlm.models.gated_delta", "mlx_vlm.models.qwen3_5.gated_delta"]
)
def test_a_kernel_computes_the_gated_delta_rule_on_a_gpu(name: str, dtype: mx.Dtype):
    """Against steps token by token: a gate for each head or element, no state before, and two sequences."""
    module = importlib.import_module(name)
    theirs = inspect.unwrap(module.gated_delta_ops)
    seams.fuse_gated_delta()
    for by_key, tokens, state in (
        (False, 5, None),
        (False, 1, random(2, HEADS, 64, WIDTH)),
        (True, 7, random(2, HEADS, 64, WIDTH)),
    ):
        q, k = (random(2, tokens, HEADS // 2, WIDTH).astype(dtype) for _ in range(2))
        v = mx.random.normal((2, tokens, HEADS, 64)).astype(dtype)
        gate = mx.sigmoid(random(2, tokens, HEADS, *[WIDTH] * by_key))
        beta = mx.sigmoid(random(2, tokens, HEADS)).astype(dtype)
        got, want = (rule(q, k, v, gate, beta, state) for rule in (module.gated_delta_ops, theirs))
        for one, other in zip(got, want, strict=True):
            assert one.dtype == other.dtype
            assert mx.allclose(one, other, atol=1e-5 if dtype == mx.float32 else 1e-2).item()


def test_what_the_kernel_cannot_take_is_left_to_mlx_lm(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch):
    """Among it as many states as need more blocks than CUDA takes along an axis, and a CPU that was chosen later."""
    calls = []

    def kernel(**launch: Any) -> list[mx.array]:
        calls.append(launch["grid"])
        return [mx.zeros(shape) for shape in launch["output_shapes"]]

    def rule(rows: int, heads: int, *others: object, width: int = 32) -> int:
        q, gate = mx.zeros((rows, 1, 1, width)), mx.zeros((rows, 1, heads))
        update(q, q, mx.zeros((rows, 1, heads, 4)), gate, gate, None, *others)
        return len(calls)

    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **_: kernel)
    update = seams._gated_delta(importlib.import_module("mlx_lm.models.gated_delta").gated_delta_ops)
    assert rule(2, 4) == 0, "the kernel has no CPU's code"
    monkeypatch.setattr(seams, "on_cuda", lambda: True)
    assert [rule(2, 4), rule(1023, 64), rule(1024, 64), rule(1, 4, width=48), rule(1, 4, mx.ones((1, 1)) == 1)] == [1, 2, 2, 2, 2]
    assert max(grid[1] for grid in calls) < 2**16
