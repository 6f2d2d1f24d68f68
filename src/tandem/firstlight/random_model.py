"""The tiny random model that is served where there is no real one (mlx)."""

from __future__ import annotations

import json
from pathlib import Path

from tandem.testing import tiny_model

CONTEXT = 8192


def make(directory: Path) -> None:
    """Write it, unless it is there whole: its tokenizer's settings come last."""
    last = directory / "tokenizer_config.json"
    if last.exists():
        return
    tiny_model(directory, "llama", layers=4, dtype="float32",
               config={"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32,
                       "max_position_embeddings": CONTEXT})
    last.write_text(json.dumps({**json.loads(last.read_text()), "model_max_length": CONTEXT}, indent=2))
