"""The plan of one step and its result: the only messages that ranks act on.

The engine alone chooses the sequences of a batch and their tokens. A rank never evaluates a stop condition and never adds or
removes a sequence by itself. It executes the plan, and raises `BatchDesync` if its state differs from the plan's fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct, msgpack

from tandem.protocol.kv_blocks import StoreOp
from tandem.protocol.logprobs import PromptLogprobs, TokenLogprob
from tandem.protocol.pictures import PictureSpan
from tandem.protocol.request import Pooling, SamplingParams

NOT_FINITE = -1
"""Error code in place of a token: the model's logits are not finite."""
NO_CONTINUATION = -2
"""Error code in place of a token: the sequence's grammar matcher failed."""
NO_GRAMMAR = -3
"""Error code in place of a token: the grammar could not be compiled, for example because a library is missing."""


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
        """Return True if `rows` rows of up to `longest` positions fit."""
        return rows <= self.rows and longest <= self.positions


class InsertOp(Struct, frozen=True, array_like=True):
    """Add a sequence with all its tokens."""

    request_id: str
    tokens: list[int]
    """Prompt tokens, then output tokens if the sequence is replayed."""
    prompt_len: int
    """Number of prompt tokens in `tokens`; the rest counts as output (penalties, random-number position)."""
    params: SamplingParams
    adapter: int = 0
    """Index of the LoRA adapter that the row uses; 0 for none."""
    pictures: list[PictureSpan] = []
    """Pictures in its prompt, in the order of their positions."""


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
    """k >= 0: return log probabilities of the prompt tokens after each position of the chunk, and of the k most likely ones
    there. None for no log probabilities. The position after the prompt is left out."""
    label_token_ids: tuple[int, ...] = ()
    """With `pooling`: the vector holds the log probabilities of these tokens after the last chunk."""


class SavePrefixOp(Struct, frozen=True, array_like=True):
    """Save the first `length` positions of a sequence's KV as prefix `key`, or restore them from it."""

    request_id: str
    key: str
    length: int
    takes: list[tuple[str, int]] = []
    """(Key, position) of checkpoints in shorter prefixes that a saved one takes over."""


class MoveOp(Struct, frozen=True, array_like=True):
    """Move a sequence and its KV from micro-batch `source` to `target`."""

    request_id: str
    source: int
    target: int


class SpecDecodeRow(Struct, frozen=True, array_like=True):
    """Decode input of one sequence in a step with drafts. Complete: ranks add no token of their own."""

    request_id: str
    length: int
    """Valid positions of its KV; later ones are from rejected drafts. Ranks trim the row to `length` before they check the
    fingerprint."""
    tokens: list[int] = []
    """Last token of the sequence, then its draft tokens. Empty to trim the sequence only."""
    past: list[int] = []
    """Earlier tokens that the draft model has not received yet."""


class SpecDecodePlan(Struct, frozen=True, array_like=True):
    """Decode several positions per sequence: a token is sampled after each token of its row."""

    rows: list[SpecDecodeRow]
    """Rows of all sequences in `StepPlan.decode` and of those only trimmed, in any order."""
    ask: int = 0
    """Tokens that the draft model proposes per sampled sequence after this step."""

    @property
    def drafts(self) -> int:
        """Number of draft tokens in this step."""
        return sum(max(len(row.tokens) - 1, 0) for row in self.rows)


