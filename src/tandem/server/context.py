"""State that the routes of one api process share."""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, TypeVar, cast

from fastapi import Request
from starlette.types import Scope

from tandem.checkpoints.catalogue import copies_of
from tandem.config.api_keys import ClientLimits
from tandem.config.settings import Settings
from tandem.config.validation import client_limits
from tandem.errors import NotFoundError, RequestError, UnavailableError
from tandem.json_types import JsonObject
from tandem.log import Seldom
from tandem.server.chats.conversations import Conversations
from tandem.server.chats.texts import THREADS
from tandem.server.engines.model_pool import ModelPool
from tandem.server.engines.replicas import Replicas
from tandem.server.engines.served_model import Served
from tandem.server.failures import ClientGone
from tandem.server.fields import told
from tandem.server.quotas import Lease, Quotas
from tandem.server.status.metrics import ApiMetrics
from tandem.server.tracing import Traces
from tandem.server.waiting import Stopped, unless
from tandem.server.workers.fair_semaphore import FairSemaphore
from tandem.server.workers.pool import Workers
from tandem.version import __version__

if TYPE_CHECKING:
    from tandem.server.generation import Running

seldom = Seldom(logging.getLogger(__name__))
Result = TypeVar("Result")
FINGERPRINT = f"tandem-{__version__}"


class Api:
    """Settings, models, live requests and metrics."""

    def __init__(self, settings: Settings, client: Replicas | ModelPool, keys: Mapping[str, ClientLimits]) -> None:
        self.settings = settings
        self.client = client
        """Engines of all models."""
        self.model_pool = client if isinstance(client, ModelPool) else None
        """Loads and unloads models; None when only one model is served."""
        self.served = client.served if isinstance(client, ModelPool) else [Served(settings, client)]
        """All models; the first is the default."""
        self.keys = tuple(keys)
        self.key_names = {key_group(key): limits.name or f"key{i}" for i, (key, limits) in enumerate(keys.items(), 1)}
        """Name of each API key in logs, by client group."""
        self.quotas = Quotas(client_limits(settings), {key_group(key): limits for key, limits in keys.items()})
        self.workers = Workers(settings.scheduler.max_queued_requests)
        """Sandboxed worker processes for large or costly parts of requests."""
        self.text_semaphore = FairSemaphore(THREADS - 1, settings.scheduler.max_queued_requests)
        """Limits tokenizer work in threads; one thread stays free for parsing bodies."""
        self.fetch_semaphore = FairSemaphore(8)
        """Limits requests whose pictures are being fetched."""
        self.metrics = ApiMetrics()
        endpoint = settings.server.otlp_traces_endpoint
        self.traces = Traces(endpoint) if endpoint is not None else None
        keep_s = settings.server.keep_conversations
        self.conversations = Conversations(keep_s) if keep_s else None
        self.live: dict[str, Running] = {}
        """HTTP requests that run in the engine, by id."""
        self.at_end: list[Callable[[RequestError], None]] = []
        """Callbacks at shutdown; each gets the error for requests that still wait."""
        self.draining = False
        self.heartbeat_s = 5.0
        """Seconds without output after which a stream gets a keep-alive comment."""
        self.started = time.time()

    @property
    def max_body(self) -> int:
        """Largest request body, in bytes."""
        return int(self.settings.server.max_body_mb * 2**20)

    def check_open(self) -> None:
        """Raise UnavailableError while draining."""
        if self.draining:
            raise UnavailableError("The server is shutting down.", retry_after=10.0, code="shutting_down")

    def check(self) -> None:
        """Raise UnavailableError while draining, or while the only model has no engine that takes requests."""
        self.check_open()
        if self.model_pool is None:
            self.served[0].status()

    def ready(self) -> bool:
        """Return whether a request would be served now, or once its model is loaded (readiness)."""
        if self.model_pool is not None:
            return not self.draining and self.model_pool.alive
        client = self.served[0].client
        return not self.draining and self.served[0].ready() and (client.warmed is None or client.reached() > 0)

    def find(self, name: str | None) -> Served:
        """Return the model of that name; None and "default" mean the first. Raises NotFoundError listing all models."""
        if name is None or name == "default":
            return self.served[0]
        for names_of in (lambda served: [*served.settings.model.served_name], lambda served: served.names()):
            for served in self.served:
                if name in names_of(served):
                    return served
        for served in self.served:
            if name in served.client.adapters:
                return served.adapted(name)
        ids = copies_of(name)
        for served in self.served:
            if not ids.isdisjoint(served.names()):
                return served
        names = ", ".join(served.name for served in self.listed())
        raise NotFoundError(
            f"The model '{name[:200]}' does not exist; there is: {names[:1000]}", param="model", code="model_not_found"
        )

    def listed(self) -> list[Served]:
        """Return all models, the default first, each followed by itself under its further names and by its LoRA adapters."""
        more = [(served, (*served.settings.model.served_name[1:], *served.client.adapters)) for served in self.served]
        return [one for served, names in more for one in (served, *map(served.adapted, names))]

    def max_context(self, served: Served) -> int | None:
        """Return the context length in tokens, prompt plus output; None while unknown. The model need not be loaded."""
        if self.model_pool is not None:
            return self.model_pool.max_context(served)
        return served.client.status.max_context if served.client.status is not None else None

    def release(self, scope: Scope) -> None:
        """Release the quota lease and the model that the request of `scope` holds."""
        lease: Lease | None = scope.pop("tandem.lease", None)
        if lease is not None:
            lease.end()
        served = scope.pop("tandem.entered", None)
        if served is not None and self.model_pool is not None:
            self.model_pool.leave(served)

    def find_live(self, request_id: str, group: str) -> Running | None:
        """Return a running request of this client (of any, without API keys); None if there is none."""
        live = self.live.get(request_id)
        return live if live is not None and (not self.keys or live.group == group) else None

    def fail_live(self, error: RequestError) -> None:
        """End every running or waiting request with `error`; journaled ones resume in the next process."""
        for live in list(self.live.values()):
            live.end(error)
        if self.model_pool is not None:
            self.model_pool.fail_waiting(error)
        for tell in self.at_end:
            tell(error)


