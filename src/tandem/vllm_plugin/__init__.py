"""vLLM on Tandem: `vllm serve` schedules and answers, our models, channels and runner compute, on MLX.

The entry points are here; they must be light, and must not import mlx: a worker first puts a fast BLAS in front of it.
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
    """True when vLLM should compute with Tandem here.

    TANDEM_VLLM=1 or 0 decides. Otherwise hardware and packages do, since a process that Ray starts sees the driver's
    environment too late: MLX is installed, and this is an Apple-silicon Mac, or vLLM has no kernels of its own.
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
    """`vllm.platform_plugins`: the platform's class, or None where it does not apply."""
    if not applies():
        return None
    # The scheduling contract that allows scheduling ahead under pipeline parallelism (compat.py).
    set_default("VLLM_USE_V2_MODEL_RUNNER", "1")
    if sys.platform == "darwin":
        # Objective-C does not survive a fork.
        set_default("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    return PLATFORM


def say_shortly() -> None:
    """Have `vllm serve` end with one line for usage errors, as `tandem serve` does."""
    if Path(sys.argv[0]).name != "vllm" or sys.excepthook is _one_line:
        return
    sys.excepthook = _one_line


def _one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, UsageError):
        sys.stderr.write(f"vllm: {error.message}\n")
    else:
        sys.__excepthook__(kind, error, trace)


def require_platform() -> None:
    """`vllm.general_plugins`, which every vLLM process calls: vLLM only logs, at DEBUG, why it passed a platform over.

    Raises RuntimeError where Tandem applies and another platform is in use.
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
