"""Load and unload LoRA adapters while serving: all ranks change, or none does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.config.settings import ModelSettings
from tandem.engine.recovery import RankGroup
from tandem.errors import NotFoundError, RequestError, TransportError, UnavailableError, UsageError
from tandem.models.adapter_files import adapter_spec, read_adapter
from tandem.protocol.adapters import AdapterChanged, AdapterLoaded, AdapterSpec, ChangeAdapter, LoadAdapter
from tandem.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

Reply = Callable[[AdapterChanged], None]
REPLACED = "The ranks are being replaced; try again when they are ready."


@dataclass(eq=False)
class _Change:
    """A change that ranks have not answered yet, or an unload that waits for requests."""

    adapter: AdapterSpec
    query: ChangeAdapter
    reply: Reply
    sent: bool = False
    """True once the ranks were told."""
    errors: dict[int, str] = field(default_factory=dict)
    """Answers so far by rank; empty texts for success."""

    @property
    def loads(self) -> bool:
        """True for a load, False for an unload."""
        return bool(self.query.path)

    def end(self, status: int, message: str = "") -> None:
        self.reply(AdapterChanged(self.query.query_id, status, message))


class AdapterManager:
    """Changes of the adapters of a rank group. Used only by the engine's thread."""

    def __init__(self, settings: ModelSettings, rank_group: RankGroup) -> None:
        self._settings, self._rank_group = settings, rank_group
        self.changes: dict[int, _Change] = {}
        """Unfinished changes by the adapter's index."""

    def ask(self, query: ChangeAdapter, reply: Reply) -> None:
        """Begin a change. `reply` is called with the answer, now or during a later `pump`."""
        group = self._rank_group
        try:
            if group.state != "ready":
                raise UnavailableError(REPLACED)
            adapter = self._checked(query) if query.path else self._leaving(query.name)
            self.changes[adapter.index] = _Change(adapter, query, reply)
        except (RequestError, UsageError, OSError) as error:
            reply(AdapterChanged(query.query_id, getattr(error, "status", 400), str(error)))

    def _leaving(self, name: str) -> AdapterSpec:
        """Return the adapter to unload. Raises RequestError."""
        adapter = self._rank_group.adapters.get(name)
        if adapter is None or adapter.index in self.changes:
            raise NotFoundError(f"The lora adapter '{name[:200]}' cannot be found, or is being unloaded.")
        return adapter

    def _checked(self, query: ChangeAdapter) -> AdapterSpec:
        """Return the adapter to load, after a look at its files' headers. Raises UsageError, OSError."""
        group = self._rank_group
        if not self._settings.enable_lora:
            raise UsageError("Adapters are loaded while serving only with --enable-lora; start the server with it.")
        if query.name in group.adapters or any(one.adapter.name == query.name for one in self.changes.values()):
            raise UsageError(f"The lora adapter '{query.name}' has already been loaded; unload it first.")
        most = group.layout.ranks[0].max_loras
        taken = {one.index for one in group.adapters.values()} | self.changes.keys()
        free = [index for index in range(1, most + 1) if index not in taken]
        adapter = adapter_spec(free[0] if free else 0, query.name, query.path)
        rank = read_adapter(adapter.path, group.layout.description).rank
        if rank > group.layout.lora_rank:
            raise UsageError(f"LoRA adapter {adapter.path}: its rank is {rank}; start the server with --max-lora-rank {rank}")
        if not free:
            raise UsageError(f"{most} LoRA adapters are loaded, the most (--max-loras); unload one first.")
        return adapter

    def look(self, scheduler: Scheduler) -> None:
        """Tell the ranks about new adapters, and about those to unload once their requests are finished. Raises RankFailure."""
        for change in list(self.changes.values()):
            used = not change.loads and any(one.adapter is change.adapter for one in scheduler.sequences.values())
            if change.sent or used:
                continue
            change.sent = True
            if not change.loads:
                self._rank_group.adapters.pop(change.adapter.name, None)  # a recovery may have dropped it
            try:
                self._rank_group.executor.load_adapter(LoadAdapter(change.adapter, unload=not change.loads))
            except (OSError, TransportError) as error:  # its files cannot be served
                del self.changes[change.adapter.index]
                change.end(400, str(error))

    def take(self, report: AdapterLoaded) -> None:
        """Take a rank's answer; the last one ends the change. What some rank could not load, all unload again."""
        change, group = self.changes.get(report.index), self._rank_group
        if change is None or report.unloaded == change.loads:
            return
        change.errors[report.rank] = report.error
        if len(change.errors) < len(group.layout.ranks):
            return
        del self.changes[report.index]
        error = next(filter(None, change.errors.values()), "")
        if change.loads and error:
            group.executor.load_adapter(LoadAdapter(change.adapter, unload=True))
        elif change.loads:
            group.adapters[change.adapter.name] = change.adapter
        log.info("LoRA adapter %s %s", change.adapter.name, error or ("loaded" if change.loads else "unloaded"))
        change.end(400 if error else 200, error)

    def give_up(self) -> None:
        """End the changes that lost ranks had begun; new ranks get the adapters that were loaded."""
        for change in [change for change in self.changes.values() if change.sent]:
            del self.changes[change.adapter.index]
            change.end(503 if change.loads else 200, REPLACED)
