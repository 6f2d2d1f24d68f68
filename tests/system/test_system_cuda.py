"""What ranks that wait for one another tell CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.env import variable
from tandem.system.cuda import MODULE_LOADING, prepare_cuda, uses_cuda


def test_kernels_are_loaded_at_once_unless_somebody_has_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MODULE_LOADING, raising=False)
    prepare_cuda()
    assert variable(MODULE_LOADING) == "EAGER"
    monkeypatch.setenv(MODULE_LOADING, "LAZY")
    prepare_cuda()
    assert variable(MODULE_LOADING) == "LAZY"


def test_cuda_is_used_if_its_mlx_is_installed_and_ranks_are_not_told_to_leave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not uses_cuda("auto")  # tests run on the MLX for CPUs
    (tmp_path / "mlx_cuda_13-0.32.4.dist-info").mkdir()
    (tmp_path / "mlx_cuda_13-0.32.4.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-cuda-13\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert uses_cuda("auto") and uses_cuda("gpu") and not uses_cuda("cpu")
