"""Models for terminal conversations: loaded in this process, or served by a running server."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from tandem.errors import UsageError
from tandem.json_types import JsonMapping, JsonObject
from tandem.protocol.request import SamplingDefaults, SamplingParams
from tandem.system.http_client import ServerClient
from tandem.text.thinking import thinking_variables

if TYPE_CHECKING:
    from tandem.llm import LLM

Prompt = str | list[JsonObject]
"""Text to complete, or messages of a conversation."""
CONNECT_S = 20.0
"""Timeout in seconds of a server's model information."""


@dataclass
class Piece:
    """Part of an answer's text."""

    text: str
    reasoning: bool = False


Pieces = Generator[Piece, None, None]
"""Generator of an answer's pieces; closing it cancels the request."""


@dataclass
class Speed:
    """Tokens and times of an answer, updated while it arrives. Times are of time.perf_counter() in seconds."""

    tokens: int = 0
    began: float = 0.0
    ended: float = 0.0
    finish: str = ""
    """Finish reason as in the API: `stop`, `length`; empty while unfinished."""

    def __str__(self) -> str:
        seconds = self.ended - self.began
        rate = f", {(self.tokens - 1) / seconds:.1f} tokens/s" if self.tokens > 1 and seconds > 0 else ""
        return f"{self.tokens} tokens{rate}{', cut at the limit' if self.finish == 'length' else ''}"


class LocalModel:
    """A model loaded in this process and its ranks."""

    where, can_see = "loaded here", False
    """Short description of the model's location; and whether messages may contain images, if known."""

    def __init__(self, llm: LLM, name: str, defaults: Mapping[str, float]) -> None:
        """Store the model. `defaults` are sampling parameters below those of the model and the user."""
        self.llm, self.name = llm, name
        self._defaults = {**defaults, **llm.default_sampling.given()}
        self.can_chat = llm.tokenizer.has_chat_template

    def answer(self, prompt: Prompt, params: JsonMapping, speed: Speed) -> Pieces:
        """Yield pieces of the answer and update `speed`. Raises UsageError and RequestError."""
        sampling = {**self._defaults, **params}
        asked: Prompt | list[int] = prompt
        if (effort := sampling.pop("reasoning_effort", None)) and not isinstance(prompt, str):
            tokenizer = self.llm.tokenizer
            variables = thinking_variables(tokenizer.template_reads, tokenizer.template_words, effort)
            asked = tokenizer.render_chat(prompt, variables)
        text = ""
        try:
            for piece in self.llm.stream(asked, SamplingParams(**sampling)):
                speed.began, speed.ended = speed.began or time.perf_counter(), time.perf_counter()
                text += piece
                yield Piece(piece)
        finally:
            speed.tokens = len(self.llm.tokenizer.encode(text, False))
            speed.finish = "length" if speed.tokens >= sampling["max_tokens"] else "stop"


class RemoteModel:
    """A model of a running server."""

    can_chat = True

    def __init__(self, server: ServerClient, name: str | None, defaults: Mapping[str, float]) -> None:
        """Select the model `name`; None selects the server's first. Raises UsageError."""
        self._server = server
        self.where = server.url
        names = self.names()
        if name and name not in ("default", *names) and not self._info(f"/v1/models/{quote(name)}"):
            raise UsageError(f"{server.url} has no model {name!r}; there is: {', '.join(names)}", param="model")
        self.name = name or names[0]
        info = self._info("/model/info")
        reads = self._info(f"/v1/models/{quote(self.name)}").get("architecture", {}).get("input_modalities", ("image",))
        self.can_see = not info or "image" in reads  # other servers, and models that are not loaded, may accept images
        own = info.get("default_sampling_params", {})
        known = SamplingDefaults.__struct_fields__
        self._defaults = {key: value for key, value in defaults.items() if key in known and key not in own}

    def names(self) -> list[str]:
        """Return the names of the server's models. Raises UsageError."""
        return self._server.models() or ["default"]

    def _info(self, path: str) -> JsonObject:
        """Return the JSON object at `path`; empty on any failure."""
        try:
            info = self._server.get_json(path, timeout_s=CONNECT_S)
        except (UsageError, ValueError):
            return {}
        return info if isinstance(info, dict) else {}

    def answer(self, prompt: Prompt, params: Mapping[str, object], speed: Speed) -> Pieces:
        """Yield pieces of the answer and update `speed`. Raises UsageError."""
        chat = not isinstance(prompt, str)
        path, name = ("/v1/chat/completions", "messages") if chat else ("/v1/completions", "prompt")
        asked = {name: prompt, "model": self.name, "stream": True, "stream_options": {"include_usage": True}}
        for event in self._server.events(path, {**self._defaults, **params, **asked}):
            speed.tokens = (event.get("usage") or {}).get("completion_tokens", speed.tokens)
            for choice in event.get("choices", ()):
                speed.began, speed.ended = speed.began or time.perf_counter(), time.perf_counter()
                speed.finish = choice.get("finish_reason") or speed.finish
                delta = (choice.get("delta") or {}) if chat else {"content": choice.get("text")}
                if thought := delta.get("reasoning_content"):
                    yield Piece(thought, reasoning=True)
                if text := delta.get("content"):
                    yield Piece(text)


Model = LocalModel | RemoteModel
