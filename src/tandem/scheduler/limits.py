"""Limits of the scheduler, and admission of requests to its queue. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tandem.errors import OverloadedError, RequestError
from tandem.kv.budget import most_rows
from tandem.protocol.ranges import check_request
from tandem.protocol.request import EngineRequest
from tandem.protocol.step import PrefillOp, padded_width
from tandem.scheduler.sequence import Sequence
from tandem.speculation.proposers import SpeculationLimits

RESERVE = 0.25
"""Fraction by which groups below their fair share may exceed the limits of a full queue."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the scheduler, computed from settings and the ranks' memory."""

    micro_batches: int
    max_batch_size: int
    """Maximum sequences in all micro-batches together."""
    prefill_chunk: int
    """Maximum prompt tokens in one step."""
    prefill_time_s: float | None = None
    """Maximum seconds that prompt tokens may add to a step with decoding. None: a multiple of the decode time; 0: no limit."""
    kv_tokens: int
    """Maximum KV positions in all micro-batches together, cached prefixes included."""
    max_context: int
    max_queued_requests: int
    max_queue_tokens: int
    eos_token_ids: frozenset[int]
    vocab_size: int
    depth: int = 2
    """Maximum plans of one micro-batch without a result, beside those with prompt chunks alone."""
    stages: int = 1
    """Stages of the pipeline; one more chunk of prompts than that is in progress at once."""
    prefill_doubling: int = 0
    """Position at which a prompt token takes twice as long as the first, roughly; then chunks of one prompt over several stages
    become shorter, to take the same time. 0: all are of one size."""
    prefix_tokens: int = 0
    """KV positions, part of `kv_tokens`, for cached prefixes; 0 for no prefix cache."""
    prefix_trimmable: bool = True
    """True if the model's caches can be trimmed to any length (no sliding windows)."""
    prefix_extra: int = 0
    """Extra cost of a cached prefix in KV positions: states of recurrent layers."""
    prefix_checkpoint: int = 0
    """Cost of each further checkpoint of a cached prefix in KV positions: states and windows."""
    prefix_every: int = 0
    """Positions between the checkpoints of a long prompt; 0: only where it ends or forks."""
    speculation: SpeculationLimits | None = None
    """Limits of speculative decoding; None without it."""
    whole_pictures: bool = False
    """True if no chunk of a prompt may end inside a picture."""
    pads_prompts: bool = False
    """True if plans request prompt passes of few shapes (`StepPlan.pads`)."""
    digests: bool = False
    """True if plans request digests from every rank."""

    @property
    def rows(self) -> int:
        """Maximum rows of one micro-batch."""
        return most_rows(self.max_batch_size, self.micro_batches)

    def pads(self, prefill: Iterable[PrefillOp]) -> bool:
        """Return True if the passes of these prompt chunks are to be padded, and no position is beyond the context."""
        return self.pads_prompts and all(op.start + padded_width(op.count) <= self.max_context for op in prefill)


def check_admission(
    request: EngineRequest, limits: Limits, live: Collection[str], waiting: Collection[Sequence], queued: int
) -> None:
    """Check if a request may be queued. `live`: ids in use; `waiting`: the queue; `queued`: its tokens.

    Raises RequestError if the request can never run, OverloadedError if the queue is full. A full queue has a reserve for
    groups below their fair share.
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
    """Raise RequestError if the request can never run, or its id is in `live`."""
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
