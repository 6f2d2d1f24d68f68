"""What a rank does not import, and what it computes itself instead."""

from __future__ import annotations

import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import infer_quant_config

from tandem.errors import BrokenModel
from tandem.loading.weights import _found_quantization

RANK = """
import sys
from tandem.loading.mlx_lm_models import import_models_only
import_models_only()
import tandem.executors.assembly, importlib
from tandem.models.families.table import FAMILIES, module_of
for family in FAMILIES:
    importlib.import_module(f"mlx_lm.models.{module_of(family)}")
print(sorted({"transformers", "mlx_lm.utils", "torch"} & set(sys.modules)))
"""


def test_a_rank_imports_no_transformers() -> None:
    run = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True, timeout=240, check=False)
    assert (run.stdout, run.stderr) == ("[]\n", "")


@pytest.mark.parametrize("command", ["serve", "parity"])
def test_the_supervisor_imports_no_web_server_and_parity_mlx_only_after_the_blas(command: str) -> None:
    heavy = "{'fastapi', 'uvicorn', 'mlx.core', 'transformers'}"
    code = f"import sys, tandem.cli.{command}; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert (run.stdout, run.stderr) == ("[]\n", "")


@pytest.mark.parametrize("module", ["tandem.server.api_process", "tandem.supervision.engines", "tandem.planner.plan"])
def test_what_serves_and_supervises_imports_no_mlx(module: str) -> None:
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", f"import {module}"], capture_output=True, text=True, check=True
    )
    names = [line.rsplit("|", 1)[1].strip() for line in run.stderr.splitlines()]
    assert module in names and [name for name in names if name.split(".")[0] in ("mlx", "mlx_lm")] == []


@pytest.mark.parametrize(
    ("bits", "size", "mode"),
    [
        (2, 64, "affine"),
        (3, 32, "affine"),
        (4, 64, "affine"),
        (6, 128, "affine"),
        (8, 32, "affine"),
        (4, 16, "nvfp4"),
        (4, 32, "mxfp4"),
        (8, 32, "mxfp8"),
    ],
)
def test_quantisation_is_found_as_mlx_lm_finds_it(bits: int, size: int, mode: str) -> None:
    layer = nn.Linear(256, 64, bias=False)
    weight, scales, *_ = mx.quantize(layer.weight, group_size=size, bits=bits, mode=mode)
    weights = {"part.w.weight": weight, "part.w.scales": scales}
    found = _found_quantization("part.w", layer, weights)
    assert found == infer_quant_config("part.w", layer, weights)
    assert found == {"bits": bits, "group_size": size, "mode": mode}


def test_quantisation_that_there_is_not_is_refused() -> None:
    layer = nn.Linear(256, 64, bias=False)
    weights = {"w.weight": mx.zeros((64, 32), mx.uint32), "w.scales": mx.zeros((64, 4), mx.uint8)}
    with pytest.raises(BrokenModel, match="w: no quantisation has 4 bits and groups of 64"):
        _found_quantization("w", layer, weights)
