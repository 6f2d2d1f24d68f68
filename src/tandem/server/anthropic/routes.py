"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.errors import RequestError
from tandem.server.anthropic.answers import MessageWriter, ending, failed_message, message, usage, whole_blocks
from tandem.server.anthropic.schemas import CountRequest, MessagesRequest
from tandem.server.anthropic.translate import chat_request, in_own_words
from tandem.server.body import parse, translated
from tandem.server.chats.answer_message import Reply
from tandem.server.chats.start import prepare_chat, start_chat
from tandem.server.context import get_api
from tandem.server.engines.served_model import Served
from tandem.server.generation.generate import collect
from tandem.server.generation.model_wait import answered_by, engage
from tandem.server.openapi import documented
from tandem.server.sse import encode_json, open_stream

router = APIRouter()


@router.post("/v1/messages", openapi_extra=documented(MessagesRequest, streams=True))
async def messages(http: Request) -> Response:
    """Answer a conversation as Anthropic's API does, in one piece or as a stream."""
    fields = await parse(http, MessagesRequest)
    return await answered_by(http, fields.model, lambda served: _answer(http, served, fields), stream=fields.stream,
                             error=failed_message)


async def _answer(http: Request, served: Served, fields: MessagesRequest) -> Response:
    api = get_api(http)
    try:
        chat = await translated(http, lambda: chat_request(fields))
        plan, generation, model = await start_chat(http, served, chat, f"msg_{uuid.uuid4().hex}", clip=True)
    except RequestError as error:
        raise in_own_words(error) from None
    reply = Reply(plan)
    if fields.stream:
        writer = MessageWriter(generation, model, reply, fields.max_tokens)
        return await open_stream(generation, writer, include_usage=True, heartbeat_s=api.heartbeat_s)
    [answer] = await collect(generation, 1)
    used = usage(generation)
    body = message(generation, model) | {"content": whole_blocks(reply, answer.text), "usage": used}
    body |= ending(reply, answer.finish_reason or "stop", answer.stop, full=used["output_tokens"] < fields.max_tokens)
    return Response(encode_json(body), headers={"request-id": generation.request_id}, media_type="application/json")


@router.post("/v1/messages/count_tokens", openapi_extra=documented(CountRequest))
async def count_tokens(http: Request) -> Response:
    """How many tokens the prompt of a conversation has."""
    fields = await parse(http, CountRequest)
    served = await engage(http, fields.model)
    try:
        plan, _ = await prepare_chat(http, served, await translated(http, lambda: chat_request(fields)))
    except RequestError as error:
        raise in_own_words(error) from None
    return Response(encode_json({"input_tokens": len(plan.prompt)}), media_type="application/json")
