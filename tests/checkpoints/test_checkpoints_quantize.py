"""`tandem model convert`: what it makes, once, and what it says of what it cannot make."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.checkpoints import quantize
from tandem.checkpoints.files import ModelFiles
from tandem.checkpoints.resolve import resolve
from tandem.cli import model as command
from tandem.cli.main import main
from tandem.cli.processes import _named
from tandem.config.loading import load
from tandem.models.description import describe
from tandem.testing import tiny_model


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "converted"


def test_a_model_is_converted_once_and_served_with_fewer_bits(cache, tmp_path, monkeypatch, capsys):
    path = tiny_model(tmp_path / "tiny")
    assert main(["model", "convert", str(path), "--quant", "mxfp4"]) == 0
    made = capsys.readouterr().out.strip()
    found = describe(resolve(made))
    assert (found.quantization["bits"], found.quantization["mode"], Path(made).parent) == (4, "mxfp4", cache)
    assert sum(found.layer_bytes) < 0.4 * sum(describe(resolve(str(path))).layer_bytes)
    monkeypatch.setattr(quantize.subprocess, "Popen", lambda *_, **__: pytest.fail("it is there"))
    assert main(["model", "convert", str(path), "--quant", "mxfp4"]) == 0
    assert capsys.readouterr().out.strip() == made
    served = _named(load({"model": [str(path)]}).settings, "mxfp4").model
    assert (served.model, served.served_name) == (made, ("tiny-mxfp4",)), "--quant of serve takes it too"
    monkeypatch.setattr("tandem.planner.hosts.this_device", lambda _: SimpleNamespace(memory_bytes=1 << 40))
    assert _named(load({"model": ["phi4"]}).settings, "4bit").model.model == "mlx-community/phi-4-4bit"
    asked = []
    monkeypatch.setattr(command, "resolve", lambda name, **_: asked.append(name) or ModelFiles(path, name))
    monkeypatch.setattr(command, "quantized", lambda files, quant, _: asked.append(quant) or Path(files.name))
    assert main(["model", "convert", "phi4", "--quant", "8bit"]) == 0
    assert asked == ["microsoft/phi-4", "8bit"], "a name means the published weights"


def test_what_cannot_be_converted_leaves_nothing(cache, tmp_path, monkeypatch, capsys):
    packed, path = tiny_model(tmp_path / "packed", quantized=True), tiny_model(tmp_path / "tiny")
    assert main(["model", "convert", str(packed)]) == 2
    assert "its weights are quantised; name the published ones" in capsys.readouterr().err
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "nobodys"}))
    assert main(["model", "convert", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "tiny: mlx-lm does not convert it: " in line and "nobodys" in line
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    assert main(["model", "convert", str(path)]) == 2
    assert "free space (`tandem model prune`) or set TANDEM_CACHE to another disk" in capsys.readouterr().err
    assert list(cache.iterdir()) == []
