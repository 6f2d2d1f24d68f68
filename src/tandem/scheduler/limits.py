"""How much the scheduler may let run and wait."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.cache.budget import growth_step, most_rows
from tandem.scheduler.lane import Lane
from tandem.speculation.proposers import SpeculationLimits


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the scheduler must keep to."""

    lanes: int
    max_batch_size: int
    """Most sequences in all lanes together."""
    prefill_chunk: int
    """Most prompt tokens in one step."""
    prefill_time_s: float | None = None
    """Most seconds that these may add to a step in which others decode; None: by what steps of decoding take; 0: any.
    """
    kv_tokens: int
    """Most KV positions in all lanes together."""
    max_context: int
    max_queue: int
    max_queue_tokens: int
    eos_token_ids: frozenset[int]
    vocab_size: int
    depth: int = 2
    """Plans of one lane that may be under way."""
    prefix_tokens: int = 0
    """KV positions, of the `kv_tokens`, that may hold prefixes of past prompts; 0 for no prefix cache."""
    prefix_trimmable: bool = True
    """The model's caches can be cut to any length (no sliding windows)."""
    prefix_extra: int = 0
    """KV positions that a snapshot costs beside those that it holds: what states of recurrent layers take."""
    speculation: SpeculationLimits | None = None
    """How to draft tokens; None for no speculative decoding."""
    digests: bool = False
    """Plans ask every rank for digests of what it computes."""

    @property
    def rows(self) -> int:
        """Most rows of one lane."""
        return most_rows(self.max_batch_size, self.lanes)

    def new_lanes(self) -> list[Lane]:
        """Empty lanes."""
        return [Lane(i, growth_step(self.kv_tokens, self.max_batch_size)) for i in range(self.lanes)]
