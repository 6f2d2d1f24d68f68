"""Request bodies in the OpenAPI description: routes parse them by hand, so FastAPI does not see them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel


def documented(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that takes `model` as its JSON body."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


class TandemApp(FastAPI):
    """FastAPI whose description gathers the nested schemas of bodies where references look for them."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI description of all routes."""
        schema = super().openapi()
        shared = schema.setdefault("components", {}).setdefault("schemas", {})
        for operations in schema["paths"].values():
            for operation in operations.values():
                content = operation.get("requestBody", {}).get("content", {})
                body = content.get("application/json", {}).get("schema", {})
                shared.update(body.pop("$defs", {}))
        return schema
