"""The plan of one step and its result: the only thing that ranks act on.

The engine alone decides which sequences are in a batch and which tokens they are made of. A rank never evaluates a
stop condition, never leaves a sequence out by itself and never joins one: it does what the plan says, and stops with
`BatchDesync` when its own state is not the one that the plan's fingerprint describes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from tandem.protocol.kv_blocks import StoreOp
from tandem.protocol.logprobs import PromptLogprobs, TokenLogprob
from tandem.protocol.request import Pooling, SamplingParams

NOT_FINITE = -1
"""In place of a token: the model's logits are not finite numbers."""
NO_CONTINUATION = -2
"""In place of a token: the matcher of the sequence's grammar gave up."""
NO_GRAMMAR = -3
"""Code in place of a token: the grammar could not be built, because a library is missing."""


class KVShape(NamedTuple):
    """Capacity of a micro-batch's KV buffer."""

    rows: int = 0
    positions: int = 0
    """Capacity of each row, in positions."""

    @property
    def size(self) -> int:
        """KV positions that the buffer holds, used or not."""
        return self.rows * self.positions

    def holds(self, rows: int, longest: int) -> bool:
        """Whether so many rows of up to `longest` positions fit."""
        return rows <= self.rows and longest <= self.positions


class InsertOp(Struct, frozen=True, array_like=True):
    """Add a sequence with all of its tokens."""

    request_id: str
    tokens: list[int]
    """The prompt, followed by the tokens produced so far when the sequence is replayed."""
    prompt_len: int
    """How many of `tokens` are the prompt; the others count as output (penalties, random-number position)."""
    params: SamplingParams


class PrefillOp(Struct, frozen=True, array_like=True):
    """Compute `tokens[start : start + count]` of one sequence."""

    request_id: str
    start: int
    count: int
    last: bool
    """True if the chunk ends the prompt: a token is sampled from its last position, and decoding starts."""
    pooling: Pooling | None = None
    """Pooling of the last chunk, which yields a vector in place of a token."""
    samples: bool = True
    """False if the sequence ends with its prompt, without a token."""
    prompt_logprobs: int | None = None
    """k >= 0: the log probabilities of the prompt's tokens that come after the chunk's positions are wanted, and those
    of the k most likely ones in their places. Nothing for the position after the prompt."""


class SavePrefixOp(Struct, frozen=True, array_like=True):
    """Save the first `length` positions of a sequence's KV under `key`, or restore them from there."""

    request_id: str
    key: str
    length: int


class MoveOp(Struct, frozen=True, array_like=True):
    """Take a sequence, with its KV, out of one micro-batch's batch into another's."""

    request_id: str
    source: int
    target: int


class SpecDecodeRow(Struct, frozen=True, array_like=True):
    """Input of one sequence for a decode step with drafts. Complete: no token is taken from the rank's own state."""

    request_id: str
    length: int
    """Positions of its KV that count. What lies behind them came from drafts that were not accepted: ranks cut the
    row to it before they check the fingerprint."""
    tokens: list[int] = []
    """The last token of the sequence, then the drafts that may follow it. Empty for a sequence that is cut only."""
    past: list[int] = []
    """For the draft model: tokens before these that it has not been told."""


class SpecDecodePlan(Struct, frozen=True, array_like=True):
    """Decode several positions of a sequence at once: a token is sampled after each of its row's tokens."""

    rows: list[SpecDecodeRow]
    """One for each of `StepPlan.decode`, and any that are only cut, in any order."""
    ask: int = 0
    """Tokens that the draft model proposes after this step, per sampled sequence."""

    @property
    def drafts(self) -> int:
        """Number of draft tokens in this step."""
        return sum(max(len(row.tokens) - 1, 0) for row in self.rows)


