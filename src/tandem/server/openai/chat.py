"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.server.generation.model_wait import answered_by
from tandem.server.openai.chat_answer import answer_chat
from tandem.server.openai.conversation import parse_turn
from tandem.server.openai.schemas import ChatRequest
from tandem.server.openapi import documented

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=documented(ChatRequest, streams=True))
async def chat_completions(http: Request) -> Response:
    """Answer a conversation, in one piece or as a stream."""
    fields, turn = await parse_turn(http)
    return await answered_by(http, fields.model, partial(answer_chat, http, fields, turn), stream=fields.stream)
