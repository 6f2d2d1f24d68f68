"""ZMQ client of one engine, with its last known state.

The engine may start later than the api, crash, hang or restart. Requests then fail with `UnavailableError`, and new ones
work as soon as the engine answers again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from tandem.config.settings import Role
from tandem.crash_guard import start_task
from tandem.errors import RequestError, TransportError, UnavailableError
from tandem.log import Seldom
from tandem.protocol import control
from tandem.protocol.adapters import AdapterChanged, ChangeAdapter
from tandem.protocol.cached_prefixes import CacheReport, QueryCache
from tandem.protocol.codec import Decoder
from tandem.protocol.request import EngineRequest
from tandem.protocol.supervisor_messages import ReplicaInfo
from tandem.server.failures import internal_error
from tandem.server.waiting import end_tasks

logger = logging.getLogger(__name__)
seldom = Seldom(logger)

HEARTBEAT_S = 1.0
"""Seconds between `QueryStatus` messages."""
MISSED_BEATS = 5
"""Heartbeats in a row without a message after which the engine counts as lost. Counting this process's heartbeats, not
seconds, avoids false losses after the api was suspended."""
REFRESH_S = 0.5
"""Timeout, in seconds, for a fresh status; after it, the last one is used."""
CACHE_S = 60.0
"""Timeout, in seconds, for a report on cached prefixes: ranks may have to read slow disks."""
ADAPTER_S = 3600.0
"""Timeout, in seconds, for a change of adapters: an unload waits for running requests."""
DRAIN_BATCH = 512
"""Most messages to read per event loop callback."""
NOBODY = "The engine is not reachable (it is starting or has gone); try again shortly."


class EngineLost(UnavailableError):
    """The engine disconnected or stopped answering while it had the request."""


class Departed(EngineLost):
    """The engine has handed over the request, for another replica to continue (migration)."""

    def __init__(self, positions: int) -> None:
        """`positions`: number of leading tokens whose KV the engine has written to disk."""
        super().__init__(
            "The engine has let go of the request, and no other takes it; please send it again.", code="shutting_down"
        )
        self.positions = positions


class Stranded(EngineLost):
    """The engine has been without ranks for too long; another replica can continue the request."""

    def __init__(self) -> None:
        super().__init__(
            "The engine has lost its ranks, and no other takes the request; please send it again.", code="engine_unavailable"
        )


class Sink(Protocol):
    """Receiver of the answers to one engine request."""

    def push(self, output: control.Output) -> None:
        """Process the next output."""

    def fail(self, error: RequestError) -> None:
        """End the request with `error`; no output follows."""

    def inputs_of(self, key: str) -> bytes:
        """Return the inputs of a picture of the request."""

    def tried(self, *, resting: bool) -> None:
        """Note that this quarantined request runs alone now.

        `resting`: the engine idles first, to see whether it crashes without the request.
        """


class ReplicaState(msgspec.Struct, frozen=True):
    """State of one engine as shown by /health."""

    replica: int
    state: str
    """State reported by the engine or the supervisor, or `unreachable`."""
    detail: str
    ranks: int
    running: int
    queued: int
    outstanding_tokens: int
    """Pending work as counted by the router: prompt tokens to compute plus expected output tokens."""
    kv_tokens_used: int
    kv_tokens_total: int
    restarts: int
    role: Role = "both"
    """A `prefill` replica computes long prompts; another replica then decodes."""


class EngineClient:
    """Client of one engine at a ZMQ `endpoint` (`ipc://...`). Use only on the event loop that called `start`."""

    def __init__(self, endpoint: str, *, heartbeat_s: float = HEARTBEAT_S, on_change: Callable[[], None] = lambda: None) -> None:
        """`on_change` is called after each update of `status` or `alive`."""
        self.endpoint = endpoint
        self.status: control.EngineStatus | None = None
        """Last status of the engine; kept after the engine is lost."""
        self.alive = False
        """True while the engine is connected and answers."""
        self._on_change = on_change
        self._heartbeat_s = heartbeat_s
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = Decoder[control.EngineMessage](control.EngineMessage).decode
        self._sinks: dict[str, Sink] = {}
        self._questions: dict[int, asyncio.Future[control.EngineMessage]] = {}
        self._queries = itertools.count(1)
        self._heard = False
        self._missed = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beat: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the socket and start the heartbeat. The engine need not run yet."""
        if self._loop is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        # IMMEDIATE: queue nothing while disconnected, so that a restarted engine never gets requests that have
        # failed already.
        for option, value in ((zmq.IMMEDIATE, 1), (zmq.RCVHWM, 0), (zmq.SNDHWM, 0), (zmq.LINGER, 200),
                              (zmq.RECONNECT_IVL, 50), (zmq.RECONNECT_IVL_MAX, 500)):  # fmt: skip
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._loop.add_reader(self._socket.FD, self._drain)
        self._loop.add_reader(self._monitor.FD, self._drain_monitor)
        self._socket.connect(self.endpoint)
        self._beat = start_task(self._heartbeat(), name="engine-heartbeat")

    async def close(self) -> None:
        """Detach from the engine and close the socket. All running requests fail."""
        if self._loop is None or self._beat is None:
            return
        await end_tasks(self._beat)
        self._send(control.Detach())
        self._fail_all("The server is shutting down.")
        self._loop.remove_reader(self._socket.FD)
        self._loop.remove_reader(self._monitor.FD)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()
        self._loop = None
        self.alive = False

    def send(self, request: EngineRequest, sink: Sink) -> bool:
        """Submit a request whose outputs go to `sink`, without the inputs of its pictures, which the engine asks for as it needs
        them; return False if no engine is connected.

        The caller must `abort` the request unless its last output has arrived.
        """
        pictures = tuple(msgspec.structs.replace(one, inputs=b"") for one in request.pictures)
        sent = self._send(control.Submit(msgspec.structs.replace(request, pictures=pictures)))
        if sent:
            self._sinks[request.request_id] = sink
        return sent

    def abort(self, request_id: str, *, answered: bool = False) -> None:
        """Abort a request in the engine; its sink gets nothing more. `answered`: the request counts as finished."""
        self._sinks.pop(request_id, None)
        self._send(control.Abort(request_id, answered))

    def hand_over(self) -> None:
        """Ask the engine to hand over its requests: each fails with `Departed`, unless it finishes first."""
        self._send(control.HandOver())

    async def metrics(self, timeout: float = 2.0) -> bytes:
        """Return the engine's metrics in Prometheus' text format; empty without an answer within `timeout` seconds."""
        answer = await self._ask(control.QueryMetrics(next(self._queries)), timeout)
        return answer.text if isinstance(answer, control.MetricsText) else b""

    async def refresh(self, timeout: float = REFRESH_S) -> None:
        """Update `status`; keep the old one if the engine does not answer within `timeout` seconds."""
        await self._ask(control.QueryStatus(next(self._queries)), timeout)

    async def cache(
        self, tokens: Sequence[int] = (), drop: Literal["", "memory", "all"] = "", timeout: float = CACHE_S
    ) -> CacheReport:
        """Return a report on cached prefixes, and how much of the prompt `tokens` they cover.

        `drop`: drop prefixes first, from memory or from memory and disk ("all"). `timeout`: seconds.
        """
        answer = await self._ask(QueryCache(next(self._queries), list(tokens), drop), timeout)
        return answer if isinstance(answer, CacheReport) else CacheReport(0, trouble="the engine does not answer")

    async def change_adapter(self, name: str, path: str = "") -> AdapterChanged:
        """Load the LoRA adapter in the directory `path` as `name`; without a path, unload it once its requests are finished."""
        answer = await self._ask(ChangeAdapter(next(self._queries), name, path), ADAPTER_S)
        return answer if isinstance(answer, AdapterChanged) else AdapterChanged(0, 503, NOBODY)

    async def _ask(
        self, question: control.QueryMetrics | control.QueryStatus | QueryCache | ChangeAdapter, timeout: float
    ) -> control.EngineMessage | None:
        if not self.alive:
            return None
        future: asyncio.Future[control.EngineMessage] = asyncio.get_running_loop().create_future()
        self._questions[question.query_id] = future
        try:
            return await asyncio.wait_for(future, timeout) if self._send(question) else None
        except TimeoutError:
            return None
        finally:
            del self._questions[question.query_id]

    # --- socket ------------------------------------------------------------------------------------------------

    def _send(self, message: control.ApiMessage) -> bool:
        """Send a message; return False if no engine is connected."""
        if self._loop is None:
            return False
        try:
            self._socket.send(self._encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        # ZMQ's descriptor is edge-triggered, and a send may consume the edge of an incoming message.
        self._loop.call_soon(self._drain)
        return True

    def _drain(self) -> None:
        """Read all available messages and dispatch them in one go."""
        if self._loop is None:
            return
        for _ in range(DRAIN_BATCH):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decode(frame)
            except TransportError as error:
                seldom.error(
                    "unreadable message from the engine: %s; it is dropped, and what it was for waits; are "
                    "api and engine of one version?",
                    error,
                )
                continue
            self._heard = True
            try:
                if not isinstance(message, control.Output):
                    self._handle(message)
                elif (sink := self._sinks.get(message.request_id)) is not None:
                    sink.push(message)
                    if message.finish_reason is not None:
                        self._sinks.pop(message.request_id, None)
            except Exception as error:  # noqa: BLE001 - ends only the request that the message is for
                failure = internal_error(error, "a message of the engine")
                sink = self._sinks.pop(getattr(message, "request_id", ""), None)
                if sink is not None:
                    sink.fail(failure)
        self._loop.call_soon(self._drain)

    def _handle(
        self, message: control.Refused | control.HandedOver | control.QuarantineNotice | control.NeedPicture | control.Answered
    ) -> None:
        if isinstance(message, control.EngineStatus):
            if not self.alive:
                logger.info("Connected to engine (%s)", message.state)
            self.status, self.alive, self._missed = message, True, 0
            self._on_change()
            self._answered(message)
        elif isinstance(message, control.MetricsText | CacheReport | AdapterChanged):
            self._answered(message)
        elif isinstance(message, control.QuarantineNotice):
            if (sink := self._sinks.get(message.request_id)) is not None:
                sink.tried(resting=message.resting)
                self._send(control.QuarantineAck(message.request_id, message.resting))
        elif isinstance(message, control.NeedPicture):
            if (sink := self._sinks.get(message.request_id)) is not None:
                self._send(control.PictureContent(message.key, sink.inputs_of(message.key)))
        elif (sink := self._sinks.pop(message.request_id, None)) is not None:
            sink.fail(Departed(message.positions) if isinstance(message, control.HandedOver) else message.as_error())

    def _answered(self, message: control.Answered) -> None:
        future = self._questions.get(message.query_id)
        if future is not None and not future.done():
            future.set_result(message)

    def _drain_monitor(self) -> None:
        """Process socket events: query the status on connect, and fail requests on disconnect."""
        while self._loop is not None:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if parse_monitor_message(frames)["event"] == zmq.EVENT_DISCONNECTED:
                self._drain()
                self._lost("The engine went away while it worked on the request; please send it again.")
            else:
                self._send(control.QueryStatus(next(self._queries)))

    async def _heartbeat(self) -> None:
        while True:
            self._drain_monitor()  # the descriptor is edge-triggered: without a first read it never fires
            self._heard = False
            self._send(control.QueryStatus(next(self._queries)))
            await asyncio.sleep(self._heartbeat_s)
            self._drain()
            if self._heard:
                self._missed = 0
            else:
                self._missed += 1
                if self._missed == MISSED_BEATS and self.alive:
                    logger.warning("no answer from the engine for %.1f s; it counts as gone", self._missed * self._heartbeat_s)
                    self._lost("The engine does not answer; try again shortly.")

    def _lost(self, message: str) -> None:
        state = self.status.state if self.status is not None else "starting"
        draining = state == "draining"
        if self.alive and self._sinks:
            logger.warning("the engine is gone; its requests (%d) wait for another or end with 503", len(self._sinks))
        elif self.alive and state not in ("draining", "starting"):  # a start that failed has its own reason
            logger.info("the engine is gone; it had no requests")
        self.alive = False
        for question in self._questions.values():
            if not question.done():
                question.set_exception(TimeoutError())  # a new engine knows nothing of it
        self._on_change()
        if draining:
            self._fail_all("The engine was shut down before the request was done.", code="shutting_down")
        else:
            self._fail_all(message)

    def _fail_all(self, message: str, code: str = "engine_unavailable") -> None:
        sinks, self._sinks = self._sinks, {}
        for request_id in sinks:
            self._send(control.Abort(request_id))  # in case the engine was only slow
        for sink in dict.fromkeys(sinks.values()):
            sink.fail(EngineLost(message, code=code))


@dataclass
class Member:
    """One replica of a model: its client, and the supervisor's information about it."""

    client: EngineClient
    info: ReplicaInfo | None = None
    """Last report of the supervisor; None before the first, or without a supervisor."""
    leaves: bool = False
    """True once the engine was asked to hand over its requests."""
    adapted: bool = False
    """True once the engine was sent the adapters that it lacks."""
    without_ranks: float | None = None
    """Event loop time since which the ranks are gone; None while they run."""

    @property
    def role(self) -> Role:
        """Role of the replica: `prefill`, `decode` or `both`."""
        return "both" if self.info is None else self.info.role

    @property
    def draining(self) -> bool:
        """True if the replica takes no new requests and will be removed."""
        return self.info is not None and self.info.state == "draining"

    @property
    def state(self) -> str:
        """State for the router: the engine's own, `draining`, or `silent` for an unreachable engine."""
        status = self.client.status
        if status is None or not self.client.alive:
            return "silent"
        return "draining" if self.draining else status.state

    def shown(self, replica: int, outstanding_tokens: int) -> ReplicaState:
        """Return the replica's state for /health, from its last status and the supervisor's report."""
        status, info = self.client.status, self.info
        now = status if self.client.alive else None
        told = "unreachable" if info is None or info.state == "running" else info.state
        return ReplicaState(
            replica,
            told if now is None else self.state,
            (info.detail if info else "") if now is None else now.detail,
            len(status.ranks) if status else 0,
            now.running if now else 0,
            now.queued if now else 0,
            outstanding_tokens,
            now.kv_tokens_used if now else 0,
            now.kv_tokens_total if now else 0,
            status.restarts if status else 0,
            self.role,
        )

    def trouble(self) -> UnavailableError | None:
        """Return why the replica takes no requests; None if it does."""
        status = self.client.status
        if status is None or not self.client.alive:
            return UnavailableError(NOBODY)
        if status.state == "starting":
            return UnavailableError("The model is still being loaded; try again shortly.", code="model_loading")
        if status.state in ("failed", "draining"):
            what = "has failed" if status.state == "failed" else "is shutting down"
            detail = f": {status.detail}" if status.detail else ""
            return UnavailableError(f"The engine {what}{detail}", retry_after=10.0)
        return None


def why_none(members: Iterable[Member]) -> UnavailableError | None:
    """Return why none of the replicas takes requests; None if one does."""
    troubles = [member.trouble() for member in members if not member.draining]
    return None if None in troubles else next(iter(troubles), UnavailableError(NOBODY))
