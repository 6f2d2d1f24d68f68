"""One served model: settings, engines and tokenizer."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from tandem.config.settings import Settings
from tandem.config.several import lora_modules
from tandem.errors import UnavailableError
from tandem.protocol.control import EngineStatus
from tandem.server.chats.texts import Texts
from tandem.server.engines.replicas import Replicas


class Served:
    """Settings, engines and tokenizer of one model. Context, parsers and limits may differ between models."""

    def __init__(self, settings: Settings, client: Replicas) -> None:
        self.settings = settings
        self.client = client
        self.texts = Texts(settings.model)
        self.adapter = ""
        """Name of the LoRA adapter that requests use; empty for the base."""
        client.adapters.update(lora_modules(settings))

    def adapted(self, name: str) -> Served:
        """Return the model with the adapter `name`."""
        found = copy.copy(self)
        found.adapter = name
        return found

    @property
    def name(self) -> str:
        """Model name in responses."""
        return self.adapter or self.base_name

    @property
    def base_name(self) -> str:
        """Name of the model without an adapter."""
        return next(self.names(), "default")

    def names(self) -> Iterator[str]:
        """Yield all names of the model, except `default`: the engine's first, then those of the settings."""
        if self.client.status is not None:
            yield self.client.status.model
        yield from filter(None, (*self.settings.model.served_name, self.settings.model.model))

    def status(self) -> EngineStatus:
        """Return the engines' status. Raises UnavailableError if none takes requests or the model is still loading."""
        status = self.client.check()
        if status.max_context < 1:
            raise UnavailableError("The model is still being loaded; try again shortly.", code="model_loading")
        return status

    @property
    def state(self) -> tuple[str, str]:
        """State (`loaded`, `unreachable`, or another state of the engines) and its detail text."""
        status = self.client.status
        if status is None or not self.client.alive:
            return "unreachable", ""
        return "loaded" if status.state == "ready" else status.state, status.detail

    def ready(self) -> bool:
        """Return whether a request would be served now: an engine is ready and the tokenizer is loaded."""
        status = self.client.status
        return status is not None and self.client.alive and status.state == "ready" and self.texts.ready(status)

    async def load_texts(self) -> None:
        """Load the tokenizer of the engine's model, if an engine has reported one. Raises UnavailableError."""
        status = self.client.status
        if status is not None and status.source and not self.texts.ready(status):
            await self.texts.tokenizer(status)
