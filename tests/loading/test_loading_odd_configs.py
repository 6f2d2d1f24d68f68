"""Entries of config.json with which mlx-lm's model cannot be made or called: one line that says what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoints.resolve import resolve
from tandem.errors import UsageError
from tandem.loading.stage import load_stage
from tandem.models.description import describe
from tandem.testing import tiny_model


@pytest.mark.parametrize(
    ("family", "nested", "entry", "value", "said"),
    [
        ("deepseek_v3", False, "rope_theta", True, "config.json: does not describe a model: float division by zero"),
        ("deepseek_v3", False, "num_experts_per_tok", 0.5, "its forward pass fails: TypeError: argpartition"),
        ("qwen3_next", False, "linear_key_head_dim", 0, "its forward pass fails: ZeroDivisionError"),
        ("gemma4", True, "num_kv_shared_layers", -1, "gemma4 cannot run so: IndexError: list index out of range"),
        ("gemma4", True, "sliding_window", 0, "its forward pass fails with 256 tokens: ValueError: [broadcast_shapes]"),
        ("mimo_v2_flash", False, "sliding_window_size", 0.5, "layers 0 to 3 do not run without the others: std::bad_cast"),
    ],
)
def test_what_mlx_lm_cannot_make_or_call(family: str, nested: bool, entry: str, value: Any, said: str, tmp_path: Path) -> None:
    path = tiny_model(tmp_path, family)
    config = json.loads((path / "config.json").read_text())
    (config["text_config"] if nested else config)[entry] = value
    (path / "config.json").write_text(json.dumps(config))
    files = resolve(str(path))
    description = describe(files)
    with pytest.raises(UsageError) as found:
        _ = load_stage(files, description, range(description.num_layers), dtype="float32").cache_bytes
    assert said in found.value.message and "\n" not in found.value.message and len(found.value.message) < 500
