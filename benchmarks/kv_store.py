"""What a decode step, a join and a leave cost in three kinds of KV store: `kv_store.py [--device gpu]`.

mlx-lm's BatchKVCache, Tandem's row KV buffer, and a pool of blocks that are gathered for attention. The first table times
one attention layer. The second runs a whole random model, also with the next step dispatched while the last one still
computes: whether writes stay in place then shows in time and peak memory. On a GPU the defaults are an 8B model. Rows
have lengths from half the context up to it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from kv_candidates import CANDIDATES, Candidate, Shape
from mlx_lm.models.cache import BatchKVCache, KVCache
from mlx_lm.models.llama import Model, ModelArgs

from tandem.runner.kv_store import KVStore


def timed(work: Callable[[], None], repeats: int) -> float:
    """Milliseconds of the fastest of several calls: what others do on the machine only adds."""
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best * 1e3


def layer_costs(make: Callable[[list[KVCache]], Candidate], shape: Shape, lengths: list[int], steps: int) -> list[float]:
    """Milliseconds of a step, a join and a leave; MiB of extra peak memory of a step; bytes held by bytes used."""
    store = make([shape.sequence(length) for length in lengths])
    store.settle()
    rows = len(lengths)
    queries, keys, values = (shape.token(rows, heads) for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    mx.eval(queries, keys, values)

    def step() -> None:
        mx.eval(store.attend(queries, keys, values, shape.head_dim**-0.5))

    step()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    step_ms = timed(step, steps)
    extra = (mx.get_peak_memory() - before) / 2**20
    used = 2 * sum(n + 1 + steps for n in lengths) * shape.kv_heads * shape.head_dim * shape.dtype.size
    ratio = store.nbytes / used
    leave_ms = join_ms = float("inf")
    newcomer = shape.sequence(max(lengths) - 128)
    for _ in range(3):  # a batch that loses a row and gains one, as in steady state
        leave_ms = min(leave_ms, timed(lambda: (store.leave(1), store.settle())[0], 1))
        join_ms = min(join_ms, timed(lambda: (store.join(newcomer), store.settle())[0], 1))
    step()
    return [step_ms, join_ms, leave_ms, extra, ratio]


def layer_table(shape: Shape, contexts: list[int], batch: int, steps: int) -> None:
    """Print costs of one layer; times are also given as a ratio to mlx-lm's."""
    print(f"\none layer, batch {batch}, {shape}")
    columns = [
        f"{name:>{width}}"
        for name, width in (("step ms", 16), ("join ms", 16), ("leave ms", 16), ("step MiB", 9), ("held/used", 9))
    ]
    print(f"{'context':>8} {'store':10} {' '.join(columns)}")
    for context in contexts:
        lengths = [context // 2 + context // 2 * i // (batch - 1) for i in range(batch)]
        base: list[float] = []
        for name, make in CANDIDATES.items():
            mx.clear_cache()
            costs = layer_costs(make, shape, lengths, steps)
            base = base or costs
            times = " ".join(f"{cost:9.2f} {cost / was:5.2f}x" for cost, was in zip(costs[:3], base[:3], strict=True))
            print(f"{context:8} {name:10} {times} {costs[3]:9.1f} {costs[4]:9.2f}", flush=True)


MODES = ("waiting", "built", "ahead")
"""Wait for a step, then build the next; build the next, then wait, then dispatch it; dispatch the next, then wait."""


def model_run(model: Model, batch: Callable[[], list[Any]], rows: int, steps: int, mode: str) -> tuple[float, float]:
    """(milliseconds a step, MiB of extra peak memory) of greedy decoding in one of MODES."""

    def build(tokens: mx.array) -> mx.array:
        return mx.argmax(model(tokens[:, None], cache=batch())[:, -1], axis=-1)

    tokens = build(mx.zeros((rows,), dtype=mx.int32))
    mx.eval(tokens)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()

    def step() -> None:
        nonlocal tokens
        following = build(tokens)
        if mode == "built":
            mx.eval(tokens)
        mx.async_eval(following)
        mx.eval(tokens if mode != "waiting" else following)
        tokens = following

    milliseconds = timed(step, steps)
    mx.eval(tokens)
    mx.synchronize()
    return milliseconds, (mx.get_peak_memory() - before) / 2**20


def model_table(args: ModelArgs, shape: Shape, contexts: list[int], rows: int, steps: int) -> None:
    """Print whole-model step times in each of MODES, and the extra memory at their peak."""
    model = Model(args)
    model.set_dtype(shape.dtype)
    mx.eval(model.parameters())
    print(f"\nwhole model, {args.num_hidden_layers} layers, hidden {args.hidden_size}, batch {rows}")
    columns = " ".join(f"{mode + ' ms':>10} {'MiB':>7}" for mode in MODES)
    print(f"{'context':>8} {'store':10} {'K MiB/layer':>11} {columns}")
    for context in contexts:
        lengths = [context // 2 + context // 2 * i // (rows - 1) for i in range(rows)]
        for name in ("mlx-lm", "row KV buffer"):
            mx.clear_cache()
            batch = whole_batch(name, shape, lengths, args.num_hidden_layers)
            results = [model_run(model, batch, rows, steps, mode) for mode in MODES]
            size = max(lengths) * rows * shape.kv_heads * shape.head_dim * shape.dtype.size / 2**20
            shown = " ".join(f"{ms:10.2f} {extra:7.0f}" for ms, extra in results)
            print(f"{context:8} {name:10} {size:11.0f} {shown}", flush=True)
            del batch


def whole_batch(name: str, shape: Shape, lengths: list[int], layers: int) -> Callable[[], list[Any]]:
    """A function that gives the caches of the next step."""
    if name == "mlx-lm":
        caches = []
        for _ in range(layers):
            caches.append(BatchKVCache.merge([shape.sequence(length) for length in lengths]))
            mx.eval(caches[-1].state)
        return lambda: caches
    store = KVStore(lambda: [KVCache() for _ in range(layers)])
    for i, length in enumerate(lengths):
        store.join(str(i), [shape.sequence(length) for _ in range(layers)])
        mx.eval([layer._parts for layer in store._layers])
    return store.batch


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--steps", type=int, help="steps to measure; default 5 on cpu, 30 on gpu")
    parser.add_argument("--layers", type=int, help="layers of the model; default 4 on cpu, 36 on gpu; 0: no model")
    args = parser.parse_args()
    gpu = args.device == "gpu"
    mx.set_default_device(mx.gpu if gpu else mx.cpu)
    shape = Shape(32, 8, 128, mx.bfloat16) if gpu else Shape(9, 3, 64, mx.float32)
    layers = args.layers if args.layers is not None else (36 if gpu else 4)
    steps = args.steps or (30 if gpu else 5)
    layer_table(shape, args.contexts, args.batch, steps)
    if layers:
        model = ModelArgs(
            model_type="llama",
            hidden_size=shape.heads * shape.head_dim,
            num_hidden_layers=layers,
            intermediate_size=12288 if gpu else 1536,
            num_attention_heads=shape.heads,
            rms_norm_eps=1e-5,
            vocab_size=151936 if gpu else 4096,
            num_key_value_heads=shape.kv_heads,
            tie_word_embeddings=True,
        )
        model_table(model, shape, args.contexts if gpu else args.contexts[:2], args.batch, steps)


if __name__ == "__main__":
    main()
