"""What an engine says of itself, where it does not matter what that is."""

from __future__ import annotations

from tandem.protocol.control import EngineStatus

STATUS = EngineStatus(
    query_id=0,
    state="ready",
    detail="",
    model="m",
    source="/m",
    max_context=9,
    vocab_size=9,
    queued=0,
    running=0,
    kv_tokens_used=0,
    kv_tokens_total=9,
    restarts=0,
    stages=1,
    micro_batches=1,
    ranks=[],
)
