"""Answers made of a generation: in one piece, or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.errors import RequestError
from tandem.server.chats.texts import LARGE, off_loop
from tandem.server.failures import ClientGone, envelope, internal_error
from tandem.server.generation.generate import Delta, Generation, collect

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
REFUSAL_GRACE_S = 0.5
"""Seconds that a stream waits before its status line, so that a refusal by the engine gets its own HTTP status."""

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_LINE_ENDS = {"\u2028".encode(): rb"\u2028", "\u2029".encode(): rb"\u2029", "\x85".encode(): rb"\u0085"}
"""Line ends of Unicode that some clients take for those of an event (httpx's `iter_lines`)."""
_encode = msgspec.json.Encoder().encode


def encode_json(value: Any) -> bytes:
    """Return JSON that is one line for all ways to split lines."""
    data = _encode(value)
    for end, escaped in _LINE_ENDS.items():
        if end in data:
            data = data.replace(end, escaped)
    return data


def json_response(body: dict[str, Any], status: int = 200) -> Response:
    """Return an answer in one piece."""
    return Response(encode_json(body), status, media_type="application/json")


class AnswerWriter(Protocol):
    """Writes a generation in the shape of one endpoint, in one piece or as complete events."""

    async def whole(self, answers: list[Delta]) -> Response:
        """Return the answer in one piece; `answers` hold all of each choice."""

    def head(self) -> bytes:
        """Return the events before the first text."""

    def delta(self, delta: Delta, extras: dict[str, Any] | None) -> bytes:
        """Return the events for new text. `extras` are fields of the last chunk that has choices."""

    def usage(self, usage: dict[str, Any], extras: dict[str, Any]) -> bytes:
        """Return the event with the usage."""

    async def end(self) -> None:
        """Do what must be done between the last text and the last event."""
        return None

    def done(self) -> bytes:
        """Return the last bytes of a stream."""
        return DONE

    def error(self, error: RequestError) -> bytes:
        """Return the last bytes of a stream that failed."""
        return failed_stream(error)


def failed_stream(error: RequestError) -> bytes:
    """Return the events that end a failed stream in OpenAI's form."""
    return b"data: " + encode_json(envelope(error)) + b"\n\n" + DONE


def named_event(data: dict[str, Any]) -> bytes:
    """Return an event whose name is its `type`."""
    return b"".join((b"event: ", data["type"].encode(), b"\ndata: ", encode_json(data), b"\n\n"))


class Envelope:
    """The part of a chunk that is the same in all chunks of a stream, encoded once."""

    def __init__(self, fields: dict[str, Any], *, include_usage: bool,
                 running: Callable[[], dict[str, Any]] | None = None) -> None:
        """`running` gives the usage so far, which every chunk is to carry."""
        self._running = running
        self._start = b"data: " + encode_json(fields)[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def chunk(self, choice: dict[str, Any], extras: dict[str, Any] | None = None) -> bytes:
        """Return an event with one choice."""
        end = self._end if self._running is None else b'],"usage":' + encode_json(self._running()) + b"}\n\n"
        if not extras:
            return b"".join((self._start, encode_json(choice), end))
        tail = b"," + encode_json(extras)[1:-1] + end[1:]
        return b"".join((self._start, encode_json(choice), b"]", tail))

    def without_choice(self, fields: dict[str, Any]) -> bytes:
        """Return an event with no choice but other fields."""
        return b"".join((self._start, b"],", encode_json(fields)[1:], b"\n\n"))


async def answered(generation: Generation, writer: AnswerWriter, *, stream: bool | None,
                   include_usage: bool = True) -> Response:
    """Return the response made of `generation`. Raises RequestError; for a stream, when the engine refuses at once."""
    if not stream:
        return await writer.whole(await collect(generation))
    grace = asyncio.get_running_loop().call_later(REFUSAL_GRACE_S, generation.subscription.nudge)
    try:
        first = await generation.next()
    except BaseException:
        generation.close()
        raise
    finally:
        grace.cancel()
    return EventStream(generation, writer, first, include_usage=include_usage)


class EventStream(Response):
    """Sends what comes together in one piece, a comment when nothing comes, and closes the generation."""

    def __init__(self, generation: Generation, writer: AnswerWriter, first: list[Delta] | None, *,
                 include_usage: bool) -> None:
        super().__init__()
        self._generation = generation
        self._writer = writer
        self._first = first
        self._include_usage = include_usage
        self._heartbeat_s = generation.api.heartbeat_s
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the end, an error, or the client's leaving."""
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self._timer = self._loop.call_later(self._heartbeat_s, self._tick)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await self._run(send)
        except ClientGone:
            pass
        except RequestError as error:
            await self._send_error(send, error)
        except Exception as error:  # noqa: BLE001 - the status line is out: the client can only be told in the stream
            await self._send_error(send, internal_error(error, "a stream"))
        finally:
            self._timer.cancel()
            self._generation.close()

    async def _run(self, send: Send) -> None:
        body = self._writer.head()
        # No comment before the first silence: `vllm bench serve` loses whatever follows one.
        deltas: list[Delta] | None = self._first or []
        while not self._generation.done:
            if deltas:
                body += await self._write(deltas)
            elif deltas is None and not body:
                body = KEEP_ALIVE
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
                self._sent_at = self._loop.time()
                body = b""
            deltas = await self._generation.next()
        body += await self._write(deltas or [])
        await self._writer.end()
        if self._include_usage:
            body += self._writer.usage(self._generation.usage(), self._extras())
        await self._end(send, body + self._writer.done())

    async def _write(self, deltas: list[Delta]) -> bytes:
        of_prompts = sum(len(delta.prompt) * (delta.prompt.k + 1) for delta in deltas if delta.prompt is not None)
        return await off_loop(of_prompts > LARGE, self._written, deltas)

    def _written(self, deltas: list[Delta]) -> bytes:
        last = deltas[-1] if deltas and self._generation.done and not self._include_usage else None
        return b"".join(self._writer.delta(delta, self._extras() if delta is last else None) for delta in deltas)

    def _extras(self) -> dict[str, Any]:
        return {"performance": self._generation.performance()}

    def _tick(self) -> None:
        """Nudge the stream when nothing was sent for a while."""
        silent = self._loop.time() - self._sent_at
        if silent >= self._heartbeat_s * 0.9:
            self._generation.subscription.nudge()
            silent = 0.0
        self._timer = self._loop.call_later(self._heartbeat_s - silent, self._tick)

    async def _send_error(self, send: Send, error: RequestError) -> None:
        await self._end(send, self._writer.error(error))

    async def _end(self, send: Send, body: bytes) -> None:
        """Send the last bytes. The request is over before, so that a client may send the next one at once."""
        self._generation.close()
        await send({"type": "http.response.body", "body": body, "more_body": False})
