"""One model as the api serves it: its settings, its engines, its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.config.settings import Settings
from tandem.errors import UnavailableError
from tandem.protocol.control import EngineStatus
from tandem.server.chats.texts import Texts
from tandem.server.engines.replicas import Replicas


class Served:
    """Settings are those of this model: context, parsers and limits of others may differ."""

    def __init__(self, settings: Settings, client: Replicas) -> None:
        self.settings = settings
        self.client = client
        self.texts = Texts(settings.model)

    @property
    def name(self) -> str:
        """Name of the model in answers."""
        return next(self.names(), "default")

    def names(self) -> Iterator[str]:
        """Every name under which it may be asked for, the served one first; `default` is not the model's own."""
        if self.client.status is not None:
            yield self.client.status.model
        yield from filter(None, (self.settings.model.served_name, self.settings.model.model))

    def status(self) -> EngineStatus:
        """The status of an engine that takes requests. Raises UnavailableError when there is none."""
        status = self.client.check()
        if status.max_context < 1:
            raise UnavailableError("The model is still being loaded; try again shortly.", code="model_loading")
        return status

    @property
    def state(self) -> tuple[str, str]:
        """`loaded`, `unreachable` or the engines' own word for another state; and why."""
        status = self.client.status
        if status is None or not self.client.alive:
            return "unreachable", ""
        return "loaded" if status.state == "ready" else status.state, status.detail

    def ready(self) -> bool:
        """True when a request sent now would be worked on at once."""
        status = self.client.status
        return status is not None and self.client.alive and status.state == "ready" and self.texts.ready(status)

    async def load_texts(self) -> None:
        """Have the tokenizer of the engine's model in memory, once there is one. Raises UnavailableError."""
        status = self.client.status
        if status is not None and status.source and not self.texts.ready(status):
            await self.texts.tokenizer(status)
