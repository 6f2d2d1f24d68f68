"""The FastAPI application."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from tandem.config.api_keys import ClientLimits
from tandem.config.settings import Settings
from tandem.config.validation import api_keys
from tandem.crash_guard import start_task
from tandem.errors import UnavailableError
from tandem.server.anthropic import routes as anthropic
from tandem.server.body import refuse_query
from tandem.server.cache import routes as cache
from tandem.server.cache.at_start import Warmer
from tandem.server.cache.warm_file import warm_bodies
from tandem.server.context import Api
from tandem.server.engines.model_pool import ModelPool
from tandem.server.engines.replicas import Replicas
from tandem.server.failures import internal_error, refuse_route
from tandem.server.gate import IGNORED_HEADER, Gate
from tandem.server.ollama import models as ollama_models
from tandem.server.ollama import routes as ollama
from tandem.server.openai import chat, completions, embeddings, models, rerank, tokens
from tandem.server.openapi import Error, TandemApp, failures
from tandem.server.quotas import RATE_HEADERS
from tandem.server.responses import routes as responses
from tandem.server.status import info, page, plan
from tandem.server.store import batch_routes, idempotency
from tandem.server.store.batches import Batches
from tandem.server.store.jobs import Jobs
from tandem.server.waiting import end_tasks
from tandem.version import __version__

logger = logging.getLogger(__name__)

_PRELOAD_S = 0.5
"""Seconds between checks for a new engine model, whose tokenizer is then preloaded."""
_PRELOAD_FIRST_S = 0.05
"""Seconds between checks until the first engine status arrives."""


def create_app(settings: Settings, client: Replicas | ModelPool, keys: Mapping[str, ClientLimits] | None = None
               ) -> FastAPI:  # fmt: skip
    """Return the application for the replicas of one model or a pool of models. Its lifespan starts and closes `client`.

    `keys`: limits by API key, by default those of the settings and their key file. Raises UsageError if a key file or a
    file of `--warmup-prompts` cannot be read, or the journal is unusable.
    """
    api = Api(settings, client, api_keys(settings) if keys is None else keys)
    jobs = Jobs(api) if settings.server.journal is not None else None
    batches = Batches(api, jobs) if jobs is not None else None
    app = TandemApp(
        title="Tandem", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=_lifespan
    )
    app.state.api, app.state.jobs, app.state.batches = api, jobs, batches
    app.state.warmer = Warmer(app, api, warm_bodies(settings))
    for module in (
        anthropic,
        batch_routes,
        cache,
        chat,
        completions,
        embeddings,
        info,
        models,
        ollama,
        ollama_models,
        page,
        plan,
        idempotency,
        rerank,
        responses,
        tokens,
    ):
        app.include_router(module.router, responses=failures(Error))
    app.add_exception_handler(HTTPException, refuse_route)
    app.add_exception_handler(RequestValidationError, refuse_query)
    if jobs is not None:
        jobs.root = app
        app.add_middleware(idempotency.Idempotency, api=api, jobs=jobs)
    app.add_middleware(Gate, api=api)
    if settings.server.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.server.cors_origin),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[
                "retry-after",
                "x-request-id",
                "idempotent-replayed",
                "location",
                IGNORED_HEADER.decode(),
                *RATE_HEADERS,
            ],
        )
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    api: Api = app.state.api
    jobs: Jobs | None = app.state.jobs
    await api.client.start()
    batches: Batches | None = app.state.batches
    if jobs is not None and batches is not None:
        await batches.start()
        await jobs.start()
    # A model pool loads each tokenizer with its model.
    preload = [start_task(_preload(api), name="tokenizer-preload")] if api.model_pool is None else []
    preload.append(start_task(app.state.warmer.run(), name="warmer"))
    try:
        yield
    finally:
        api.draining = True
        await end_tasks(*preload)
        api.fail_live(UnavailableError("The server is shutting down.", code="shutting_down"))
        if jobs is not None and batches is not None:
            await batches.close()
            await jobs.close()
        await api.workers.close()
        await api.client.close()
        if api.traces is not None:
            await asyncio.to_thread(api.traces.close)


async def _preload(api: Api) -> None:
    """Keep the tokenizer of the engine's current model loaded, until cancelled."""
    [served] = api.served
    failed_source: str | None = None
    while True:
        status = served.client.status
        if status is not None and status.source != failed_source:
            try:
                await served.load_texts()
            except UnavailableError:
                failed_source = status.source  # logged already; each request retries and gets the error
            except Exception as error:  # noqa: BLE001 - a model's files may raise anything; /health must keep working
                internal_error(error, "a tokenizer")
                failed_source = status.source
        await asyncio.sleep(_PRELOAD_FIRST_S if status is None else _PRELOAD_S)
