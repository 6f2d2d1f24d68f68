"""Decode attention that reads only each row's own length: CUDA kernels over views of the KV buffer, and grouping by length on
a CPU.

MLX's attention over rows of different lengths computes all rows up to the longest, under a mask. Here a block of four warps
takes one row and one kv head (or a part of the row, if there are few rows). 8 to 32 lanes of a warp share a position: each
reads up to 16 bytes at once, for all queries of the kv head. Each group of lanes has an online softmax (Milakov and Gimelshein
2018) of its own, merged at the end. A second kernel combines the parts (flash decoding, Dao et al. 2023). Sums are float32 for
every type. Keys and values are read through their strides, without copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import mlx.core as mx

from tandem.loading.memory import CUDA_TYPES
from tandem.loading.quantized_kv import Quantized
from tandem.runner.kv_buffer import Attention

WARPS, LANES = 4, 32
BLOCKS = 512
"""Blocks that fill a GPU: about four per multiprocessor of the largest."""
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
#define UNROLL(i, COUNT) _Pragma("unroll") for (int i = 0; i < COUNT; i++)
template <typename N, int COUNT> struct alignas(COUNT * sizeof(N)) Vector { N at[COUNT]; };  // read at once
"""
_ATTEND = r"""
    constexpr int P = G * D <= 512 ? 8 : G * D <= 1024 ? 16 : 32;  // lanes that share a position
    constexpr int STATES = 128 / P, E = D / P, U = 2;  // each state takes U positions at once
    constexpr int EVEN = E & -E, MOST = 128 / BITS;
    constexpr int V = EVEN < MOST ? EVEN : MOST, Q = EVEN < 4 ? EVEN : 4;  // numbers per read of up to 16 bytes
    const int parts = gridDim.y, part = blockIdx.y;
    const int head = blockIdx.x % KVH, row = blockIdx.x / KVH;
    const int state = threadIdx.x / P, lane = threadIdx.x % P;
    const int length = lengths[row] + 1;
    const int each = (length + parts - 1) / parts;
    const int begin = part * each, end = min(length, begin + each);
    auto place = [&](int e, int width) { return (e / width * P + lane) * width + e % width; };
    auto at = [&](auto* side, const Strides& strides, long p) {
        return side + row * strides[0] + head * strides[1] + p * strides[2];
    };
    DEFINE_READ
    __shared__ float qs[G][D], tops[STATES][G], sums[STATES][G], accs[STATES][D];
    for (int g = state; g < G; g += STATES) {
        const T* qp = q + row * q_strides[0] + (head * G + g) * q_strides[1];
        UNROLL(e, E) qs[g][place(e, Q)] = float(qp[place(e, V)]) * scale[0];
    }
    __syncthreads();
    float acc[G][E] = {}, top[G], sum[G] = {};
    UNROLL(g, G) top[g] = -1e30f;
    for (int start = begin + state; start - state < end; start += U * STATES) {
        Chunk kk[U][E / V], vv[U][E / V];
        UNROLL(u, U) {
            const long p = min(start + u * STATES, end - 1);
            READ_BOTH
        }
        float s[U][G] = {};
        UNROLL(u, U) UNROLL(e, E) {
            const float x = number(kk[u][e / V], e);
            UNROLL(g, G) s[u][g] += qs[g][place(e, Q)] * x;
        }
        UNROLL(g, G) {
            float now = top[g];
            UNROLL(u, U) {
                for (int o = P / 2; o; o >>= 1) s[u][g] += __shfl_xor_sync(0xffffffff, s[u][g], o);
                if (start + u * STATES >= end) s[u][g] = -1e30f;
                now = fmaxf(now, s[u][g]);
            }
            const float keep = __expf(top[g] - now);
            sum[g] *= keep; top[g] = now;
            if (keep != 1.f) UNROLL(e, E) acc[g][e] *= keep;
            UNROLL(u, U) { s[u][g] = __expf(s[u][g] - now); sum[g] += s[u][g]; }
        }
        UNROLL(u, U) UNROLL(e, E) {
            const float x = number(vv[u][e / V], e);
            UNROLL(g, G) acc[g][e] += s[u][g] * x;
        }
    }
    UNROLL(g, G) if (!lane) { tops[state][g] = top[g]; sums[state][g] = sum[g]; }
    UNROLL(g, G) {
        UNROLL(e, E) accs[state][place(e, V)] = acc[g][e];
        __syncthreads();
        const long to = ((long)row * KVH + head) * G + g;
        for (int d = threadIdx.x; d < D; d += 128) {
            float best = -1e30f, total = 0.f, value = 0.f;
            for (int w = 0; w < STATES; w++) best = fmaxf(best, tops[w][g]);
            for (int w = 0; w < STATES; w++) {
                const float c = __expf(tops[w][g] - best);
                total += sums[w][g] * c; value += accs[w][d] * c;
            }
"""
_FULL = {
    "DEFINE_READ": r"""
    using Chunk = Vector<T, V>;
    auto read = [&](const T* from, Chunk* to) { UNROLL(c, E / V) to[c] = *(const Chunk*)(from + place(c * V, V)); };
    auto number = [&](const Chunk& x, int e) { return float(x.at[e % V]); };
""",
    "READ_BOTH": "read(at(k, k_strides, p), kk[u]); read(at(v, v_strides, p), vv[u]);",
}
_GROUPED = {
    "DEFINE_READ": r"""
    using Codes = Vector<uint32_t, V * BITS < 32 ? 1 : V * BITS / 32>;
    struct Chunk { Codes codes; T scale, bias; };  // all of one group
    auto read = [&](const uint32_t* codes, const T* scales, const T* biases, Chunk* to) {
        UNROLL(c, E / V) {
            const unsigned d = place(c * V, V);
            to[c] = {*(const Codes*)(codes + d * BITS / 32), scales[d / SIZE], biases[d / SIZE]};
        }
    };
    auto number = [&](const Chunk& x, int e) {
        const uint32_t code = x.codes.at[e % V * BITS / 32] >> (unsigned(place(e, V)) * BITS % 32);
        return float(code & ((1u << BITS) - 1)) * float(x.scale) + float(x.bias);
    };
""",
    "READ_BOTH": "read(at(k, k_strides, p), at(ks, ks_strides, p), at(kb, kb_strides, p), kk[u]);"
    " read(at(v, v_strides, p), at(vs, vs_strides, p), at(vb, vb_strides, p), vv[u]);",
}
"""CUDA code that reads keys and values, a `Chunk` at once: unquantised (`_FULL`) or quantised in groups (`_GROUPED`)."""
_WHOLE = (
    _ATTEND
    + r"""
            out[to * D + d] = T(value / total);
        }
        __syncthreads();
    }
"""
)
_PARTS = (
    _ATTEND
    + r"""
            values[(to * parts + part) * D + d] = value;
            if (!d) { stats[(to * parts + part) * 2] = best; stats[(to * parts + part) * 2 + 1] = total; }
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
    alike = dim == _width(keys) == _width(values) and all(one.dtype == queries.dtype for one in numbers)
    return not rest and sharing <= MOST_SHARING and dim in HEAD_DIMS and alike


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
    dimension, or both quantised; positions begin at multiples of 16 bytes, as in a KV buffer. lengths int32 [rows]: tokens
    before this one; longest: their maximum. Returns [rows, heads, 1, D] in the type of `queries`.
    """
    if not serves(queries, keys, values):
        return None
    rows, heads, _, dim = queries.shape
    kv_heads, grouped = _arrays(keys)[0].shape[1], isinstance(keys, Quantized)
    parts = _parts(rows * kv_heads, longest + 1)
    bits, size = keys.groups if isinstance(keys, Quantized) else (8 * queries.itemsize, dim)
    template = [("T", queries.dtype), ("KVH", kv_heads), ("G", heads // kv_heads), ("D", dim), ("BITS", bits), ("SIZE", size)]
    inputs = [queries, *_arrays(keys), *_arrays(values), lengths, _number(scale)]
    launch = {"grid": (rows * kv_heads * WARPS * LANES, parts, 1), "threadgroup": (WARPS * LANES, 1, 1)}
    out: mx.array
    if parts == 1:
        [out] = _kernel("whole", grouped)(
            inputs=inputs, template=template, output_shapes=[(rows, heads, 1, dim)], output_dtypes=[queries.dtype], **launch
        )
        return out
    shapes = [(rows * heads, parts, dim), (rows * heads, parts, 2)]
    partial, stats = _kernel("parts", grouped)(
        inputs=inputs, template=template, output_shapes=shapes, output_dtypes=[mx.float32, mx.float32], **launch
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
        header=CUDA_TYPES + _HEADER,
        ensure_row_contiguous=False,
    )
