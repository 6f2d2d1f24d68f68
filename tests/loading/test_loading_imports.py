"""What a rank computes itself, since it does not import what others have for it."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import infer_quant_config

from tandem.errors import BrokenModel
from tandem.loading.weights import _found_quantization


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
