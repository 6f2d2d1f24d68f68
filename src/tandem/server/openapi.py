"""OpenAPI descriptions of request bodies and errors, which FastAPI cannot derive: routes parse and answer by hand."""

from __future__ import annotations

from typing import Literal

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tandem.json_types import JsonObject

SCHEMAS = "#/components/schemas/{model}"


class ErrorObject(BaseModel, extra="forbid"):
    """Fields of an error in OpenAI's shape."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel, extra="forbid"):
    """Error in OpenAI's shape."""

    error: ErrorObject


class AnthropicErrorObject(BaseModel, extra="forbid"):
    """Fields of an error in Anthropic's shape."""

    type: str
    message: str


class AnthropicError(BaseModel, extra="forbid"):
    """Error in Anthropic's shape."""

    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str | None = None


class OllamaError(BaseModel, extra="forbid"):
    """Error in Ollama's shape."""

    error: str


_described: list[type[BaseModel]] = [Error, AnthropicError, OllamaError]


def documented(model: type[BaseModel], *, streams: bool = False, stream_type: str = "text/event-stream") -> JsonObject:
    """Return the `openapi_extra` of a route whose JSON body is `model`; `streams`: it may answer with a stream."""
    _described.append(model)
    extra: JsonObject = {"requestBody": {"required": True, "content": _json(model)}}
    if streams:
        extra["responses"] = {"200": {"content": {stream_type: {"schema": {"type": "string"}}}}}
    return extra


def failures(model: type[BaseModel]) -> dict[int | str, JsonObject]:
    """Return the `responses` of routes whose error bodies are of type `model`."""
    return {
        "4XX": {"description": "The request is at fault; the message says how.", "content": _json(model)},
        "5XX": {"description": "The server is at fault, or cannot answer now.", "content": _json(model)},
    }


def _json(model: type[BaseModel]) -> JsonObject:
    return {"application/json": {"schema": {"$ref": SCHEMAS.format(model=model.__name__)}}}


class TandemApp(FastAPI):
    """FastAPI application whose OpenAPI description includes the schemas of `documented` and `failures`."""

    def openapi(self) -> JsonObject:
        """Return the OpenAPI description of all routes."""
        if self.openapi_schema is None:
            schemas = super().openapi().setdefault("components", {}).setdefault("schemas", {})
            _, definitions = models_json_schema(
                [(model, "validation") for model in dict.fromkeys(_described)], ref_template=SCHEMAS
            )
            schemas.update(definitions["$defs"])
        assert self.openapi_schema is not None
        return self.openapi_schema
