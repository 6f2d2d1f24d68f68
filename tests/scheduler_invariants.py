"""Limits of schedulers in tests, and what must hold between their tables, whatever has happened."""

from __future__ import annotations

from collections import Counter

from tandem.kv.index import PrefixIndex
from tandem.scheduler.limits import Limits
from tandem.scheduler.scheduler import Scheduler


def make_limits(**changes: object) -> Limits:
    """One micro-batch of a small model, with `changes`."""
    values: dict[str, object] = {
        "micro_batches": 1,
        "max_batch_size": 8,
        "prefill_chunk": 16,
        "kv_tokens": 10_000,
        "max_context": 512,
        "max_queued_requests": 1000,
        "max_queue_tokens": 10**6,
        "eos_token_ids": frozenset([0]),
        "vocab_size": 50,
        **changes,
    }
    return Limits(**values)  # type: ignore[arg-type]


def check_invariants(scheduler: Scheduler) -> None:
    """Raise AssertionError unless every invariant holds."""
    under_way = scheduler._under_way.values()
    for sequence in scheduler.sequences.values():
        places = (sequence in scheduler.waiting) + sum(
            sequence.request_id in micro_batch.members for micro_batch in scheduler.batches.micro_batches
        )
        parked = sequence.finished or sequence.complete
        assert places == 1 or (parked and places == 0 and sequence.inflight > 0), sequence
        assert sequence.inflight == sum([*p.sampled(), *p.ended()].count(sequence.request_id) for p in under_way)
        if sequence.micro_batch is not None and sequence.decoding:
            assert sequence.computed == len(sequence.tokens) + sequence.inflight - 1, sequence
        assert sequence.finished or sequence.produced < max(sequence.request.params.max_tokens, 1)
    for micro_batch in scheduler.batches.micro_batches:
        assert micro_batch.outstanding == sum(p.micro_batch == micro_batch.index for p in under_way)
        assert set(micro_batch.members) <= set(scheduler.sequences)
    check_prefixes(scheduler.prefixes)
    assert scheduler.batches.running <= 1 or scheduler.batches.running <= scheduler.limits.max_batch_size


def check_prefixes(index: PrefixIndex) -> None:
    """Raise AssertionError unless the tables of a prefix cache agree."""
    held = sum(map(index._cost, (*index._cached_prefixes.values(), *index._reserved.values())))
    assert index.positions == held <= max(index._budget, 0)
    known = Counter(one for prefix in index._cached_prefixes.values() for one in prefix.hashes)
    assert index._known == (Counter() if index._trimmable else known)
    assert {key for keys in index._by_hash.values() for key in keys} == set(index._cached_prefixes)
