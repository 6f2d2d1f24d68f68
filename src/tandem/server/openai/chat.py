"""How a chat is answered: whole, or in chunks."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.protocol.logprobs import TokenLogprob
from tandem.server.chats.answer_message import Reply, WholeMessage
from tandem.server.chats.plan import ChatPlan
from tandem.server.chats.start import start_chat
from tandem.server.chats.texts import LARGE, off_loop
from tandem.server.context import get_api
from tandem.server.engines.served_model import Served
from tandem.server.generation.generate import Delta, Generation, collect
from tandem.server.generation.model_wait import answered_by
from tandem.server.ids import FINGERPRINT, new_id
from tandem.server.openai.conversation import Turn, parse_turn
from tandem.server.openai.logprobs import chat_logprobs, prompt_places
from tandem.server.openai.schemas import ChatRequest
from tandem.server.openapi import documented
from tandem.server.sse import ChunkWriter, Envelope, encode_json, open_stream

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=documented(ChatRequest, streams=True))
async def chat_completions(http: Request) -> Response:
    """Answer a conversation, in one piece or as a stream."""
    fields, turn = await parse_turn(http)
    return await answered_by(http, fields.model, partial(answer_chat, http, fields, turn), stream=fields.stream)


async def answer_chat(http: Request, fields: ChatRequest, turn: Turn, served: Served) -> Response:
    """In one piece or as a stream, of a model that is there. Raises RequestError."""
    api = get_api(http)
    plan, generation, model = await start_chat(http, served, fields, new_id("chatcmpl"))
    n = fields.n or 1
    replies = [Reply(plan, hides_reasoning=fields.hides_reasoning) for _ in range(n)]
    if fields.stream:
        writer = ChatWriter(generation, model, turn, replies, fields)
        return await open_stream(generation, writer, include_usage=fields.include_usage, heartbeat_s=api.heartbeat_s)
    answers = await collect(generation, n)
    size = len(plan.prompt) * ((fields.prompt_logprobs or 0) + 1) if fields.prompt_logprobs is not None else 0
    messages = [reply.message(answer.text) for reply, answer in zip(replies, answers, strict=True)]
    if fields.max_tokens != 0:
        turn.answered(messages[0])
    finishes = [reply.finish_reason(answer.finish_reason or "stop")
                for reply, answer in zip(replies, answers, strict=True)]
    choices = list(zip(messages, finishes, strict=True))
    return await off_loop(size > LARGE, lambda: _whole(plan, generation, answers, choices, turn, fields, model))


def _whole(
    plan: ChatPlan, generation: Generation, answers: list[Delta], choices: list[tuple[dict[str, Any], str]],
    turn: Turn, fields: ChatRequest, model: str
) -> Response:
    tokenizer, asked, of_prompt = generation.tokenizer, fields.prompt_logprobs, answers[0].prompt
    places = {} if asked is None or of_prompt is None else {
        "prompt_logprobs": prompt_places(tokenizer, plan.prompt, of_prompt, asked)}
    body = {
        "id": generation.request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": FINGERPRINT,
        "choices": [
            {
                "index": index,
                "message": message,
                "logprobs": chat_logprobs(tokenizer, answer.logprobs) if fields.logprobs else None,
                "finish_reason": finish,
            }
            for index, (answer, (message, finish)) in enumerate(zip(answers, choices, strict=True))
        ],
        **places,
        **turn.shown,
        "usage": generation.usage(),
        "performance": generation.performance(),
    }
    return Response(encode_json(body), media_type="application/json")


class ChatWriter(ChunkWriter):
    """Chunks of a streamed chat answer, in OpenAI's order: role, text and calls, finish, usage."""

    def __init__(
        self,
        generation: Generation,
        model: str,
        turn: Turn,
        replies: list[Reply],
        fields: ChatRequest,
    ) -> None:
        self._tokenizer = generation.tokenizer
        self._replies = replies
        self._entries: list[list[TokenLogprob]] = [[] for _ in replies]
        self._logprobs = bool(fields.logprobs)
        self._turn = turn
        self._said = WholeMessage() if turn.kept else None
        self._envelope = Envelope(
            {
                "id": generation.request_id,
                "object": "chat.completion.chunk",
                "created": int(time.time()),
                "model": model,
                "system_fingerprint": FINGERPRINT,
            },
            include_usage=fields.include_usage,
            running=generation.usage if fields.continuous_usage else None,
        )

    def head(self) -> bytes:
        """The role of each choice."""
        return b"".join(
            self._envelope.chunk(_choice(index, {"role": "assistant", "content": ""}), self._turn.shown)
            for index in range(len(self._replies))
        )

    def delta(self, delta: Delta, extras: dict[str, Any] | None) -> bytes:
        """Chunks with what the text adds, if anything, and one for the end."""
        reply, ended = self._replies[delta.index], delta.finish_reason is not None
        entries = self._entries[delta.index]
        entries += delta.logprobs
        pieces = [reply.delta(event) for event in reply.read(delta.text, last=ended)]
        if entries and ended and not pieces:
            pieces = [{"content": ""}]
        chunks = b""
        for piece in pieces:
            if self._said is not None and not delta.index:
                self._said.add(piece)
            logprobs = chat_logprobs(self._tokenizer, entries) if self._logprobs else None
            entries.clear()
            chunks += self._envelope.chunk(_choice(delta.index, piece, logprobs))
        if delta.finish_reason is not None:
            if self._said is not None and not delta.index:
                self._turn.answered(self._said.message())
            end = _choice(delta.index, {}, finish_reason=reply.finish_reason(delta.finish_reason))
            chunks += self._envelope.chunk(end, {**self._turn.shown, **(extras or {})})
        return chunks

    def usage(self, usage: dict[str, Any], extras: dict[str, Any]) -> bytes:
        """The last chunk, without choices."""
        return self._envelope.without_choice({"usage": usage, **self._turn.shown, **extras})


def _choice(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
