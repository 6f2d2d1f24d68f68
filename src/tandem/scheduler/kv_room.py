"""Capacity of the lanes' KV buffers on the ranks, as far as the KV cache has room. Ranks do as plans say."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.cache.budget import batch_positions, kv_shape
from tandem.protocol.step import KVShape, PrefillOp
from tandem.scheduler.lane import Lane
from tandem.scheduler.limits import Limits


def plan_shapes(lanes: Sequence[Lane], lane: Lane, prefill: Sequence[PrefillOp], limits: Limits, *, drafts: int,
                cached: int) -> list[KVShape]:
    """Set each lane's capacity from the next plan on, which is `lane`'s and computes these chunks.

    `cached`: positions of prefixes. Buffers grow beyond what they need only where room is left for all members, the
    prefixes and one more prompt. Spare capacity is given back, in any lane, when the limit would not hold otherwise.
    """
    joins = {op.request_id for op in prefill if op.last and op.samples}
    rows = [one.rows(joins, drafts + (one is lane)) for one in lanes]
    longest = [max(lengths, default=0) for lengths in rows]
    least = [batch_positions(lengths, lane.step) for lengths in rows]
    for i, one in enumerate(lanes):
        others = cached + sum(other.occupied(drafts) for other in lanes if other is not one)
        room = limits.kv_tokens - others - one.prompt_positions(joins, prefill) - longest[i]
        one.shape = kv_shape(one.shape, len(rows[i]), longest[i], most=limits.rows, room=max(room, least[i]))
    prompts = sum(one.prompt_positions(joins, prefill) for one in lanes)
    for i in sorted(range(len(lanes)), key=lambda i: least[i] - lanes[i].shape.size):
        if cached + prompts + sum(one.shape.size for one in lanes) > limits.kv_tokens:
            lanes[i].shape = kv_shape(KVShape(), len(rows[i]), longest[i], room=least[i])
    return [one.shape for one in lanes]
