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
from tandem.server.chats.plan import ChatPlan, start_chat
from tandem.server.chats.request_texts import RequestTexts
from tandem.server.chats.response_formats import response_format_of
from tandem.server.chats.texts import off_loop
from tandem.server.context import get_api, new_id, note_ignored
from tandem.server.engines.served_model import Served
from tandem.server.generation import Delta, Generation
from tandem.server.ollama.models import canonical
from tandem.server.ollama.schemas import OllamaChatRequest, OllamaEmbedRequest, OllamaGenerateRequest
from tandem.server.ollama.translate import NAMES, chat_request, completion_request, sampling_of
from tandem.server.openai.completions import encode_prompts
from tandem.server.openai.embeddings import embed as embedded
from tandem.server.openai.models import unload
from tandem.server.openai.sampling import check_sizes, sequences_of
from tandem.server.openai.schemas import CompletionRequest, EmbeddingRequest
from tandem.server.openapi import documented
from tandem.server.sse import AnswerWriter, encode_json, json_response, streamed
from tandem.server.tools.deltas import CallArguments, CallStart, ReasoningText, merged

router = APIRouter()

NDJSON = "application/x-ndjson"
PLAIN = ChatPlan([], None, None, frozenset(), "stop", hides_reasoning=False, short_ids=False, thinking=None, marked=False)
"""Plan of a raw prompt, whose whole answer is content."""


@router.post("/api/chat", openapi_extra=documented(OllamaChatRequest, streams=True, stream_type=NDJSON))
async def chat(http: Request) -> Response:
    """Answer a conversation, as a stream unless `stream` is false."""
    fields = await parse(http, OllamaChatRequest)
    return await _answer(http, fields, empty=not fields.messages)


@router.post("/api/generate", openapi_extra=documented(OllamaGenerateRequest, streams=True, stream_type=NDJSON))
async def generate(http: Request) -> Response:
    """Answer a prompt, as a stream unless `stream` is false."""
    fields = await parse(http, OllamaGenerateRequest)
    return await _answer(http, fields, empty=not fields.prompt)


@router.post("/api/embed", openapi_extra=documented(OllamaEmbedRequest))
async def embed(http: Request) -> Response:
    """Return an embedding for each input."""
    started, fields = time.monotonic(), await parse(http, OllamaEmbedRequest)
    vectors, tokens = await _embeddings(http, fields, fields.input, "input")
    spent = {"total_duration": int((time.monotonic() - started) * 1e9), "load_duration": 0, "prompt_eval_count": tokens}
    return json_response({"model": fields.model, "embeddings": vectors, **spent})


@router.post("/api/embeddings", openapi_extra=documented(OllamaEmbedRequest))
async def embeddings(http: Request) -> Response:
    """Return the embedding of `prompt`."""
    fields = await parse(http, OllamaEmbedRequest)
    [vector], _ = await _embeddings(http, fields, fields.prompt, "prompt")
    return json_response({"embedding": vector})


async def _embeddings(http: Request, fields: OllamaEmbedRequest, given: object, param: str) -> tuple[list[list[float]], int]:
    """Return the embeddings of the field named `param` and its tokens. Raises RequestError."""
    with in_words({"input": param}):
        request = checked({"input": given, "dimensions": fields.dimensions}, EmbeddingRequest)
        vectors, inputs = await embedded(http, await acquire(http, canonical(http, fields.model)), request)
    units = await off_loop(len(vectors) > 16, lambda: [unit_vector(one, request.dimensions).tolist() for one in vectors])
    return units, sum(map(len, inputs))


async def _answer(http: Request, fields: OllamaChatRequest | OllamaGenerateRequest, *, empty: bool) -> Response:
    """Answer a request; an `empty` one only loads the model, or with `keep_alive` 0 unloads it."""
    name, started = canonical(http, fields.model), time.monotonic()
    sampling, left_out = sampling_of(fields, get_api(http).settings.server.unknown_fields)
    note_ignored(http, *left_out, *(["keep_alive"] if fields.keep_alive is not None and not empty else []))
    if empty and str(fields.keep_alive).rstrip("hms") == "0":
        await unload(http, name)
        return _nothing(fields, "unload")
    served = await acquire(http, name)
    if empty:
        return _nothing(fields, "load")
    load_s = time.monotonic() - started
    with in_words(NAMES):
        if isinstance(fields, OllamaGenerateRequest) and fields.raw:
            plan, generation = PLAIN, await _raw(http, served, completion_request(fields, sampling))
        else:
            request = await translated(http, lambda: chat_request(fields, sampling))
            plan, generation = await start_chat(http, served, request, new_id("ollama"))
    writer = LineWriter(generation, Reply(plan), fields, load_s)
    if fields.stream is not False:
        return await streamed(generation, writer)
    return writer.whole((await generation.collect())[0])


