"""Patches of mlx-lm and MLX: functions that are replaced for the whole process (mlx).

*Attention*: a cache with its own `attend` method computes attention, in every family.

*Recurrences*: without a kernel mlx-lm takes one step per token. MLX would first compute the states of all tokens of a
chunk and then the outputs, with every state alive in between: 2 GiB a layer for 512 tokens of Qwen3.5-397B. The patch
makes each token's state depend on its output. The arithmetic is unchanged.

*The gated delta rule* on NVIDIA GPUs, for which neither library has a kernel: one kernel takes the place of mlx-lm's step per
token, and of mlx-vlm's chunks.

*`mx.split`* on NVIDIA GPUs: a part's reported size ignores the gaps between its rows. MLX's rotary kernel for CUDA
allocates its result by that size but writes with the part's strides, and so overwrites other arrays. Models with latent
attention rotate such parts in every layer (https://github.com/ml-explore/mlx/pull/4540). Slices report the gaps.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

from tandem.loading import quantized_kv
from tandem.loading.memory import CUDA_TYPES, on_cuda
from tandem.loading.quantized_kv import Quantized

BLOCK = 16
"""Tokens per call of a function in `SCANS`, and so states alive at once."""
AHEAD = 8
"""Tokens queued on an NVIDIA GPU while earlier ones are awaited. MLX would queue about 70, whose states and products
all take memory at once: 2.4 GiB for two layers of Qwen3.5-397B instead of 1."""
STEPS = (("gated_delta", "_gated_delta_step_ops"), ("rwkv7", "_wkv7_step_ops"), ("mamba", "MambaBlock.ssm_step"))
"""mlx-lm functions, by module, that return one token's output and the next state."""
SCANS = (("bailing_moe_linear", "recurrent_gla"),)
"""mlx-lm functions, by module, over all tokens of q, k, v [B, H, L, D] from a state `h`; they return the final state
last."""
GATED_DELTA = ("mlx_lm.models.gated_delta", "mlx_vlm.models.gated_delta", "mlx_vlm.models.qwen3_5.gated_delta")
"""Modules with the gated delta rule."""
_GATED_DELTA = r"""
    constexpr int N = Dk / 32;  // numbers of a state's row that a lane keeps
    const int T = q_shape[1], Hk = q_shape[2], Hv = v_shape[2], Dv = v_shape[3], b = blockIdx.y / Hv, h = blockIdx.y % Hv;
    const int lane = threadIdx.x % 32, row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const long place = ((long)blockIdx.y * Dv + row) * Dk + lane * N;
    float s[N];
    for (int i = 0; i < N; i++) s[i] = float(state[place + i]);
    for (int t = 0; t < T; t++) {
        const long at = ((long)b * T + t) * Hv + h, shared = (((long)b * T + t) * Hk + h / (Hv / Hk)) * Dk + lane * N;
        float seen = 0.f, out = 0.f;
        for (int i = 0; i < N; i++) {
            s[i] *= float(g[BY_KEY ? at * Dk + lane * N + i : at]);
            seen += s[i] * float(k[shared + i]);
        }
        for (int o = 16; o; o >>= 1) seen += __shfl_xor_sync(0xffffffff, seen, o);
        const float delta = (float(v[at * Dv + row]) - seen) * float(beta[at]);
        for (int i = 0; i < N; i++) {
            s[i] += float(k[shared + i]) * delta;
            out += s[i] * float(q[shared + i]);
        }
        for (int o = 16; o; o >>= 1) out += __shfl_xor_sync(0xffffffff, out, o);
        if (lane == 0) y[at * Dv + row] = Y(out);
    }
    for (int i = 0; i < N; i++) next[place + i] = S(s[i]);
"""
WARPS, MOST_BLOCKS = 4, 65_535
"""Warps of a block, each with one row of a state, and the most blocks that CUDA takes along a grid's second axis."""

Recurrence = Callable[..., tuple[mx.array, Any]]

