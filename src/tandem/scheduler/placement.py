"""Which lane takes a sequence. A batch costs rows x longest, so lengths that are alike belong together."""

from __future__ import annotations

from collections.abc import Sequence as Items

from tandem.scheduler.lane import Lane

SLACK = 3
"""A lane that has more rows than the emptiest, by one for so many rows of all lanes, takes none: stages take turns, and
lanes that differ much let some of them wait."""
ALIKE = 256
"""Costs that differ by fewer positions are the same."""


def choose_lane(lanes: Items[Lane], length: int, *, asking: Lane, rows: int, drafts: int = 0) -> Lane:
    """The lane in which a sequence of `length` positions costs least, of those that have nearly the fewest rows.

    `asking` is taken where several are as good, since its plan is being made. `rows`: most rows of a lane.
    """
    free = [lane for lane in lanes if len(lane.members) < rows]
    if not free:
        return asking
    fewest = min(len(lane.members) for lane in lanes)
    slack = sum(len(lane.members) for lane in lanes) // SLACK
    near = [lane for lane in free if len(lane.members) - fewest <= slack] or free

    def cost(lane: Lane) -> tuple[int, int, bool]:
        added = lane.positions([length], drafts) - lane.positions(drafts=drafts)
        return added // ALIKE, len(lane.members), lane is not asking

    return min(near, key=cost)
