"""Decode attention that reads only each row's own length: CUDA kernels over views of the KV buffer, and grouping by length on
a CPU.

MLX's attention over rows of different lengths computes all rows up to the longest, under a mask. Here a block of four warps
takes one row and one kv head (or a part of the row, if there are few rows). It processes the row's positions with an online
softmax (Milakov and Gimelshein 2018). A second kernel combines the parts (flash decoding, Dao et al. 2023). Sums are float32
for every type. Keys and values are read through their strides, without copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import mlx.core as mx

from tandem.loading.quantized_kv import Quantized
from tandem.runner.kv_buffer import Attention

WARPS, LANES = 4, 32
BLOCKS = 264
"""Blocks that fill a GPU: two per multiprocessor of the largest."""
PART = 2048
"""Maximum positions per block for long rows."""
MOST_PARTS = 64
HEAD_DIMS = (64, 96, 128, 192, 256)
MOST_SHARING = 16
"""Maximum query heads per kv head; more exceed the registers of a block."""
ALIKE = 64
"""Positions by which row lengths may differ and still share a call on a CPU."""
WASTE = 65_536
"""Key elements beyond the rows' ends, per row, from which grouping by length is faster on a CPU."""

_HEADER = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
"""
_ATTEND = r"""
    constexpr int W = 4, E = D / 32;
    const int parts = gridDim.y, part = blockIdx.y;
    const int head = blockIdx.x % KVH, row = blockIdx.x / KVH;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int length = lengths[row] + 1;
    const int each = (length + parts - 1) / parts;
    const int begin = part * each, end = min(length, begin + each);
    BEGIN
    float qr[G][E], acc[G][E], top[G], sum[G];
    for (int g = 0; g < G; g++) {
        top[g] = -1e30f; sum[g] = 0.f;
        const T* qp = q + (long)row * q_strides[0] + (long)(head * G + g) * q_strides[1] + lane * E;
        for (int e = 0; e < E; e++) { qr[g][e] = float(qp[e]) * scale[0]; acc[g][e] = 0.f; }
    }
    for (int p = begin + warp; p < end; p += W) {
        float kk[E], vv[E];
        READ
        for (int g = 0; g < G; g++) {
            float s = 0.f;
            for (int e = 0; e < E; e++) s += qr[g][e] * kk[e];
            for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(0xffffffff, s, o);
            const float now = fmaxf(top[g], s), keep = __expf(top[g] - now), weight = __expf(s - now);
            sum[g] = sum[g] * keep + weight; top[g] = now;
            for (int e = 0; e < E; e++) acc[g][e] = acc[g][e] * keep + weight * vv[e];
        }
    }
    __shared__ float tops[W][G], sums[W][G], accs[W][D];
    for (int g = 0; g < G; g++) if (!lane) { tops[warp][g] = top[g]; sums[warp][g] = sum[g]; }
    for (int g = 0; g < G; g++) {
        for (int e = 0; e < E; e++) accs[warp][lane * E + e] = acc[g][e];
        __syncthreads();
        const long at = ((long)row * KVH + head) * G + g;
        for (int d = threadIdx.x; d < D; d += W * 32) {
            float best = -1e30f, total = 0.f, value = 0.f;
            for (int w = 0; w < W; w++) best = fmaxf(best, tops[w][g]);
            for (int w = 0; w < W; w++) {
                const float c = __expf(tops[w][g] - best);
                total += sums[w][g] * c; value += accs[w][d] * c;
            }
"""
_FULL = {
    "BEGIN": r"""
    const T* kp = k + (long)row * k_strides[0] + (long)head * k_strides[1] + lane * E;
    const T* vp = v + (long)row * v_strides[0] + (long)head * v_strides[1] + lane * E;
""",
    "READ": r"""
        for (int e = 0; e < E; e++) {
            kk[e] = float(kp[(long)p * k_strides[2] + e]); vv[e] = float(vp[(long)p * v_strides[2] + e]);
        }
""",
}
_GROUPED = {
    "BEGIN": r"""
    const uint32_t* kp = k + (long)row * k_strides[0] + (long)head * k_strides[1];
    const uint32_t* vp = v + (long)row * v_strides[0] + (long)head * v_strides[1];
    const T* ksp = ks + (long)row * ks_strides[0] + (long)head * ks_strides[1];
    const T* kbp = kb + (long)row * kb_strides[0] + (long)head * kb_strides[1];
    const T* vsp = vs + (long)row * vs_strides[0] + (long)head * vs_strides[1];
    const T* vbp = vb + (long)row * vb_strides[0] + (long)head * vb_strides[1];
    constexpr int EACH = 32 / BITS;
    constexpr uint32_t CODE = (1u << BITS) - 1;
""",
    "READ": r"""
        const uint32_t* kw = kp + (long)p * k_strides[2], * vw = vp + (long)p * v_strides[2];
        const T* kc = ksp + (long)p * ks_strides[2], * ka = kbp + (long)p * kb_strides[2];
        const T* vc = vsp + (long)p * vs_strides[2], * va = vbp + (long)p * vb_strides[2];
        const int d = lane * E;
        if constexpr (SIZE % E == 0) {  // all of one group, in whole words or within one
            constexpr int FIT = E < EACH ? E : EACH;
            const int g = d / SIZE;
            const float kscale = kc[g], kbias = ka[g], vscale = vc[g], vbias = va[g];
            for (int w = 0; w < E / FIT; w++) {
                const uint32_t x = kw[d / EACH + w] >> (d % EACH * BITS), y = vw[d / EACH + w] >> (d % EACH * BITS);
                for (int i = 0; i < FIT; i++) {
                    kk[w * FIT + i] = float((x >> (i * BITS)) & CODE) * kscale + kbias;
                    vv[w * FIT + i] = float((y >> (i * BITS)) & CODE) * vscale + vbias;
                }
            }
        } else for (int e = 0; e < E; e++) {
            const int at = d + e, g = at / SIZE, shift = at % EACH * BITS;
            kk[e] = float((kw[at / EACH] >> shift) & CODE) * float(kc[g]) + float(ka[g]);
            vv[e] = float((vw[at / EACH] >> shift) & CODE) * float(vc[g]) + float(va[g]);
        }
""",
}
"""CUDA code that reads keys and values, unquantised (`_FULL`) or quantised in groups (`_GROUPED`)."""
_WHOLE = (
    _ATTEND
    + r"""
            out[at * D + d] = T(value / total);
        }
        __syncthreads();
    }
