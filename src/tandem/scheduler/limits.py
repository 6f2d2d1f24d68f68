"""How much the scheduler may let run and wait, and which requests the queue takes. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from tandem.errors import OverloadedError, RequestError
from tandem.kv.budget import most_rows
from tandem.protocol.ranges import check_request
from tandem.protocol.request import EngineRequest
from tandem.scheduler.sequence import Sequence
from tandem.speculation.proposers import SpeculationLimits

RESERVE = 0.25
"""Share by which a full queue's limits are exceeded for groups below their own share."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that the scheduler keeps to."""

    micro_batches: int
    max_batch_size: int
    """Most sequences in all micro-batches together."""
    prefill_chunk: int
    """Most prompt tokens in one step."""
    prefill_time_s: float | None = None
    """Most seconds that these may add to a step in which others decode; None: by what steps of decoding take; 0: any.
    """
    kv_tokens: int
    """Most KV positions in all micro-batches together."""
    max_context: int
    max_queued_requests: int
    max_queue_tokens: int
    eos_token_ids: frozenset[int]
    vocab_size: int
    depth: int = 2
    """Plans of one micro-batch that may be under way."""
    prefix_tokens: int = 0
    """KV positions, of the `kv_tokens`, that may hold prefixes of past prompts; 0 for no prefix cache."""
    prefix_trimmable: bool = True
    """The model's caches can be cut to any length (no sliding windows)."""
    prefix_extra: int = 0
    """KV positions that a cached prefix costs beside those that it holds: what states of recurrent layers take."""
    speculation: SpeculationLimits | None = None
    """How to draft tokens; None for no speculative decoding."""
    digests: bool = False
    """Plans ask every rank for digests of what it computes."""

    @property
    def rows(self) -> int:
        """Most rows of one micro-batch."""
        return most_rows(self.max_batch_size, self.micro_batches)


def check_admission(
    request: EngineRequest, limits: Limits, live: Collection[str], waiting: Collection[Sequence], queued: int
) -> None:
    """May a request wait for its turn? `live` are the ids in use, `waiting` is the queue, of `queued` tokens in all.

    Raises RequestError if it can never run, OverloadedError if the queue is full. One group cannot fill it for the
    others: those that have less than their share of its places find some in reserve.
    """
    _check_fits(request, limits, live)
    mine = sum(sequence.request.group == request.group for sequence in waiting)
    others = {sequence.request.group for sequence in waiting} - {request.group}
    stretch = 1 + RESERVE if others and mine < limits.max_queued_requests / (len(others) + 1) else 1.0
    if len(waiting) >= limits.max_queued_requests * stretch:
        raise OverloadedError(f"{len(waiting)} requests are waiting already (max_queued_requests); try again later")
    if waiting and queued + len(request.prompt) > limits.max_queue_tokens * stretch:
        raise OverloadedError(f"{queued} prompt tokens are waiting already (max_queue_tokens); try again later")


def _check_fits(request: EngineRequest, limits: Limits, live: Collection[str]) -> None:
    """Raises RequestError if the request can never run, or has the id of one that is `live`."""
    params = request.params
    if request.request_id in live:
        raise RequestError(f"request id {request.request_id!r} is in use; choose another", param="request_id")
    if not request.prompt:
        raise RequestError("the prompt has no tokens; send at least one", param="prompt")
    if min(tokens := (*request.prompt, *request.produced)) < 0 or max(tokens) >= limits.vocab_size:
        raise RequestError(f"prompt token ids must lie in 0..{limits.vocab_size - 1}", param="prompt")
    if not 0 < request.weight < math.inf:
        raise RequestError(f"the weight {request.weight} is not a number above 0", param="weight")
    check_request(request, limits.vocab_size)
    if request.pooling is None and len(request.produced) >= max(params.max_tokens, 1):
        raise RequestError(
            f"max_tokens is {params.max_tokens}, and {len(request.produced)} tokens are out already", param="max_tokens"
        )
    need = len(request.prompt) + params.max_tokens
    if need > limits.max_context:
        raise RequestError(
            f"This model's maximum context length is {limits.max_context} tokens. However, you requested {need} "
            f"tokens ({len(request.prompt)} in the prompt, {params.max_tokens} in the completion). "
            "Please reduce the length of the prompt or max_tokens.",
            param="messages",
            code="context_length_exceeded",
        )
    if need > limits.kv_tokens:
        raise RequestError(
            f"prompt and output of {need} tokens exceed the KV cache of {limits.kv_tokens} tokens; "
            "shorten the request or raise --kv-tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
