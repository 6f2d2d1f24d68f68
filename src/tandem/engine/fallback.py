"""When machines are lost for longer, or cannot start: the planner's layouts for those that remain."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tandem.config.settings import Settings
from tandem.engine.layout import GangLayout, plan_layout
from tandem.errors import UsageError
from tandem.launchers.machines import hosts_for, named_backend
from tandem.planner.hardware import METAL_FENCE, Link, Machine
from tandem.planner.plan import plan
from tandem.planner.profile import Cluster, with_profile
from tandem.planner.types import Request
from tandem.protocol.control import Ready

log = logging.getLogger(__name__)

BANDWIDTH, FLOPS = 100e9, 4e12
LINK = Link(name="any", latency=100e-6, bandwidth=1e9)
"""Without a profile nothing is known of the machines but their memory, which decides what fits, and their fences."""


@dataclass(frozen=True)
class Fallback:
    """A layout over some of the machines."""

    layout: GangLayout
    slots: tuple[int, ...]
    """Places of the full layout that its ranks take, in their order."""


class Alternatives:
    """Layouts over fewer machines than the full one has, the best one first, and the next when one cannot start."""

    def __init__(self, settings: Settings, full: GangLayout, facts: Sequence[Ready]) -> None:
        """`facts`: what the ranks of the full layout, in their order, have said of their machines."""
        self._settings = settings
        self._full = full
        self._facts = facts
        hosts = hosts_for(settings.parallel) if full.profile is not None else ()
        self._names = [hosts[slot].ssh if slot < len(hosts) else ready.host for slot, ready in enumerate(facts)]
        """What a profile calls the machine of each place."""
        self._backend = None if full.profile is None else named_backend(settings.parallel)
        self._said: set[str] = set()
        self._present: tuple[int, ...] = ()
        self._left: Iterator[Fallback] = iter(())

    def next(self, present: Sequence[int]) -> Fallback | None:
        """A layout over the places `present` of the full one: the best one, or the one after that which was given last
        for the same places; after the last one the first again. None if none fits."""
        if tuple(present) == self._present and (found := next(self._left, None)) is not None:
            return found
        self._present = tuple(present)
        self._left = self._layouts(present)
        return next(self._left, None)

    def _layouts(self, present: Sequence[int]) -> Iterator[Fallback]:
        settings, full = self._settings, self._full
        wanted = Request(context=min(full.max_context, settings.scheduler.kv_tokens or full.max_context),
                         goal="latency", dtype=settings.model.dtype, dequantize=settings.model.dequantize,
                         kv_dtype=settings.scheduler.kv_dtype,
                         memory_fraction=settings.scheduler.memory_fraction)
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
            parallel = replace(settings.parallel, parallel=sizes,
                               expert_parallel=any(stage.whole_experts for stage in stages) or (
                                   settings.parallel.expert_parallel and max(sizes) > 1),
                               hardware_profile=None, pipeline_parallel_size=1, tensor_parallel_size=1,
                               layer_split=tuple(stage.layers for stage in stages), tensor_split=None)
            try:
                layout = plan_layout(replace(settings, parallel=parallel))
            except UsageError as error:
                log.warning("no layout over the machines that remain: %s; another is tried", error.message)
                continue
            yield Fallback(layout, tuple(present[machine] for machine in candidate.layout.machines))

    def _cluster(self, present: Sequence[int], wanted: Request) -> Cluster:
        """What to plan with: assumed speeds, and measured ones for those machines that the profile knows."""
        parallel, full = self._settings.parallel, self._full
        machines = [Machine(name=str(slot), memory=self._facts[slot].memory_bytes, bandwidth=BANDWIDTH, flops=FLOPS,
                            gpu=self._facts[slot].gpu, fence=METAL_FENCE if self._facts[slot].metal else 0.0)
                    for slot in present]
        cluster = with_profile(machines, [LINK], full.profile, description=full.description, request=wanted,
                               fast=parallel.fast_sync != "off", backend=self._backend,
                               names=[self._names[slot] for slot in present],
                               source=str(parallel.hardware_profile))
        for note in cluster.notes:
            if note not in self._said:
                self._said.add(note)
                log.info("a layout over fewer machines: %s", note)
        return cluster