"""
)
_PARTS = (
    _ATTEND
    + r"""
            values[(at * parts + part) * D + d] = value;
            if (!d) { stats[(at * parts + part) * 2] = best; stats[(at * parts + part) * 2 + 1] = total; }
        }
        __syncthreads();
    }
"""
)
_JOIN = r"""
    const long at = blockIdx.x;
    const int parts = values_shape[1];
    for (int d = threadIdx.x; d < D; d += blockDim.x) {
        float best = -1e30f, total = 0.f, value = 0.f;
        for (int p = 0; p < parts; p++) best = fmaxf(best, stats[(at * parts + p) * 2]);
        for (int p = 0; p < parts; p++) {
            const float c = __expf(stats[(at * parts + p) * 2] - best);
            total += stats[(at * parts + p) * 2 + 1] * c; value += values[(at * parts + p) * D + d] * c;
        }
        out[at * D + d] = T(value / total);
    }
"""


def decode_attention(choice: str = "auto") -> Attention | None:
    """Return the decode attention that replaces mlx-lm's on a GPU; None for mlx-lm's. `choice` is `auto` or `masked`.

    On Metal always None, since these kernels have not run there yet.
    """
    return attend if choice == "auto" and mx.cuda.is_available() and not on_cpu() else None


def on_cpu() -> bool:
    """Return True if MLX computes on the CPU."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def serves(queries: mx.array, keys: mx.array | Quantized, values: mx.array | Quantized) -> bool:
    """Return True for supported shapes: queries [rows, heads, 1, D], keys and values [rows, kv_heads, positions, D]."""
    sharing, rest = divmod(queries.shape[1], _arrays(keys)[0].shape[1])
    dim, numbers = queries.shape[3], (_arrays(keys)[-1], _arrays(values)[-1])
    return (
        not rest
        and sharing <= MOST_SHARING
        and dim in HEAD_DIMS
        and dim == _width(keys) == _width(values)
        and all(one.dtype == queries.dtype for one in numbers)
    )


def _arrays(side: mx.array | Quantized) -> tuple[mx.array, ...]:
    return side.parts if isinstance(side, Quantized) else (side,)


def _width(side: mx.array | Quantized) -> int:
    """Return the head dimension of keys or values."""
    return side.scales.shape[3] * side.groups.size if isinstance(side, Quantized) else side.shape[3]


