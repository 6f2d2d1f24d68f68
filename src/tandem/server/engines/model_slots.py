"""Which of several models are in memory: what to load, and what must go for it. Pure: no clock, no sockets.

Models that are asked for are loaded in the order in which they were, so that none waits for ever. Room is made by the
model that was used least recently; one with requests under way goes only when nobody else can, and then takes no new
requests until it is back, so that a busy model cannot keep the others out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

PATIENCE_S = 1.0
"""Seconds that a model must have been waited for before a busy one is made to finish and go."""


@dataclass(eq=False, kw_only=True)
class ModelSlot:
    """One model as the policy sees it."""

    name: str
    needs: Mapping[str, int] = field(default_factory=dict)
    """Bytes on each machine; empty where there is no memory plan."""
    state: str = "unloaded"
    """`unloaded`, `loading`, `loaded` or `unloading`."""
    keep: bool = False
    unload_after: float | None = None
    """Seconds of idleness after which it goes."""
    users: int = 0
    """Requests that it works on."""
    used_at: float = 0.0
    """When it last began one."""
    idle_at: float = 0.0
    """When it last ended one, or was loaded."""
    wanted_at: float | None = None
    """Since when requests wait for it; None when none does."""


S = TypeVar("S", bound=ModelSlot)


@dataclass
class Decision(Generic[S]):
    """Models to load, to unload and to close now."""

    load: list[S] = field(default_factory=list)
    unload: list[S] = field(default_factory=list)
    close: list[S] = field(default_factory=list)
    """Busy models that have to finish and go."""


def decide(slots: Sequence[S], budget: Mapping[str, int], max_loaded: int | None, now: float) -> Decision[S]:
    """Return what follows from the slots as they are. Call it whenever one has changed, and as time goes by."""
    decision: Decision[S] = Decision()
    occupied = [slot for slot in slots if slot.state != "unloaded"]
    waiting = [slot for slot in slots if slot.state == "unloaded" and slot.wanted_at is not None]
    for wanted in sorted(waiting, key=lambda slot: slot.wanted_at or 0.0):
        if _fits([*occupied, wanted], budget, max_loaded):
            decision.load.append(wanted)
            occupied.append(wanted)
            continue
        victims = _victims(wanted, occupied, budget, max_loaded)
        decision.unload += [slot for slot in victims if not slot.users]
        if now - (wanted.wanted_at or now) >= PATIENCE_S:
            decision.close += [slot for slot in victims if slot.users]
        break  # the next ones wait behind it, or they would take the room that is being made
    decision.unload += [slot for slot in occupied if slot not in decision.unload and _idle_for_long(slot, now)]
    return decision


def _victims(wanted: S, occupied: list[S], budget: Mapping[str, int], max_loaded: int | None) -> list[S]:
    """Return the models to unload for `wanted`: idle ones before busy ones, the least recently used first, no more
    than needed.

    None, as long as it would not fit then either: what is being loaded cannot be unloaded before it is there.
    """
    staying = [slot for slot in occupied if slot.state != "unloading"]

    def fits_without(gone: list[S]) -> bool:
        return _fits([*(slot for slot in staying if slot not in gone), wanted], budget, max_loaded)

    order = sorted(
        (slot for slot in staying if slot.state == "loaded" and not slot.keep), key=lambda slot: (slot.users > 0, slot.used_at)
    )
    count = next((n for n in range(len(order) + 1) if fits_without(order[:n])), 0)
    victims = order[:count]
    for slot in reversed(order[:count]):
        if fits_without([one for one in victims if one is not slot]):
            victims = [one for one in victims if one is not slot]
    return victims


def _idle_for_long(slot: ModelSlot, now: float) -> bool:
    return (
        slot.state == "loaded"
        and not slot.keep
        and not slot.users
        and slot.wanted_at is None
        and slot.unload_after is not None
        and now - slot.idle_at >= slot.unload_after
    )


def _fits(slots: Sequence[ModelSlot], budget: Mapping[str, int], max_loaded: int | None) -> bool:
    if max_loaded is not None and len(slots) > max_loaded:
        return False
    return all(sum(slot.needs.get(machine, 0) for slot in slots) <= size for machine, size in budget.items())
