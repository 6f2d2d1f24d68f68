"""A fast linear algebra library in front of the slow reference one that MLX's Linux CPU build is linked to.

Symbols of a library loaded with RTLD_GLOBAL before MLX win over those of the one that MLX brings along. float32
products then run 20 to 90 times as fast (docs/performance.md).
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
    """Load `choice` (`auto`, `none`, or a path) and return what was loaded, None for nothing. Later calls say the same.

    Call before mlx is imported; on anything but Linux it does nothing, since MLX uses Accelerate there. Raises
    ConfigError when a path that was asked for cannot be loaded or MLX is there already.
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
    """Set the threads of a library that `preload_blas` loaded; only OpenBLAS has a known call for it."""
    if library is not None and hasattr(loaded := ctypes.CDLL(library), "openblas_set_num_threads"):
        loaded.openblas_set_num_threads(threads)
