"""Responses from a generation: one JSON body, or a stream of server-sent events (of lines, as its writer has it)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.errors import RequestError
from tandem.json_types import JsonMapping
from tandem.server.chats.texts import LARGE, off_loop
from tandem.server.context import head
from tandem.server.failures import envelope
from tandem.server.generation import Delta, Generation
from tandem.server.openai.schemas import SamplingFields

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
REFUSAL_GRACE_S = 0.5
"""Seconds before a stream sends its status line, so that an early refusal by the engine gets its own HTTP status."""

HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

_LINE_ENDS = {"\u2028".encode(): rb"\u2028", "\u2029".encode(): rb"\u2029", "\x85".encode(): rb"\u0085"}
"""Unicode line separators, at which some clients split events (httpx's `iter_lines`), and their JSON escapes."""
_encode = msgspec.json.Encoder().encode


def encode_json(value: object) -> bytes:
    """Return `value` as JSON on one line, also for clients that split at Unicode line separators."""
    data = _encode(value)
    for end, escaped in _LINE_ENDS.items():
        if end in data:
            data = data.replace(end, escaped)
    return data


def json_response(body: Mapping[str, object], status: int = 200) -> Response:
    """Return an HTTP response with `body` as JSON."""
    return Response(encode_json(body), status, media_type="application/json")


class AnswerWriter(Protocol):
    """Encoder of one endpoint's stream; each method returns complete events."""

    headers: ClassVar[list[tuple[bytes, bytes]]] = HEADERS
    done: ClassVar[bytes] = DONE
    """Last bytes of a stream; empty where the last event ends it."""

    def keep_alive(self) -> bytes:
        """Return what is sent when there was no text for the heartbeat interval."""
        return KEEP_ALIVE

    def head(self) -> bytes:
        """Return the events before the first text, none by default."""
        return b""

    def delta(self, delta: Delta, extras: dict[str, object] | None) -> bytes:
        """Return the events for new text. `extras`: fields for the last chunk with choices, if no usage follows."""

    def usage(self, usage: dict[str, object], extras: dict[str, object]) -> bytes:
        """Return the usage event; `extras` are further fields of it."""

    async def end(self) -> None:
        """Run endpoint-specific work between the last text and the last event."""
        return None

    def error(self, error: RequestError) -> bytes:
        """Return the last bytes of a stream that failed."""
        return failed_stream(error)


def failed_stream(error: RequestError) -> bytes:
    """Return the events that end a failed stream in OpenAI's format."""
    return b"data: " + encode_json(envelope(error)) + b"\n\n" + DONE


def named_event(data: JsonMapping) -> bytes:
    """Return a server-sent event named after the `type` field of `data`."""
    return b"".join((b"event: ", data["type"].encode(), b"\ndata: ", encode_json(data), b"\n\n"))


class Envelope:
    """Constant part of all chunks of a stream, encoded once."""

    def __init__(
        self, fields: Mapping[str, object], *, include_usage: bool, running: Callable[[], dict[str, object]] | None = None
    ) -> None:
        """`fields`: the constant part. `running`: returns the usage so far, for streams with usage in every chunk."""
        self._running = running
        self._start = b"data: " + encode_json(fields)[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def chunk(self, choice: Mapping[str, object], extras: Mapping[str, object] | None = None) -> bytes:
        """Return a chunk with one choice; `extras` are further fields of the chunk."""
        end = self._end if self._running is None else b'],"usage":' + encode_json(self._running()) + b"}\n\n"
        if not extras:
            return b"".join((self._start, encode_json(choice), end))
        tail = b"," + encode_json(extras)[1:-1] + end[1:]
        return b"".join((self._start, encode_json(choice), b"]", tail))

    def without_choice(self, fields: Mapping[str, object]) -> bytes:
        """Return a chunk with an empty `choices` and with `fields`."""
        return b"".join((self._start, b"],", encode_json(fields)[1:], b"\n\n"))


class ChunkWriter(AnswerWriter):
    """Base class for streams in OpenAI's format: chunks with a shared envelope, usage in the last."""

    def __init__(self, kind: str, generation: Generation, fields: SamplingFields) -> None:
        """`kind`: the `object` of each chunk."""
        self._generation = generation
        self._envelope = Envelope(
            head(kind, generation.request_id, generation.model),
            include_usage=fields.include_usage,
            running=generation.usage if fields.continuous_usage else None,
        )

    def usage(self, usage: dict[str, object], extras: dict[str, object]) -> bytes:
        """Return the last chunk, which has the usage and no choices."""
        return self._envelope.without_choice({"usage": usage, **extras})


async def start_stream(
    scope: Scope, send: Send, error: Callable[[RequestError], bytes], headers: list[tuple[bytes, bytes]] = HEADERS
) -> None:
    """Send the headers of a stream unless sent; `error` encodes any later failure (see `Gate`)."""
    begun = "tandem.stream" in scope
    scope["tandem.stream"] = error
    if not begun:
        await send({"type": "http.response.start", "status": 200, "headers": headers})


async def streamed(generation: Generation, writer: AnswerWriter, *, include_usage: bool = True) -> Response:
    """Return a streaming response for `generation`. Raises RequestError if the engine refuses within `REFUSAL_GRACE_S`."""
    grace = asyncio.get_running_loop().call_later(REFUSAL_GRACE_S, generation.nudge)
    try:
        first = await generation.next()
    except BaseException:
        generation.close()
        raise
    finally:
        grace.cancel()
    return EventStream(generation, writer, first, include_usage=include_usage)


class EventStream(Response):
    """Streaming response: batches available text into one write, sends keep-alive comments, closes the generation."""

    def __init__(self, generation: Generation, writer: AnswerWriter, first: list[Delta] | None, *, include_usage: bool) -> None:
        super().__init__()
        self._generation = generation
        self._writer = writer
        self._first = first
        self._include_usage = include_usage
        self._heartbeat_s = generation.api.heartbeat_s
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the end. Raises RequestError, including ClientGone."""
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self._timer = self._loop.call_later(self._heartbeat_s, self._tick)
        try:
            await start_stream(scope, send, self._writer.error, self._writer.headers)
            await self._run(send)
        finally:
            self._timer.cancel()
            self._generation.close()

    async def _run(self, send: Send) -> None:
        body = self._writer.head()
        # No comment before the first pause: `vllm bench serve` loses the data that follows one.
        deltas: list[Delta] | None = self._first or []
        while not self._generation.done:
            if deltas:
                body += await self._write(deltas)
            elif deltas is None and not body:
                body = self._writer.keep_alive()
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
                self._sent_at = self._loop.time()
                body = b""
            deltas = await self._generation.next()
        body += await self._write(deltas or [])
        await self._writer.end()
        if self._include_usage:
            body += self._writer.usage(self._generation.usage(), self._extras())
        self._generation.close()  # before the last bytes, so that the client's next request finds this slot free
        await send({"type": "http.response.body", "body": body + self._writer.done, "more_body": False})

    async def _write(self, deltas: list[Delta]) -> bytes:
        of_prompts = sum(len(delta.prompt) * (delta.prompt.k + 1) for delta in deltas if delta.prompt is not None)
        return await off_loop(of_prompts > LARGE, self._written, deltas)

    def _written(self, deltas: list[Delta]) -> bytes:
        last = deltas[-1] if deltas and self._generation.done and not self._include_usage else None
        return b"".join(self._writer.delta(delta, self._extras() if delta is last else None) for delta in deltas)

    def _extras(self) -> dict[str, object]:
        return {"performance": self._generation.performance()}

    def _tick(self) -> None:
        """Trigger a keep-alive comment when nothing was sent for the heartbeat interval (a timer callback)."""
        silent = self._loop.time() - self._sent_at
        if silent >= self._heartbeat_s * 0.9:
            self._generation.nudge()
            silent = 0.0
        self._timer = self._loop.call_later(self._heartbeat_s - silent, self._tick)
