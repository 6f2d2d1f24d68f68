"""Route POST /v1/chat/completions, optionally with server-side conversations."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request
from pydantic_core import from_json
from starlette.responses import Response

from tandem.json_types import JsonObject
from tandem.protocol.logprobs import TokenLogprob
from tandem.server.acquire import acquire
from tandem.server.body import outgrown, parse, read_body, understood
from tandem.server.chats.answer_message import Reply, WholeMessage
from tandem.server.chats.conversations import Conversations
from tandem.server.chats.plan import start_chat
from tandem.server.chats.texts import LARGE, off_loop
from tandem.server.context import get_api, get_group, head, new_id
from tandem.server.generation import Delta, Generation
from tandem.server.openai.logprobs import chat_logprobs, prompt_places
from tandem.server.openai.schemas import ChatRequest
from tandem.server.openapi import documented
from tandem.server.sse import ChunkWriter, encode_json, streamed

router = APIRouter()
_INSTRUCTIONS = ("system", "developer")


@router.post("/v1/chat/completions", openapi_extra=documented(ChatRequest, streams=True))
async def chat_completions(http: Request) -> Response:
    """Answer a conversation, in one piece or as a stream."""
    fields, turn = await parse_turn(http)
    served = await acquire(http, fields.model, stream=fields.stream)
    plan, generation = await start_chat(http, served, fields, new_id("chatcmpl"))
    replies = [Reply(plan) for _ in range(generation.choices)]
    if fields.stream:
        return await streamed(generation, ChatWriter(generation, replies, turn, fields), include_usage=fields.include_usage)
    answers = await generation.collect()
    messages = [
        (reply.message(answer.text), reply.finish_reason(answer.finish_reason or "stop"))
        for reply, answer in zip(replies, answers, strict=True)
    ]
    if fields.max_tokens != 0:
        turn.answered(messages[0][0])  # the conversation continues with the first choice

    def body() -> bytes:
        answer = {
            **head("chat.completion", generation.request_id, generation.model),
            "choices": [
                {
                    "index": answer.index,
                    "message": message,
                    "logprobs": chat_logprobs(generation.tokenizer, answer.logprobs) if fields.logprobs else None,
                    "finish_reason": finish_reason,
                }
                for answer, (message, finish_reason) in zip(answers, messages, strict=True)
            ],
            **turn.shown,
            "usage": generation.usage(),
            "performance": generation.performance(),
        }
        if fields.prompt_logprobs is not None and answers[0].prompt is not None:
            answer["prompt_logprobs"] = prompt_places(
                generation.tokenizer, plan.prompt, answers[0].prompt, fields.prompt_logprobs
            )
        return encode_json(answer)

    size = len(plan.prompt) * (fields.prompt_logprobs + 1) if fields.prompt_logprobs is not None else 0
    return Response(await off_loop(size > LARGE, body), media_type="application/json")


class ChatWriter(ChunkWriter):
    """Writer of a streamed chat answer: role, text and calls, finish, usage."""

    def __init__(self, generation: Generation, replies: list[Reply], turn: ConversationTurn, fields: ChatRequest) -> None:
        """`replies`: parsers of the choices, in order."""
        super().__init__("chat.completion.chunk", generation, fields)
        self._replies, self._turn, self._fields = replies, turn, fields
        self._entries: list[list[TokenLogprob]] = [[] for _ in replies]
        self._said = WholeMessage() if turn.kept else None

    def _logprobs(self, entries: list[TokenLogprob]) -> JsonObject | None:
        return chat_logprobs(self._generation.tokenizer, entries) if self._fields.logprobs else None

    def head(self) -> bytes:
        """Return a chunk with the role for each choice."""
        return b"".join(
            self._envelope.chunk(_choice(index, {"role": "assistant", "content": ""}), self._turn.shown)
            for index in range(len(self._replies))
        )

    def delta(self, delta: Delta, extras: dict[str, object] | None) -> bytes:
        """Return the chunks for new text, and one with the finish_reason at the end of the choice."""
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

    def usage(self, usage: dict[str, object], extras: dict[str, object]) -> bytes:
        """Return the last chunk, which has the usage and no choices."""
        return super().usage(usage, {**self._turn.shown, **extras})


def _choice(
    index: int, delta: dict[str, object], logprobs: dict[str, object] | None = None, finish_reason: str | None = None
) -> dict[str, object]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


class ConversationTurn:
    """One request and its answer as part of a stored conversation."""

    def __init__(
        self, given: str | None, store: Conversations | None = None, owner: str = "", asked: bytes = b"", past: int = 0
    ) -> None:
        """`given`: the client's conversation id, if any. `asked`: JSON list of all messages; the first `past` were stored."""
        self._name = owner, given or str(uuid.uuid4())
        self._carried = given is not None
        self._store, self._asked = store, asked
        self.shown: JsonObject = {"conversation_id": self._name[1]}
        """Extra fields for the answer."""
        if store is not None:
            self.shown["conversation_messages"] = past

    @property
    def kept(self) -> bool:
        """True if the server stores conversations."""
        return self._store is not None

    def answered(self, message: JsonObject) -> None:
        """Store the conversation with the answer `message`, if conversations are stored."""
        if self._store is not None:
            self._store.put(self._name, self._asked[:-1] + b"," + encode_json(message) + b"]", carried=self._carried)


async def parse_turn(http: Request) -> tuple[ChatRequest, ConversationTurn]:
    """Read the request's body and prepend the stored messages of its conversation. Raises RequestError."""
    api = get_api(http)
    store = api.conversations
    if store is None or "tandem.seed" in http.scope:  # journaled requests outlive conversations in memory
        fields = await parse(http, ChatRequest)
        return fields, ConversationTurn(fields.conversation_id)
    raw = await read_body(http, api.max_body)
    fields = await understood(http, raw, ChatRequest)
    given, owner = fields.conversation_id, get_group(http)
    past = store.get((owner, given)) if given is not None else None
    if past is None or any(message.role == "assistant" for message in fields.messages):
        asked = await off_loop(len(raw) > LARGE, lambda: encode_json(from_json(raw)["messages"]))
        return fields, ConversationTurn(given, store, owner, asked)
    whole, asked, count = await off_loop(len(past) + len(raw) > LARGE, _joined, past, raw)
    if len(whole) > api.max_body:
        raise outgrown("conversation_id", api.max_body, "; begin another 'conversation_id'")
    http.scope.pop("tandem.ignored", None)  # the fields are parsed again
    return await understood(http, whole, ChatRequest), ConversationTurn(given, store, owner, asked, count)


def _joined(past: bytes, raw: bytes) -> tuple[bytes, bytes, int]:
    """Return the body with the messages of `past` prepended, the joined messages, and how many of them are from `past`.

    System and developer messages in the request replace earlier ones.
    """
    body: JsonObject = from_json(raw)
    before: list[JsonObject] = from_json(past)
    asked: list[JsonObject] = body["messages"]
    instructions = [message for message in asked if message["role"] in _INSTRUCTIONS]
    if instructions:
        asked = [message for message in asked if message["role"] not in _INSTRUCTIONS]
        before = [message for message in before if message["role"] not in _INSTRUCTIONS]
    body["messages"] = [*instructions, *before, *asked]
    return encode_json(body), encode_json(body["messages"]), len(before)
