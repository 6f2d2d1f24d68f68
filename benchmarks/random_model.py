"""Write a model directory with random weights, for speed alone: `random_model.py qwen3-8b DIRECTORY`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from plain_copy import save

from tandem.testing import write_tokenizer

BASE = {"rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "tie_word_embeddings": False, "max_position_embeddings": 32768}
_HYBRID = {
    **{"model_type": "qwen3_next", "num_experts": 0, "num_experts_per_tok": 1, "decoder_sparse_step": 1, "mlp_only_layers": []},
    **{"moe_intermediate_size": 0, "shared_expert_intermediate_size": 0, "partial_rotary_factor": 0.25},
    **{"linear_conv_kernel_dim": 4, "full_attention_interval": 4, "tie_word_embeddings": True},
}
"""Three layers of four with recurrent states, no experts."""
SHAPES: dict[str, dict[str, Any]] = {
    "hybrid-1b": {
        **_HYBRID,
        **{"hidden_size": 1536, "num_hidden_layers": 24, "intermediate_size": 4608, "vocab_size": 151936},
        **{"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 256},
        **{"linear_num_value_heads": 16, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    },
    "hybrid-tiny": {
        **_HYBRID,
        **{"hidden_size": 128, "num_hidden_layers": 8, "intermediate_size": 256, "vocab_size": 1024},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    },
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
    "llama-45m": {
        "model_type": "llama",
        "hidden_size": 512,
        "num_hidden_layers": 12,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 8192,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
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
_TOWER = {
    **{"in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
    **{"num_position_embeddings": 2304, "hidden_act": "gelu_pytorch_tanh", "model_type": "qwen3_vl"},
}
SEEING: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-vl-8b": (
        "qwen3-8b",
        {
            **{"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096},
            "deepstack_visual_indexes": [8, 16, 24],
        },
    ),
    "qwen3-vl-tiny": (
        "tiny",
        {
            **{"depth": 4, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 64},
            "deepstack_visual_indexes": [0, 1, 2],
        },
    ),
}
"""Models that see (they need the extra `vision`): the shape of their text model, and their vision tower."""
PIXELS = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
"""Fewest and most pixels of a picture for the tower; others are resized."""
BYTES_AND_PAIRS = 512
"""Vocabulary entries that the test tokenizer makes sense of; the others are made up."""
JUDGMENTS = ("yes", "no")
"""First two of the others: the answers of rerankers."""
PICTURES = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Next ones, of models that see."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("shape", choices=sorted({**SHAPES, **SEEING}), help="which model to resemble")
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

    text, tower = SEEING.get(shape, (shape, {}))
    config = {**BASE, **SHAPES[text], "eos_token_id": 2, "torch_dtype": dtype}
    config |= {"num_hidden_layers": layers} if layers else {}
    if tower:
        config, model = _seeing(config, tower)
    else:
        module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
        model = module.Model(module.ModelArgs.from_dict(config))
    shapes = {name: array.shape for name, array in tree_flatten(model.parameters())}
    mx.random.seed(seed)
    kind = getattr(mx, dtype)
    directory.mkdir(parents=True, exist_ok=True)
    save(
        directory,
        {
            name: mx.full(size, float(not name.endswith("bias")), kind)
            if len(size) == 1
            else mx.random.normal(size, dtype=kind, scale=0.02)
            for name, size in shapes.items()
        },
    )
    _tokenizer(directory, config)
    if tower:
        _processor(directory, tower)
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def _seeing(config: dict[str, Any], tower: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the config of a model that sees, whose text model has this `config`, and the model."""
    from tandem.loading.text_tower import build_whole

    text = {**config, "model_type": "qwen3_vl_text", "rope_theta": 5e6}
    side = text["head_dim"] * 20 // 128
    text["rope_scaling"] = {"rope_type": "default", "mrope_section": [text["head_dim"] // 2 - 2 * side, side, side]}
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    whole = {
        **{key: config[key] for key in ("eos_token_id", "torch_dtype", "vocab_size", "tie_word_embeddings")},
        **{"model_type": "qwen3_vl", "text_config": text, "vision_config": {**_TOWER, **tower}},
        **{name: BYTES_AND_PAIRS + len(JUDGMENTS) + number for number, name in enumerate(names)},
    }
    return whole, build_whole(whole, "qwen3_vl")


def _processor(directory: Path, tower: dict[str, Any]) -> None:
    """Settings of the processor of pictures, as published ones have them."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))  # for the chat template
    from processors import QWEN

    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": QWEN}, indent=2))
    settings = {"image_processor_type": "Qwen2VLImageProcessorFast", "size": PIXELS, "patch_size": _TOWER["patch_size"]}
    settings |= {"merge_size": _TOWER["spatial_merge_size"], "temporal_patch_size": _TOWER["temporal_patch_size"]}
    settings |= dict.fromkeys(("image_mean", "image_std"), [0.5, 0.5, 0.5])
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))


def _tokenizer(directory: Path, config: dict[str, Any]) -> None:
    """The tests' byte-level tokenizer and made-up words, so that every id of the vocabulary has a text."""
    write_tokenizer(directory, BYTES_AND_PAIRS)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    sees = "vision_config" in config
    words = dict.fromkeys(JUDGMENTS, False) | (dict.fromkeys(PICTURES, True) if sees else {})
    text = config.get("text_config", config)
    made_up = range(BYTES_AND_PAIRS + len(words), text["vocab_size"])
    tokenizer["model"]["vocab"] |= {word: BYTES_AND_PAIRS + i for i, word in enumerate(words)} | {f"Ġw{i}": i for i in made_up}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] += [
        {"id": BYTES_AND_PAIRS + i, "content": word, "special": special, **plain}
        for i, (word, special) in enumerate(words.items())
    ]
    path.write_text(json.dumps(tokenizer))
    path = directory / "tokenizer_config.json"
    settings = {**json.loads(path.read_text()), "model_max_length": text["max_position_embeddings"]}
    path.write_text(json.dumps(settings, indent=2))


if __name__ == "__main__":
    main()
