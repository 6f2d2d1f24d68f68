"""Model pool: several models behind one api; requests wait until theirs is loaded, others are unloaded for it.

The supervisor starts and stops engines. The api decides which models to load (`model_slots.py`), since only the api has
the waiting requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from tandem.crash_guard import start_task
from tandem.errors import OverloadedError, RequestError, UnavailableError
from tandem.json_types import JsonObject
from tandem.protocol.control import EngineStatus
from tandem.protocol.events import Event
from tandem.protocol.supervisor_messages import LoadModel, ModelInfo, ReplicaList, UnloadModel
from tandem.server.engines.engine_client import ReplicaState
from tandem.server.engines.model_slots import ModelSlot, decide
from tandem.server.engines.replicas import merged_metrics, merged_status
from tandem.server.engines.served_model import Served
from tandem.server.engines.supervisor import SupervisorLink
from tandem.server.failures import internal_error, refused
from tandem.server.waiting import end_tasks

logger = logging.getLogger(__name__)

LOOK_S, IDLE_LOOK_S = 0.05, 1.0
"""Seconds between updates: while a model loads, unloads or is waited for, and otherwise."""
FAILED_S = 10.0
"""Seconds until a model that failed to load is tried again."""
LOAD_FAILED = "model_load_failed"
"""Error code of requests to a model that failed to load."""


@dataclass(eq=False, kw_only=True)
class _Place(ModelSlot):
    """Slot of one model, with the requests that wait for it."""

    served: Served
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    info: ModelInfo | None = None
    closed: bool = False
    """True while the model takes no new requests, as it is to be unloaded for another."""
    told: bool = False
    """True from sending a load or unload command until the supervisor's list reflects it."""
    failed_at: float = float("-inf")
    reading: asyncio.Task[None] | None = None
    """Task that loads the tokenizer."""
    pressed: bool = False
    """True once a client has requested unloading."""


