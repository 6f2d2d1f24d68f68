"""Preloading of a fast BLAS library in place of the slow reference BLAS that MLX's Linux CPU build links to.

Symbols of a library loaded with RTLD_GLOBAL before MLX take precedence over those of MLX's own library. float32 products
then run 20 to 90 times as fast (docs/performance.md). An OpenBLAS that is older than the processor does not recognise it and
uses kernels without AVX; it is loaded again with better ones.
"""

from __future__ import annotations

import _ctypes
import ctypes
import ctypes.util
import functools
import glob
import logging
import sys
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

from tandem.env import set_default
from tandem.errors import ConfigError

log = logging.getLogger(__name__)

_FALLBACKS = frozenset(("Prescott", "Barcelona", "Nehalem"))
"""Kernels that OpenBLAS uses on x86 processors that it does not recognise."""
_KERNELS = (("SkylakeX", {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}), ("Haswell", {"avx2", "fma"}))
"""Names for OPENBLAS_CORETYPE, best first, and the processor flags that they need."""
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
            _load(name)
            return name
        except OSError as error:
            if choice != "auto":
                raise ConfigError(f"--blas {choice}: {error}; give auto, none or a library's path", param="blas") from error
    return None


def _load(name: str) -> None:
    """Load a library; an OpenBLAS a second time if it does not recognise the processor. OPENBLAS_CORETYPE takes precedence."""
    library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    if not hasattr(library, "openblas_get_corename"):
        return
    library.openblas_get_corename.restype = ctypes.c_char_p
    kernels = better_kernels(library.openblas_get_corename().decode(), cpu_flags())
    if kernels is not None:
        set_default("OPENBLAS_CORETYPE", kernels)
        _ctypes.dlclose(library._handle)  # the variable is read when the library is loaded
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        log.info("OpenBLAS does not recognise this processor: loading it again with %s kernels", kernels)


def better_kernels(core: str, flags: Set[str]) -> str | None:
    """Return the name of OpenBLAS kernels for a processor with these flags, if `core` is a fallback; None to change nothing."""
    if core not in _FALLBACKS:
        return None
    return next((name for name, needed in _KERNELS if needed <= flags), None)


def cpu_flags() -> Set[str]:
    """Return the first processor's flags; empty where Linux names none (ARM)."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        return set(next((line for line in lines if line.startswith("flags")), "").split())
    return set()


def limit_threads(library: str | None, threads: int) -> None:
    """Set the number of threads of a library loaded by `preload_blas`; OpenBLAS only, a no-op for others."""
    if library is not None and hasattr(loaded := ctypes.CDLL(library), "openblas_set_num_threads"):
        loaded.openblas_set_num_threads(threads)
