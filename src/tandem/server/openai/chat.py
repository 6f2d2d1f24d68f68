"""POST /v1/chat/completions: the request behind its conversation, and its answer, whole or in chunks."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from pydantic_core import from_json
from starlette.responses import Response

from tandem.errors import RequestError
from tandem.protocol.logprobs import TokenLogprob
from tandem.server.body import read_body, understood
from tandem.server.chats.answer_message import Reply, WholeMessage
from tandem.server.chats.conversations import Conversations
from tandem.server.chats.plan import ChatPlan
from tandem.server.chats.start import start_chat
from tandem.server.chats.texts import LARGE, off_loop
from tandem.server.context import get_api, get_group
from tandem.server.engines.served_model import Served
from tandem.server.generation.generate import Delta, Generation
from tandem.server.generation.model_wait import answered_by
from tandem.server.ids import head, new_id
from tandem.server.openai.logprobs import chat_logprobs, prompt_places
from tandem.server.openai.schemas import ChatRequest
from tandem.server.openapi import documented
from tandem.server.sse import AnswerWriter, Envelope, answered, encode_json

router = APIRouter()
_INSTRUCTIONS = ("system", "developer")
Json = dict[str, Any]


@router.post("/v1/chat/completions", openapi_extra=documented(ChatRequest, streams=True))
async def chat_completions(http: Request) -> Response:
    """Answer a conversation, in one piece or as a stream."""
    fields, turn = await parse_turn(http)
    return await answered_by(http, fields.model, partial(_answer, http, fields, turn), stream=fields.stream)


async def _answer(http: Request, fields: ChatRequest, turn: Turn, served: Served) -> Response:
    """Answer by a model that is there. Raises RequestError."""
    plan, generation, model = await start_chat(http, served, fields, new_id("chatcmpl"))
    writer = ChatWriter(plan, generation, model, turn, fields)
    return await answered(generation, writer, stream=fields.stream, include_usage=fields.include_usage)


class ChatWriter(AnswerWriter):
    """A chat's answer, whole, or in chunks in OpenAI's order: role, text and calls, finish, usage."""

    def __init__(self, plan: ChatPlan, generation: Generation, model: str, turn: Turn, fields: ChatRequest) -> None:
        self._plan, self._generation, self._model, self._fields = plan, generation, model, fields
        self._tokenizer = generation.tokenizer
        self._replies = [Reply(plan, hides_reasoning=fields.hides_reasoning) for _ in range(generation.choices)]
        self._entries: list[list[TokenLogprob]] = [[] for _ in self._replies]
        self._turn = turn
        self._said = WholeMessage() if turn.kept else None
        self._envelope = Envelope(head("chat.completion.chunk", generation.request_id, model),
                                  include_usage=fields.include_usage,
                                  running=generation.usage if fields.continuous_usage else None)

    async def whole(self, answers: list[Delta]) -> Response:
        """Return all choices; the conversation goes on with the first."""
        messages = [reply.message(answer.text) for reply, answer in zip(self._replies, answers, strict=True)]
        if self._fields.max_tokens != 0:
            self._turn.answered(messages[0])
        asked = self._fields.prompt_logprobs
        size = len(self._plan.prompt) * (asked + 1) if asked is not None else 0
        return Response(await off_loop(size > LARGE, self._body, answers, messages), media_type="application/json")

    def _body(self, answers: list[Delta], messages: list[Json]) -> bytes:
        asked, of_prompt = self._fields.prompt_logprobs, answers[0].prompt
        places = {} if asked is None or of_prompt is None else {
            "prompt_logprobs": prompt_places(self._tokenizer, self._plan.prompt, of_prompt, asked)}
        return encode_json({
            **head("chat.completion", self._generation.request_id, self._model),
            "choices": [
                {
                    "index": answer.index,
                    "message": message,
                    "logprobs": self._logprobs(answer.logprobs),
                    "finish_reason": reply.finish_reason(answer.finish_reason or "stop"),
                }
                for reply, answer, message in zip(self._replies, answers, messages, strict=True)
            ],
            **places,
            **self._turn.shown,
            "usage": self._generation.usage(),
            "performance": self._generation.performance(),
        })

    def _logprobs(self, entries: list[TokenLogprob]) -> Json | None:
        return chat_logprobs(self._tokenizer, entries) if self._fields.logprobs else None

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
            logprobs = self._logprobs(entries)
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


class Turn:
    """One request's part in its conversation."""

    def __init__(self, given: str | None, store: Conversations | None = None, owner: str = "", asked: bytes = b"",
                 past: int = 0) -> None:
        """`asked`: all messages of the request as a JSON list, of which the first `past` were kept."""
        self._name = owner, given or str(uuid.uuid4())
        self._carried = given is not None
        self._store, self._asked = store, asked
        self.shown: Json = {"conversation_id": self._name[1]}
        """Fields of the answer."""
        if store is not None:
            self.shown["conversation_messages"] = past

    @property
    def kept(self) -> bool:
        """Conversations are kept."""
        return self._store is not None

    def answered(self, message: Json) -> None:
        """The conversation goes on with `message`, if it is kept."""
        if self._store is not None:
            self._store.put(self._name, self._asked[:-1] + b"," + encode_json(message) + b"]", carried=self._carried)


async def parse_turn(http: Request) -> tuple[ChatRequest, Turn]:
    """The request's body, behind what is kept of its conversation. Raises RequestError."""
    api = get_api(http)
    raw = await read_body(http, api.max_body)
    fields = await understood(http, raw, ChatRequest)
    given, store, owner = fields.conversation_id, api.conversations, get_group(http)
    if store is None or "tandem.seed" in http.scope:  # from the journal, which outlives what is kept here
        return fields, Turn(given)
    past = store.get((owner, given)) if given is not None else None
    if past is None or any(message.role == "assistant" for message in fields.messages):
        asked = await off_loop(len(raw) > LARGE, lambda: encode_json(from_json(raw)["messages"]))
        return fields, Turn(given, store, owner, asked)
    whole, asked, count = await off_loop(len(past) + len(raw) > LARGE, _joined, past, raw)
    if len(whole) > api.max_body:
        raise RequestError(f"The conversation has become larger than the limit of {api.max_body} bytes "
                           "(--max-body-mb); begin another 'conversation_id'.", param="conversation_id",
                           code="context_length_exceeded")
    http.scope.pop("tandem.ignored", None)  # its fields are read once more
    return await understood(http, whole, ChatRequest), Turn(given, store, owner, asked, count)


def _joined(past: bytes, raw: bytes) -> tuple[bytes, bytes, int]:
    """The body with the messages of `past` first, these messages, and how many are of `past`. Instructions that the
    request has take the place of those before."""
    body: Json = from_json(raw)
    before: list[Json] = from_json(past)
    asked: list[Json] = body["messages"]
    instructions = [one for one in asked if one["role"] in _INSTRUCTIONS]
    if instructions:
        asked = [one for one in asked if one["role"] not in _INSTRUCTIONS]
        before = [one for one in before if one["role"] not in _INSTRUCTIONS]
    body["messages"] = [*instructions, *before, *asked]
    return encode_json(body), encode_json(body["messages"]), len(before)