class StepPlan(Struct, frozen=True, array_like=True):
    """One step of one micro-batch. Operations apply in the order of the fields."""

    step_id: int
    """Number of the step, counted over all micro-batches."""
    micro_batch: int
    """Which of the independent batches this step advances."""
    removes: list[str] = []
    """Ids of sequences to drop, of any micro-batch."""
    moves: list[MoveOp] = []
    """Moves between micro-batches, used by vLLM's scheduler, which chooses the sequences of each step anew."""
    inserts: list[InsertOp] = []
    restores: list[SavePrefixOp] = []
    decode: list[str] = []
    """Every sequence of the micro-batch whose prompt is done, in joining order: each takes one token."""
    prefill: list[PrefillOp] = []
    """Chunks of prompts, in the order in which they are computed, after the decode."""
    saves: list[SavePrefixOp] = []
    """Prompts whose KV is cached once their chunk of this step is computed."""
    stores: list[StoreOp] = []
    """Disk blocks of cached prefixes to write to disk."""
    evicts: list[str] = []
    """Keys of cached prefixes to drop, last of all."""
    sampling_seeds: dict[str, int] = {}
    """64-bit seed of each inserted sequence."""
    fingerprint: str = ""
    """`batch_fingerprint` of the batch that must be there once removes and inserts are done."""
    spec_decode_plan: SpecDecodePlan | None = None
    """Draft tokens of `decode`; None if each sequence takes exactly one token."""
    pause: bool = False
    """True if the micro-batch's decoding sequences skip this step; `decode` is empty."""
    digest: bool = False
    """Report what went into this rank's layers and what came out (`RankStep.digest`)."""
    tidy: bool = False
    """Give buffers that are kept for reuse back first: the memory of a device is nearly full."""
    keeps: list[StoreOp] = []
    """Disk blocks of sequences of the micro-batch (in place of a key their ids) to write to disk, when the step is computed."""
    kv_shapes: list[KVShape] = []
    """Capacity of each micro-batch's KV buffer when the step is done. Empty: ranks choose it, without a limit."""

    def sampled(self) -> list[str]:
        """Ids that get a token in this step, in the order of `StepResult.tokens`: one with drafts stands there once
        for each of its positions."""
        decode = self.decode
        if self.spec_decode_plan is not None:
            positions = {row.request_id: len(row.tokens) for row in self.spec_decode_plan.rows}
            decode = [one for one in decode for _ in range(positions[one])]
        return [*decode, *(op.request_id for op in self.prefill if op.last and op.samples)]

    def ended(self) -> list[str]:
        """Ids that end in this step with their prompts, without a token."""
        return [op.request_id for op in self.prefill if op.last and not op.samples]

    @property
    def width(self) -> int:
        """Positions that the decode computes of each sequence; those with fewer tokens are filled up."""
        if self.spec_decode_plan is None:
            return 1
        return max((len(row.tokens) for row in self.spec_decode_plan.rows), default=1)

    @property
    def hands_out(self) -> bool:
        """True if the sampling rank passes its tokens to the first stage, so that the next plan need not name them.

        Not so with drafts, since which of the tokens count is decided where the result is read; nor when drafts are
        asked for, which the next plan will name.
        """
        return self.spec_decode_plan is None or not (self.spec_decode_plan.drafts or self.spec_decode_plan.ask)


def by_id(ids: Iterable[str], tokens: Iterable[int]) -> dict[str, list[int]]:
    """Group `tokens` by id; an id may occur several times in `ids`."""
    found: dict[str, list[int]] = {}
    for request_id, token in zip(ids, tokens, strict=True):
        found.setdefault(request_id, []).append(token)
    return found


def accepted(tokens: Sequence[int], sampled: Sequence[int]) -> int:
    """Return the number of drafts, `tokens[1:]`, that equal the tokens sampled in their places.

    `sampled[:accepted + 1]` is the output of the sequence, the same as without drafts.
    """
    drafts = tokens[1:]
    return next(
        (i for i, (mine, theirs) in enumerate(zip(drafts, sampled, strict=False)) if mine != theirs),
        min(len(drafts), len(sampled)),
    )


class StepResult(Struct, frozen=True, array_like=True):
    """Result of one plan, from the sampling rank."""

    step_id: int
    micro_batch: int
    tokens: list[int] = []
    """Tokens in the order of `StepPlan.sampled()`; a negative value is an error code such as `NOT_FINITE`."""
    logprobs: dict[str, list[TokenLogprob]] = {}
    """Log probabilities by request id, one per token, for sequences that asked."""
    vectors: dict[str, bytes] = {}
    """Pooled hidden states of those of `StepPlan.ended()` that asked, float32 in little-endian order; empty for one
    that is not finite."""
    drafts: dict[str, list[int]] = {}
    """Tokens proposed by the draft model, by request id, if the plan asked."""
    prompt_logprobs: dict[str, PromptLogprobs] = {}
    """Log probabilities of prompt tokens in this step's chunks, if the plan asked."""


class RankStep(Struct, frozen=True, array_like=True):
    """Timing and memory of one rank in one step, for metrics and the watchdog."""

    rank: int
    step_id: int
    busy_s: float
    """Seconds from the moment that the inputs were there until the outputs were."""
    kv_bytes: int
    """Bytes of KV of its sequences after the step."""
    prefix_bytes: int = 0
    """Bytes of the prefix cache."""
    digest: tuple[int, int] | None = None
    """32-bit digests of the hidden states that went into the rank's layers in this step and of what came out of them;
    None unless the plan asked. Ranks of one stage, and both ends of a hand-off, must agree on every bit."""


class GrammarReady(Struct, frozen=True, tag=True):
    """Report that the sampling rank has compiled the grammar of a sequence, or failed to."""

    rank: int
    request_id: str


def batch_fingerprint(lengths: Iterable[tuple[str, int]]) -> str:
    """16 hex digits over the ordered (request id, tokens in its KV cache) of one micro-batch's batch."""
    text = "".join(f"{request_id}:{length};" for request_id, length in lengths)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
