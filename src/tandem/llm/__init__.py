"""The Python API: an engine inside a program, without a server."""

from __future__ import annotations

from tandem.llm.llm import LLM, AsyncLLM
from tandem.llm.session import RequestOutput

__all__ = ["LLM", "AsyncLLM", "RequestOutput"]