async def _raw(http: Request, served: Served, request: CompletionRequest) -> Generation:
    """Start to continue the one prompt of `request` as it stands. Raises RequestError."""
    check_sizes(request, most_choices=1)
    texts = await RequestTexts.of(http, served)
    [prompt] = await encode_prompts(texts, request.prompt, "prompt")
    form = await response_format_of(texts, request)
    work = sequences_of(
        prompt,
        request,
        served,
        texts.status,
        param="prompt",
        asked=request.max_tokens,
        logprobs=None,
        form=form,
        prompt_logprobs=None,
    )
    return Generation(
        http, served, request, work, texts.tokenizer, request_id=new_id("ollama"), prompt_tokens=len(prompt), continues=True
    )


def _nothing(fields: OllamaChatRequest | OllamaGenerateRequest, reason: str) -> Response:
    return json_response(_part(fields, {}, done=True) | {"done_reason": reason})


def _part(fields: OllamaChatRequest | OllamaGenerateRequest, piece: JsonObject, *, done: bool = False) -> JsonObject:
    """Return an object of the answer. `piece`: `content`, `thinking` or `tool_calls` of a message."""
    said: JsonObject = {"message": {"role": "assistant", "content": "", **piece}}
    if isinstance(fields, OllamaGenerateRequest):
        said = {"response": piece.get("content", ""), **({"thinking": piece["thinking"]} if "thinking" in piece else {})}
    return {"model": fields.model, "created_at": datetime.now(UTC).isoformat(), **said, "done": done}


class LineWriter(AnswerWriter):
    """Writer of an answer in Ollama's format: as one object, or as a JSON object a line. Tool calls are never divided."""

    headers = [(b"content-type", NDJSON.encode()), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

    def __init__(
        self, generation: Generation, reply: Reply, fields: OllamaChatRequest | OllamaGenerateRequest, load_s: float
    ) -> None:
        """`load_s`: seconds until the model was loaded."""
        self._generation, self._reply, self._fields, self._load_s = generation, reply, fields, load_s
        self._call: JsonObject | None = None
        self._arguments = ""
        self._reason = "stop"

    def whole(self, answer: Delta) -> Response:
        """Return the HTTP response for a complete answer."""
        said: JsonObject = {}
        for piece in self._pieces(answer.text, last=True):
            for name, value in piece.items():
                said[name] = said[name] + value if name in said else value
        self._reason = answer.finish_reason or "stop"
        return json_response(_part(self._fields, said, done=True) | self._figures())

    def head(self) -> bytes:
        """Return nothing, as every line has text."""
        return b""

    def keep_alive(self) -> bytes:
        """Return a line without text, as clients parse every line."""
        return self._line({})

    def delta(self, delta: Delta, extras: JsonObject | None) -> bytes:
        """Return the lines for new text."""
        self._reason = delta.finish_reason or "stop"
        return b"".join(map(self._line, self._pieces(delta.text, last=delta.finish_reason is not None)))

    def usage(self, usage: JsonObject, extras: JsonObject) -> bytes:
        """Return the last line, with reason, counts and durations."""
        return encode_json(_part(self._fields, {}, done=True) | self._figures()) + b"\n"

    def done(self) -> bytes:
        """Return nothing, as `"done": true` ends the stream."""
        return b""

    def error(self, error: RequestError) -> bytes:
        """Return the line that ends a failed stream."""
        return encode_json({"error": error.message}) + b"\n"

    def _line(self, piece: JsonObject) -> bytes:
        return encode_json(_part(self._fields, piece)) + b"\n"

    def _pieces(self, text: str, *, last: bool) -> Iterator[JsonObject]:
        """Yield the pieces of a message in new text; a call once its arguments are complete."""
        for event in merged(self._reply.read(text, last=last)):
            if isinstance(event, CallArguments):
                self._arguments += event.text
                continue
            yield from self._ended_call()
            if isinstance(event, CallStart):
                self._call = {"id": self._reply.call_id("call", event), "function": {"index": event.index, "name": event.name}}
            else:
                yield {"thinking" if isinstance(event, ReasoningText) else "content": event.text}
        if last:
            yield from self._ended_call()

    def _ended_call(self) -> Iterator[JsonObject]:
        if self._call is not None:
            self._call["function"]["arguments"] = arguments_object(self._arguments)
            yield {"tool_calls": [self._call]}
        self._call, self._arguments = None, ""

    def _figures(self) -> JsonObject:
        """Return why the answer ended, token counts, and durations in nanoseconds."""
        speed, counted = self._generation.performance(), self._generation.usage()
        total, first = (float(str(speed[name])) for name in ("total_seconds", "ttft_seconds"))
        return {
            "done_reason": self._reason,
            "total_duration": int((self._load_s + total) * 1e9),
            "load_duration": int(self._load_s * 1e9),
            "prompt_eval_count": counted["prompt_tokens"],
            "prompt_eval_duration": int(first * 1e9),
            "eval_count": counted["completion_tokens"],
            "eval_duration": int((total - first) * 1e9),
        }
