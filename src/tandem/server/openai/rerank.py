"""Routes POST /v1/rerank and POST /v1/score: relevance of documents for a query, by decoders such as Qwen3-Reranker."""

from __future__ import annotations

import math
import struct

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.errors import RequestError, invalid
from tandem.json_types import JsonObject
from tandem.server.acquire import acquire
from tandem.server.body import parse
from tandem.server.chats.request_texts import RequestTexts
from tandem.server.context import get_api, head, new_id
from tandem.server.engines.served_model import Served
from tandem.server.generation import Prompts
from tandem.server.openai.schemas import JudgingFields, RerankRequest, ScoreRequest
from tandem.server.openapi import documented
from tandem.server.sse import json_response
from tandem.text.tokenizer import too_long

router = APIRouter()

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Task of a request without `instruction`, as Qwen3-Reranker was trained with."""
START = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
LABELS = ("yes", "no")


@router.post("/v1/rerank", openapi_extra=documented(RerankRequest))
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/rerank", include_in_schema=False)
async def rerank(http: Request) -> Response:
    """Sort documents by their relevance for a query, the most relevant first (Jina, Cohere, vLLM)."""
    fields = await parse(http, RerankRequest)
    pairs = [(fields.query, document) for document in fields.documents]
    model, scores, usage = await _judged(http, fields, pairs, "documents")
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: fields.top_n or None]
    results: list[JsonObject] = [{"index": index, "relevance_score": scores[index]} for index in best]
    if fields.return_documents is not False:
        for result in results:
            result["document"] = {"text": fields.documents[result["index"]]}
    return json_response({"id": new_id("rerank"), "model": model, "object": "list", "results": results, "usage": usage})


@router.post("/v1/score", openapi_extra=documented(ScoreRequest))
@router.post("/score", include_in_schema=False)
async def score(http: Request) -> Response:
    """Return the relevance of each text of `text_2` for `text_1`, or of pairs of both (vLLM)."""
    fields = await parse(http, ScoreRequest)
    queries, documents = fields.text_1, fields.text_2
    queries = queries * len(documents) if len(queries) == 1 else queries
    if len(queries) != len(documents):
        message = f"'text_1' has {len(queries)} texts and 'text_2' has {len(documents)}; give one, or as many as there."
        raise invalid("text_1", message)
    model, scores, usage = await _judged(http, fields, list(zip(queries, documents, strict=True)), "text_2")
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
    return json_response({**head("list", new_id("score"), model), "data": data, "usage": usage})


async def _judged(
    http: Request, fields: JudgingFields, pairs: list[tuple[str, str]], param: str
) -> tuple[str, list[float], JsonObject]:
    """Return the model's name, the probability of "yes" against "no" for each (query, document), and the usage."""
    served, api = await acquire(http, fields.model), get_api(http)
    status, texts = served.status(), await RequestTexts.of(http, served)
    start, end, *labels = await texts.encode([START, END, *LABELS], param, special=False)
    _check(served, able=texts.tokenizer.has_special("<|im_start|>") and all(len(label) == 1 for label in labels))
    if sum(len(query) + len(document) for query, document in pairs) > api.max_body:
        message = f"{len(pairs)} documents, each with its query, have more than {api.max_body} characters; send fewer at once."
        raise invalid(param, message)
    task = INSTRUCTION if fields.instruction is None else fields.instruction
    bodies = [f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}" for query, document in pairs]
    prompts = [[*start, *body, *end] for body in await texts.encode(bodies, param, special=False)]
    for index, prompt in enumerate(prompts):
        if len(prompt) > status.max_context:
            raise too_long(status.max_context, f"{param}[{index}]", len(prompt))
    ids = tuple(label for [label] in labels)
    how: JsonObject = {"pooling": "last", "label_token_ids": ids, "window": api.settings.server.max_choices}
    outputs = await Prompts(http, served, "rank", prompts, timeout=fields.timeout, **how).outputs()
    scores = [1 / (1 + math.exp(min(no - yes, 700.0))) for yes, no in (struct.unpack("<2f", one.vector) for one in outputs)]
    tokens = sum(map(len, prompts))
    return status.model, scores, {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}


def _check(served: Served, *, able: bool) -> None:
    """Raise RequestError unless the model is a reranker. `able`: its tokenizer has what Qwen3-Reranker's prompt needs."""
    status, wanted = served.status(), served.settings.model.reranker
    named = any("rerank" in name.lower() for name in (*served.names(), status.source))
    able = able and status.generates
    if not able or wanted == "off" or (wanted == "auto" and not named):
        more = "; if it was trained as Qwen3-Reranker was, start the server with --reranker on" if able else ""
        message = f"The model '{served.name}' does not rerank: serve one such as Qwen3-Reranker{more}."
        raise RequestError(message, param="model", code="rerank_unsupported")
