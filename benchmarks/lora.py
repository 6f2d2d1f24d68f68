"""What LoRA adapters in one batch cost: the step with one of its own for each row, over the step without.

`lora.py --hidden 2048 --layers 16 --intermediate 8192 --heads 32 --kv-heads 8 --vocab 128256` is a 1B shape; the goal
there is 1.25 with ten adapters of rank 16 on all linear layers. Both steps run in turns in one process, over one copy of
random weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

from tandem.comm.blas import preload_blas

GOAL = 1.25
PROMPT = 64
"""Tokens of each row before the first step."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, value in (("hidden", 512), ("layers", 4), ("intermediate", 2048), ("heads", 8), ("kv-heads", 4), ("vocab", 8192)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--adapters", type=int, default=10)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        stage = loaded(args, Path(directory))
    mixed = [1 + row % args.adapters for row in range(args.rows)]
    cases = {"no adapter": [0] * args.rows, "one for all rows": [1] * args.rows, "each its own": mixed}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(args.rounds):
        for name, rows in cases.items():
            times[name].append(step_ms(stage, rows, args.steps))
    best = {name: min(found) for name, found in times.items()}
    base = best["no adapter"]
    harness.table(["batch", "ms a step", "ratio"], [[name, value, value / base] for name, value in best.items()])
    result = harness.verdict("step with adapters / without", best["each its own"] / base, GOAL, at_most=True)
    harness.write_json(args.json, args, {"times": times, "verdict": result})


def loaded(args: argparse.Namespace, directory: Path) -> Any:
    """A stage of all layers, with its adapters loaded."""
    preload_blas("auto")  # before MLX
    import mlx.core as mx

    from tandem.checkpoints.files import read_tensors
    from tandem.checkpoints.resolve import resolve
    from tandem.loading.stage import load_stage
    from tandem.models.description import describe
    from tandem.testing import tiny_model

    config = {
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.hidden // args.heads,
    }
    files = resolve(str(tiny_model(directory / "model", layers=args.layers, vocab=args.vocab, config=config)))
    description = describe(files)
    fuse = mx.default_device().type == mx.DeviceType.gpu  # as `--fuse-projections auto`
    stage = load_stage(files, description, range(args.layers), dtype=args.dtype, max_loras=args.adapters, fuse=fuse)
    shapes = {name: info.shape for name, info in read_tensors(files).items() if "_proj.weight" in name}
    for number in range(1, args.adapters + 1):
        path = directory / f"adapter-{number}"
        path.mkdir()
        arrays = {}
        for name, (outputs, inputs) in shapes.items():
            module = name.removesuffix(".weight")
            arrays[f"{module}.lora_a"] = mx.random.normal((inputs, args.rank), scale=0.02)
            arrays[f"{module}.lora_b"] = mx.random.normal((args.rank, outputs), scale=0.02)
        mx.save_safetensors(str(path / "adapters.safetensors"), arrays)
        (path / "adapter_config.json").write_text(json.dumps({"lora_parameters": {"scale": 2.0}}))
        stage.adapters.load(number, str(path))
    return stage


def step_ms(stage: Any, adapters: list[int], steps: int) -> float:
    """Milliseconds a decode step, dispatched ahead as a rank does, with these adapters of its rows."""
    import mlx.core as mx

    from tandem.runner.kv_store import KVStore

    store = KVStore(stage.make_caches)
    for row, adapter in enumerate(adapters):
        caches = stage.make_caches()
        stage.adapters.choose([adapter])
        mx.eval(stage.forward(mx.array([[1 + row] * PROMPT]), caches))
        store.join(str(row), caches)
    tokens, started = mx.zeros((len(adapters),), mx.int32), 0.0
    for step in range(steps + 10):
        if step == 10:
            started = time.perf_counter()
        stage.adapters.choose(adapters)
        hidden = stage.forward(tokens[:, None], store.batch())
        following = mx.argmax(stage.head(hidden)[:, -1], axis=-1).astype(mx.int32)
        mx.async_eval(following)
        tokens.tolist()
        tokens = following
    tokens.tolist()
    return (time.perf_counter() - started) / steps * 1e3


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
