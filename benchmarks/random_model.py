"""Write a model directory with random weights, for speed alone: `random_model.py qwen3-8b DIRECTORY`."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

from plain_copy import save

from tandem.testing import write_tokenizer

BASE = {"rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "tie_word_embeddings": False, "max_position_embeddings": 32768}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "llama-1gb": {
        "model_type": "llama",
        "hidden_size": 1280,
        "num_hidden_layers": 24,
        "intermediate_size": 3456,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32000,
    },
    "llama-10m": {
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "intermediate_size": 768,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 8192,
    },
    "tiny": {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 1024,
    },
}
BYTES_AND_PAIRS = 512
"""Vocabulary entries that the test tokenizer makes sense of; the others are made up."""
JUDGMENTS = ("yes", "no")
"""First two of the others: the answers of rerankers."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES), help="which model to resemble")
    parser.add_argument("directory", type=Path, help="where to write it")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"), help="of the weights")
    parser.add_argument("--layers", type=int, help="other than that model's")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers")
    args = parser.parse_args()
    write(args.shape, args.directory, dtype=args.dtype, seed=args.seed, layers=args.layers)
    size = sum(path.stat().st_size for path in args.directory.glob("*.safetensors"))
    print(f"{args.directory}: {args.shape}, {size / 2**30:.2f} GiB")


def write(shape: str, directory: Path, *, dtype: str = "bfloat16", seed: int = 0, layers: int | None = None) -> None:
    """Write config, tokenizer and weights of a random model of this shape, with so many `layers`."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    config = {**BASE, **SHAPES[shape], "eos_token_id": 2, "torch_dtype": dtype}
    config |= {"num_hidden_layers": layers} if layers else {}
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    shapes = {name: array.shape for name, array in tree_flatten(module.Model(module.ModelArgs.from_dict(config)).parameters())}
    mx.random.seed(seed)
    kind = getattr(mx, dtype)
    directory.mkdir(parents=True, exist_ok=True)
    save(
        directory,
        {
            name: mx.ones(size, dtype=kind) if len(size) == 1 else mx.random.normal(size, dtype=kind, scale=0.02)
            for name, size in shapes.items()
        },
    )
    _tokenizer(directory, config)
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def _tokenizer(directory: Path, config: dict[str, Any]) -> None:
    """The tests' byte-level tokenizer and made-up words, so that every id of the vocabulary has a text."""
    write_tokenizer(directory, BYTES_AND_PAIRS)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    made_up = range(BYTES_AND_PAIRS + len(JUDGMENTS), config["vocab_size"])
    tokenizer["model"]["vocab"] |= {f"Ġw{i}": i for i in made_up}
    plain = dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] += [{"id": BYTES_AND_PAIRS + i, "content": word, **plain} for i, word in enumerate(JUDGMENTS)]
    path.write_text(json.dumps(tokenizer))
    path = directory / "tokenizer_config.json"
    settings = {**json.loads(path.read_text()), "model_max_length": config["max_position_embeddings"]}
    path.write_text(json.dumps(settings, indent=2))


if __name__ == "__main__":
    main()
