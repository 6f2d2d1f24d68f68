"""Streaming client that records the arrival time of each piece of text, on asyncio sockets with minimal work per token.

Client and servers often share a machine, so the client's CPU time slows the servers. An HTTP library would need more CPU
time than the servers' own HTTP code.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tandem.json_types import JsonObject

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
READ_BYTES = 2**16


@dataclass(frozen=True, kw_only=True)
class Target:
    """An OpenAI-compatible server and the request parameters to use."""

    base_url: str
    """Address without /v1, such as http://127.0.0.1:8000."""
    model: str
    endpoint: str = COMPLETIONS
    """Either `COMPLETIONS` or `CHAT`, or another path with the same interface."""
    api_key: str = field(default="", repr=False)
    body: Mapping[str, object] = field(default_factory=dict)
    """Additional fields of each request's body."""
    timeout_s: float = 600.0
    """Seconds after which a request counts as failed."""


@dataclass(frozen=True)
class BenchRequest:
    """One request to send."""

    prompt: str
    max_tokens: int
    name: str = ""


@dataclass
class Timed:
    """Timed answer to a request; times are of time.perf_counter() in seconds."""

    job: BenchRequest
    sent: float
    pieces: list[float] = field(default_factory=list)
    """Arrival times of the events with text."""
    ended: float = 0.0
    tokens: int = 0
    """Output tokens as the server reports them; the number of events with text if it does not."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    error: str = ""
    """Reason of a failure; empty on success."""
    stopped: bool = False
    """Set by the caller to end the answer at its next event."""

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first text."""
        return self.pieces[0] - self.sent

    @property
    def e2e(self) -> float:
        """Seconds from sending to the last text."""
        return self.pieces[-1] - self.sent

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first; 0 for an answer of one token."""
        return (self.pieces[-1] - self.pieces[0]) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive events with text."""
        return [b - a for a, b in zip(self.pieces, self.pieces[1:], strict=False)]

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first token; 0 if all text arrived at once."""
        took = self.pieces[-1] - self.pieces[0]
        return (self.tokens - 1) / took if took else 0.0


async def send(target: Target, job: BenchRequest, answer: Timed | None = None) -> Timed:
    """Send one streaming completion and return the timed answer. Failures of any kind are stored in its `error`.

    A given `answer` is filled while the text arrives, so that the caller can observe progress.
    """
    answer = answer or Timed(job, time.perf_counter())
    try:
        async with asyncio.timeout(target.timeout_s):
            await _stream(target, job, answer)
    except TimeoutError:
        answer.error = f"no end within {target.timeout_s:g} s"
    except (OSError, EOFError, ValueError, LookupError, TypeError) as error:  # a broken connection or a malformed answer
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended = time.perf_counter()
    if not answer.error and not answer.pieces:
        answer.error = "an answer without text"
    answer.tokens = answer.tokens or len(answer.pieces)
    return answer


async def _stream(target: Target, job: BenchRequest, answer: Timed) -> None:
    chat = target.endpoint.endswith("chat/completions")
    prompt = {"messages": [{"role": "user", "content": job.prompt}]} if chat else {"prompt": job.prompt}
    body = {
        "model": target.model,
        **prompt,
        "max_tokens": job.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.body,
    }
    data = json.dumps(body).encode()
    url = urlsplit(target.base_url)
    secure = url.scheme == "https"
    reader, writer = await asyncio.open_connection(
        url.hostname, url.port or (443 if secure else 80), ssl=ssl.create_default_context() if secure else None
    )
    key = f"Authorization: Bearer {target.api_key}\r\n" if target.api_key else ""
    head = (
        f"POST {url.path.rstrip('/')}{target.endpoint} HTTP/1.1\r\nHost: {url.netloc}\r\n{key}Accept: */*\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    try:
        answer.sent = time.perf_counter()
        writer.write(head.encode() + data)
        status = (await reader.readline()).decode("latin-1").split(maxsplit=2)[1]
        lines = _lines(reader, await _is_chunked(reader))
        if status != "200":
            answer.error = f"HTTP {status}: {' '.join([line.decode(errors='replace') async for line in lines])[:500]}"
            return
        async for line in lines:
            if line.startswith(b"data:") and line != b"data: [DONE]":
                _take(answer, json.loads(line[5:]), time.perf_counter())
            if answer.stopped:
                return
    finally:
        writer.close()


async def _is_chunked(reader: asyncio.StreamReader) -> bool:
    """Read the response headers; return True for chunked transfer encoding."""
    chunked = False
    while (line := await reader.readline()).strip():
        name, _, value = line.lower().partition(b":")
        chunked |= name == b"transfer-encoding" and b"chunked" in value
    return chunked


async def _lines(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """Yield the lines of the body without line ends. Raises EOFError when a chunked body is truncated."""
    left = b""
    while data := await (_chunk(reader) if chunked else reader.read(READ_BYTES)):
        *whole, left = (left + data).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")
    if left:
        yield left


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    """Return the next chunk's data; empty at the end of the body."""
    size = int((await reader.readline()).split(b";")[0], 16)
    return (await reader.readexactly(size + 2))[:-2]


def _take(answer: Timed, event: JsonObject, now: float) -> None:
    if "error" in event:
        answer.error = str(event["error"].get("message") if isinstance(event["error"], dict) else event["error"])[:500]
        return
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        if text:
            answer.pieces.append(now)
            answer.text += text
    if usage := event.get("usage"):
        answer.tokens, answer.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
