"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.server.body import parse
from tandem.server.chats.texts import decode, encode, render_chat
from tandem.server.context import get_api
from tandem.server.openai.chat import checked_template_kwargs
from tandem.server.openai.sampling import check_token_ids
from tandem.server.openai.schemas import DetokenizeRequest, TokenizeRequest
from tandem.server.openapi import documented
from tandem.server.sse import encode_json

router = APIRouter()


@router.post("/tokenize", openapi_extra=documented(TokenizeRequest))
async def tokenize(http: Request) -> Response:
    """Token ids of a prompt, or of a conversation in the chat template."""
    api = get_api(http)
    fields = await parse(http, TokenizeRequest, api.max_body)
    served = await api.engage(http, fields.model)
    status = served.status()
    tokenizer = await served.texts.tokenizer(status)
    if fields.messages is not None:
        messages = [message.as_template_input() for message in fields.messages]
        kwargs = checked_template_kwargs(fields.chat_template_kwargs)
        tokens = await render_chat(tokenizer, messages, kwargs, add_generation_prompt=fields.add_generation_prompt)
    else:
        special = fields.add_special_tokens is not False
        tokens = await encode(tokenizer, fields.prompt or "", add_special_tokens=special)
    texts = [tokenizer.token_text(token) for token in tokens] if fields.return_token_strs else None
    body = {"count": len(tokens), "max_model_len": status.max_context, "tokens": tokens, "token_strs": texts}
    return Response(encode_json(body), media_type="application/json")


@router.post("/detokenize", openapi_extra=documented(DetokenizeRequest))
async def detokenize(http: Request) -> Response:
    """Text of token ids, special tokens included."""
    api = get_api(http)
    fields = await parse(http, DetokenizeRequest, api.max_body)
    served = await api.engage(http, fields.model)
    status = served.status()
    check_token_ids(fields.tokens, status.vocab_size, "tokens")
    tokenizer = await served.texts.tokenizer(status)
    return Response(encode_json({"prompt": await decode(tokenizer, fields.tokens)}), media_type="application/json")
