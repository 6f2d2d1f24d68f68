"""Models and layouts that cannot be: one line and code 2, of `serve` and of `plan`, before weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.main import main
from tandem.testing import tiny_config, tiny_model

HOSTS = ("--hosts", *(f"{name}=16GB:m3" for name in "abcdefgh"))
ANY = tuple[str, ...]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with models of several types."""
    path = tmp_path_factory.mktemp("models")
    for family in ("llama", "gemma4", "deepseek_v3", "plamo"):
        tiny_model(path / family, family)
    return path


def changed(models: Path, family: str, path: Path, **entries: Any) -> Path:
    """The model with other entries in its config.json."""
    path.mkdir()
    for file in (models / family).iterdir():
        (path / file.name).symlink_to(file)
    config = json.loads((models / family / "config.json").read_text())
    (path / "config.json").unlink()
    (path / "config.json").write_text(json.dumps({**config, **entries}))
    return path


def refused(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which a command ends; an engine, which reads weights, would log more."""
    assert main([*words, *(("--port", "0") if words[0] == "serve" else HOSTS)]) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"model_type": "gemma9"}, "model_type 'gemma9' is not supported (nearest is gemma"),
        ({"model_type": "talkie"}, "talkie is not supported: its output projection is stored as a bare parameter"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quantisation 'bitsandbytes' is not supported; use a model in MLX format, or convert one with `mlx_lm.convert`",
        ),
        (
            {"quantization": {"group_size": 64, "bits": 4, "model.layers.0.mlp.up_proj": {"mode": "x"}}},
            "quantization settings {'mode': 'x'} of model.layers.0.mlp.up_proj are not MLX's",
        ),
        ({"quantization_config": {"quant_method": "awq", "bits": "4\n"}}, "AWQ with 4 bits is not supported"),
    ],
    ids=["unknown type", "refused type", "unknown quantisation", "unknown mode of a layer", "bits in text"],
)
def test_what_config_json_says(
    entries: dict[str, Any], said: str, models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    odd = str(changed(models, "llama", tmp_path / "odd", **entries))
    line = refused(capfd, "plan", odd)
    assert said in line and len(line) < 300, "a list of all types is no message"
    if "quantization_config" in entries:
        assert said in refused(capfd, "serve", odd)


@pytest.mark.parametrize(
    ("family", "serve", "layout", "said"),
    [
        (
            "gemma4",
            ("-pp", "2", "--layer-split", "3,1"),
            "pp=2 layers=3,1",
            "no stage can begin at layer 3, since layers 2 to 3 share keys and values and stay in one stage; nearest is "
            "--layer-split 2,2",
        ),
        (
            "plamo",
            ("-tp", "2"),
            "tp=2",
            "plamo does not run tensor-parallel: its query heads take the key heads in turn, "
            "so that those of one key head do not stand together; use --pipeline-parallel-size 2",
        ),
        ("deepseek_v3", (), "tp=8", "more than the model's 4 kv heads; use at most 4"),
    ],
)
def test_how_a_family_cannot_be_cut(
    family: str, serve: ANY, layout: str, said: str, models: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capfd, "plan", str(models / family), "--layout", layout)
    if serve:
        assert said in refused(capfd, "serve", str(models / family), *serve)


@pytest.mark.slow
def test_a_type_that_fails_its_trial(models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = {**tiny_config("llama"), "model_type": "iquestcoder", "num_key_value_heads": 3}
    odd = changed(models, "llama", tmp_path / "odd", **config)
    assert "an unlisted architecture, and its trial failed: " in refused(capfd, "serve", str(odd))
