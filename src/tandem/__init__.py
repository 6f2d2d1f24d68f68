"""Tandem: serves one large language model over several machines, on MLX."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tandem.version import __version__

if TYPE_CHECKING:
    from tandem.llm import LLM, AsyncLLM, RequestOutput
    from tandem.protocol.request import SamplingParams, StructuredOutputs

__all__ = ["LLM", "AsyncLLM", "RequestOutput", "SamplingParams", "StructuredOutputs", "__version__"]

_LAZY = {
    "AsyncLLM": "tandem.llm",
    "LLM": "tandem.llm",
    "RequestOutput": "tandem.llm",
    "SamplingParams": "tandem.protocol.request",
    "StructuredOutputs": "tandem.protocol.request",
}


def __getattr__(name: str) -> object:
    # Importing the package must stay cheap: every process imports it, and most need little of it.
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
