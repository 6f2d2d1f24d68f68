"""Request bodies and errors in the OpenAPI description: routes parse and answer by hand, so FastAPI sees neither."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from tandem.server.failures import ANTHROPIC_PATH

_ERROR = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "additionalProperties": False,
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "additionalProperties": False,
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def documented(model: type[BaseModel], *, streams: bool = False) -> dict[str, Any]:
    """`openapi_extra` of a route that takes `model` as its JSON body; `streams`: and may answer with events."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    if streams:
        extra["responses"] = {"200": {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
    return extra


def _failure(description: str, path: str) -> dict[str, Any]:
    name = "AnthropicError" if path.startswith(ANTHROPIC_PATH) else "Error"
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


class TandemApp(FastAPI):
    """FastAPI whose description gathers the nested schemas of bodies where references look for them."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI description of all routes."""
        if self.openapi_schema is not None:
            return self.openapi_schema
        schema = super().openapi()
        shared = schema.setdefault("components", {}).setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, which never happens here
            shared.pop(name, None)
        shared["Error"] = _ERROR
        shared["AnthropicError"] = _ANTHROPIC_ERROR
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                operation["responses"]["4XX"] = _failure("The request is at fault; the message says how.", path)
                operation["responses"]["5XX"] = _failure("The server is at fault, or cannot answer now.", path)
                content = operation.get("requestBody", {}).get("content", {})
                body = content.get("application/json", {}).get("schema", {})
                shared.update(body.pop("$defs", {}))
        return schema
