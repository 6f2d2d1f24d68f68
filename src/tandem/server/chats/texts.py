"""Tokenizer of the engine's model, and threads for tokenizer work that would block the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from sys import getsizeof
from typing import TypeVar, TypeVarTuple

from msgspec import Struct

from tandem.checkpoints.files import ModelFiles
from tandem.config.settings import ModelSettings, Settings
from tandem.config.several import settings_of
from tandem.errors import TandemError, UnavailableError
from tandem.guided.accept import GrammarCheck
from tandem.log import Seldom
from tandem.protocol.control import EngineStatus
from tandem.protocol.request import MAX_PICTURE_BYTES
from tandem.text.pictures import Prepared
from tandem.text.tokenizer import Tokenizer, check_template_file, load_tokenizer

logger = logging.getLogger(__name__)
seldom = Seldom(logger)

LARGE = 8192
"""Characters or tokens above which text work runs in a thread: about 1 ms of tokenizing."""

FILES_AWAY = "tokenizer_unavailable"
"""Error code for unreadable tokenizer files (a server fault)."""

PictureKey = tuple[str, str, bool]
"""Source of the model, URL of a picture, and whether a small one is enough."""
Result = TypeVar("Result")
Given = TypeVarTuple("Given")


class TextsOf(Struct, frozen=True):
    """Arguments to load a model's tokenizer and template in another process as the api has."""

    source: str
    """Model directory."""
    name: str
    chat_template: str | None
    """File that replaces the model's template."""
    trust_remote_code: bool


def tokenizer_of(model: TextsOf) -> Tokenizer:
    """Load the tokenizer of a model. Raises TandemError."""
    files = ModelFiles(path=Path(model.source), name=model.name)
    return load_tokenizer(files, chat_template_file=model.chat_template, trust_remote_code=model.trust_remote_code)


def check_templates(settings: Settings) -> None:
    """Raise TandemError if the `--chat-template` file of any model is unusable."""
    models = [settings_of(settings, one).model for one in settings.named] or [settings.model]
    for given in filter(None, (one.chat_template for one in models)):
        check_template_file(given)


class Texts:
    """Cache of the tokenizer of the engine's model; reloads when the engine changes its model."""

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._tokenizers: dict[str, Tokenizer] = {}
        """The last tokenizer that was loaded, by its model's directory."""
        self._grammars: tuple[Tokenizer, GrammarCheck] | None = None
        self._lock = asyncio.Lock()
        self.prepared: dict[PictureKey, Prepared] = {}
        """Pictures as the processor prepared them, oldest first."""

    def keep(self, pictures: Mapping[PictureKey, Prepared]) -> None:
        """Keep prepared pictures, up to `MAX_PICTURE_BYTES` with their URLs in all; the oldest are dropped."""
        self.prepared |= pictures
        sizes = {key: getsizeof(key[1]) + one.picture.size for key, one in self.prepared.items()}
        over = sum(sizes.values()) - MAX_PICTURE_BYTES
        while over > 0:
            over -= sizes[oldest := next(iter(sizes))]
            del sizes[oldest], self.prepared[oldest]

    def ready(self, status: EngineStatus) -> bool:
        """Return whether the tokenizer of this engine's model is loaded."""
        return status.source in self._tokenizers

    async def tokenizer(self, status: EngineStatus) -> Tokenizer:
        """Return the tokenizer of the engine's model, loading it if needed. Raises UnavailableError."""
        if (loaded := self._tokenizers.get(status.source)) is not None:
            return loaded
        if not status.source:
            raise UnavailableError("The model is still being loaded; try again shortly.", code="model_loading")
        async with self._lock:
            if status.source not in self._tokenizers:
                self._tokenizers = {status.source: await asyncio.to_thread(self._load, status)}
            return self._tokenizers[status.source]

    def grammars(self, tokenizer: Tokenizer) -> GrammarCheck:
        """Return the grammar checker for `tokenizer`."""
        if self._grammars is None or self._grammars[0] is not tokenizer:
            self._grammars = (tokenizer, GrammarCheck(tokenizer))
        return self._grammars[1]

    def described(self, status: EngineStatus) -> TextsOf:
        """Return the arguments for another process to load the same tokenizer."""
        return TextsOf(status.source, status.model, self._settings.chat_template, self._settings.trust_remote_code)

    def _load(self, status: EngineStatus) -> Tokenizer:
        try:
            return tokenizer_of(self.described(status))
        except TandemError as error:
            seldom.error("cannot load the tokenizer: %s; requests get 503 until its files are mended", error)
            raise UnavailableError(f"The tokenizer cannot be loaded: {error.message}", retry_after=30.0) from error


THREADS = 3
"""Threads for text work; few, as each busy one delays the event loop by some milliseconds (GIL)."""
_threads = ThreadPoolExecutor(THREADS, "texts")


async def off_loop(large: bool, work: Callable[[*Given], Result], *given: *Given) -> Result:
    """Return `work(*given)`; run in a thread if `large`."""
    return await asyncio.get_running_loop().run_in_executor(_threads, work, *given) if large else work(*given)
