"""Route POST /v1/embeddings."""

from __future__ import annotations

import base64

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.errors import RequestError, invalid
from tandem.models.pooling import unit_vector
from tandem.protocol.control import EngineStatus
from tandem.server.acquire import acquire
from tandem.server.body import parse
from tandem.server.chats.request_texts import RequestTexts
from tandem.server.chats.texts import off_loop
from tandem.server.context import get_api
from tandem.server.engines.served_model import Served
from tandem.server.generation import Prompts
from tandem.server.openai.completions import encode_prompts
from tandem.server.openai.schemas import MAX_INPUTS, EmbeddingRequest
from tandem.server.openapi import documented
from tandem.server.sse import encode_json

router = APIRouter()


@router.post("/v1/embeddings", openapi_extra=documented(EmbeddingRequest))
async def embeddings(http: Request) -> Response:
    """Return an embedding, normalized to length 1, for each input."""
    fields = await parse(http, EmbeddingRequest)
    served = await acquire(http, fields.model)
    vectors, inputs = await embed(http, served, fields)
    return Response(
        await off_loop(len(vectors) > 16, lambda: _body(fields, vectors, inputs, served.name)), media_type="application/json"
    )


async def embed(http: Request, served: Served, fields: EmbeddingRequest) -> tuple[list[bytes], list[list[int]]]:
    """Return the pooled hidden state and the token ids of each input. Raises RequestError."""
    status = served.status()
    _check(fields, status)
    inputs = await encode_prompts(await RequestTexts.of(http, served), fields.input, "input", closed=True)
    window = get_api(http).settings.server.max_choices
    prompts = Prompts(http, served, "embd", inputs, timeout=fields.timeout, pooling=status.pooling, window=window)
    return [output.vector for output in await prompts.outputs()], inputs


def _check(fields: EmbeddingRequest, status: EngineStatus) -> None:
    """Check pooling, dimensions and inputs against the model, before tokenizing. Raises RequestError."""
    if status.pooling is None:
        raise RequestError(
            "This model's files ask for a way of pooling that is not supported; start the server with "
            "--pooling last or --pooling mean.",
            param="model",
            code="embeddings_unsupported",
        )
    if fields.dimensions is not None and fields.dimensions > status.hidden_size:
        raise invalid(
            "dimensions", f"Invalid 'dimensions': {fields.dimensions} is more than the {status.hidden_size} of this model."
        )
    if len(fields.input) > MAX_INPUTS:
        raise invalid("input", f"At most {MAX_INPUTS} inputs in one request, not {len(fields.input)}.")
    if "" in fields.input:
        raise invalid("input", "'input' cannot be an empty string.")


def _body(fields: EmbeddingRequest, vectors: list[bytes], inputs: list[list[int]], model: str) -> bytes:
    data = []
    for index, vector in enumerate(vectors):
        unit = unit_vector(vector, fields.dimensions)
        packed = fields.encoding_format == "base64"
        data.append(
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(unit.tobytes()).decode() if packed else unit.tolist(),
            }
        )
    tokens = sum(map(len, inputs))
    return encode_json(
        {"object": "list", "data": data, "model": model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    )
