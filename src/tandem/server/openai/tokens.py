"""Routes POST /tokenize, POST /detokenize and (if enabled) GET /tokenizer_info, in vLLM's format."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.errors import NotFoundError, UnavailableError
from tandem.server.acquire import acquire, find_model
from tandem.server.body import parse
from tandem.server.chats.plan import checked_template_kwargs
from tandem.server.chats.request_texts import RequestTexts
from tandem.server.chats.texts import LARGE, off_loop
from tandem.server.context import get_api
from tandem.server.openai.sampling import check_token_ids
from tandem.server.openai.schemas import DetokenizeRequest, TokenizeRequest
from tandem.server.openapi import documented
from tandem.server.sse import encode_json, json_response

router = APIRouter()


@router.post("/tokenize", openapi_extra=documented(TokenizeRequest))
async def tokenize(http: Request) -> Response:
    """Return the token ids of a prompt, or of a conversation rendered with the chat template."""
    fields = await parse(http, TokenizeRequest)
    texts = await RequestTexts.of(http, await acquire(http, fields.model))
    if fields.messages is not None:
        kwargs = checked_template_kwargs(fields.chat_template_kwargs)
        tokens = (await texts.render(fields.messages, kwargs, add_generation_prompt=fields.add_generation_prompt)).tokens
    else:
        special = fields.add_special_tokens is not False
        [tokens] = await texts.encode([fields.prompt or ""], "prompt", special=special)

    def body() -> bytes:
        strings = [texts.tokenizer.token_text(token) for token in tokens] if fields.return_token_strs else None
        return encode_json(
            {"count": len(tokens), "max_model_len": texts.status.max_context, "tokens": tokens, "token_strs": strings}
        )

    return Response(await off_loop(len(tokens) > LARGE, body), media_type="application/json")


@router.post("/detokenize", openapi_extra=documented(DetokenizeRequest))
async def detokenize(http: Request) -> Response:
    """Return the text of token ids, including special tokens."""
    fields = await parse(http, DetokenizeRequest)
    texts = await RequestTexts.of(http, await acquire(http, fields.model))
    check_token_ids(fields.tokens, texts.status.vocab_size, "tokens")
    return json_response({"prompt": await texts.decode(fields.tokens)})


@router.get("/tokenizer_info")
async def tokenizer_info(http: Request, model: str | None = None) -> Response:
    """Return the model's tokenizer_config.json and its chat template."""
    api = get_api(http)
    if not api.settings.server.enable_tokenizer_info_endpoint:
        raise NotFoundError("/tokenizer_info is switched off (--enable-tokenizer-info-endpoint turns it on).", code="unknown_url")
    served = find_model(http, model)
    if api.model_pool is not None and not api.model_pool.available(served):
        raise UnavailableError(
            f"The model '{served.name}' is not loaded, and a GET loads none: POST /v1/models/{served.name}/load does.",
            code="model_not_loaded",
        )
    texts = await RequestTexts.of(http, served)
    info = {**texts.tokenizer.info, "max_model_len": texts.status.max_context}
    return json_response(info)
