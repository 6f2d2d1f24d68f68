"""Model pool: the engines of several models, loaded and unloaded on commands from the API server.

Same interface as `EngineSet`, which runs the engines of one model. The API server decides when to load which model, since
the queues of requests are there.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from dataclasses import dataclass

from tandem.checkpoints.resolve import name_of
from tandem.config.settings import NamedModel, Role, Settings
from tandem.config.several import named_models, settings_of, unload_after
from tandem.errors import UsageError
from tandem.processes.child import ChildProcess
from tandem.protocol.control import EngineStatus
from tandem.protocol.events import History
from tandem.protocol.supervisor_messages import ModelInfo, ReplicaInfo
from tandem.supervision.engines import EngineSet
from tandem.supervision.model_memory import Footprint, budget_of, check_fit, footprint, granted, look_at_machines

log = logging.getLogger("tandem.cli")


@dataclass
class _Model:
    name: str
    settings: Settings
    """Settings of this model alone, limited to its share of memory."""
    memory: Footprint
    keep: bool
    unload_after: float | None
    engines: EngineSet | None = None
    unloading: bool = False
    failure: str = ""
    requested: bool = False
    """True once a request has loaded or unloaded the model."""

    @property
    def state(self) -> str:
        if self.engines is not None:
            return "unloading" if self.unloading else "running"
        return "failed" if self.failure else "unloaded"


def several(settings: Settings) -> bool:
    """Return True for settings of the several models of a pool, or of one that is unloaded while idle."""
    return bool(settings.models.extra_models or settings.named or (settings.models.unload_after and settings.model.model))


def with_names(settings: Settings) -> Settings:
    """Return settings that list every model in `named`, the main one first. Raises UsageError."""
    further = named_models(settings)
    if settings.model.model:
        name = next(iter(settings.model.served_name), None) or name_of(settings.model.model)
        further = (NamedModel(name=name, values={}, source="MODEL"), *further)
    most = 1 if len(further) == 1 else settings.models.max_loaded
    models = dataclasses.replace(settings.models, extra_models=(), max_loaded=most)
    model = dataclasses.replace(settings.model, served_name=settings.model.served_name[1:])
    settings = dataclasses.replace(settings, model=model, models=models, named=further)
    names = [one.name for one in named_models(settings)]
    for wrong in set(models.pinned_models) - set(names):
        raise UsageError(f"--pinned-models {wrong}: there is no such model; there are: {', '.join(names)}", param="pinned_models")
    return settings


class EnginePool:
    """Engines of several models. `start` loads the pinned models, and the first one if it fits."""

    def __init__(self, settings: Settings, *, history: History | None = None) -> None:
        """Plan the memory of all models. `settings` come from `with_names`, with the bound port.

        Events are recorded in `history`. Raises UsageError naming a model that cannot be found, laid out or ever fit.
        """
        self._settings = settings
        self._history = history or History()
        self._numbers = itertools.count()
        self._machines = look_at_machines(settings)
        self.budget = budget_of(settings, self._machines)
        self._models = {one.name: self._plan(one) for one in settings.named}
        pinned = {model.name: model.memory.needs for model in self._models.values() if model.keep}
        limit = settings.models.max_loaded
        if limit is not None and len(pinned) >= limit and len(self._models) > limit:
            raise UsageError(
                f"--max-loaded {limit}: {len(pinned)} models are kept and leave no room for others", param="max_loaded"
            )
        for model in self._models.values():
            check_fit(model.name, model.memory, self.budget, pinned)
        self.announced = False
        self.last_words = ""
        """Reason why the server cannot start."""

    def _plan(self, one: NamedModel) -> _Model:
        settings, models = settings_of(self._settings, one), self._settings.models
        try:
            memory = footprint(settings, self._machines, self.budget)
        except UsageError as error:
            error.message = f"model {one.name}: {error.message}"
            raise
        check_fit(one.name, memory, self.budget, {})
        if models.max_loaded == 1:
            memory = dataclasses.replace(memory, needs=dict(self.budget) if memory.needs else {})
        keep = one.name in models.pinned_models or one.values.get("keep") is True
        return _Model(
            one.name,
            granted(settings, memory.needs, self._machines, models.max_loaded),
            memory,
            keep,
            unload_after(self._settings, one),
        )

    def start(self) -> None:
        """Load the pinned models, and the first one if it fits beside them."""
        first = next(iter(self._models.values()))
        kept = [one for one in self._models.values() if one.keep and one is not first]
        beside = {name: sum(one.memory.needs.get(name, 0) for one in kept) for name in self.budget}
        fits = all(beside[name] + need <= self.budget[name] for name, need in first.memory.needs.items())
        fits = fits and len(kept) < (self._settings.models.max_loaded or len(self._models))
        for one in [first, *kept] if fits else kept:
            self._start(one)

    # --- requests of the control socket ---

    def load(self, name: str) -> str:
        """Start loading a model unless it is loaded; return its name. Raises UsageError if it is unknown or being unloaded."""
        one = self._find(name)
        if one.unloading:
            raise UsageError(f"model {name} is being unloaded; try again when that is done")
        one.requested = True
        if one.engines is None:
            self._start(one)
        return name

    def unload(self, name: str) -> str:
        """Unload a model after its requests are finished; return its name. Raises UsageError if it is unknown or pinned."""
        one = self._find(name)
        if one.keep:
            raise UsageError(f"model {name} is kept (--pinned-models); it is never unloaded")
        one.requested = True
        if one.engines is not None and not one.unloading:
            log.info("model %s finishes what it has, and leaves memory", name)
            self._history.note("model_unloading", f"{name} finishes what it has, and leaves memory", model=name)
            one.unloading = True
            one.engines.drain_all()
        return name

    def add(self, role: Role = "both") -> int:
        """Raise UsageError: the number of a model's replicas is part of the memory plan."""
        raise UsageError(
            "replicas cannot be added where there are several models; set data_parallel_size in the model's table [models.NAME]"
        )

    def drain(self, index: int) -> int:
        """Start draining a replica, which exits after its requests; return its number. Raises UsageError if it cannot drain."""
        for one in self._loaded:
            if any(info.replica == index for info in one.infos()):
                return one.drain(index)
        raise UsageError(f"there is no replica {index}; there are: {', '.join(str(info.replica) for info in self.infos())}")

    def roll(self, _: Settings) -> None:
        """Begin to replace the replicas of all loaded models, with their settings; `roll_on` does it."""
        for one in self._loaded:
            one.roll(one.settings)

    def roll_on(self) -> bool:
        """Replace the next replica, one model after another. Return True when all are replaced."""
        return all(one.roll_on() for one in self._loaded)

    @property
    def went_back(self) -> bool:
        """True if the last rolling restart ended early for a model."""
        return any(one.went_back for one in self._loaded)

    def infos(self) -> list[ReplicaInfo]:
        """Return the replicas of all loaded models."""
        return [info for engines in self._loaded for info in engines.infos()]

    def models(self) -> list[ModelInfo]:
        """Return all models, in the order of the configuration."""
        return [
            ModelInfo(one.name, one.state, one.failure, one.memory.needs, one.memory.max_context, one.keep, one.unload_after)
            for one in self._models.values()
        ]

    # --- health checks ---

    def look(self) -> int | None:
        """Start and replace processes as needed. Return an exit code when the server must end, else None."""
        for one in self._models.values():
            if (engines := one.engines) is None:
                continue
            code = engines.look()
            if code is None:
                states = engines.statuses().values()
                engines.announced |= bool(states) and all(status and status.state == "ready" for status in states)
                continue
            for child in engines.children:
                child.kill()
                child.wait(1.0)
            engines.close()
            one.engines, reason = None, engines.last_words
            if one.unloading:
                one.unloading = False
                log.info("model %s is unloaded", one.name)
                self._history.note("model_unloaded", f"{one.name} has left memory", model=one.name)
            elif not self.announced and not one.requested:  # loaded by the configuration, not by a request
                log.error("model %s cannot be loaded; the server ends", one.name)
                self.last_words = reason
                return code
            else:
                one.failure = reason or f"its engine ended with code {code}"
                log.error("model %s: %s; a request for it tries again", one.name, one.failure)
                self._history.note(
                    "model_failed",
                    f"{one.name} cannot be used: {one.failure}",
                    level="error",
                    model=one.name,
                    remedy="Mend what is named; the next request for it tries again.",
                )
        return None

    def statuses(self) -> dict[int, EngineStatus | None]:
        """Return the last status by replica number, without failed replicas; None for a replica that has not answered."""
        return {number: status for engines in self._loaded for number, status in engines.statuses().items()}

    def close(self) -> None:
        """Remove the files of ended processes and close all sockets."""
        for engines in self._loaded:
            engines.close()

    @property
    def children(self) -> list[ChildProcess]:
        """Processes that run or have not been reaped."""
        return [child for engines in self._loaded for child in engines.children]

    @property
    def _loaded(self) -> list[EngineSet]:
        return [one.engines for one in self._models.values() if one.engines is not None]

    def _find(self, name: str) -> _Model:
        if name not in self._models:
            raise UsageError(f"there is no model {name}; there are: {', '.join(self._models)}")
        return self._models[name]

    def _start(self, one: _Model) -> None:
        log.info("model %s is loaded", one.name)
        self._history.note("model_loading", f"{one.name} is loaded", model=one.name)
        one.failure = ""
        one.engines = EngineSet(one.settings, model=one.name, numbers=self._numbers, history=self._history)
        one.engines.start()
