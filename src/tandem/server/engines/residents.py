"""Several models behind one api: requests wait until theirs is in memory, and idle ones go to make room.

The supervisor starts and ends engines; which model is to be there is decided here, by `tandem.cache.residency`, since
the api alone knows who waits for what.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from tandem.borders import start_task
from tandem.cache.residency import Seat, decide
from tandem.errors import OverloadedError, RequestError, UnavailableError
from tandem.protocol.control import EngineStatus
from tandem.protocol.events import Event
from tandem.protocol.supervisor import LoadModel, ModelInfo, ReplicaList, UnloadModel
from tandem.server.engines.client import ReplicaState
from tandem.server.engines.replicas import merged_metrics, merged_status
from tandem.server.engines.served_model import Served
from tandem.server.engines.supervisor import SupervisorLink
from tandem.server.failures import internal_error, refused
from tandem.server.waiting import end_tasks

logger = logging.getLogger(__name__)

LOOK_S, IDLE_LOOK_S = 0.05, 1.0
"""Seconds between two looks while something changes, and while nothing does."""
ASK_AGAIN_S = 2.0
"""Seconds until a command is given again that shows no effect."""
FAILED_S = 10.0
"""Seconds for which a model that could not be loaded is not tried again."""
LOAD_FAILED = "model_load_failed"
"""Code of the error that its requests end with."""


@dataclass(eq=False)
class _Place:
    """One model, and who waits for it."""

    served: Served
    seat: Seat
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    info: ModelInfo | None = None
    closed: bool = False
    """It has to go for another, and takes no new requests until it is back."""
    asked_at: float = float("-inf")
    """When a command was given,"""
    asked_after: int = -1
    """and how many there had been before it."""
    failed_at: float = float("-inf")
    reading: asyncio.Task[None] | None = None
    """Loads its tokenizer."""
    pressed: bool = False
    """Somebody asked for it to be unloaded."""


class Residents:
    """All models of a server; of their engines it says what `Replicas` says. Belongs to the event loop of `start`."""

    def __init__(self, models: Sequence[Served], link: SupervisorLink, *,
                 max_loaded: int | None) -> None:
        """`models` in the order of the configuration, the default one first."""
        self._places = {served.name: _Place(served, Seat(served.name, {})) for served in models}
        self._link = link
        for served in models:
            served.client.requests.tell = link.tell
        self._max_loaded = max_loaded
        self.budget: dict[str, int] = {}
        """Bytes that models may take together on each machine."""
        self.alive = False
        """True once the supervisor has said which models there are."""
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._registry = CollectorRegistry()
        self._loads = Counter("tandem_model_loads", "Times that a model was loaded", ["model"], registry=self._registry)
        self._loaded = Gauge("tandem_model_loaded", "1 while a model is in memory and answers", ["model"],
                             registry=self._registry)
        self._waits = Gauge("tandem_model_waiting_requests", "Requests that wait for a model to be loaded", ["model"],
                            registry=self._registry)

    @property
    def served(self) -> list[Served]:
        """All models, the default one first."""
        return [place.served for place in self._places.values()]

    # --- life ---

    async def start(self) -> None:
        """Connect to the supervisor, and through it to engines."""
        self._task = start_task(self._run(), name="residents")
        await self._link.start(self._listed, self._reached)

    async def close(self) -> None:
        """Leave all engines. All subscriptions, and whoever waits, fail."""
        await self._link.close()
        await end_tasks(self._task)
        for place in self._places.values():
            if place.reading is not None:
                place.reading.cancel()
            self._refuse(place, UnavailableError("The server is shutting down.", code="shutting_down"))
            await place.served.client.close()

    def fail_waiting(self, error: RequestError) -> None:
        """End whoever waits for a model."""
        for place in self._places.values():
            self._refuse(place, error)

    @property
    def waiting(self) -> int:
        """Requests that wait for a model."""
        return sum(len(place.waiting) for place in self._places.values())

    async def _listed(self, latest: ReplicaList) -> None:
        """The supervisor has said how things are."""
        self.budget = latest.budget
        for info in latest.models:
            place = self._places.get(info.model)
            if place is None:
                continue
            before = place.info
            if info.state == "failed" and (before is None or (before.state, before.commands) != ("failed",
                                                                                                info.commands)):
                place.failed_at = _now()
                self._refuse(place, _failure(info))
            place.info = info
            place.seat.needs, place.seat.keep, place.seat.unload_after = info.needs, info.keep, info.unload_after
            await place.served.client.update([one for one in latest.replicas if one.model == info.model])
        self.alive = True
        self._changed.set()

    def _reached(self) -> int:
        return sum(place.served.client.reached() for place in self._places.values())

    # --- requests ---

    async def enter(self, served: Served) -> None:
        """Wait until the model is loaded, and count a request there; whoever has entered must `leave`.

        Raises OverloadedError when too many wait, UnavailableError when it cannot be loaded.
        """
        place = self._places[served.name]
        if self._open(place) and not place.waiting:
            self._begin(place)
            return
        if place.info is not None and place.info.state == "failed" and _now() - place.failed_at < FAILED_S:
            raise _failure(place.info)
        limit = served.settings.scheduler.max_queue
        if len(place.waiting) >= limit:
            raise OverloadedError(f"{limit} requests wait for {served.name} to be loaded; try again later.",
                                  retry_after=5.0)
        future = asyncio.get_running_loop().create_future()
        place.waiting.append(future)
        self._changed.set()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.leave(served)
            raise
        finally:
            with contextlib.suppress(ValueError):
                place.waiting.remove(future)

    def leave(self, served: Served) -> None:
        """A request that had entered is over."""
        seat = self._places[served.name].seat
        seat.users -= 1
        seat.idle_at = _now()
        self._changed.set()

    def available(self, served: Served) -> bool:
        """True when `enter` would not wait."""
        place = self._places[served.name]
        return self._open(place) and not place.waiting

    def _open(self, place: _Place) -> bool:
        """It takes requests: its engines answer, also while they replace ranks."""
        status = place.served.client.status
        return (place.seat.state == "in" and not (place.closed or place.pressed) and place.served.client.alive
                and status is not None and status.state in ("ready", "recovering") and place.served.texts.ready(status))

    def _begin(self, place: _Place) -> None:
        place.seat.users += 1
        place.seat.used_at = _now()

    def _refuse(self, place: _Place, error: RequestError) -> None:
        while place.waiting:
            if not (future := place.waiting.popleft()).done():
                future.set_exception(error)

    # --- commands ---

    def state(self, served: Served) -> tuple[str, str]:
        """`loaded`, `loading`, `unloading`, `unloaded`, `failed` or, of one that was loaded, the engines' own word; and
        why."""
        place = self._places[served.name]
        info, state = place.info, place.seat.state
        if info is None:
            return "unknown", "the supervisor has not answered yet"
        if info.state == "failed":
            return "failed", info.detail
        if state in ("out", "leaving", "loading"):
            return {"out": "unloaded", "leaving": "unloading"}.get(state, state), ""
        return served.state

    def facts(self, served: Served) -> dict[str, Any]:
        """Bytes that a model takes on each machine, whether it stays, seconds of idleness after which it goes, and who
        waits for it."""
        place = self._places[served.name]
        info = place.info
        return {"needs": info.needs if info else {}, "keep": bool(info and info.keep),
                "unload_after": info.unload_after if info else None, "waiting": len(place.waiting),
                "running": place.seat.users}

    @property
    def health(self) -> str:
        """The state of the whole: healthy as long as a request can be answered, if need be by loading its model."""
        if not self.alive:
            return "unreachable"
        states = {self.state(place.served)[0] for place in self._places.values()}
        for state, word in (("loaded", "healthy"), ("recovering", "recovering"), ("loading", "starting")):
            if state in states:
                return word
        return "failed" if states == {"failed"} else "healthy"

    def max_context(self, served: Served) -> int | None:
        """Most tokens of prompt and output together, known before it is loaded."""
        info = self._places[served.name].info
        return info.max_context if info is not None else None

    async def unload(self, served: Served) -> None:
        """Have a model finish what it has, and wait until it is gone. Raises RequestError when it must stay."""
        place = self._places[served.name]
        if place.seat.keep:
            raise refused(409, f"Model '{served.name}' is kept (--keep) and never unloaded.", param="model",
                          code="model_kept")
        place.pressed = place.seat.state in ("in", "loading")
        while place.pressed or place.seat.state == "leaving":
            self._changed.set()
            await asyncio.sleep(LOOK_S)

    # --- the loop ---

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            for place in self._places.values():
                self._follow(place)
            self._act()
            busy = any(place.waiting or place.pressed or place.seat.state in ("loading", "leaving")
                       for place in self._places.values())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LOOK_S if busy else IDLE_LOOK_S)
            await asyncio.sleep(0)

    def _follow(self, place: _Place) -> None:
        """Bring the seat up to date with what supervisor and engines say; let in whoever may."""
        seat, info = place.seat, place.info
        status = place.served.client.status
        there = place.served.client.alive and status is not None and status.state == "ready"
        if status is not None and there and not place.served.texts.ready(status) and place.reading is None:
            place.reading = start_task(self._read_texts(place), name="tokenizer")
        before = seat.state
        if info is not None and (info.commands > place.asked_after or _now() - place.asked_at > ASK_AGAIN_S):
            seat.state = _state(seat, info, there)
        if seat.state == "in" and before != "in":
            seat.idle_at = seat.used_at = _now()
            self._loads.labels(seat.name).inc()
        if seat.state != "in":
            place.closed = False
        if seat.state in ("out", "leaving"):
            place.pressed = False
        while place.waiting and self._open(place):
            future = place.waiting.popleft()
            if not future.done():
                self._begin(place)
                future.set_result(None)
        if not place.waiting:
            seat.wanted_at = None
        elif seat.wanted_at is None:
            seat.wanted_at = _now()
        self._loaded.labels(seat.name).set(self._open(place))
        self._waits.labels(seat.name).set(len(place.waiting))

    async def _read_texts(self, place: _Place) -> None:
        try:
            await place.served.load_texts()
        except Exception as error:  # noqa: BLE001 - whatever it is, requests must not wait for it
            self._refuse(place, error if isinstance(error, RequestError) else internal_error(error, "a tokenizer"))
            await asyncio.sleep(FAILED_S)
        finally:
            place.reading = None
            self._changed.set()

    def _act(self) -> None:
        """Load and unload as the policy has it."""
        if not self.alive:
            return
        decision = decide([place.seat for place in self._places.values()], self.budget, self._max_loaded, _now())
        closing = {seat.name for seat in decision.close}
        for place in self._places.values():
            place.closed = place.seat.name in closing
            free = place.seat.state == "in" and not place.seat.users
            if place.pressed and free and place.seat not in decision.unload:
                decision.unload.append(place.seat)
        for seat in decision.unload:
            self._tell(seat, UnloadModel(seat.name), "leaving")
        for seat in decision.load:
            self._tell(seat, LoadModel(seat.name), "loading")

    def _tell(self, seat: Seat, command: LoadModel | UnloadModel, state: str) -> None:
        logger.info("model %s: %s", seat.name, state)
        place = self._places[seat.name]
        place.asked_at, place.asked_after = _now(), place.info.commands if place.info is not None else 0
        seat.state = state
        self._link.tell(command)

    # --- all engines together ---

    @property
    def status(self) -> EngineStatus | None:
        """The engines of all loaded models as one; None while none is loaded."""
        parts = [part for place in self._places.values() for part in place.served.client.parts()]
        return merged_status(parts) if parts else None

    def check(self) -> EngineStatus:
        """The status of the whole. Raises UnavailableError when no model is loaded."""
        status = self.status
        if status is None:
            raise UnavailableError("No model is loaded just now; a request for one loads it.", code="model_loading")
        return status

    def replicas(self) -> list[ReplicaState]:
        """Each engine of each loaded model."""
        return [one for place in self._places.values() for one in place.served.client.replicas()]

    def events(self) -> list[Event]:
        """What happened lately, as the supervisor tells it."""
        return list(self._link.events)

    async def refresh(self) -> None:
        """Ask the engines of all models how they are."""
        await asyncio.gather(*(place.served.client.refresh() for place in self._places.values()))

    async def metrics(self, timeout: float = 2.0) -> bytes:
        """Metrics of all models, labelled with their names."""
        texts = await asyncio.gather(*(place.served.client.metrics(timeout) for place in self._places.values()))
        return merged_metrics(dict(zip(self._places, texts, strict=True)), "model") + generate_latest(self._registry)


def _state(seat: Seat, info: ModelInfo, there: bool) -> str:
    """The seat's state as supervisor and engines have it; what was `in` stays so while its engines recover."""
    if info.state == "running":
        return "in" if there or seat.state == "in" else "loading"
    return "leaving" if info.state == "unloading" else "out"


def _failure(info: ModelInfo) -> UnavailableError:
    return UnavailableError(f"The model '{info.model}' cannot be loaded: {info.detail}", retry_after=FAILED_S,
                            code=LOAD_FAILED)


def _now() -> float:
    return asyncio.get_running_loop().time()
