"""How an engine serves with less than its settings name: smaller limits after a GPU's memory was full, and fewer
machines, over which the planner lays out the model, when some are lost or cannot start."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tandem.config.settings import Settings
from tandem.engine.build_layout import RankGroupLayout, plan_layout
from tandem.errors import RankFailure, UsageError
from tandem.launchers.host_addresses import hosts_for, named_backend
from tandem.planner.hardware import METAL_FENCE, Link, Machine
from tandem.planner.plan import plan
from tandem.planner.profile import Cluster, with_profile
from tandem.planner.types import Request
from tandem.protocol.control import Ready

log = logging.getLogger(__name__)

BANDWIDTH, FLOPS = 100e9, 4e12
LINK = Link(name="any", latency=100e-6, bandwidth=1e9)
"""Link assumed where no profile exists: only the machines' memory then decides."""


MOST_HALVINGS = 2
"""Times that limits are halved because a GPU's memory was full; then requests are blamed as for other failures."""
WIDEN_S, LATEST_WIDEN_S = 300.0, 7200.0
"""Seconds without a full memory until limits that were halved are doubled; twice as long each time that it was full
again, up to the second."""
BAR_AFTER = 2
"""Starts in a row that one rank's machine prevents before the model is laid out without it."""
AGAIN_S, LATEST_AGAIN_S = 10.0, 300.0
"""Seconds until all machines are tried again after they could not start; twice as long each time, up to the second."""
SEEK_S = 1.0
"""Seconds between two looks for machines that were lost."""


@dataclass(frozen=True)
class ActiveLayout:
    """A layout, and the places of the full one that its ranks take."""

    layout: RankGroupLayout
    slots: tuple[int, ...] | None = None
    """None: all places, in their order, as in the full layout alone."""
    degraded: str = ""
    """Why it is not the full one; empty for that."""


class MemoryBackoff:
    """How often limits are halved because a GPU's memory was full, and when a halving is taken back."""

    def __init__(self) -> None:
        self.halvings = 0
        self.pause_s = WIDEN_S
        """Seconds without a full memory until a halving is taken back."""
        self._restore_at = 0.0

    def halve(self, now: float) -> bool:
        """Halve the limits once more, at `now` seconds; False after `MOST_HALVINGS` times."""
        if self.halvings >= MOST_HALVINGS:
            return False
        self.halvings += 1
        if self._restore_at:
            self.pause_s = min(2 * self.pause_s, LATEST_WIDEN_S)
        self._restore_at = now + self.pause_s
        return True

    def restore(self, now: float) -> bool:
        """Take back one halving; False unless one is due."""
        if not self.halvings or now < self._restore_at:
            return False
        self.halvings -= 1
        self._restore_at = now + self.pause_s
        return True


class ExcludedMachines:
    """Places of the full layout that are not used although their machines are present, and when all are tried again."""

    def __init__(self) -> None:
        self.pause_s = AGAIN_S
        """Seconds until the full layout is tried again after it could not start."""
        self._failed_start = (-1, 0)
        """The place whose rank could not start last, and how often in a row."""
        self._barred: set[int] = set()
        """Places whose ranks could not start."""
        self._wedged: set[int] = set()
        """Places whose GPU does not answer, until their machines have been away, and so may have been restarted."""
        self._retry_at = 0.0
        self._sought_at = 0.0

    def note(self, failure: RankFailure, slots: tuple[int, ...] | None, now: float) -> None:
        """Record the machine that a failure of ranks in these places (`ActiveLayout.slots`) accuses, if any.

        A rank of the full layout that cannot start twice in a row bars its machine; a GPU that does not answer counts
        as lost at once, though the machine's processes run.
        """
        if failure.rank is None:
            return
        if failure.cause == "gpu":
            self._wedged.add(failure.rank if slots is None else slots[failure.rank])
        elif failure.cause == "start" and slots is None:
            slot, times = self._failed_start
            self._failed_start = (failure.rank, times + 1 if slot == failure.rank else 1)
            if self._failed_start[1] >= BAR_AFTER:
                self._barred.add(failure.rank)
                self._retry_at = now + self.pause_s

    def full_layout_failed(self, failure: RankFailure, now: float) -> None:
        """Record that the full layout, tried again, could not start: the next try comes later."""
        if failure.cause == "gpu":
            self.note(failure, None, now)
        self._retry_at = now + self.pause_s
        self.pause_s = min(2 * self.pause_s, LATEST_AGAIN_S)

    def started(self, *, full: bool) -> None:
        """Record that ranks have started; those of the `full` layout clear all that was held against machines."""
        self._failed_start = (-1, 0)
        if full:
            self._barred.clear()
            self._wedged.clear()
            self.pause_s = AGAIN_S

    @property
    def barred(self) -> bool:
        """True while some machine is not used because its rank could not start."""
        return bool(self._barred)

    def usable(self, present: Iterable[int]) -> list[int]:
        """Return the `present` places whose machines can be used."""
        return [slot for slot in present if slot not in self._barred | self._wedged]

    def due(self, now: float) -> bool:
        """True, once a second at most, when it is time to look whether all machines are back."""
        if now - self._sought_at < SEEK_S or now < self._retry_at:
            return False
        self._sought_at = now
        return True

    def all_back(self, present: Sequence[int], places: int) -> bool:
        """True if all `places` are present, and none has been so since its GPU stopped answering."""
        self._wedged &= set(present)
        return not self._wedged and len(present) == places


