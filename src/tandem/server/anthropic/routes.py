"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.errors import RequestError
from tandem.server.anthropic.answers import MessageWriter, failed_message
from tandem.server.anthropic.schemas import CountRequest, MessagesRequest
from tandem.server.anthropic.translate import chat_request, in_own_words
from tandem.server.body import parse, translated
from tandem.server.chats.answer_message import Reply
from tandem.server.chats.start import prepare_chat, start_chat
from tandem.server.engines.served_model import Served
from tandem.server.generation.model_wait import answered_by, engage
from tandem.server.openapi import documented
from tandem.server.sse import answered, json_response

router = APIRouter()


@router.post("/v1/messages", openapi_extra=documented(MessagesRequest, streams=True))
async def messages(http: Request) -> Response:
    """Answer a conversation as Anthropic's API does, in one piece or as a stream."""
    fields = await parse(http, MessagesRequest)
    return await answered_by(http, fields.model, lambda served: _answer(http, served, fields), stream=fields.stream,
                             error=failed_message)


async def _answer(http: Request, served: Served, fields: MessagesRequest) -> Response:
    try:
        chat = await translated(http, lambda: chat_request(fields))
        plan, generation, model = await start_chat(http, served, chat, f"msg_{uuid.uuid4().hex}", clip=True)
    except RequestError as error:
        raise in_own_words(error) from None
    return await answered(generation, MessageWriter(generation, model, Reply(plan), fields.max_tokens),
                          stream=fields.stream)


@router.post("/v1/messages/count_tokens", openapi_extra=documented(CountRequest))
async def count_tokens(http: Request) -> Response:
    """How many tokens the prompt of a conversation has."""
    fields = await parse(http, CountRequest)
    served = await engage(http, fields.model)
    try:
        plan, _ = await prepare_chat(http, served, await translated(http, lambda: chat_request(fields)))
    except RequestError as error:
        raise in_own_words(error) from None
    return json_response({"input_tokens": len(plan.prompt)})