def attend(
    queries: mx.array, keys: mx.array | Quantized, values: mx.array | Quantized, lengths: mx.array, longest: int, scale: float
) -> mx.array | None:
    """Compute the attention of one token per row over positions 0 .. lengths[row], its own included. None for unsupported
    shapes.

    queries [rows, heads, 1, D]. keys, values [rows, kv_heads, positions, D]: views with any strides and a contiguous last
    dimension, or both quantised. lengths int32 [rows]: tokens before this one; longest: their maximum. Returns [rows, heads,
    1, D] in the type of `queries`.
    """
    if not serves(queries, keys, values):
        return None
    rows, heads, _, dim = queries.shape
    kv_heads, grouped = _arrays(keys)[0].shape[1], isinstance(keys, Quantized)
    parts = _parts(rows * kv_heads, longest + 1)
    template = [("T", queries.dtype), ("KVH", kv_heads), ("G", heads // kv_heads), ("D", dim)]
    template += [("BITS", keys.groups.bits), ("SIZE", keys.groups.size)] if isinstance(keys, Quantized) else []
    inputs = [queries, *_arrays(keys), *_arrays(values), lengths, _number(scale)]
    launch = {"grid": (rows * kv_heads * WARPS * LANES, parts, 1), "threadgroup": (WARPS * LANES, 1, 1)}
    out: mx.array
    if parts == 1:
        [out] = _kernel("whole", grouped)(
            inputs=inputs, template=template, output_shapes=[(rows, heads, 1, dim)], output_dtypes=[queries.dtype], **launch
        )
        return out
    partial, stats = _kernel("parts", grouped)(
        inputs=inputs,
        template=template,
        output_shapes=[(rows * heads, parts, dim), (rows * heads, parts, 2)],
        output_dtypes=[mx.float32, mx.float32],
        **launch,
    )
    [out] = _kernel("join")(
        inputs=[partial, stats],
        template=[("T", queries.dtype), ("D", dim)],
        grid=(rows * heads * LANES * WARPS, 1, 1),
        threadgroup=(LANES * WARPS, 1, 1),
        output_shapes=[(rows, heads, 1, dim)],
        output_dtypes=[queries.dtype],
    )
    return out


@cache
def _number(value: float) -> mx.array:
    """Return float32 [1], cached over layers and steps."""
    made = mx.array([value], dtype=mx.float32)
    mx.eval(made)
    return made


def _parts(blocks: int, longest: int) -> int:
    """Return the number of parts per row: enough to fill the device, and none longer than `PART`."""
    wanted = max(-(-BLOCKS // blocks), -(-longest // PART))
    return max(1, min(wanted, MOST_PARTS, -(-longest // 64)))


def chosen_attention(choice: str = "auto") -> Attention | None:
    """Return the decode attention that replaces mlx-lm's on this device; None for mlx-lm's. `choice` is `auto` or `masked`."""
    return attend_by_length if choice == "auto" and on_cpu() else decode_attention(choice)


def attend_by_length(
    queries: mx.array, keys: mx.array | Quantized, values: mx.array | Quantized, lengths: mx.array, longest: int, scale: float
) -> mx.array | None:
    """Compute the same as `attend`, on a CPU and for any shapes. None if rows have similar lengths or KV is quantised.

    Reading `lengths` does not wait, as it was made from host numbers. MLX has no fused attention on a CPU: under a mask all
    rows are computed, with scores stored, up to the longest.
    """
    if isinstance(keys, Quantized) or isinstance(values, Quantized):
        return None
    held: list[int] = lengths.tolist()  # type: ignore[assignment]
    rows, kv_heads, _, dim = keys.shape
    if (rows * longest - sum(held)) * kv_heads * dim < WASTE * rows:
        return None
    # Keys are read once for all queries of a kv head, values per query: a product with one row is faster than with a few.
    together = (queries * scale).reshape(rows, kv_heads, -1, dim).swapaxes(2, 3)
    found = []
    for start, stop in _alike(held):
        most = max(held[start:stop]) + 1
        scores = (keys[start:stop, :, :most] @ together[start:stop]).swapaxes(2, 3)
        if min(held[start:stop]) + 1 < most:
            mask = mx.arange(most) <= lengths[start:stop, None]
            scores = mx.where(mask[:, None, None], scores, mx.finfo(scores.dtype).min)
        weights = mx.softmax(scores, axis=-1, precise=True)[:, :, :, None]
        found.append(weights @ values[start:stop, :, None, :most])
    return mx.concatenate(found).reshape(rows, -1, 1, values.shape[3])


def _alike(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Yield runs of rows (first, one past the last) whose lengths differ by at most a factor of two."""
    start, least, most = 0, lengths[0], lengths[0]
    for row, length in enumerate(lengths):
        least, most = min(least, length), max(most, length)
        if most > 2 * least + ALIKE:
            yield start, row
            start, least, most = row, length, length
    yield start, len(lengths)


@cache
def _kernel(name: str, grouped: bool = False) -> Any:
    sides = ["k", "ks", "kb", "v", "vs", "vb"] if grouped else ["k", "v"]
    inputs = ["q", *sides, "lengths", "scale"]
    source, given, made = {
        "whole": (_WHOLE, inputs, ["out"]),
        "parts": (_PARTS, inputs, ["values", "stats"]),
        "join": (_JOIN, ["values", "stats"], ["out"]),
    }[name]
    for place, code in (_GROUPED if grouped else _FULL).items():
        source = source.replace(place, code)
    return mx.fast.cuda_kernel(
        name=f"tandem_ragged_{name}{'_grouped' if grouped else ''}",
        input_names=given,
        output_names=made,
        source=source,
        header=_HEADER,
        ensure_row_contiguous=False,
    )
