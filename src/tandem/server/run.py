"""Run the api process: uvicorn on a socket, until a signal ends it."""

from __future__ import annotations

import logging
import signal
import socket
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI

from tandem.config.settings import Settings
from tandem.env import runtime_dir
from tandem.errors import UnavailableError
from tandem.server.app import create_app
from tandem.server.context import Api
from tandem.server.engines.client import EngineClient
from tandem.server.engines.protocol import Engines
from tandem.server.engines.residents import Residents
from tandem.server.listener import listen

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0
"""Seconds for connections to close after the last request has ended."""


class ApiServer(uvicorn.Server):
    """uvicorn that drains: after the first signal it goes on listening, so that probes see it as not ready, refuses
    new work and lets running requests finish; a second signal ends it at once.
    """

    def __init__(self, config: uvicorn.Config, api: Api, drain_timeout: float) -> None:
        super().__init__(config)
        self._api = api
        self._drain_timeout = drain_timeout
        self._drain_until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; on a second signal, stop."""
        if self._drain_until is None:
            self._api.draining = True
            self._drain_until = time.monotonic() + self._drain_timeout
            logger.info("signal %d: draining, %d requests are running", sig, len(self._api.live))
        else:
            self.should_exit = self.force_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say where, in the words that people search logs for."""
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            host = f"[{host}]" if ":" in host else host
            logger.info("Uvicorn running on http://%s:%d (Press CTRL+C to quit)", host, port)

    async def on_tick(self, counter: int) -> bool:
        """True when it is time to exit; called about each 0.1 s."""
        if self._drain_until is not None and not self.should_exit:
            late = time.monotonic() > self._drain_until
            if late:
                self._api.fail_live(UnavailableError("The server is shutting down.", code="shutting_down"))
            self.should_exit = late or not self._api.live
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close, and do so in good order even when forced: the engine must hear that this api goes."""
        self._api.draining = True
        self._api.fail_live(UnavailableError("The server is shutting down.", code="shutting_down"))
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()


def engine_endpoint(settings: Settings) -> str:
    """zmq address of the engine: the configured socket, or the one in the runtime directory that the port names."""
    path = settings.process.engine_socket or str(runtime_dir() / f"engine-{settings.server.port}.sock")
    return path if "://" in path else f"ipc://{path}"


def make_server(app: FastAPI, drain_timeout: float) -> ApiServer:
    """A uvicorn server for `app` that logs through our own loggers and drains on signals."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(_CLOSE_S),
    )
    return ApiServer(config, app.state.api, drain_timeout)


def run_api(settings: Settings, *, fd: int | None = None, engines: Engines | Residents | None = None) -> None:
    """Serve HTTP until SIGTERM or SIGINT, on the inherited listening socket `fd` or on the configured address.

    `engines` is what works on the requests; by default the one engine that the settings name. Returns after the drain.
    Raises ConfigError when the address cannot be had.
    """
    listener = socket.socket(fileno=fd) if fd is not None else listen(settings.server.host, settings.server.port)
    app = create_app(settings, engines or EngineClient(engine_endpoint(settings)))
    server = make_server(app, settings.process.drain_timeout)
    # uvicorn raises the signals that it caught once more when it is done; they have had their effect by then.
    before = {number: signal.signal(number, _ignore) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        listener.close()


def _ignore(_: int, __: FrameType | None) -> None:
    """Handler that does nothing (SIG_IGN would be inherited by children)."""
