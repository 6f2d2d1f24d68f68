"""Routes of Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import base64
import hashlib

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.errors import RequestError
from tandem.json_types import JsonObject
from tandem.server.acquire import acquire
from tandem.server.anthropic.schemas import CountRequest, MessagesRequest
from tandem.server.anthropic.translate import NAMES, chat_request
from tandem.server.body import parse, translated
from tandem.server.body_validation import in_words
from tandem.server.chats.answer_message import Reply, arguments_object
from tandem.server.chats.budgets import SENT_TO_ALL
from tandem.server.chats.plan import plan_chat, start_chat
from tandem.server.context import new_id, note_ignored
from tandem.server.failures import anthropic_envelope
from tandem.server.generation import Delta, Generation
from tandem.server.openapi import AnthropicError, documented, failures
from tandem.server.sse import AnswerWriter, json_response, named_event, streamed
from tandem.server.tools.deltas import CallArguments, CallStart, Content, Event, ReasoningText, merged

router = APIRouter(responses=failures(AnthropicError))


@router.post("/v1/messages", openapi_extra=documented(MessagesRequest, streams=True))
async def messages(http: Request) -> Response:
    """Answer a conversation, in one piece or as a stream."""
    fields = await parse(http, MessagesRequest)
    served = await acquire(http, fields.model, stream=fields.stream, error=failed_message)
    http.scope[SENT_TO_ALL] = NAMES["thinking_token_budget"]
    if hosted := [f"tools.{tool.name}" for tool in fields.tools or () if tool.hosted]:
        note_ignored(http, *hosted)
    with in_words(NAMES):
        chat = await translated(http, lambda: chat_request(fields))
        plan, generation = await start_chat(http, served, chat, new_id("msg", "_"))
    writer = MessageWriter(generation, Reply(plan), fields.max_tokens)
    if fields.stream:
        return await streamed(generation, writer)
    return writer.whole((await generation.collect())[0])


@router.post("/v1/messages/count_tokens", openapi_extra=documented(CountRequest))
async def count_tokens(http: Request) -> Response:
    """Count the prompt tokens of a conversation."""
    fields = await parse(http, CountRequest)
    served = await acquire(http, fields.model)
    with in_words(NAMES):
        plan, _ = await plan_chat(http, served, await translated(http, lambda: chat_request(fields)))
    return json_response({"input_tokens": len(plan.prompt)})


def _message(generation: Generation) -> JsonObject:
    """Return a message object without content."""
    return {
        "id": generation.request_id,
        "type": "message",
        "role": "assistant",
        "model": generation.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "usage": _usage(generation),
    }


def _usage(generation: Generation) -> JsonObject:
    """Return the usage so far. Cached prompt tokens are not included in `input_tokens`, as at Anthropic."""
    counted = generation.usage()
    cached, details = counted["prompt_tokens_details"]["cached_tokens"], counted.get("completion_tokens_details")
    return {
        "input_tokens": counted["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counted["completion_tokens"],
        **({"output_tokens_details": {"thinking_tokens": details["reasoning_tokens"]}} if details else {}),
    }


def _whole_blocks(reply: Reply, text: str) -> list[JsonObject]:
    """Return the content blocks of a complete answer."""
    blocks: list[JsonObject] = []
    for event in merged(reply.read(text, last=True)):
        if isinstance(event, CallArguments):
            blocks[-1]["input"] = arguments_object(event.text)
        else:
            blocks.append(_block(reply, event))
            if not isinstance(event, CallStart):
                blocks[-1][_FIELDS[type(event)]] = event.text
            if isinstance(event, ReasoningText):
                blocks[-1]["signature"] = _signature(event.text)
    return blocks


def _signature(thinking: str) -> str:
    """Return a digest of the text as signature; clients require one but cannot verify it."""
    return base64.b64encode(hashlib.blake2b(thinking.encode("utf-8", "surrogateescape")).digest()).decode()


_FIELDS: dict[type[Event], str] = {Content: "text", ReasoningText: "thinking", CallArguments: "partial_json"}
_DELTAS: dict[type[Event], str] = {Content: "text_delta", ReasoningText: "thinking_delta", CallArguments: "input_json_delta"}


def _block(reply: Reply, event: Event) -> JsonObject:
    """Return the empty content block that `event` opens."""
    if isinstance(event, CallStart):
        return {"type": "tool_use", "id": reply.call_id("toolu", event), "name": event.name, "input": {}}
    if isinstance(event, ReasoningText):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": "", "citations": None}


def failed_message(error: RequestError) -> bytes:
    """Return Anthropic's event that ends a failed stream."""
    return named_event(anthropic_envelope(error))


class MessageWriter(AnswerWriter):
    """Writer of an answer in Anthropic's format: as one message, or as events."""

    done = b""

    def __init__(self, generation: Generation, reply: Reply, max_tokens: int) -> None:
        self._generation = generation
        self._max_tokens = max_tokens
        self._reply = reply
        self._index = -1
        self._open: type[Event] | None = None
        self._thinking = ""
        self._ending: JsonObject = {}

    def whole(self, answer: Delta) -> Response:
        """Return the HTTP response for a complete answer."""
        body = _message(self._generation) | {"content": _whole_blocks(self._reply, answer.text)}
        return json_response(body | self._ending_of(answer))

    def _ending_of(self, last: Delta) -> JsonObject:
        """Return `stop_reason` and `stop_sequence`. Length below `max_tokens` means that the context is full."""
        reason, sequence = "tool_use" if self._reply.called else "end_turn", None
        if last.finish_reason == "length":
            short = _usage(self._generation)["output_tokens"] < self._max_tokens
            reason = "model_context_window_exceeded" if short else "max_tokens"
        elif last.stop is not None:
            reason, sequence = "stop_sequence", last.stop
        return {"stop_reason": reason, "stop_sequence": sequence}

    def head(self) -> bytes:
        """Return the events `message_start` and `ping`."""
        start = _message(self._generation)
        return named_event({"type": "message_start", "message": start}) + named_event({"type": "ping"})

    def delta(self, delta: Delta, extras: JsonObject | None) -> bytes:
        """Return the events for new text."""
        ended = delta.finish_reason is not None
        written = b"".join(map(self._event, merged(self._reply.read(delta.text, last=ended))))
        if ended:
            written += self._close()
            self._ending = self._ending_of(delta)
        return written

    def usage(self, usage: JsonObject, extras: JsonObject) -> bytes:
        """Return the events `message_delta` and `message_stop`."""
        end = {"type": "message_delta", "delta": self._ending, "usage": _usage(self._generation)}
        return named_event(end) + named_event({"type": "message_stop"})

    def error(self, error: RequestError) -> bytes:
        """Return the event that ends a failed stream."""
        return failed_message(error)

    def _event(self, event: Event) -> bytes:
        opening = b""
        kind = CallArguments if isinstance(event, CallStart) else type(event)
        if isinstance(event, CallStart) or kind is not self._open:
            opening = self._close()
            self._open, self._index = kind, self._index + 1
            block = _block(self._reply, event)
            opening += named_event({"type": "content_block_start", "index": self._index, "content_block": block})
        if isinstance(event, CallStart):
            return opening
        if isinstance(event, ReasoningText):
            self._thinking += event.text
        delta = {"type": _DELTAS[kind], _FIELDS[kind]: event.text}
        return opening + named_event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open is ReasoningText:
            delta = {"type": "signature_delta", "signature": _signature(self._thinking)}
            signed = named_event({"type": "content_block_delta", "index": self._index, "delta": delta})
        self._open, self._thinking = None, ""
        return signed + named_event({"type": "content_block_stop", "index": self._index})
