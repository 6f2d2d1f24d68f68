"""vLLM plugin: `vllm serve` schedules and serves; Tandem's models, channels and runner compute on MLX.

These entry points must be cheap and must not import mlx: a worker first loads a fast BLAS.
"""

from __future__ import annotations

import platform
import sys
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from tandem.env import set_default, variable
from tandem.errors import UsageError

PLATFORM = "tandem.vllm_plugin.platform.TandemPlatform"


def applies() -> bool:
    """True if vLLM should compute with Tandem in this process.

    TANDEM_VLLM=1 or 0 decides. Otherwise MLX must be installed, on an Apple-silicon Mac or beside a vLLM without kernels.
    Variables alone do not suffice: processes that Ray starts get the driver's environment too late.
    """
    choice = variable("TANDEM_VLLM")
    if choice is not None:
        return choice not in ("0", "false", "no")
    if find_spec("mlx") is None:
        return False
    if sys.platform == "darwin":
        return platform.machine() == "arm64"
    return find_spec("vllm._C") is None


def register() -> str | None:
    """Return the platform class for `vllm.platform_plugins`; None if Tandem does not apply."""
    if not applies():
        return None
    # Allows vLLM to schedule ahead under pipeline parallelism (compat.py).
    set_default("VLLM_USE_V2_MODEL_RUNNER", "1")
    if sys.platform == "darwin":
        # Objective-C does not survive a fork.
        set_default("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    return PLATFORM


def say_shortly() -> None:
    """Make `vllm serve` print usage errors as one line, like `tandem serve`."""
    if Path(sys.argv[0]).name != "vllm" or sys.excepthook is _one_line:
        return
    sys.excepthook = _one_line


def _one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, UsageError):
        sys.stderr.write(f"vllm: {error.message}\n")
    else:
        sys.__excepthook__(kind, error, trace)


def require_platform() -> None:
    """Patch vLLM and check its choice of platform, for `vllm.general_plugins`, which every vLLM process calls.

    Raises RuntimeError if Tandem applies and vLLM uses another platform; vLLM itself logs the reason only at DEBUG.
    """
    if not applies():
        return
    from vllm.platforms import current_platform

    from tandem.vllm_plugin.compat import apply

    if f"{type(current_platform).__module__}.{type(current_platform).__name__}" == PLATFORM:
        apply()
        say_shortly()
        return
    why = "VLLM_TARGET_DEVICE=cpu makes vLLM ignore platform plugins; unset it"
    if variable("VLLM_TARGET_DEVICE") != "cpu":
        why = "look for 'Platform plugin tandem failed' in its log at VLLM_LOGGING_LEVEL=DEBUG"
    raise RuntimeError(
        f"vLLM has chosen {type(current_platform).__name__} and not Tandem's platform: {why}, or set "
        "TANDEM_VLLM=0 to do without Tandem"
    )