class StepPlan(Struct, frozen=True, array_like=True):
    """Plan of one step of one micro-batch. Operations apply in the order of the fields."""

    step_id: int
    """Number of the step, counted over all micro-batches."""
    micro_batch: int
    """Number of the micro-batch that this step advances."""
    removes: list[str] = []
    """Ids of sequences to remove, of any micro-batch."""
    moves: list[MoveOp] = []
    """Moves between micro-batches, for vLLM's scheduler, which chooses the sequences of each step anew."""
    inserts: list[InsertOp] = []
    restores: list[SavePrefixOp] = []
    decode: list[str] = []
    """Ids of all decoding sequences of the micro-batch in joining order; each takes one token."""
    prefill: list[PrefillOp] = []
    """Prompt chunks in the order of computation, after the decode."""
    saves: list[SavePrefixOp] = []
    """Prefixes to save from prompts whose chunk of this step completes them."""
    stores: list[StoreOp] = []
    """Disk blocks of cached prefixes to write to disk."""
    evicts: list[str] = []
    """Keys of cached prefixes to drop, as the last operation."""
    sampling_seeds: dict[str, int] = {}
    """64-bit seed of each inserted sequence, by request id."""
    fingerprint: str = ""
    """`batch_fingerprint` that the batch must have after removes and inserts."""
    spec_decode_plan: SpecDecodePlan | None = None
    """Draft tokens of `decode`; None if each sequence takes exactly one token."""
    pause: bool = False
    """True if the micro-batch's decoding sequences skip this step; `decode` is empty."""
    digest: bool = False
    """True to report digests of the rank's inputs and outputs (`RankStep.digest`)."""
    tidy: bool = False
    """True to free cached MLX buffers first, as a device's memory is nearly full."""
    keeps: list[StoreOp] = []
    """Disk blocks of running sequences to write to disk after the step; `key` is the request id."""
    pads: bool = False
    """True to compute prompt chunks in passes of few shapes (`padded_width`), as a new shape costs a GPU more than padding."""
    kv_shapes: list[KVShape] = []
    """Capacity of each micro-batch's KV buffer after the step. Empty: ranks choose it, without a limit."""

    def sampled(self) -> list[str]:
        """Return the ids that get a token, in the order of `StepResult.tokens`. An id with drafts occurs once per position."""
        decode = self.decode
        if self.spec_decode_plan is not None:
            positions = {row.request_id: len(row.tokens) for row in self.spec_decode_plan.rows}
            decode = [one for one in decode for _ in range(positions[one])]
        return [*decode, *(op.request_id for op in self.prefill if op.last and op.samples)]

    def ended(self) -> list[str]:
        """Return the ids that end with their prompts in this step, without a token."""
        return [op.request_id for op in self.prefill if op.last and not op.samples]

    @property
    def width(self) -> int:
        """Positions per sequence in the decode; shorter rows are padded."""
        if self.spec_decode_plan is None:
            return 1
        return max((len(row.tokens) for row in self.spec_decode_plan.rows), default=1)

    @property
    def hands_out(self) -> bool:
        """True if the sampling rank sends its tokens to the first stage, so the next plan omits them.

        False with drafts in this step, as the scheduler decides which tokens count. Also False when the draft model is asked
        for tokens, which the next plan contains.
        """
        return self.spec_decode_plan is None or not (self.spec_decode_plan.drafts or self.spec_decode_plan.ask)


def by_id(ids: Sequence[str], tokens: Sequence[int]) -> dict[str, list[int]]:
    """Group `tokens` by id; an id may occur several times in `ids`."""
    found = {request_id: [token] for request_id, token in zip(ids, tokens, strict=True)}
    if len(found) < len(ids):
        found = {request_id: [] for request_id in found}
        for request_id, token in zip(ids, tokens, strict=True):
            found[request_id].append(token)
    return found


def padded_width(count: int) -> int:
    """Return `count` positions rounded up to one of at most four widths between powers of two, 16 apart at least."""
    step = 1 << max(count.bit_length() - 3, 4)
    return -(-count // step) * step


def accepted(tokens: Sequence[int], sampled: Sequence[int]) -> int:
    """Return the number of leading drafts, `tokens[1:]`, equal to the tokens sampled at their positions.

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
    """Log probabilities by request id, one per token, for sequences that requested them."""
    vectors: dict[str, bytes] = {}
    """Pooled hidden states by request id, float32 little-endian; empty if not finite."""
    drafts: dict[str, list[int]] = {}
    """Tokens proposed by the draft model, by request id, if the plan requested them."""
    prompt_logprobs: dict[str, PromptLogprobs] = {}
    """Log probabilities of prompt tokens in this step's chunks, by request id, if requested."""


class RankStep(Struct, frozen=True, array_like=True):
    """Timing and memory of one rank in one step, for metrics and the watchdog."""

    rank: int
    step_id: int
    busy_s: float
    """Seconds from the arrival of the inputs to the completion of the outputs."""
    kv_bytes: int
    """Bytes of KV of the rank's sequences after the step."""
    prefix_bytes: int = 0
    """Bytes of the prefix cache."""
    digest: tuple[int, int] | None = None
    """32-bit digests of the hidden states entering and leaving the rank's layers; None unless the plan asks. Ranks of a stage
    must agree on every bit, as must sender and receiver between stages."""


class GrammarReady(Struct, frozen=True, tag=True):
    """Report that the sampling rank has compiled a sequence's grammar, or failed to."""

    rank: int
    request_id: str


def batch_fingerprint(lengths: Iterable[tuple[str, int]]) -> str:
    """Return 16 hex digits: the hash of a micro-batch's ordered (request id, KV length) pairs."""
    return hashlib.blake2b(msgpack.encode(list(lengths)), digest_size=8).hexdigest()
