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

from tandem.protocol.logprobs import PromptLogprobs, TokenLogprob
from tandem.protocol.pieces import StoreOp
from tandem.protocol.request import Pooling, SamplingParams

NOT_FINITE = -1
"""In place of a token: the model's logits are not finite numbers."""
NO_CONTINUATION = -2
"""In place of a token: the matcher of the sequence's grammar gave up."""
NO_GRAMMAR = -3
"""In place of a token: the grammar could not be built, as what is needed for it is not there."""


class KVShape(NamedTuple):
    """Capacity of a lane's KV buffer."""

    rows: int = 0
    positions: int = 0
    """Of each row."""

    @property
    def size(self) -> int:
        """KV positions that the buffer holds, used or not."""
        return self.rows * self.positions

    def holds(self, rows: int, longest: int) -> bool:
        """Whether so many rows of up to `longest` positions fit."""
        return rows <= self.rows and longest <= self.positions


class InsertOp(Struct, frozen=True, array_like=True):
    """A sequence that the rank does not know yet, sent whole."""

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
    """The chunk ends the prompt: a token is sampled from its last position, and the sequence decodes from then on."""
    pooling: Pooling | None = None
    """The last chunk yields a pooled hidden state in place of a token."""
    samples: bool = True
    """False: the sequence ends with its prompt, and its last chunk brings no token."""
    prompt_logprobs: int | None = None
    """k >= 0: the log probabilities of the prompt's tokens that come after the chunk's positions are wanted, and those
    of the k most likely ones in their places. Nothing for the position after the prompt."""


class SnapshotOp(Struct, frozen=True, array_like=True):
    """Save the first `length` positions of a sequence's KV under `key`, or restore them from there."""

    request_id: str
    key: str
    length: int


class MoveOp(Struct, frozen=True, array_like=True):
    """Take a sequence, with its KV, out of one lane's batch into another's."""

    request_id: str
    source: int
    target: int


class SpecDecodeRow(Struct, frozen=True, array_like=True):
    """What one sequence of the lane decodes from, all of it said: nothing is taken from what the rank holds."""

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
    """So many tokens the draft model shall guess for each sequence that is sampled in this step, after those."""

    @property
    def drafts(self) -> int:
        """Tokens that are tried out."""
        return sum(max(len(row.tokens) - 1, 0) for row in self.rows)


class StepPlan(Struct, frozen=True, array_like=True):
    """One step of one lane. Operations apply in the order of the fields."""

    step_id: int
    """Rises by one over all lanes."""
    lane: int
    """Which of the independent batches this step advances."""
    removes: list[str] = []
    """Sequences that are over, of whichever lane."""
    moves: list[MoveOp] = []
    """For schedulers (vLLM's) that pick the sequences of each step anew; our own leaves a sequence in its lane."""
    inserts: list[InsertOp] = []
    restores: list[SnapshotOp] = []
    decode: list[str] = []
    """Every sequence of the lane whose prompt is done, in joining order: each takes one token."""
    prefill: list[PrefillOp] = []
    """Chunks of prompts, in the order in which they are computed, after the decode."""
    saves: list[SnapshotOp] = []
    """Prompts whose KV is to be kept, each when its chunk of this step is done."""
    stores: list[StoreOp] = []
    """Pieces of kept prefixes to write to disk."""
    evicts: list[str] = []
    """Keys of kept prefixes to drop, last of all."""
    sampling_seeds: dict[str, int] = {}
    """64-bit seed of each inserted sequence."""
    fingerprint: str = ""
    """`batch_fingerprint` of the batch that must be there once removes and inserts are done."""
    spec_decode_plan: SpecDecodePlan | None = None
    """What `decode` computes, where that is more than one token after the one that the rank holds."""
    pause: bool = False
    """The lane's decoding sequences wait in this step, and `decode` is empty."""
    digest: bool = False
    """Report what went into this rank's layers and what came out (`RankStep.digest`)."""
    tidy: bool = False
    """Give buffers that are kept for reuse back first: the memory of a device is nearly full."""
    keeps: list[StoreOp] = []
    """Pieces of sequences of the lane (in place of a key their ids) to write to disk, when the step is computed."""
    kv_shapes: list[KVShape] = []
    """Capacity of each lane's KV buffer when the step is done. Empty: ranks choose it, without a limit."""

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
        """What is sampled goes to whoever feeds on it, so that the lane's next plan need not name tokens.

        Not so with drafts, since which of the tokens count is decided where the result is read; nor when drafts are
        asked for, which the next plan will name.
        """
        return self.spec_decode_plan is None or not (self.spec_decode_plan.drafts or self.spec_decode_plan.ask)


def by_id(ids: Iterable[str], tokens: Iterable[int]) -> dict[str, list[int]]:
    """The tokens of each of `ids`, which may stand there several times, in their order."""
    found: dict[str, list[int]] = {}
    for request_id, token in zip(ids, tokens, strict=True):
        found.setdefault(request_id, []).append(token)
    return found


def accepted(tokens: Sequence[int], sampled: Sequence[int]) -> int:
    """How many of a row's drafts, `tokens[1:]`, are what was sampled in their places. So `sampled[:accepted + 1]` is
    the sequence's output: what it would have been one token at a time."""
    drafts = tokens[1:]
    return next((i for i, (mine, theirs) in enumerate(zip(drafts, sampled, strict=False)) if mine != theirs),
                min(len(drafts), len(sampled)))


class StepResult(Struct, frozen=True, array_like=True):
    """What the sampling rank returns for one plan."""

    step_id: int
    lane: int
    tokens: list[int] = []
    """In the order of `StepPlan.sampled()`; a negative one says why there is none."""
    logprobs: dict[str, list[TokenLogprob]] = {}
    """Only for sequences that asked: one for each of their tokens."""
    vectors: dict[str, bytes] = {}
    """Pooled hidden states of those of `StepPlan.ended()` that asked, float32 in little-endian order; empty for one
    that is not finite."""
    drafts: dict[str, list[int]] = {}
    """What the draft model guesses after the tokens that count, where the plan asked."""
    prompt_logprobs: dict[str, PromptLogprobs] = {}
    """Of this step's chunks, where the plan asked."""


class RankStep(Struct, frozen=True, array_like=True):
    """How one rank fared in one step, for metrics and for the progress watchdog."""

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
    """The grammar of a sequence is compiled on the rank that samples, or cannot be: no step waits for it."""

    rank: int
    request_id: str


def batch_fingerprint(lengths: Iterable[tuple[str, int]]) -> str:
    """16 hex digits over the ordered (request id, tokens in its KV cache) of one lane's batch."""
    text = "".join(f"{request_id}:{length};" for request_id, length in lengths)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