_of_mlx_lm = base.scaled_dot_product_attention


def patch_mlx_lm() -> None:
    """Apply all patches to the imported modules of mlx-lm. Idempotent."""
    let_caches_attend()
    bound_recurrences()
    if on_cuda():
        fuse_gated_delta()
        split_by_slices()


def _attend(
    queries: mx.array, keys: Any, values: Any, cache: object, scale: float, mask: Any, sinks: mx.array | None = None
) -> mx.array:
    """Replacement for mlx-lm's attention: queries [B, heads, L, D], keys and values [B, kv_heads, S, D] or `Quantized`."""
    own = getattr(cache, "attend", None)
    out: mx.array | None = None
    if own is not None:
        out = own(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    if out is None and isinstance(keys, Quantized):
        out = quantized_kv.attend(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    return _of_mlx_lm(queries, keys, values, cache, scale, mask, sinks) if out is None else out


def let_caches_attend() -> None:
    """Patch attention in the model modules of mlx-lm and mlx-vlm, imported already or later. Idempotent."""
    base.scaled_dot_product_attention = _attend
    for name, module in list(sys.modules.items()):
        if name.startswith(("mlx_lm.models.", "mlx_vlm.models.")):
            theirs = module.__dict__.get("scaled_dot_product_attention")
            if getattr(theirs, "__module__", "") in ("mlx_lm.models.base", "mlx_vlm.models.base"):
                module.__dict__["scaled_dot_product_attention"] = _attend


def bound_recurrences() -> None:
    """Patch the recurrences of mlx-lm's imported model modules. Idempotent."""
    for places, ordered in ((STEPS, _step), (SCANS, _scan)):
        for module, path in places:
            owner: object = sys.modules.get(f"mlx_lm.models.{module}")
            *parents, name = path.split(".")
            for parent in parents:
                owner = getattr(owner, parent, None)
            theirs = getattr(owner, name, None)
            if theirs is not None and not hasattr(theirs, "__wrapped__"):
                setattr(owner, name, ordered(theirs))


def _step(theirs: Recurrence) -> Recurrence:
    wait = _LookAhead().after if on_cuda() else None

    @functools.wraps(theirs)
    def step(*args: object) -> tuple[mx.array, mx.array]:
        output, state = theirs(*args)
        state = mx.depends(state, output)
        if wait is not None:
            wait(args, state)
        return output, state

    return step


class _LookAhead:
    """Evaluates a chunk's tokens, `AHEAD` at a time. A step continues the chunk if its arguments include the previous
    step's state."""

    def __init__(self) -> None:
        self._last: mx.array | None = None
        self._before: mx.array | None = None
        self._tokens = 0

    def after(self, args: tuple[object, ...], state: mx.array) -> None:
        """Record that a step with arguments `args` returned `state`; start and await evaluation every `AHEAD` steps."""
        goes_on = any(one is self._last for one in args)
        self._last, self._tokens = state, self._tokens + 1 if goes_on else 1
        if not goes_on:
            self._before = None
        elif self._tokens % AHEAD == 0:
            mx.async_eval(state)  # type: ignore[no-untyped-call,unused-ignore]
            if self._before is not None:
                mx.eval(self._before)
            self._before = state


def _scan(theirs: Recurrence) -> Recurrence:
    @functools.wraps(theirs)
    def scan(q: mx.array, k: mx.array, v: mx.array, g: mx.array, scale: float, h: mx.array | None = None) -> tuple[mx.array, Any]:
        outputs: list[mx.array] = []
        for start in range(0, q.shape[2], BLOCK):
            part = (slice(None), slice(None), slice(start, start + BLOCK))
            keys = mx.depends(k[part], outputs[-1]) if outputs else k[part]  # keys times values need no state
            output, h = theirs(q[part], keys, v[part], g, scale, h)
            outputs.append(output)
        return mx.concatenate(outputs, axis=2), h

    return scan


def fuse_gated_delta() -> None:
    """Patch the gated delta rule of imported model modules. Idempotent."""
    for owner in filter(None, map(sys.modules.get, GATED_DELTA)):
        for name in ("gated_delta_ops", "gated_delta_chunked"):
            theirs = getattr(owner, name, None)
            if theirs is not None and not hasattr(theirs, "__wrapped__"):
                setattr(owner, name, _gated_delta(theirs))


def _gated_delta(theirs: Recurrence) -> Recurrence:
    """Return the gated delta rule (Yang et al. 2024, https://arxiv.org/abs/2412.06464) as a kernel: outputs [B, T, Hv, Dv] for
    q, k [B, T, Hk, Dk], v [B, T, Hv, Dv], g [B, T, Hv] or [B, T, Hv, Dk] and beta [B, T, Hv], and the state [B, Hv, Dv, Dk]
    behind them. A warp takes one row of a state; sums are float32. `theirs` takes what it cannot: other widths, masks, and more
    states than `MOST_BLOCKS`; and calls after the default device was changed.
    """
    made: Any = mx.fast.cuda_kernel(
        name="tandem_gated_delta",
        input_names=["q", "k", "v", "g", "beta", "state"],
        output_names=["y", "next"],
        source=_GATED_DELTA,
        header=CUDA_TYPES,
    )

    @functools.wraps(theirs)
    def update(
        q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array | None = None, *others: object
    ) -> tuple[mx.array, mx.array]:
        (rows, _, heads, depth), width = v.shape, k.shape[-1]
        unfit = width % 32 or depth % WARPS or rows * heads > MOST_BLOCKS or not on_cuda()
        if unfit or any(one is not None for one in others):  # a mask, or a wish for each token's state
            return theirs(q, k, v, g, beta, state, *others)
        state = mx.zeros((rows, heads, depth, width)) if state is None else state
        y, state = made(
            inputs=[q, k, v, g, beta, state],
            template=[("Y", q.dtype), ("S", state.dtype), ("Dk", width), ("BY_KEY", g.ndim == 4)],
            grid=(depth * 32, rows * heads, 1),
            threadgroup=(WARPS * 32, 1, 1),
            output_shapes=[v.shape, state.shape],
            output_dtypes=[q.dtype, state.dtype],
        )
        return y, state

    return update


def split_by_slices() -> None:
    """Make `mx.split` and the arrays' method return slices, for the whole process. Idempotent."""
    owners: tuple[Any, ...] = (mx, mx.array)
    for owner in owners:
        theirs = owner.split
        if not hasattr(theirs, "__wrapped__"):
            owner.split = _sliced(theirs)


def _sliced(theirs: Callable[..., list[mx.array]]) -> Callable[..., list[mx.array]]:
    @functools.wraps(theirs)
    def split(a: mx.array, indices_or_sections: int | list[int], axis: int = 0, **others: object) -> list[mx.array]:
        if others or not -a.ndim <= axis < a.ndim:
            return theirs(a, indices_or_sections, axis, **others)
        length, ends = a.shape[axis], indices_or_sections
        if isinstance(ends, int):
            if ends < 1 or length % ends:
                return theirs(a, ends, axis)
            ends = [length // ends * number for number in range(1, ends)]
        before = (slice(None),) * (axis % a.ndim)
        return [a[(*before, slice(start, stop))] for start, stop in pairwise((0, *ends, length))]

    return split


class Placeholder:
    """Replacement for a layer in the model's list. Attributes and class are the layer's, since models check them."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    # isinstance falls back to this after the real type.
    __class__ = property(lambda self: type(self._layer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __contains__(self, name: object) -> bool:
        return name in self._layer


class ChangedLayer(Placeholder):
    """Placeholder for a layer whose output goes through `change`."""

    def __init__(self, layer: nn.Module | Placeholder, change: Callable[[Any], object]) -> None:
        """Store the layer and the function."""
        super().__init__(layer)
        self._change = change

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the layer, and return its changed output."""
        return self._change(self._layer(*args, **kwargs))
