"""Routes POST /api/chat, /api/generate, /api/embed and /api/embeddings of Ollama's API."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.errors import RequestError
from tandem.json_types import JsonObject
from tandem.models.pooling import unit_vector
from tandem.server.acquire import acquire
from tandem.server.body import parse, translated
from tandem.server.body_validation import checked, in_words
from tandem.server.chats.answer_message import Reply, arguments_object
from tandem.server.chats.plan import ChatPlan, ThinkingSettings, start_chat
from tandem.server.chats.texts import off_loop
from tandem.server.context import get_api, new_id, note_ignored
from tandem.server.generation import Delta, Generation
from tandem.server.ollama import requests
from tandem.server.ollama.models import NDJSON, canonical
from tandem.server.openai.completions import start_completion
from tandem.server.openai.embeddings import embed as embedded
from tandem.server.openai.models import unload
from tandem.server.openai.schemas import CompletionRequest, EmbeddingRequest
from tandem.server.openapi import OllamaError, documented, failures
from tandem.server.sse import HEADERS, AnswerWriter, encode_json, json_response, streamed
from tandem.server.tools.deltas import CallArguments, CallStart, ReasoningText, merged

router = APIRouter(responses=failures(OllamaError))


PLAIN = ChatPlan([], ThinkingSettings(None, "", None))
"""Plan of a raw prompt, whose whole answer is content."""


@router.post("/api/chat", openapi_extra=documented(requests.OllamaChatRequest, streams=True, stream_type=NDJSON))
async def chat(http: Request) -> Response:
    """Answer a conversation, as a stream unless `stream` is false; without messages only load or unload the model."""
    fields = await parse(http, requests.OllamaChatRequest)
    return await _answer(http, fields, empty=not fields.messages)


@router.post("/api/generate", openapi_extra=documented(requests.OllamaGenerateRequest, streams=True, stream_type=NDJSON))
async def generate(http: Request) -> Response:
    """Answer a prompt, as a stream unless `stream` is false; without one only load or unload the model."""
    fields = await parse(http, requests.OllamaGenerateRequest)
    return await _answer(http, fields, empty=not fields.prompt)


async def _answer(http: Request, fields: requests.OllamaRequest, *, empty: bool) -> Response:
    name, started = canonical(http, fields.model), time.monotonic()
    unloads = empty and str(fields.keep_alive).rstrip("hms") in ("0", "0.0")  # 0.0: what Ollama's Python client makes of 0
    ignored = requests.without_effect(fields, get_api(http).settings.server.unknown_fields)
    if ignored := ignored + ["keep_alive"] * (fields.keep_alive is not None and not unloads):
        note_ignored(http, *ignored)
    if unloads:
        await unload(http, name)
    else:
        served = await acquire(http, name)
    if empty:
        return json_response(_part(fields, {}) | {"done": True, "done_reason": "unload" if unloads else "load"})
    load_s = time.monotonic() - started
    pictures = {"messages": "images"} if getattr(fields, "images", None) else {}  # of /api/generate, which has no messages
    with in_words(requests.NAMES | pictures):
        request = await translated(http, lambda: requests.translated_request(fields))
        if isinstance(request, CompletionRequest):
            plan, (generation, _) = PLAIN, await start_completion(http, served, request, new_id("ollama"))
        else:
            plan, generation = await start_chat(http, served, request, new_id("ollama"))
    writer = LineWriter(generation, Reply(plan), fields, load_s)
    return await streamed(generation, writer) if fields.stream else writer.whole((await generation.collect())[0])


@router.post("/api/embed", openapi_extra=documented(requests.OllamaEmbedRequest))
@router.post("/api/embeddings", openapi_extra=documented(requests.OllamaEmbedRequest))
async def embed(http: Request) -> Response:
    """Return an embedding for each `input`; for `prompt` of the older /api/embeddings, one."""
    started, fields = time.monotonic(), await parse(http, requests.OllamaEmbedRequest)
    given, names = (fields.prompt, {"input": "prompt"}) if http.url.path == "/api/embeddings" else (fields.input, {})
    with in_words(names):
        request = checked({"input": given, "dimensions": fields.dimensions}, EmbeddingRequest)
        vectors, inputs = await embedded(http, await acquire(http, canonical(http, fields.model)), request)
    units = await off_loop(len(vectors) > 16, lambda: [unit_vector(one, request.dimensions).tolist() for one in vectors])
    if names:
        return json_response({"embedding": units[0]})
    spent = {"total_duration": _ns(time.monotonic() - started), "prompt_eval_count": sum(map(len, inputs))}
    return json_response({"model": fields.model, "embeddings": units, "load_duration": 0, **spent})


def _ns(seconds: object) -> int:
    return int(float(str(seconds)) * 1e9)


def _part(fields: requests.OllamaRequest, piece: JsonObject) -> JsonObject:
    """Return an object of the answer. `piece`: `content`, `thinking` or `tool_calls` of a message."""
    said: JsonObject = {"message": {"role": "assistant", "content": "", **piece}}
    if isinstance(fields, requests.OllamaGenerateRequest):
        said = {"response": "", **{name.replace("content", "response"): value for name, value in piece.items()}}
    return {"model": fields.model, "created_at": datetime.now(UTC).isoformat(), **said, "done": False}


class LineWriter(AnswerWriter):
    """Writer of an answer in Ollama's format: as one object, or as a JSON object a line. Tool calls are never divided."""

    headers = [(b"content-type", NDJSON.encode()), *HEADERS[1:]]
    done = b""

    def __init__(self, generation: Generation, reply: Reply, fields: requests.OllamaRequest, load_s: float) -> None:
        """`load_s`: seconds until the model was loaded."""
        self._generation, self._reply, self._fields, self._load_s = generation, reply, fields, load_s
        self._call: JsonObject | None = None
        self._arguments, self._reason = "", "stop"

    def whole(self, answer: Delta) -> Response:
        """Return the HTTP response for a complete answer."""
        said: JsonObject = {}
        for piece in self._pieces(answer):
            said |= {name: said[name] + value if name in said else value for name, value in piece.items()}
        return json_response(_part(self._fields, said) | self._end())

    def keep_alive(self) -> bytes:
        """Return a line without text, as clients parse every line."""
        return self._line({})

    def delta(self, delta: Delta, extras: JsonObject | None) -> bytes:
        """Return the lines for new text."""
        return b"".join(map(self._line, self._pieces(delta)))

    def usage(self, usage: JsonObject, extras: JsonObject) -> bytes:
        """Return the last line, with reason, counts and durations."""
        return encode_json(_part(self._fields, {}) | self._end()) + b"\n"

    def error(self, error: RequestError) -> bytes:
        """Return the line that ends a failed stream."""
        return encode_json({"error": error.message}) + b"\n"

    def _line(self, piece: JsonObject) -> bytes:
        return encode_json(_part(self._fields, piece)) + b"\n"

    def _pieces(self, delta: Delta) -> Iterator[JsonObject]:
        """Yield the pieces of a message in new text; a call once its arguments are complete."""
        self._reason = delta.finish_reason or self._reason
        for event in merged(self._reply.read(delta.text, last=delta.finish_reason is not None)):
            if isinstance(event, CallArguments):
                self._arguments += event.text
                continue
            yield from self._ended_call()
            if isinstance(event, CallStart):
                self._call = {"id": self._reply.call_id("call", event), "function": {"index": event.index, "name": event.name}}
            else:
                yield {"thinking" if isinstance(event, ReasoningText) else "content": event.text}
        if delta.finish_reason is not None:
            yield from self._ended_call()

    def _ended_call(self) -> Iterator[JsonObject]:
        if self._call is not None:
            self._call["function"]["arguments"] = arguments_object(self._arguments)
            yield {"tool_calls": [self._call]}
        self._call, self._arguments = None, ""

    def _end(self) -> JsonObject:
        """Return the last fields: why the answer ended, token counts, and durations in nanoseconds."""
        speed, counted = self._generation.performance(), self._generation.usage()
        first, total = _ns(speed["ttft_seconds"]), _ns(speed["total_seconds"])
        spent = {"load_duration": _ns(self._load_s), "prompt_eval_duration": first, "eval_duration": total - first}
        counts = {"prompt_eval_count": counted["prompt_tokens"], "eval_count": counted["completion_tokens"]}
        return {"done": True, "done_reason": self._reason, "total_duration": _ns(self._load_s) + total, **spent, **counts}
