"""Degraded service: smaller limits after a GPU's memory was full, and layouts over fewer machines when some are lost or
cannot start."""

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
"""Maximum halvings of limits because a GPU's memory was full; later failures blame requests."""
WIDEN_S, LATEST_WIDEN_S = 300.0, 7200.0
"""Seconds without full memory until halved limits are doubled, and the maximum. The wait doubles each time memory is full
again."""
BAR_AFTER = 2
"""Consecutive failed starts on one machine before the model is laid out without it."""
AGAIN_S, LATEST_AGAIN_S = 10.0, 300.0
"""Seconds until the full layout is retried after it could not start, and the maximum. The wait doubles each time."""
SEEK_S = 1.0
"""Seconds between checks for the return of lost machines."""


@dataclass(frozen=True)
class ActiveLayout:
    """A layout and the slots (places of the full layout) that its ranks use."""

    layout: RankGroupLayout
    slots: tuple[int, ...] | None = None
    """Slot of each rank; None: all slots in order, as in the full layout."""
    degraded: str = ""
    """Reason why this is not the full layout; empty if it is."""


class MemoryBackoff:
    """Number of halvings of limits after full GPU memory, and the time to undo them."""

    def __init__(self) -> None:
        self.halvings = 0
        self.pause_s = WIDEN_S
        """Seconds without full memory until a halving is undone."""
        self._restore_at = 0.0

    def halve(self, now: float) -> bool:
        """Count a halving at `now` (seconds); return False after `MOST_HALVINGS`."""
        if self.halvings >= MOST_HALVINGS:
            return False
        self.halvings += 1
        if self._restore_at:
            self.pause_s = min(2 * self.pause_s, LATEST_WIDEN_S)
        self._restore_at = now + self.pause_s
        return True

    def restore(self, now: float) -> bool:
        """Undo one halving if due at `now` (seconds); return False otherwise."""
        if not self.halvings or now < self._restore_at:
            return False
        self.halvings -= 1
        self._restore_at = now + self.pause_s
        return True


class ExcludedMachines:
    """Slots excluded although their machines are present, and the time to retry the full layout."""

    def __init__(self) -> None:
        self.pause_s = AGAIN_S
        """Seconds until the full layout is retried after it could not start."""
        self._failed_start = (-1, 0)
        """(Slot whose rank failed to start last, number of consecutive failures)."""
        self._barred: set[int] = set()
        """Slots whose ranks could not start."""
        self._wedged: set[int] = set()
        """Slots whose GPU does not answer. Cleared when their machines have been absent, and so may have restarted."""
        self._retry_at = 0.0
        self._sought_at = 0.0

    def note(self, failure: RankFailure, slots: tuple[int, ...] | None, now: float) -> None:
        """Exclude the machine that caused `failure`, if any. `slots`: slots of the failed ranks (`ActiveLayout.slots`).

        A rank of the full layout that fails to start `BAR_AFTER` times in a row excludes its machine. A GPU that does not
        answer excludes it at once, even if its processes run.
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
        """Record that the retried full layout could not start; delay the next retry."""
        if failure.cause == "gpu":
            self.note(failure, None, now)
        self._retry_at = now + self.pause_s
        self.pause_s = min(2 * self.pause_s, LATEST_AGAIN_S)

    def started(self, *, full: bool) -> None:
        """Record that ranks have started. Those of the `full` layout clear all exclusions."""
        self._failed_start = (-1, 0)
        if full:
            self._barred.clear()
            self._wedged.clear()
            self.pause_s = AGAIN_S

    @property
    def barred(self) -> bool:
        """True if some machine is excluded because its rank could not start."""
        return bool(self._barred)

    def usable(self, present: Iterable[int]) -> list[int]:
        """Return the `present` slots that are not excluded."""
        return [slot for slot in present if slot not in self._barred | self._wedged]

    def due(self, now: float) -> bool:
        """Return True, at most once per `SEEK_S`, if it is time to check whether all machines are back."""
        if now - self._sought_at < SEEK_S or now < self._retry_at:
            return False
        self._sought_at = now
        return True

    def all_back(self, present: Sequence[int], places: int) -> bool:
        """Return True if all slots (`places` of them) are present, and no GPU is still considered unresponsive."""
        self._wedged &= set(present)
        return not self._wedged and len(present) == places


class Alternatives:
    """Layouts planned over fewer machines than the full one: the best first, then others if one cannot start."""

    def __init__(self, settings: Settings, full: RankGroupLayout, facts: Sequence[Ready]) -> None:
        """Store the settings. `facts`: `Ready` of each rank of the full layout, in rank order."""
        self._settings = settings
        self._full = full
        self._facts = facts
        hosts = hosts_for(settings.parallel) if full.profile is not None else ()
        self._names = [hosts[slot].ssh if slot < len(hosts) else ready.host for slot, ready in enumerate(facts)]
        """Name of each slot's machine in a hardware profile."""
        self._backend = None if full.profile is None else named_backend(settings.parallel)
        self._said: set[str] = set()
        self._present: tuple[int, ...] = ()
        self._left: Iterator[ActiveLayout] = iter(())

    def next(self, present: Sequence[int]) -> ActiveLayout | None:
        """Return a layout over the slots `present`, or None if none fits.

        Repeated calls with the same slots return the next best layout, and start over after the last.
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
        """Return machines and links for the planner: assumed speeds, replaced by measured ones from the profile."""
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
