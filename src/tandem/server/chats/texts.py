"""The tokenizer of the model that the engine serves, and work with it that must not hold up the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tandem.checkpoints.files import ModelFiles
from tandem.config.settings import ModelSettings
from tandem.errors import TandemError, UnavailableError
from tandem.guided.check import GrammarCheck
from tandem.log import Seldom
from tandem.protocol.control import EngineStatus
from tandem.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)
seldom = Seldom(logger)

LARGE = 8192
"""Characters (or tokens) from which on text work is done in a thread: about a millisecond of tokenising."""

Result = TypeVar("Result")


class Texts:
    """Loads the tokenizer that belongs to the engine's model, once, and again when the engine changes its model."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._source: str | None = None
        self._tokenizer: Tokenizer | None = None
        self._grammars: tuple[Tokenizer, GrammarCheck] | None = None
        self._lock = asyncio.Lock()

    def ready(self, status: EngineStatus) -> bool:
        """True when the tokenizer of this engine's model is in memory."""
        return self._tokenizer is not None and self._source == status.source

    async def tokenizer(self, status: EngineStatus) -> Tokenizer:
        """The tokenizer of the engine's model. Raises UnavailableError while there is none."""
        if self._tokenizer is not None and self._source == status.source:
            return self._tokenizer
        if not status.source:
            raise UnavailableError("The model is still being loaded; try again shortly.", code="model_loading")
        async with self._lock:
            if self._tokenizer is None or self._source != status.source:
                self._tokenizer = await asyncio.to_thread(self._load, status)
                self._source = status.source
            return self._tokenizer

    def grammars(self, tokenizer: Tokenizer) -> GrammarCheck:
        """What tries grammars for the model of `tokenizer`."""
        if self._grammars is None or self._grammars[0] is not tokenizer:
            self._grammars = (tokenizer, GrammarCheck(tokenizer))
        return self._grammars[1]

    def _load(self, status: EngineStatus) -> Tokenizer:
        files = ModelFiles(path=Path(status.source), name=status.model)
        try:
            return load_tokenizer(
                files,
                chat_template_file=self._settings.chat_template,
                trust_remote_code=self._settings.trust_remote_code,
            )
        except TandemError as error:
            seldom.error("cannot load the tokenizer: %s; requests get 503 until its files are mended", error)
            raise UnavailableError(f"The tokenizer cannot be loaded: {error.message}", retry_after=30.0) from error


async def off_loop(large: bool, work: Callable[[], Result]) -> Result:
    """Run `work` here when it is small, in a thread when it is `large`."""
    return await asyncio.to_thread(work) if large else work()


async def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text."""
    return await off_loop(len(text) > LARGE, lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))


async def decode(tokenizer: Tokenizer, tokens: list[int], *, skip_special_tokens: bool = False) -> str:
    """Text of token ids."""
    return await off_loop(
        len(tokens) > LARGE, lambda: tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
    )


async def render_chat(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    template_kwargs: dict[str, Any],
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Token ids of a conversation in the model's chat template, which is told of the `tools`.

    Raises RequestError when there is no template, or the template rejects the conversation.
    """
    size = sum(len(message["content"]) + 32 for message in messages)

    def render() -> list[int]:
        return tokenizer.render_chat(
            messages, tools=tools or None, add_generation_prompt=add_generation_prompt, **template_kwargs
        )

    return await off_loop(size > LARGE, render)
