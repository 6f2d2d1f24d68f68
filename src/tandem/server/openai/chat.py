"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.errors import RequestError
from tandem.protocol.control import EngineStatus
from tandem.protocol.logprobs import TokenLogprob
from tandem.server.body import note_ignored, parse
from tandem.server.chats.answer_message import Reply
from tandem.server.chats.plan import ChatPlan, plan_chat
from tandem.server.chats.request_texts import RequestTexts
from tandem.server.chats.texts import LARGE, off_loop
from tandem.server.chats.thinking import add_thinking, wish_of
from tandem.server.context import get_api, get_group
from tandem.server.engines.served_model import Served
from tandem.server.generation.answer import Answer, collect, engine_requests
from tandem.server.generation.generate import Delta, Generation
from tandem.server.generation.model_wait import answered_by
from tandem.server.ids import new_id
from tandem.server.openai.logprobs import chat_logprobs, prompt_places
from tandem.server.openai.sampling import check_choices, check_prompt_fields, room, sampling_params
from tandem.server.openai.schemas import ChatRequest
from tandem.server.openapi import documented
from tandem.server.sse import ChunkWriter, Envelope, encode_json, open_stream
from tandem.text.tokenizer import Tokenizer
from tandem.version import __version__

router = APIRouter()

FINGERPRINT = f"tandem-{__version__}"
_RESERVED = frozenset(
    {"self", "messages", "conversation", "tools", "tokenize", "add_generation_prompt", "return_dict", "chat_template"}
)


@router.post("/v1/chat/completions", openapi_extra=documented(ChatRequest, streams=True))
async def chat_completions(http: Request) -> Response:
    """Answer a conversation, in one piece or as a stream."""
    fields = await parse(http, ChatRequest)
    return await answered_by(http, fields.model, lambda served: _answer(http, served, fields), stream=fields.stream)


async def _answer(http: Request, served: Served, fields: ChatRequest) -> Response:
    api = get_api(http)
    plan, generation, model = await start_chat(http, served, fields, new_id("chatcmpl"))
    n = fields.n or 1
    conversation_id = fields.conversation_id or str(uuid.uuid4())
    if fields.stream:
        replies = [Reply(plan, hides_reasoning=fields.hides_reasoning) for _ in range(n)]
        writer = ChatWriter(generation, model, conversation_id, replies, fields)
        return await open_stream(generation, writer, include_usage=fields.include_usage, heartbeat_s=api.heartbeat_s)
    answers = await collect(generation, n)
    size = len(plan.prompt) * ((fields.prompt_logprobs or 0) + 1) if fields.prompt_logprobs is not None else 0
    return await off_loop(size > LARGE, lambda: _whole(plan, generation, answers, conversation_id, fields, model))


async def prepare_chat(http: Request, served: Served, fields: ChatRequest) -> tuple[ChatPlan, Tokenizer, EngineStatus]:
    """What the request comes to, for a model that is loaded. Raises RequestError."""
    check_choices(served, fields.n or 1)
    texts = await RequestTexts.of(http, served)
    variables = template_kwargs(fields)
    note_ignored(http, *add_thinking(wish_of(fields), texts.tokenizer, variables))
    return await plan_chat(served, texts, fields, variables), texts.tokenizer, texts.status


async def start_chat(
    http: Request, served: Served, fields: ChatRequest, request_id: str, *, clip: bool = False
) -> tuple[ChatPlan, Generation, str]:
    """Check the request and submit it; the generation is the caller's to close. Also the model's name.

    With `clip` an output limit beyond the context is no error. Raises RequestError.
    """
    check_prompt_fields(fields)
    plan, tokenizer, status = await prepare_chat(http, served, fields)
    max_tokens = room(plan.prompt, asked_tokens(fields), served, status, param="messages", clip=clip)
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    params = [
        sampling_params(
            fields, status, max_tokens=max_tokens, logprobs=logprobs, choice=choice, form=plan.form,
            prompt_logprobs=None if choice and max_tokens else fields.prompt_logprobs)  # one says it for all
        for choice in range(fields.n or 1)
    ]
    work = [(plan.prompt, one) for one in params]
    generation = Generation(
        get_api(http),
        http,
        served,
        engine_requests(request_id, get_group(http), work),
        tokenizer,
        request_id=request_id,
        prompt_tokens=len(plan.prompt),
        stream=bool(fields.stream),
        timeout=fields.timeout,
        continues=plan.form is not None,
        shown=plan.shown,
    )
    return plan, generation, status.model


