"""What the routes of one api process share."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from fastapi import Request

from tandem.config.keys import ClientLimits
from tandem.config.settings import Settings
from tandem.config.validation import client_limits
from tandem.errors import RequestError, UnavailableError
from tandem.protocol.control import EngineStatus
from tandem.server.engines import Engines
from tandem.server.metrics import ApiMetrics
from tandem.server.quotas import Quotas
from tandem.server.subscription import Subscription
from tandem.server.texts import Texts

if TYPE_CHECKING:
    from tandem.server.jobs import Jobs


@dataclass(kw_only=True)
class LiveRequest:
    """One generating HTTP request, as /v1/status shows it and as cancelling finds it."""

    request_id: str
    route: str
    group: str
    stream: bool
    prompt_tokens: int
    choices: int
    subscription: Subscription
    completion_tokens: int = 0
    created: float = field(default_factory=time.time)


class Api:
    """Settings, engine client, tokenizer, live requests and metrics."""

    def __init__(self, settings: Settings, client: Engines, keys: Mapping[str, ClientLimits]) -> None:
        self.settings = settings
        self.client = client
        self.keys = tuple(keys)
        self.quotas = Quotas(client_limits(settings), {key_group(key): limits for key, limits in keys.items()})
        self.texts = Texts(settings.model)
        self.metrics = ApiMetrics()
        self.live: dict[str, LiveRequest] = {}
        self.jobs: Jobs | None = None
        """Journalled requests; None without a journal."""
        self.draining = False
        self.heartbeat_s = 5.0
        """Seconds of silence after which a stream gets a comment."""
        self.started = time.time()

    @property
    def max_body(self) -> int:
        """Largest request body, in bytes."""
        return int(self.settings.server.max_body_mb * 2**20)

    def status(self) -> EngineStatus:
        """The status of an engine that takes requests. Raises UnavailableError when there is none."""
        if self.draining:
            raise UnavailableError("The server is shutting down.", retry_after=10.0, code="shutting_down")
        status = self.client.check()
        if status.max_context < 1:
            raise UnavailableError("The model is still being loaded; try again shortly.", code="model_loading")
        return status

    def ready(self) -> bool:
        """True when a request sent now would be worked on at once."""
        status = self.client.status
        up = status is not None and self.client.alive and not self.draining
        return up and status is not None and status.state == "ready" and self.texts.ready(status)

    def names(self) -> Iterator[str]:
        """Every name under which the model may be asked for, the served one first."""
        if self.client.status is not None:
            yield self.client.status.model
        yield from filter(None, (self.settings.model.served_name, self.settings.model.model, "default"))

    def find_live(self, request_id: str, group: str) -> LiveRequest | None:
        """A live request of this client (of anyone, when there are no API keys)."""
        live = self.live.get(request_id)
        return live if live is not None and (not self.keys or live.group == group) else None

    def fail_live(self, error: RequestError) -> None:
        """End every generating request with `error`; those in the journal are for the next process."""
        for live in list(self.live.values()):
            live.subscription.close()
            live.subscription.fail(error)
        if self.jobs is not None:
            self.jobs.release(error)


def key_digest(key: str) -> bytes:
    """What is kept and compared of an API key, 32 bytes."""
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=32).digest()


def key_group(key: str) -> str:
    """The group of the requests that come with a key."""
    return key_digest(key).hex()[:16]


def get_api(request: Request) -> Api:
    """The `Api` of the application that serves this request."""
    return cast(Api, request.app.state.api)


def get_group(request: Request) -> str:
    """Who is asking, for fairness: a digest of the API key, or the client's address."""
    return cast(str, request.scope.get("tandem.group", ""))
