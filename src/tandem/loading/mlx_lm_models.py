"""Import of mlx-lm's model code without the rest of the package.

The package's `__init__` imports transformers for tokenizers and generation. That takes more than a second of CPU time
per rank at every start and recovery, and ranks use none of it.
"""

from __future__ import annotations

import importlib.util
import sys

FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that models raise for configs with invalid entries."""


def import_models_only() -> None:
    """Replace `mlx_lm` in `sys.modules` with an empty package, whose submodules still import. For Tandem's own
    processes. No effect if it is already imported."""
    spec = importlib.util.find_spec("mlx_lm") if "mlx_lm" not in sys.modules else None
    if spec is not None:
        sys.modules["mlx_lm"] = importlib.util.module_from_spec(spec)
