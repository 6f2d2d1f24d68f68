"""Preloading of a fast BLAS library in place of the slow reference BLAS that MLX's Linux CPU build links to.

Symbols of a library loaded with RTLD_GLOBAL before MLX take precedence over those of MLX's own library. float32 products
then run 20 to 90 times as fast (docs/performance.md).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import glob
import sys
from pathlib import Path

from tandem.errors import ConfigError

CANDIDATES = ("libopenblas.so.0", "libopenblasp.so.0", "libmkl_rt.so.2", "libblis.so.4")


@functools.cache
def preload_blas(choice: str) -> str | None:
    """Load the BLAS library `choice` (`auto`, `none`, or a path); return its name, or None if none was loaded. Cached.

    Call before mlx is imported. Does nothing outside Linux: MLX uses Accelerate on macOS. Raises ConfigError when an
    explicit path cannot be loaded or mlx is already imported.
    """
    if choice == "none" or sys.platform != "linux":
        return None
    if "mlx.core" in sys.modules:
        if choice == "auto":
            return None
        raise ConfigError("--blas: MLX is loaded already; set it before anything imports mlx", param="blas")
    candidates = (*CANDIDATES, *glob.glob(str(Path(sys.prefix) / "lib" / "libmkl_rt.so.*")))
    for name in candidates if choice == "auto" else (choice,):
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
            return name
        except OSError as error:
            if choice != "auto":
                raise ConfigError(f"--blas {choice}: {error}; give auto, none or a library's path", param="blas") from error
    return None


def limit_threads(library: str | None, threads: int) -> None:
    """Set the number of threads of a library loaded by `preload_blas`; OpenBLAS only, a no-op for others."""
    if library is not None and hasattr(loaded := ctypes.CDLL(library), "openblas_set_num_threads"):
        loaded.openblas_set_num_threads(threads)
