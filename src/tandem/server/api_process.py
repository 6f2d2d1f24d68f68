"""Run the api process: uvicorn on a socket, until a signal ends it."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
import ssl
import time
from collections.abc import Iterable, Mapping
from types import FrameType

import uvicorn
from fastapi import FastAPI
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from tandem.config.api_keys import ClientLimits
from tandem.config.settings import Settings
from tandem.env import engine_socket_path
from tandem.errors import UnavailableError, UsageError
from tandem.json_types import JsonObject
from tandem.server.app import create_app
from tandem.server.connections.acceptor import YOUNG_S, Acceptor, most_connections
from tandem.server.connections.connection import Connection
from tandem.server.connections.tls import LOOK_S, Certificate
from tandem.server.context import Api
from tandem.server.engines.model_pool import ModelPool
from tandem.server.engines.replicas import Replicas
from tandem.server.failures import error_response, unexpected
from tandem.server.listener import listen

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0
"""Seconds for connections to close after the last request has ended."""
_IDLE_S = 5.0
"""Seconds for which a retiring api without a journal keeps idle connections: the request of a slow client may be on the way."""
_TICKS = 10
"""Ticks of uvicorn's main loop in a second."""


class ApiServer(uvicorn.Server):
    """uvicorn server that drains on the first signal and exits at once on the second.

    While draining it keeps listening, so that probes see it as not ready, refuses new requests and finishes running ones.
    On SIGUSR1 it leaves new connections to its successor, and ends with the last of its own.
    """

    def __init__(self, config: uvicorn.Config, api: Api, drain_timeout: float) -> None:
        """Load the certificate, if any. `drain_timeout`: seconds. Raises ConfigError for an unusable certificate."""
        super().__init__(config)
        self._api = api
        server = api.settings.server
        self._certificate = Certificate(server.tls_cert, server.tls_key) if server.tls_cert is not None else None
        self._acceptors: list[Acceptor] = []
        self._slice_turn = asyncio.Lock()
        self._drain_timeout = drain_timeout
        self._drain_until: float | None = None
        self._retires = self._retired = False
        self.succeeds = False
        """Whether to accept connections only once ready, as the predecessor serves until then."""
        self.announces = True
        """Whether to log the address once ready; False where the supervisor does."""
        self._addresses: list[str] = []
        """URLs not announced yet."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start draining; on a second signal, exit at once."""
        if not self._api.draining:
            level = logging.INFO if self._api.live or self._api.ready() else logging.DEBUG  # DEBUG: a start that failed said why
            self._api.draining = True
            self._drain_until = time.monotonic() + self._drain_timeout
            logger.log(level, "Received %s: draining %d running requests", signal.Signals(sig).name, len(self._api.live))
        else:
            self.should_exit = self.force_exit = True

    def retire(self, sig: int, frame: FrameType | None) -> None:
        """Leave new connections to the successor from the next tick on."""
        self._retires = True

    def _finish(self) -> None:
        """Accept no more, ask clients to connect anew, and close idle connections. Without a journal streams are not cut."""
        now, journal = time.monotonic(), self._api.settings.server.journal
        if not self._retired:
            self._retired = True
            # The second list is made of the first once a second.
            for headers in (self.config.encoded_headers, self.server_state.default_headers):
                headers.append((b"connection", b"close"))
            for acceptor in self._acceptors:
                acceptor.stop()
        if self._drain_until is None or (self._api.live and journal is None):
            self._drain_until = now + self._drain_timeout
        before = now - (_IDLE_S if journal is None else YOUNG_S)  # with a journal the successor waits for the end
        for acceptor in self._acceptors:
            while acceptor.slots.make_room(before=before):
                pass

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting connections on `sockets`. The address is logged later, once requests can be served."""
        asyncio.get_running_loop().set_exception_handler(_report)
        await super().startup([])  # connections are taken by our own acceptor
        most = most_connections(self._api.settings.server.max_connections)
        most_each = self._api.settings.server.max_connections_per_address or max(most // 2, 1)
        scheme = "http" if self._certificate is None else "https"
        for listener in sockets or ():
            acceptor = Acceptor(listener, self._connection, most=most, most_each=most_each, tls=self._tls)
            self._acceptors.append(acceptor)
            host, port = listener.getsockname()[:2]
            self._addresses.append(f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}")
        if not self.succeeds:
            self._accept()

    def _accept(self) -> None:
        self.succeeds = False
        for acceptor in self._acceptors:
            acceptor.start()

    def _announce(self) -> None:
        """Log each address once, in uvicorn's wording, which people and tools search logs for."""
        for address in self._addresses:
            logger.info("Uvicorn running on %s (Press CTRL+C to quit)", address)
        self._addresses.clear()

    def _connection(self) -> Connection:
        made = Connection(self.config, self.server_state, self.lifespan.state)
        made.slice_turn = self._slice_turn
        return made

    def _clients(self) -> list[Connection]:
        return [client for client in self.server_state.connections if isinstance(client, Connection)]

    def _tls(self) -> ssl.SSLContext | None:
        return self._certificate.context if self._certificate is not None else None

    async def on_tick(self, counter: int) -> bool:
        """Do periodic work and return whether to exit; uvicorn calls this about every 0.1 s."""
        if self.announces and self._addresses and self._api.ready():
            self._announce()
        if self.succeeds and self._api.ready():
            self._accept()
        if self._retires and not self._api.draining:
            self._finish()
        if counter % _TICKS == 0:
            now = asyncio.get_running_loop().time()
            for client in self._clients():
                client.look(now)
        if self._certificate is not None and counter % int(LOOK_S * _TICKS) == 0:
            self._certificate.look()
        if self._drain_until is not None and not self.should_exit:
            late = time.monotonic() > self._drain_until
            if late:
                self._api.draining = True  # what the journal holds is left for the next process
                self._api.fail_live(UnavailableError("The server is shutting down.", code="shutting_down"))
            self.should_exit = late or not (self._api.live or (self._retired and self.server_state.connections))
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, fail running requests, and shut down; the lifespan ends even when forced, to detach from engines."""
        self._api.draining = True
        self._api.fail_live(UnavailableError("The server is shutting down.", code="shutting_down"))
        for acceptor in self._acceptors:
            acceptor.stop()
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()


def engine_endpoint(settings: Settings) -> str:
    """Return the engine's zmq address: the configured socket, or that of the port in the runtime directory."""
    path = settings.process.engine_socket or str(engine_socket_path(settings.server.port))
    return path if "://" in path else f"ipc://{path}"


