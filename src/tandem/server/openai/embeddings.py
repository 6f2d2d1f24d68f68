"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.errors import RequestError
from tandem.models.pooling import unit_vector
from tandem.protocol.control import EngineStatus
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.server.body import parse
from tandem.server.chats.fitting import too_long
from tandem.server.chats.request_texts import RequestTexts
from tandem.server.chats.texts import off_loop
from tandem.server.context import get_api, get_group
from tandem.server.engines.served_model import Served
from tandem.server.generation.lifetime import Running
from tandem.server.generation.model_wait import engage
from tandem.server.ids import new_id
from tandem.server.openai.completions import encode_prompts
from tandem.server.openai.sampling import check_token_ids
from tandem.server.openai.schemas import MAX_INPUTS, EmbeddingRequest
from tandem.server.openapi import documented
from tandem.server.sse import encode_json

router = APIRouter()


@router.post("/v1/embeddings", openapi_extra=documented(EmbeddingRequest))
async def embeddings(http: Request) -> Response:
    """One vector of length 1 for each input."""
    fields = await parse(http, EmbeddingRequest)
    served = await engage(http, fields.model)
    status = served.status()
    _check(fields, status)
    inputs = await _encode_all(await RequestTexts.of(http, served), fields.input)
    vectors = await Embedding(http, served, inputs, status, timeout=fields.timeout).vectors()
    return Response(await off_loop(len(vectors) > 16, lambda: _body(fields, vectors, inputs, status.model)),
                    media_type="application/json")


def _check(fields: EmbeddingRequest, status: EngineStatus) -> None:
    """What needs the model but no tokenizer. Raises RequestError."""
    if status.pooling is None:
        raise RequestError("This model's files ask for a way of pooling that is not supported; start the server with "
                           "--pooling last or --pooling mean.", param="model", code="embeddings_unsupported")
    if fields.dimensions is not None and fields.dimensions > status.hidden_size:
        raise RequestError(f"Invalid 'dimensions': {fields.dimensions} is more than the {status.hidden_size} of this "
                           "model.", param="dimensions", code="invalid_value")
    if len(fields.input) > MAX_INPUTS:
        raise RequestError(f"At most {MAX_INPUTS} inputs in one request, not {len(fields.input)}.", param="input",
                           code="invalid_value")
    if "" in fields.input:
        raise RequestError("'input' cannot be an empty string.", param="input", code="invalid_value")


async def _encode_all(texts: RequestTexts, inputs: list[Any]) -> list[list[int]]:
    """Token ids of every input; those that the client gave are checked. Raises RequestError."""
    encoded = await encode_prompts(texts, inputs, "input", closed=True)
    for tokens in encoded:
        if len(tokens) > texts.status.max_context:
            raise too_long(texts.status.max_context, "input", len(tokens))
        if not tokens:
            raise RequestError("'input' holds no tokens; give at least one.", param="input", code="invalid_value")
        check_token_ids(tokens, texts.status.vocab_size, "input")
    return encoded


def _body(fields: EmbeddingRequest, vectors: list[bytes], inputs: list[list[int]], model: str) -> bytes:
    data = []
    for index, vector in enumerate(vectors):
        unit = unit_vector(vector, fields.dimensions)
        packed = fields.encoding_format == "base64"
        data.append({"object": "embedding", "index": index,
                     "embedding": base64.b64encode(unit.tobytes()).decode() if packed else unit.tolist()})
    tokens = sum(map(len, inputs))
    return encode_json({"object": "list", "data": data, "model": model,
                        "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})


class Embedding(Running):
    """Inputs on their way to vectors: not all at once, so that a long list does not fill the engine's queue."""

    def __init__(self, http: Request, served: Served, inputs: Sequence[list[int]], status: EngineStatus, *,
                 timeout: float | None) -> None:
        """Submit the first. Raises UnavailableError, OverloadedError."""
        request_id, group = new_id("embd"), get_group(http)
        params = SamplingParams(max_tokens=0)
        requests = [EngineRequest(request_id=f"{request_id}-{index}", prompt=tokens, params=params, group=group,
                                  pooling=status.pooling) for index, tokens in enumerate(inputs)]
        self._window = self._sent = get_api(http).settings.server.max_choices
        self._requests = requests
        self._vectors: dict[str, bytes] = {}
        super().__init__(http, served, requests[:self._window], request_id=request_id, choices=len(requests),
                         prompt_tokens=sum(map(len, inputs)), stream=False, timeout=timeout)

    @property
    def done(self) -> bool:
        """True when all vectors are there."""
        return len(self._vectors) == len(self._requests)

    async def vectors(self) -> list[bytes]:
        """Pooled hidden states in the order of the inputs. Closes the request; raises RequestError."""
        try:
            while not self.done:
                for output in await self.subscription.get():
                    self._vectors[output.request_id] = output.vector
                if not self.done and len(self._vectors) == self._sent:
                    self._sent += self._window
                    self.go_on(self._requests[len(self._vectors):self._sent])
        finally:
            self.close()
        return [self._vectors[request.request_id] for request in self._requests]
