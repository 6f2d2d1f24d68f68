"""The response object, but for its output."""

from __future__ import annotations

from typing import Any

from tandem.server.responses.schemas import ResponsesRequest

Json = dict[str, Any]


def empty_response(fields: ResponsesRequest, response_id: str, model: str, created: int, status: str) -> Json:
    """A response that has no output (yet); what was asked for stands in it, with the defaults."""
    form = fields.text.format if fields.text is not None else None
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        "background": bool(fields.background),
        "store": bool(fields.background),
        "previous_response_id": fields.previous_response_id or None,
        "truncation": "disabled",
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "reasoning": fields.reasoning.model_dump() if fields.reasoning is not None else None,
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
        "tool_choice": fields.tool_choice or "auto",
        "tools": [tool.model_dump() for tool in fields.tools or ()],
        "top_p": 1.0 if fields.top_p is None else fields.top_p,
    }