async def unless_gone(http: Request, waiting: Coroutine[None, None, Result]) -> Result:
    """Await `waiting`, but cancel it when the client disconnects. Raises ClientGone, and what `waiting` raises."""
    try:
        return await unless(gone(http), waiting)
    except Stopped:
        raise ClientGone("The client left.") from None


async def gone(http: Request) -> None:
    """Wait until the client disconnects, or its answer is complete."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def head(kind: str, request_id: str, model: str) -> JsonObject:
    """Return the first fields of OpenAI's answers and chunks; `kind` is the value of `object`."""
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": model, "system_fingerprint": FINGERPRINT}


def new_id(prefix: str, mark: str = "-") -> str:
    """Return a random id such as `chatcmpl-9f3c...`; `mark` is the separator after `prefix`."""
    return f"{prefix}{mark}{uuid.uuid4().hex}"


def key_digest(key: str) -> bytes:
    """Return the 32-byte digest of an API key, for storage and comparison."""
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=32).digest()


def key_group(key: str) -> str:
    """Return the client group of an API key: 16 hex digits of its digest."""
    return key_digest(key).hex()[:16]


def get_api(request: Request) -> Api:
    """Return the `Api` of the application that serves this request."""
    return cast(Api, request.app.state.api)


def get_group(request: Request) -> str:
    """Return the client's group, for quotas and fair queueing: a digest of the API key, or the group of its address."""
    return cast(str, request.scope.get("tandem.group", ""))


def note_ignored(request: Request, *names: str) -> None:
    """Report request fields without effect in a response header and in the log."""
    request.scope.setdefault("tandem.ignored", []).extend(names)
    level = logging.WARNING if get_api(request).settings.server.unknown_fields == "warn" else logging.DEBUG
    shown = told(names)
    seldom.log(level, "%s: no effect of %s", request.url.path, shown, kind=shown)