class ModelPool:
    """All models of a server, with the interface of `Replicas`. Use only on the event loop that called `start`."""

    def __init__(self, models: Sequence[Served], link: SupervisorLink, *, max_loaded: int | None) -> None:
        """`models`: in the order of the configuration, default first. `max_loaded`: most loaded models, None for no limit."""
        self._places = {served.name: _Place(name=served.name, served=served) for served in models}
        self._link = link
        for served in models:
            served.client.requests.tell = link.tell
        self._max_loaded = max_loaded
        self.budget: dict[str, int] = {}
        """Bytes that all models together may use, by machine."""
        self.alive = False
        """True once the supervisor has listed the models."""
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.registry = CollectorRegistry()
        self._loads = Counter("tandem_model_loads", "Times that a model was loaded", ["model"], registry=self.registry)
        self._loaded = Gauge("tandem_model_loaded", "1 while a model is in memory and answers", ["model"], registry=self.registry)
        self._waits = Gauge(
            "tandem_model_waiting_requests", "Requests that wait for a model to be loaded", ["model"], registry=self.registry
        )

    @property
    def served(self) -> list[Served]:
        """All models, the default one first."""
        return [place.served for place in self._places.values()]

    # --- life ---

    async def start(self) -> None:
        """Start polling the supervisor, and connect to the engines it lists."""
        self._task = start_task(self._run(), name="model_pool")
        await self._link.start(self._listed, self._reached)

    async def close(self) -> None:
        """Disconnect from all engines. Running and waiting requests fail."""
        await self._link.close()
        await end_tasks(self._task)
        for place in self._places.values():
            if place.reading is not None:
                place.reading.cancel()
            self._refuse(place, UnavailableError("The server is shutting down.", code="shutting_down"))
            await place.served.client.close()

    def fail_waiting(self, error: RequestError) -> None:
        """End all requests that wait for a model with `error`."""
        for place in self._places.values():
            self._refuse(place, error)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a model."""
        return sum(len(place.waiting) for place in self._places.values())

    async def _listed(self, latest: ReplicaList) -> None:
        """Update models and replicas from the supervisor's list."""
        self.budget = latest.budget
        listed = [(self._places[info.model], info) for info in latest.models if info.model in self._places]
        for place, info in listed:  # no await in this loop: it would overwrite a command sent meanwhile
            before = place.info
            if info.state == "failed" and (before is None or before.state != "failed" or place.told):
                place.failed_at = _now()
                self._refuse(place, _failure(info))
            place.info, place.told = info, False
            place.needs, place.keep, place.unload_after = info.needs, info.keep, info.unload_after
        for place, info in listed:
            await place.served.client.update(
                [replica for replica in latest.replicas if replica.model == info.model], rolling=latest.rolling
            )
        self.alive = True
        self._changed.set()

    def _reached(self) -> int:
        return sum(place.served.client.reached() for place in self._places.values())

    # --- requests ---

    async def enter(self, served: Served) -> None:
        """Wait until the model is loaded, and count a request at it until `leave`.

        Raises OverloadedError if too many requests wait, UnavailableError if the model fails to load.
        """
        place = self._places[served.base_name]
        if self._open(place) and not place.waiting:
            self._begin(place)
            return
        if place.info is not None and place.info.state == "failed" and _now() - place.failed_at < FAILED_S:
            raise _failure(place.info)
        limit = served.settings.scheduler.max_queued_requests
        if len(place.waiting) >= limit:
            raise OverloadedError(f"{limit} requests wait for {served.name} to be loaded; try again later.", retry_after=5.0)
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
        """End a request that `enter` has counted."""
        place = self._places[served.base_name]
        place.users -= 1
        place.idle_at = _now()
        self._changed.set()

    def available(self, served: Served) -> bool:
        """Return whether `enter` would return at once."""
        place = self._places[served.base_name]
        return self._open(place) and not place.waiting

    def _open(self, place: _Place) -> bool:
        """Return whether a model takes requests: loaded, not closed, its engines ready or recovering."""
        status = place.served.client.status
        return (
            place.state == "loaded"
            and not (place.closed or place.pressed)
            and place.served.client.alive
            and status is not None
            and status.state in ("ready", "recovering")
            and place.served.texts.ready(status)
        )

    def _begin(self, place: _Place) -> None:
        place.users += 1
        place.used_at = _now()

    def _refuse(self, place: _Place, error: RequestError) -> None:
        while place.waiting:
            if not (future := place.waiting.popleft()).done():
                future.set_exception(error)

    # --- commands ---

    def state(self, served: Served) -> tuple[str, str]:
        """Return the state of a model and its detail text.

        The state is `loading`, `unloading`, `unloaded`, `failed` or `unknown`; for a loaded model, as of `Served.state`.
        """
        place = self._places[served.base_name]
        info, state = place.info, place.state
        if info is None:
            return "unknown", "the supervisor has not answered yet"
        if info.state == "failed":
            return "failed", info.detail
        if state in ("unloaded", "unloading", "loading"):
            return state, ""
        return served.state

    def facts(self, served: Served) -> JsonObject:
        """Return a model's memory needs (bytes by machine), pinning, idle timeout (seconds) and number of requests."""
        place = self._places[served.base_name]
        info = place.info
        return {
            "needs": info.needs if info else {},
            "keep": bool(info and info.keep),
            "unload_after": info.unload_after if info else None,
            "waiting": len(place.waiting),
            "running": place.users,
        }

    @property
    def health(self) -> str:
        """Overall state: `healthy` while some model is loaded or can be loaded."""
        if not self.alive:
            return "unreachable"
        states = {self.state(place.served)[0] for place in self._places.values()}
        for state, word in (("loaded", "healthy"), ("recovering", "recovering"), ("loading", "starting")):
            if state in states:
                return word
        return "failed" if states == {"failed"} else "healthy"

    def max_context(self, served: Served) -> int | None:
        """Return the context length in tokens, also before the model is loaded; None while unknown."""
        info = self._places[served.base_name].info
        return info.max_context if info is not None else None

    async def unload(self, served: Served) -> None:
        """Unload a model after its running requests, and wait until done. Raises RequestError (409) for a pinned model."""
        place = self._places[served.base_name]
        if place.keep:
            raise refused(
                409, f"Model '{served.name}' is kept (--pinned-models) and never unloaded.", param="model", code="model_kept"
            )
        place.pressed = place.state in ("loaded", "loading")
        while place.pressed or place.state == "unloading":
            self._changed.set()
            await asyncio.sleep(LOOK_S)

    # --- the loop ---

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            for place in self._places.values():
                self._follow(place)
            self._act()
            busy = any(
                place.waiting or place.pressed or place.state in ("loading", "unloading") for place in self._places.values()
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LOOK_S if busy else IDLE_LOOK_S)
            await asyncio.sleep(0)

    def _follow(self, place: _Place) -> None:
        """Update a model's state from supervisor and engines, and admit waiting requests if it is available."""
        info = place.info
        status = place.served.client.status
        there = place.served.client.alive and status is not None and status.state == "ready"
        if status is not None and there and not place.served.texts.ready(status) and place.reading is None:
            place.reading = start_task(self._read_texts(place), name="tokenizer")
        before = place.state
        if info is not None and not place.told:
            place.state = _state(place, info, there)
        if place.state == "loaded" and before != "loaded":
            place.idle_at = place.used_at = _now()
            self._loads.labels(place.name).inc()
        if place.state != "loaded":
            place.closed = False
        if place.state in ("unloaded", "unloading"):
            place.pressed = False
            place.served.texts.prepared.clear()
        while place.waiting and self._open(place):
            future = place.waiting.popleft()
            if not future.done():
                self._begin(place)
                future.set_result(None)
        if not place.waiting:
            place.wanted_at = None
        elif place.wanted_at is None:
            place.wanted_at = _now()
        self._loaded.labels(place.name).set(self._open(place))
        self._waits.labels(place.name).set(len(place.waiting))

    async def _read_texts(self, place: _Place) -> None:
        try:
            await place.served.load_texts()
        except Exception as error:  # noqa: BLE001 - any error must end the waiting requests
            self._refuse(place, error if isinstance(error, RequestError) else internal_error(error, "a tokenizer"))
            await asyncio.sleep(FAILED_S)
        finally:
            place.reading = None
            self._changed.set()

    def _act(self) -> None:
        """Send the load and unload commands that the policy decides."""
        if not self.alive:
            return
        decision = decide([*self._places.values()], self.budget, self._max_loaded, _now())
        for place in self._places.values():
            place.closed = place in decision.close
            if place.pressed and place.state == "loaded" and not place.users and place not in decision.unload:
                decision.unload.append(place)
        for place in decision.unload:
            self._tell(place, UnloadModel(place.name), "unloading")
        for place in decision.load:
            self._tell(place, LoadModel(place.name), "loading")

    def _tell(self, place: _Place, command: LoadModel | UnloadModel, state: str) -> None:
        logger.info("Model %s: %s", place.name, state)
        place.state, place.told = state, True
        self._link.tell(command)

    # --- all engines together ---

    @property
    def status(self) -> EngineStatus | None:
        """Merged status of the engines of all loaded models; None while no engine answers."""
        parts = [part for place in self._places.values() for part in place.served.client.parts()]
        return merged_status(parts) if parts else None

    def check(self) -> EngineStatus:
        """Return the merged status. Raises UnavailableError if no model is loaded."""
        status = self.status
        if status is None:
            raise UnavailableError("No model is loaded just now; a request for one loads it.", code="model_loading")
        return status

    def replicas(self) -> list[ReplicaState]:
        """Return the states of all replicas of all models."""
        return [replica for place in self._places.values() for replica in place.served.client.replicas()]

    def events(self) -> list[Event]:
        """Return the latest events of the supervisor."""
        return list(self._link.events)

    async def refresh(self) -> None:
        """Query the status of the engines of all models."""
        await asyncio.gather(*(place.served.client.refresh() for place in self._places.values()))

    async def metrics(self, timeout: float = 2.0) -> bytes:
        """Return the metrics of all engines, labelled by model, and the pool's own. `timeout`: seconds per engine."""
        texts = await asyncio.gather(*(place.served.client.metrics(timeout) for place in self._places.values()))
        return merged_metrics(dict(zip(self._places, texts, strict=True)), "model") + generate_latest(self.registry)


def _state(slot: ModelSlot, info: ModelInfo, there: bool) -> str:
    """Return a slot's state from the supervisor's report and `there` (an engine is ready).

    A loaded model stays `loaded` while its engines recover.
    """
    if info.state == "running":
        return "loaded" if there or slot.state == "loaded" else "loading"
    return "unloading" if info.state == "unloading" else "unloaded"


def _failure(info: ModelInfo) -> UnavailableError:
    return UnavailableError(f"The model '{info.model}' cannot be loaded: {info.detail}", retry_after=FAILED_S, code=LOAD_FAILED)


def _now() -> float:
    return asyncio.get_running_loop().time()
