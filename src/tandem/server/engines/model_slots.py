"""Policy of the model pool: which models to load, and which to unload for them. Pure: no clock, no sockets.

Models are loaded in the order of their first waiting request, so that none starves. The least recently used model is
unloaded first. A busy model is unloaded only if no idle one suffices; until then it takes no new requests, so that it
cannot keep others out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

PATIENCE_S = 1.0
"""Seconds that requests must wait for a model before a busy one is closed for it."""


@dataclass(eq=False, kw_only=True)
class ModelSlot:
    """State of one model, as input to the policy. Times are in seconds of the caller's clock."""

    name: str
    needs: Mapping[str, int] = field(default_factory=dict)
    """Bytes needed, by machine; empty without a memory plan."""
    state: str = "unloaded"
    """`unloaded`, `loading`, `loaded` or `unloading`."""
    keep: bool = False
    unload_after: float | None = None
    """Idle seconds after which to unload; None for never."""
    users: int = 0
    """Number of running requests."""
    used_at: float = 0.0
    """Time of the last request's start."""
    idle_at: float = 0.0
    """Time of the last request's end, or of loading."""
    wanted_at: float | None = None
    """Time since which requests wait for the model; None if none does."""


S = TypeVar("S", bound=ModelSlot)


@dataclass
class Decision(Generic[S]):
    """Models to load, to unload and to close now."""

    load: list[S] = field(default_factory=list)
    unload: list[S] = field(default_factory=list)
    close: list[S] = field(default_factory=list)
    """Busy models to close: they finish their requests, then are unloaded."""


def decide(slots: Sequence[S], budget: Mapping[str, int], max_loaded: int | None, now: float) -> Decision[S]:
    """Return what to load, unload and close. Call after each change, and periodically.

    `budget`: bytes that models may use, by machine; `max_loaded`: most loaded models (None: no limit); `now`: seconds.
    """
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
        break  # others wait behind it, or they would take the memory that is being freed
    decision.unload += [slot for slot in occupied if slot not in decision.unload and _idle_for_long(slot, now)]
    return decision


def _victims(wanted: S, occupied: list[S], budget: Mapping[str, int], max_loaded: int | None) -> list[S]:
    """Return the fewest models to unload for `wanted`: idle before busy ones, then least recently used first.

    Empty if `wanted` would not fit even then, as loading models cannot be unloaded yet.
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
