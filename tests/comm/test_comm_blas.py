"""Kernels of OpenBLAS on processors that it does not recognise."""

from __future__ import annotations

import subprocess
import sys
from ctypes.util import find_library

import pytest

from tandem.comm.blas import better_kernels, cpu_flags
from tandem.env import child_environment

AVX512 = {"avx2", "fma", "avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    ("core", "flags", "kernels"),
    [
        ("Prescott", AVX512, "SkylakeX"),
        ("Barcelona", AVX512 - {"avx512bw"}, "Haswell"),
        ("Prescott", {"sse2"}, None),
        ("Haswell", AVX512, None),
    ],
)
def test_only_a_fallback_is_replaced_by_what_the_processor_can(core: str, flags: set[str], kernels: str | None) -> None:
    assert better_kernels(core, flags) == kernels


CODE = """
import ctypes
from tandem.comm.blas import preload_blas
library = ctypes.CDLL(preload_blas("auto"))
library.openblas_get_corename.restype = ctypes.c_char_p
print(library.openblas_get_corename().decode())
"""


@pytest.mark.skipif(sys.platform != "linux" or not find_library("openblas"), reason="without OpenBLAS")
@pytest.mark.parametrize("given", [None, "Prescott"])
def test_openblas_runs_with_kernels_for_this_processor_unless_others_are_asked_for(given: str | None) -> None:
    environment = child_environment({"OPENBLAS_CORETYPE": given})
    core = subprocess.check_output([sys.executable, "-P", "-c", CODE], env=environment, text=True).strip()
    assert core == given if given else better_kernels(core, cpu_flags()) is None
