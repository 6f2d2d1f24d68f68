"""When machines are lost for longer: the planner's layout for those that remain."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.config.settings import Settings
from tandem.engine.layout import GangLayout, plan_layout
from tandem.errors import UsageError
from tandem.planner.hardware import Link, Machine
from tandem.planner.plan import plan
from tandem.planner.types import Request
from tandem.protocol.control import Ready

log = logging.getLogger(__name__)

BANDWIDTH, FLOPS = 100e9, 4e12
LINK = Link(name="any", latency=100e-6, bandwidth=1e9)
"""Nothing is known of the machines but their memory, and memory decides what fits."""


@dataclass(frozen=True)
class Fallback:
    """A layout over some of the machines."""

    layout: GangLayout
    slots: tuple[int, ...]
    """Places of the full layout that its ranks take, in their order."""


def fallback(settings: Settings, full: GangLayout, facts: Sequence[Ready], present: Sequence[int]) -> Fallback | None:
    """The best layout over the places `present` of the full one, whose ranks once said `facts`; None if none fits."""
    machines = [Machine(name=str(slot), memory=facts[slot].memory_bytes, bandwidth=BANDWIDTH, flops=FLOPS,
                        gpu=facts[slot].gpu) for slot in present]
    wanted = Request(context=min(full.max_context, settings.scheduler.kv_tokens or full.max_context), goal="latency",
                     dtype=settings.model.dtype, dequantize=settings.model.dequantize,
                     memory_fraction=settings.scheduler.memory_fraction)
    try:
        found = plan(full.description, machines, [LINK], wanted)
        for candidate in found.candidates:
            if candidate.layout is None or not candidate.fits or len(candidate.layout.replicas) > 1:
                continue
            [stages] = candidate.layout.replicas
            sizes = tuple(len(stage.machines) for stage in stages)
            parallel = replace(settings.parallel, parallel=sizes, pipeline_parallel_size=1, tensor_parallel_size=1,
                               layer_split=tuple(stage.layers for stage in stages), tensor_split=None)
            layout = plan_layout(replace(settings, parallel=parallel))
            return Fallback(layout, tuple(present[machine] for machine in candidate.layout.machines))
    except UsageError as error:
        log.warning("no layout over the machines that remain: %s", error.message)
    return None