def asked_tokens(fields: ChatRequest) -> int | None:
    """The output limit, which OpenAI has renamed. Raises RequestError when both names are used with two values."""
    old, new = fields.max_tokens, fields.max_completion_tokens
    if old is not None and new is not None and old != new:
        message = f"'max_tokens' ({old}) and 'max_completion_tokens' ({new}) contradict each other; give one of them."
        raise RequestError(message, param="max_tokens", code="invalid_value")
    return new if new is not None else old


def template_kwargs(fields: ChatRequest) -> dict[str, Any]:
    """Variables for the chat template. Also checks that log probabilities are asked for consistently."""
    if fields.top_logprobs is not None and not fields.logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs", code="invalid_value")
    given = checked_template_kwargs(fields.chat_template_kwargs)
    thinking = fields.enable_thinking
    if thinking is not None and given.setdefault("enable_thinking", thinking) != thinking:
        message = "'enable_thinking' contradicts the one in 'chat_template_kwargs'."
        raise RequestError(message, param="enable_thinking", code="invalid_value")
    return given


def checked_template_kwargs(given: dict[str, Any] | None) -> dict[str, Any]:
    """A copy. Raises RequestError when it would replace what the server itself hands to the template."""
    for name in given or {}:
        if name in _RESERVED:
            raise RequestError(f"'{name}' cannot be set in 'chat_template_kwargs'.", param="chat_template_kwargs")
    return dict(given or {})


def _whole(
    plan: ChatPlan, generation: Generation, answers: list[Answer], conversation_id: str, fields: ChatRequest, model: str
) -> Response:
    tokenizer, asked, of_prompt = generation.tokenizer, fields.prompt_logprobs, answers[0].prompt
    replies = [Reply(plan, hides_reasoning=fields.hides_reasoning) for _ in answers]
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
                "message": reply.message(answer.text),
                "logprobs": chat_logprobs(tokenizer, answer.logprobs) if fields.logprobs else None,
                "finish_reason": reply.finish_reason(answer.finish_reason),
            }
            for index, (reply, answer) in enumerate(zip(replies, answers, strict=True))
        ],
        **places,
        "conversation_id": conversation_id,
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
        conversation_id: str,
        replies: list[Reply],
        fields: ChatRequest,
    ) -> None:
        self._tokenizer = generation.tokenizer
        self._replies = replies
        self._entries: list[list[TokenLogprob]] = [[] for _ in replies]
        self._logprobs = bool(fields.logprobs)
        self._conversation = {"conversation_id": conversation_id}
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
            self._envelope.chunk(_choice(index, {"role": "assistant", "content": ""}), self._conversation)
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
            logprobs = chat_logprobs(self._tokenizer, entries) if self._logprobs else None
            entries.clear()
            chunks += self._envelope.chunk(_choice(delta.index, piece, logprobs))
        if delta.finish_reason is not None:
            end = _choice(delta.index, {}, finish_reason=reply.finish_reason(delta.finish_reason))
            chunks += self._envelope.chunk(end, {**self._conversation, **(extras or {})})
        return chunks

    def usage(self, usage: dict[str, Any], extras: dict[str, Any]) -> bytes:
        """The last chunk, without choices."""
        return self._envelope.without_choice({"usage": usage, **self._conversation, **extras})


def _choice(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
