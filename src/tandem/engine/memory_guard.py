"""What is done while a device's memory is nearly full, before it is full and a gang is lost.

Room for KV is worked out when ranks start, from what is known then; buffers that steps take for a moment, other
programs and rounding are not. So ranks tell what they hold after every step. Where those of one device hold too much
together, prefixes and freed buffers are let go of and nobody joins; where that is not enough, sequences leave their
batches, the youngest first, and start again later.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tandem.log import Seldom
from tandem.protocol.control import Ready, Stepped
from tandem.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)
seldom = Seldom(log)

EASE, SHED = 0.85, 0.95
"""Shares of a device's memory from which caches are let go of, and from which sequences are."""
MARGIN = 0.03
"""So much above `--memory-fraction` is the first of them at least: what a full KV cache may take is no trouble. So much
below it all is well again."""


class MemoryGuard:
    """For one engine, whatever gang it has."""

    def __init__(self, memory_fraction: float) -> None:
        """`memory_fraction`: share of a device's memory that weights and KV may take."""
        self._ease = min(max(EASE, memory_fraction + MARGIN), SHED)
        self._ready: Sequence[Ready] = ()
        self._used: dict[int, int] = {}
        self._next = 0

    def watch(self, ready: Sequence[Ready], report: Stepped, scheduler: Scheduler) -> None:
        """A rank of the gang that said `ready` has done a step: ease the `scheduler`'s hold on memory, or no more."""
        if ready is not self._ready:
            self._ready, self._next, scheduler.pressed = ready, 0, False
            self._used.clear()
        self._used[report.step.rank] = report.used_bytes
        share, where = self._fullest()
        if share >= self._ease and not scheduler.pressed:
            seldom.warning("the device's memory on %s is %.0f %% full: kept prefixes and buffers are let go of, and "
                           "requests wait; lower --memory-fraction or --kv-tokens if this goes on", where, 100 * share)
        scheduler.pressed = share >= self._ease - (MARGIN if scheduler.pressed else 0)
        # What the last one leaves shows once the steps that were under way are done.
        if share >= SHED and report.step.step_id >= self._next and scheduler.relieve():
            self._next = scheduler.next_step + scheduler.limits.lanes
            seldom.warning("the device's memory on %s is %.0f %% full; a request starts again later", where,
                           100 * share)

    def _fullest(self) -> tuple[float, str]:
        """The largest share of a device's memory that its ranks hold, and the name of its machine."""
        held: dict[tuple[str, int], int] = {}
        most = (0.0, "")
        for one in self._ready:
            device = (one.machine or one.host, one.rank if one.own_memory else -1)
            held[device] = held.get(device, 0) + self._used.get(one.rank, 0)
            most = max(most, (held[device] / max(one.memory_bytes, 1), one.host))
        return most
