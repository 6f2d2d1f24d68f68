"""What answers in a terminal: a model that is loaded here, or one of a running server."""

from __future__ import annotations

import json
import time
import urllib.error
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tandem.bench.client import error_message, open_url
from tandem.errors import UsageError
from tandem.protocol.request import SamplingDefaults

if TYPE_CHECKING:
    from tandem.llm import LLM

Message = dict[str, Any]
CONNECT_S = 20.0
"""Seconds that a server gets to answer at all when it is asked for what it has."""


@dataclass
class Piece:
    """Some text of an answer."""

    text: str
    reasoning: bool = False


Pieces = Generator[Piece, None, None]
"""An answer as it comes; closing it stops it."""


@dataclass
class Speed:
    """What an answer took; filled in while it comes."""

    tokens: int = 0
    began: float = 0.0
    ended: float = 0.0
    finish: str = ""
    """Why it ended, as the API has it."""

    def __str__(self) -> str:
        seconds = self.ended - self.began
        rate = f", {(self.tokens - 1) / seconds:.1f} tokens/s" if self.tokens > 1 and seconds > 0 else ""
        return f"{self.tokens} tokens{rate}{', cut at the limit' if self.finish == 'length' else ''}"


class Loaded:
    """A model in this process and its ranks."""

    where, can_see = "loaded here", False
    """Where it is, in a few words; and whether messages may hold images, as far as one can tell beforehand."""

    def __init__(self, llm: LLM, name: str, defaults: Mapping[str, Any]) -> None:
        """`defaults` are those of a terminal, for what neither the model nor the user says."""
        self.llm, self.name = llm, name
        self._defaults = {**defaults, **llm.default_sampling.given()}
        self.can_chat = llm.tokenizer.has_chat_template

    def answer(self, messages: Sequence[Message], params: Mapping[str, Any], speed: Speed) -> Pieces:
        """The answer to a conversation, as it comes. Raises UsageError and RequestError."""
        return self._pieces(list(messages), params, speed)

    def complete(self, prompt: str, params: Mapping[str, Any], speed: Speed) -> Pieces:
        """A prompt's completion, as it comes. Raises UsageError and RequestError."""
        return self._pieces(prompt, params, speed)

    def _pieces(self, prompt: Any, params: Mapping[str, Any], speed: Speed) -> Pieces:
        from tandem.protocol.request import SamplingParams

        asked = {**self._defaults, **params}
        text = ""
        try:
            for piece in self.llm.stream(prompt, SamplingParams(**asked)):
                speed.began, speed.ended = speed.began or time.perf_counter(), time.perf_counter()
                text += piece
                yield Piece(piece)
        finally:
            speed.tokens = len(self.llm.tokenizer.encode(text, False))
            speed.finish = "length" if speed.tokens >= asked["max_tokens"] else "stop"


class Served:
    """A model of a running server."""

    can_chat = True

    def __init__(self, url: str, key: str, name: str | None, defaults: Mapping[str, Any]) -> None:
        """The model of that name, by default the server's first. Raises UsageError."""
        self._url, self._key = url, key
        self.where = url
        names = self.names()
        if name not in (None, "default", *names) and not self._get(f"/v1/models/{name}", quiet=True):  # of other names
            raise UsageError(f"{url} has no model {name!r}; there is: {', '.join(names)}", param="model")
        self.name = name or names[0]
        info = self._get("/model/info", quiet=True)
        self.can_see = not info  # Tandem's own servers, which tell it, read text alone; of others one cannot know
        own = info.get("default_sampling_params", {})
        known = SamplingDefaults.__struct_fields__
        self._defaults = {key: value for key, value in defaults.items() if key in known and key not in own}

    def names(self) -> list[str]:
        """Names of its models. Raises UsageError."""
        try:
            return [str(one["id"]) for one in self._get("/v1/models")["data"]] or ["default"]
        except (LookupError, TypeError):
            raise UsageError(f"{self._url} does not answer as a server of models; is --url right?",
                             param="url") from None

    def answer(self, messages: Sequence[Message], params: Mapping[str, Any], speed: Speed) -> Pieces:
        """The answer to a conversation, as it comes. Raises UsageError and RequestError."""
        for choice in self._stream("/v1/chat/completions", {"messages": list(messages)}, params, speed):
            delta = choice.get("delta") or {}
            if thought := delta.get("reasoning_content"):
                yield Piece(thought, reasoning=True)
            if text := delta.get("content"):
                yield Piece(text)

    def complete(self, prompt: str, params: Mapping[str, Any], speed: Speed) -> Pieces:
        """A prompt's completion, as it comes. Raises UsageError and RequestError."""
        for choice in self._stream("/v1/completions", {"prompt": prompt}, params, speed):
            if text := choice.get("text"):
                yield Piece(text)

    def _stream(self, path: str, body: Message, params: Mapping[str, Any], speed: Speed) -> Iterator[dict[str, Any]]:
        asked = {**self._defaults, **params, **body, "model": self.name, "stream": True,
                 "stream_options": {"include_usage": True}}
        with self._open(path, json.dumps(asked).encode(), None) as response:
            for line in response:
                data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                if not data or data == b"[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise UsageError(str(chunk["error"].get("message", chunk["error"])))
                speed.tokens = (chunk.get("usage") or {}).get("completion_tokens", speed.tokens)
                for choice in chunk.get("choices", ()):
                    speed.began, speed.ended = speed.began or time.perf_counter(), time.perf_counter()
                    speed.finish = choice.get("finish_reason") or speed.finish
                    yield choice

    def _get(self, path: str, *, quiet: bool = False) -> dict[str, Any]:
        try:
            with self._open(quote(path), None, CONNECT_S) as response:
                found = json.load(response)
        except (UsageError, ValueError):
            if quiet:  # not every server has it
                return {}
            raise
        return found if isinstance(found, dict) else {}

    @contextmanager
    def _open(self, path: str, body: bytes | None, timeout: float | None) -> Iterator[Any]:
        """A response; closing it stops what the server does for it. Raises UsageError."""
        try:
            with open_url(self._url + path, self._key, body, timeout_s=timeout) as response:
                yield response
        except urllib.error.HTTPError as error:
            raise UsageError(error_message(error) or f"the server answers {error.code} {error.reason}") from None
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise UsageError(f"{self._url} cannot be reached: {reason}", param="url") from None


Model = Loaded | Served
"""Whom a terminal talks to."""
