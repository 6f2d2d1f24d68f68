"""Warm the prompts of `--warmup-prompts` at each replica before it counts as reached, and after its ranks are replaced."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass

from fastapi import FastAPI, Request
from starlette.types import Message

from tandem.config.api_keys import ClientLimits
from tandem.errors import NotFoundError, OverloadedError, RequestError, UnavailableError
from tandem.server.body_validation import parse_bytes
from tandem.server.cache.schemas import WarmRequest
from tandem.server.cache.warm_file import Body
from tandem.server.cache.warming import warm
from tandem.server.context import Api
from tandem.server.engines.served_model import Served
from tandem.server.failures import internal_error
from tandem.server.quotas import Lease, Usage
from tandem.server.store.calls import post_scope

logger = logging.getLogger(__name__)

LOOK_S = 0.2
"""Seconds between checks for new replicas."""
ROUTE = "/v1/cache/warm"


@dataclass
class _Progress:
    """Progress of warming one replica."""

    ranks: tuple[int, ...]
    """Process ids of the ranks; after a change, warming restarts."""
    prompts: int = 0
    done: bool = False


class Warmer:
    """Task that warms prompts at the replicas of all models, outside clients' quotas."""

    def __init__(self, app: FastAPI, api: Api, bodies: list[Body]) -> None:
        self._app, self._api, self._bodies = app, api, bodies
        self._progress: dict[tuple[int, int], _Progress] = {}
        """Progress by (index of the model, replica)."""
        for served in api.served if bodies else ():
            served.client.warmed = set()

    async def run(self) -> None:
        """Warm new replicas until cancelled."""
        while self._bodies:
            for index, served in enumerate(self._api.served):
                await self._look(index, served)
            await asyncio.sleep(LOOK_S)

    async def _look(self, index: int, served: Served) -> None:
        fresh: dict[int, _Progress] = {}
        for replica, status in served.client.parts():
            if status.state == "ready" and served.texts.ready(status):
                ranks = tuple(rank.pid for rank in status.ranks)
                progress = self._progress.get((index, replica))
                if progress is None or progress.ranks != ranks:
                    progress = self._progress[index, replica] = _Progress(ranks)
                if not progress.done:
                    fresh[replica] = progress
        if not fresh:
            return
        try:
            for number, body in enumerate(body for body in self._bodies if self._model(body) is served):
                behind = [replica for replica, progress in fresh.items() if progress.prompts == number]
                if behind:
                    await self._warm(served, body, behind)
                for replica in behind:
                    fresh[replica].prompts += 1
        except (OverloadedError, UnavailableError) as error:
            logger.debug("a prompt of --warmup-prompts waits: %s", error.message)
            return
        for replica, progress in fresh.items():
            progress.done = True
            if served.client.warmed is not None:
                served.client.warmed.add(replica)

    def _model(self, body: Body) -> Served | None:
        name = body.get("model")
        try:
            return self._api.find(name if isinstance(name, str) else None)
        except NotFoundError:
            return self._api.served[0]  # the file may be for a server with another model name

    async def _warm(self, served: Served, body: Body, replicas: list[int]) -> None:
        """Warm one prompt at `replicas`. Raises OverloadedError, UnavailableError; other errors are only logged."""
        scope = post_scope(self._app, ROUTE, "", 0)
        scope["tandem.lease"] = Lease(Usage(ClientLimits()), time.monotonic)
        try:
            fields, _ = parse_bytes(json.dumps(body).encode(), WarmRequest, "ignore")
            told = await warm(Request(scope, _silence), served, fields, replicas)
            logger.info(
                "warmed %d tokens, %d of them computed, at %d replica(s), in %.1f s",
                told["prompt_tokens"],
                told["computed_tokens"],
                len(told["replicas"]),
                told["seconds"],
            )
        except (OverloadedError, UnavailableError):
            raise
        except RequestError as error:
            logger.warning("a prompt of --warmup-prompts: %s; the server goes on without it", error.message)
        except Exception as error:  # noqa: BLE001 - warming must not stop the server
            internal_error(error, "--warmup-prompts")
        finally:
            self._api.release(scope)


async def _silence() -> Message:
    """ASGI `receive` of a client that sends nothing and stays connected: wait until cancelled."""
    silence: asyncio.Future[Message] = asyncio.Future()
    return await silence
