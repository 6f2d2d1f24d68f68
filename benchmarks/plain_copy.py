"""Write a copy of a model that is not quantised and never ends a text by itself: `plain_copy.py SOURCE TARGET`.

Weights that are stored as wanted already are linked, not copied.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

SHARD_BYTES = 4 * 2**30


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="model directory that mlx-lm can load")
    parser.add_argument("target", type=Path, help="directory to write")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("stored", "float32", "bfloat16", "float16"),
        help="type of the copy's weights; stored: as they are",
    )
    args = parser.parse_args()
    config = json.loads((args.source / "config.json").read_text())
    args.target.mkdir(parents=True, exist_ok=True)
    for path in args.source.iterdir():
        if path.suffix != ".safetensors" and not path.name.endswith(".index.json") and path.name != "config.json":
            shutil.copy(path, args.target / path.name)
    if args.dtype == "stored":
        for path in [*args.source.glob("*.safetensors"), *args.source.glob("*.index.json")]:
            link = args.target / path.name
            link.unlink(missing_ok=True)
            link.symlink_to(path.resolve())
    else:
        write_weights(args.source, args.target, args.dtype)
        config.pop("quantization", None)
        config.pop("quantization_config", None)
        config["torch_dtype"] = args.dtype
    for name in ("tokenizer_config.json", "special_tokens_map.json"):  # mlx-lm stops at the tokenizer's too
        if (args.target / name).exists():
            texts = json.loads((args.target / name).read_text())
            texts.pop("eos_token", None)
            (args.target / name).write_text(json.dumps(texts, indent=2))
    config["eos_token_id"] = config["vocab_size"] - 1
    (args.target / "generation_config.json").unlink(missing_ok=True)
    # Written last: a directory with it is complete.
    (args.target / "config.json").write_text(json.dumps(config, indent=2))


def write_weights(source: Path, target: Path, dtype: str) -> None:
    """Expand and cast the weights of `source`, and save them."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import dequantize_model, load_model

    model, config = load_model(source, lazy=True)
    if "quantization" in config:
        model = dequantize_model(model)
    kind = getattr(mx, dtype)
    weights: dict[str, Any] = {
        name: array.astype(kind) if mx.issubdtype(array.dtype, mx.floating) else array
        for name, array in tree_flatten(model.parameters())
    }
    save(target, weights)


def save(target: Path, weights: dict[str, Any]) -> None:
    """Save in shards, with an index; each shard is computed only when it is written."""
    import mlx.core as mx

    shards: list[dict[str, Any]] = [{}]
    for name in list(weights):
        if sum(one.nbytes for one in shards[-1].values()) > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = weights.pop(name)
    weight_map: dict[str, str] = {}
    for number in range(len(shards)):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(shards[number], file)
        mx.save_safetensors(str(target / file), shards[number], {"format": "mlx"})
        shards[number] = {}
        mx.clear_cache()
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


if __name__ == "__main__":
    main()
