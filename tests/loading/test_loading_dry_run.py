"""Architectures without a row are tried before they are served: what passes, what is refused, and with which words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Literal

import mlx.core as mx
import pytest

from tandem.checkpoints.resolve import resolve
from tandem.cli.main import main
from tandem.config.settings import ModelSettings, ParallelSettings, Settings
from tandem.engine.build_layout import plan_layout
from tandem.errors import ConfigError, UnsupportedModel
from tandem.loading import dry_run
from tandem.models.description import describe
from tandem.models.dry_run import require_dry_run
from tandem.models.families.shrink import shrunk
from tandem.models.families.table import ALIASES, FAMILIES, family_of, module_of
from tandem.processes.sandbox import EXIT_MEMORY
from tandem.testing import tiny_config, tiny_model

UNLISTED = {**tiny_config("llama", vocab=300), "model_type": "iquestcoder"}
"""A type that mlx-lm runs with another one's module."""


@pytest.mark.slow
def test_published_widths_are_cut_down() -> None:
    """DeepSeek V3's config: what is tried has a thousandth of its weights and every part of it."""
    config = {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 163840,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "quantization_config": {"quant_method": "fp8"},
    }
    small = next(shrunk(config))
    assert small["num_attention_heads"] == small["num_key_value_heads"] == 4 and small["hidden_size"] == 224
    assert (small["num_hidden_layers"], small["n_routed_experts"], small["num_experts_per_tok"]) == (8, 8, 2)
    assert small["kv_lora_rank"] == 512 and "quantization_config" not in small
    assert dry_run.try_config(config).endswith("agree with mlx-lm in all bits")


def test_a_stage_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    head = dry_run.PipelineModel.head
    monkeypatch.setattr(dry_run.PipelineModel, "head", lambda pipeline_model, h: head(pipeline_model, h) + mx.array(0.5))
    with pytest.raises(UnsupportedModel, match="over 1 stages the logits of call 1 differ from mlx-lm's by 0.5"):
        dry_run.try_config(tiny_config("llama"))


def test_a_stage_that_cannot_have_two_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that calls share: the embedding keeps the last tokens of one row in them, and the head meets two."""
    monkeypatch.setattr(dry_run.PipelineModel, "_elsewhere", lambda pipeline_model, index, caches: pipeline_model._made[index])
    assert dry_run.outcome(tiny_config("longcat_flash_ngram"))[0] is False
    monkeypatch.undo()
    head = dry_run.PipelineModel.head
    monkeypatch.setattr(
        dry_run.PipelineModel, "head", lambda pipeline_model, h: head(pipeline_model, mx.broadcast_to(h[:1], h.shape))
    )
    with pytest.raises(UnsupportedModel, match="over 1 stages the logits of 2 rows at once differ in call 1"):
        dry_run.try_config(tiny_config("llama"))


@pytest.mark.slow
def test_an_unlisted_type_is_tried_in_a_process_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tiny_model(tmp_path / "unlisted", vocab=300, settings=UNLISTED)
    description = describe(resolve(str(path)))
    assert description.family not in FAMILIES and family_of(description.family).one_by_one
    require_dry_run(path, description)
    assert "iquestcoder: unlisted architecture, parity checked: 4 layers" in caplog.text
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text(json.dumps({**UNLISTED, "num_attention_heads": "two"}))
    with pytest.raises(UnsupportedModel, match="its trial failed: "):
        require_dry_run(tmp_path / "broken", description)


def test_a_trial_that_takes_much_memory_is_ended(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(UNLISTED))
    program = "from tandem.loading import dry_run; dry_run.MOST_BYTES = 10**6; dry_run.tried(__import__('sys').argv[1])"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert done.stdout == "it takes more than 0.001 GB, cut down as it is\n"
    assert done.returncode == EXIT_MEMORY


def test_what_mlx_says_in_many_lines_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="makes no model: uniform") as found:
        dry_run.try_config({**UNLISTED, "head_dim": 10**30})
    assert "\n" not in found.value.message


@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_drafts_that_cannot_be_taken_back_are_refused_before_anything_is_loaded(
    tmp_path: Path, method: Literal["ngram", "mtp"]
) -> None:
    from tandem.config.settings import SpeculationSettings

    settings = Settings(
        model=ModelSettings(model=str(tiny_model(tmp_path, "longcat_flash_ngram"))),
        parallel=ParallelSettings(),
        speculation=SpeculationSettings(speculative_method=method),
    )
    with pytest.raises(ConfigError, match="longcat_flash_ngram takes no drafts: its n-grams are looked up"):
        plan_layout(settings)


def test_a_model_that_sees_is_served_as_text_and_this_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {**tiny_config("gemma3n"), "vision_config": {"depth": 2}}
    path = tiny_model(tmp_path / "seeing", settings=config)
    plan_layout(Settings(model=ModelSettings(model=str(path)), parallel=ParallelSettings()))
    assert "seeing: its text model alone is served, vision left out" in caplog.text


def test_types_can_be_tried_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "--tiny", "qwen3_next"]) == 0
    assert "PASS qwen3_next: 4 layers" in capsys.readouterr().out
    assert main(["parity", "--tiny", "nothing"]) == 2
    assert "neither a directory" in capsys.readouterr().err
    assert main(["parity", "--tiny", "lfm2_vl"]) == 2 and "did you mean lfm2-vl?" in capsys.readouterr().err
    assert main(["parity", "--tiny", "afm7"]) == 2 and "because its last layers" in capsys.readouterr().err


def test_modules_are_named_as_mlx_lm_names_them() -> None:
    from mlx_lm.utils import MODEL_REMAPPING

    assert {name: module_of(name) for name in MODEL_REMAPPING} == MODEL_REMAPPING
    assert not ALIASES.keys() & FAMILIES.keys()
