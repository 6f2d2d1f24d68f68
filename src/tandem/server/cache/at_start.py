"""Prompts of `--warm`: at each replica before it counts as reached, and again when its ranks have been replaced."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from fastapi import FastAPI, Request

from tandem.errors import NotFoundError, OverloadedError, RequestError, UnavailableError
from tandem.server.cache.routes import warm_request
from tandem.server.cache.schemas import WarmRequest
from tandem.server.cache.warm_file import Body
from tandem.server.context import Api
from tandem.server.engines.served_model import Served
from tandem.server.failures import internal_error
from tandem.server.validation import parse_bytes

logger = logging.getLogger(__name__)

LOOK_S = 0.2
"""Seconds between two looks for replicas that are new."""
ROUTE = "/v1/cache/warm"


class Warmer:
    """Looks after the replicas of all models."""

    def __init__(self, app: FastAPI, api: Api, bodies: list[Body]) -> None:
        self._app, self._api, self._bodies = app, api, bodies
        self._done: dict[tuple[int, int], tuple[int, ...]] = {}
        """By model and replica: processes of the ranks that have the prompts."""
        for served in api.served if bodies else ():
            served.client.warmed = set()

    async def run(self) -> None:
        """Until it is cancelled."""
        while self._bodies:
            for index, served in enumerate(self._api.served):
                await self._look(index, served)
            await asyncio.sleep(LOOK_S)

    async def _look(self, index: int, served: Served) -> None:
        ready = {replica: tuple(rank.pid for rank in status.ranks) for replica, status in served.client.parts()
                 if status.state == "ready" and served.texts.ready(status)}
        fresh = [replica for replica, ranks in ready.items() if self._done.get((index, replica)) != ranks]
        if not fresh:
            return
        try:
            for body in self._bodies:
                if self._model(body) is served:
                    await self._warm(served, body, fresh)
        except (OverloadedError, UnavailableError) as error:
            logger.debug("a prompt of --warm waits: %s", error.message)
            return
        for replica in fresh:
            self._done[index, replica] = ready[replica]
            if served.client.warmed is not None:
                served.client.warmed.add(replica)

    def _model(self, body: Body) -> Served | None:
        name = body.get("model")
        try:
            return self._api.find(name if isinstance(name, str) else None)
        except NotFoundError:
            return self._api.served[0]  # as a file for another server may name it

    async def _warm(self, served: Served, body: Body, replicas: list[int]) -> None:
        """Raises OverloadedError, UnavailableError. Another fault is logged: the server serves all the same."""
        scope: dict[str, Any] = {
            "type": "http", "method": "POST", "scheme": "http", "path": ROUTE, "raw_path": ROUTE.encode(),
            "root_path": "", "query_string": b"", "headers": [], "client": None, "server": None, "app": self._app,
            "state": {}, "tandem.group": "", "tandem.trusted": True}
        try:
            self._api.quotas.enter(scope)
            fields, _ = parse_bytes(json.dumps(body).encode(), WarmRequest, "ignore")
            told = await warm_request(Request(scope, _silence), served, fields, replicas)
            logger.info("warmed %d tokens, %d of them computed, at %d replica(s), in %.1f s", told["prompt_tokens"],
                        told["computed_tokens"], len(told["replicas"]), told["seconds"])
        except (OverloadedError, UnavailableError):
            raise
        except RequestError as error:
            logger.warning("a prompt of --warm: %s; the server goes on without it", error.message)
        except Exception as error:  # noqa: BLE001 - whatever it is, the server serves
            internal_error(error, "--warm")
        finally:
            self._api.release(scope)


async def _silence() -> Any:
    """A client that says nothing more, and stays."""
    await asyncio.Event().wait()