def make_server(app: FastAPI, drain_timeout: float) -> ApiServer:
    """Return a uvicorn server for `app` that logs through our own loggers and drains on signals.

    Raises ConfigError for a certificate that cannot be used.
    """
    # Their warnings are about clients' input; the clients get errors themselves.
    for library in ("uvicorn.error", "python_multipart"):
        logging.getLogger(library).setLevel(logging.ERROR)
    trusted = app.state.api.settings.server.trusted_proxies
    config = uvicorn.Config(
        app,
        proxy_headers=bool(trusted),
        forwarded_allow_ips=[*trusted, *_as_ipv6(trusted)],
        http=Connection,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(_CLOSE_S),
    )
    return ApiServer(config, app.state.api, drain_timeout)


def _as_ipv6(networks: Iterable[str]) -> list[str]:
    """Return the IPv4 networks as IPv4-mapped IPv6 networks, the form in which a dual-stack socket reports peers."""
    known = [ipaddress.ip_network(network) for network in networks]
    return [f"::ffff:{network.network_address}/{96 + network.prefixlen}" for network in known if network.version == 4]


def run_api(
    settings: Settings,
    engines: Replicas | ModelPool,
    *,
    fd: int | None = None,
    announce: bool = True,
    succeeds: bool = False,
    keys: Mapping[str, ClientLimits] | None = None,
) -> None:
    """Serve HTTP until SIGTERM or SIGINT, on the inherited listening socket `fd` or on the configured address.

    `keys` as for `create_app`. `announce`: log the address once requests can be served. `succeeds`: accept
    connections only then, as the predecessor serves until it gets SIGUSR1. Returns after the drain.
    Raises ConfigError if the address cannot be bound or the certificate is unusable.
    """
    listener = socket.socket(fileno=fd) if fd is not None else listen(settings.server.host, settings.server.port)
    app = create_app(settings, engines, keys)
    server = make_server(app, settings.process.drain_timeout)
    server.announces, server.succeeds = announce, succeeds
    # uvicorn raises the signals that it caught once more when it is done; they have had their effect by then.
    before = {number: signal.signal(number, _ignore) for number in (signal.SIGTERM, signal.SIGINT)}
    before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, server.retire)
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        listener.close()


def serve_unavailable(settings: Settings, fd: int, error: UsageError, seconds: float) -> None:
    """Answer each request on the listening socket `fd` with status 503 for `seconds`, since the api cannot start.

    The answer names only the setting, as the message of `error` may quote a path.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    flag = f"--{error.param.replace('_', '-')}" if error.param else "a setting"
    reason = f"The server cannot use what {flag} names now; its log says why. It tries again by itself."

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        answer = error_response(UnavailableError(reason, retry_after=seconds, code="settings_unusable"), scope)
        if path.startswith("/health"):
            alive = path == "/health/live"
            answer = JSONResponse(
                {"status": "alive"} if alive else {"status": "unavailable", "detail": reason}, 200 if alive else 503
            )
        await answer(scope, receive, send)

    async def serve() -> None:
        config = uvicorn.Config(
            refuse,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        if settings.server.tls_cert is not None:
            config.load()
            config.ssl = Certificate(settings.server.tls_cert, settings.server.tls_key).context
        asyncio.get_running_loop().call_later(seconds, setattr, server, "should_exit", True)
        await server.serve(sockets=[listener])

    with socket.socket(fileno=fd) as listener:
        try:
            asyncio.run(serve())
        except UsageError:  # unusable certificate: no answer is possible
            time.sleep(seconds)


def _report(_: asyncio.AbstractEventLoop, context: JsonObject) -> None:
    """Log an unhandled exception of the event loop (an asyncio exception handler)."""
    message = str(context.get("message", "an error")).partition("(")[0]
    unexpected(
        context.get("exception"),
        f"the event loop ({message.strip()})",
        "what it concerned (a connection, a request) has ended, the rest goes on",
    )


def _ignore(_: int, __: FrameType | None) -> None:
    """Do nothing on a signal (child processes would inherit SIG_IGN)."""
