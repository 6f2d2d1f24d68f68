"""mlx-lm's model code without the rest of it.

The package's `__init__` imports transformers for its tokenizers and generation: more than a second of processor time,
which every start and every recovery would wait for in each rank, and none of it is used there.
"""

from __future__ import annotations

import importlib.util
import sys

FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that mlx-lm's models raise where a config's entries make no sense."""


def import_models_only() -> None:
    """From now on `mlx_lm` has its submodules and nothing else; for a process that is ours. No effect if it is imported
    already.
    """
    spec = importlib.util.find_spec("mlx_lm") if "mlx_lm" not in sys.modules else None
    if spec is not None:
        sys.modules["mlx_lm"] = importlib.util.module_from_spec(spec)
