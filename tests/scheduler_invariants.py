"""Limits of schedulers in tests, and what must hold between their tables, whatever has happened."""

from __future__ import annotations

from tandem.kv.index import PrefixIndex
from tandem.scheduler.limits import Limits
from tandem.scheduler.scheduler import Scheduler


def make_limits(**changes: object) -> Limits:
    """One lane of a small model, with `changes`."""
    values: dict[str, object] = {
        "lanes": 1, "max_batch_size": 8, "prefill_chunk": 16, "kv_tokens": 10_000, "max_context": 512,
        "max_queue": 1000, "max_queue_tokens": 10**6, "eos_token_ids": frozenset([0]), "vocab_size": 50, **changes}
    return Limits(**values)  # type: ignore[arg-type]


def check_invariants(scheduler: Scheduler) -> None:
    """Raise AssertionError unless every invariant holds."""
    under_way = scheduler._under_way.values()
    for sequence in scheduler.sequences.values():
        places = (sequence in scheduler.waiting) + sum(
            sequence.request_id in lane.members for lane in scheduler.batches.lanes)
        parked = sequence.finished or sequence.complete
        assert places == 1 or (parked and places == 0 and sequence.inflight > 0), sequence
        assert sequence.inflight == sum([*p.sampled(), *p.ended()].count(sequence.request_id) for p in under_way)
        if sequence.lane is not None and sequence.decoding:
            assert sequence.computed == len(sequence.tokens) + sequence.inflight - 1, sequence
        assert sequence.finished or sequence.produced < max(sequence.request.params.max_tokens, 1)
    for lane in scheduler.batches.lanes:
        assert lane.outstanding == sum(p.lane == lane.index for p in under_way)
        assert set(lane.members) <= set(scheduler.sequences)
    check_prefixes(scheduler.prefixes)
    assert scheduler.batches.running <= 1 or scheduler.batches.running <= scheduler.limits.max_batch_size


def check_prefixes(index: PrefixIndex) -> None:
    """Raise AssertionError unless the tables of a prefix cache agree."""
    held = sum(snapshot.length + index._extra for snapshot in (*index._snapshots.values(), *index._reserved.values()))
    assert index.positions == held <= max(index._budget, 0)
    assert {key for keys in index._by_hash.values() for key in keys} == set(index._snapshots)
