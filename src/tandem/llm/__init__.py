"""The Python API: an engine within a program, without a server."""

from __future__ import annotations

from tandem.llm.answer import RequestOutput
from tandem.llm.awaiting import AsyncLLM
from tandem.llm.blocking import LLM

__all__ = ["LLM", "AsyncLLM", "RequestOutput"]