class Alternatives:
    """The planner's layouts over fewer machines than the full one has: the best first, the next if one cannot start."""

    def __init__(self, settings: Settings, full: RankGroupLayout, facts: Sequence[Ready]) -> None:
        """`facts`: what the ranks of the full layout, in their order, have said of their machines."""
        self._settings = settings
        self._full = full
        self._facts = facts
        hosts = hosts_for(settings.parallel) if full.profile is not None else ()
        self._names = [hosts[slot].ssh if slot < len(hosts) else ready.host for slot, ready in enumerate(facts)]
        """Name of each place's machine in a hardware profile."""
        self._backend = None if full.profile is None else named_backend(settings.parallel)
        self._said: set[str] = set()
        self._present: tuple[int, ...] = ()
        self._left: Iterator[ActiveLayout] = iter(())

    def next(self, present: Sequence[int]) -> ActiveLayout | None:
        """Return a layout over the places `present` of the full one, or None if none fits.

        The best comes first; asked again for the same places, the next one, and after the last the first again.
        """
        if tuple(present) == self._present and (layout := next(self._left, None)) is not None:
            return layout
        self._present = tuple(present)
        self._left = self._layouts(present)
        return next(self._left, None)

    def _layouts(self, present: Sequence[int]) -> Iterator[ActiveLayout]:
        settings, full = self._settings, self._full
        wanted = Request(
            context=min(full.max_context, settings.scheduler.kv_tokens or full.max_context),
            goal="latency",
            dtype=settings.model.dtype,
            dequantize=settings.model.dequantize,
            kv_dtype=settings.scheduler.kv_dtype,
            memory_fraction=settings.scheduler.memory_fraction,
        )
        cluster = self._cluster(present, wanted)
        try:
            candidates = plan(full.description, cluster.machines, cluster.links, wanted).candidates
        except UsageError as error:
            log.warning("no layout over the machines that remain: %s; the others are waited for", error.message)
            return
        for candidate in candidates:
            if candidate.layout is None or not candidate.fits or len(candidate.layout.replicas) > 1:
                continue
            [stages] = candidate.layout.replicas
            sizes = tuple(len(stage.machines) for stage in stages)
            parallel = replace(
                settings.parallel,
                parallel=sizes,
                expert_parallel=any(stage.whole_experts for stage in stages)
                or (settings.parallel.expert_parallel and max(sizes) > 1),
                hardware_profile=None,
                pipeline_parallel_size=1,
                tensor_parallel_size=1,
                layer_split=tuple(stage.layers for stage in stages),
                tensor_split=None,
            )
            try:
                layout = plan_layout(replace(settings, parallel=parallel))
            except UsageError as error:
                log.warning("no layout over the machines that remain: %s; another is tried", error.message)
                continue
            yield ActiveLayout(layout, tuple(present[machine] for machine in candidate.layout.machines))

    def _cluster(self, present: Sequence[int], wanted: Request) -> Cluster:
        """Machines and links to plan with: assumed speeds, and measured ones for machines that the profile knows."""
        parallel, full = self._settings.parallel, self._full
        machines = [
            Machine(
                name=str(slot),
                memory=self._facts[slot].memory_bytes,
                bandwidth=BANDWIDTH,
                flops=FLOPS,
                gpu=self._facts[slot].gpu,
                fence=METAL_FENCE if self._facts[slot].metal else 0.0,
            )
            for slot in present
        ]
        cluster = with_profile(
            machines,
            [LINK],
            full.profile,
            description=full.description,
            request=wanted,
            fast=parallel.fast_sync != "off",
            backend=self._backend,
            names=[self._names[slot] for slot in present],
            source=str(parallel.hardware_profile),
        )
        for note in cluster.notes:
            if note not in self._said:
                self._said.add(note)
                log.info("a layout over fewer machines: %s", note)
        return cluster
