"""Sequence: the scheduler's state of one request."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import InitVar, dataclass, field

from msgspec.structs import replace

from tandem.kv.index import FIRST_BLOCKS, block_hashes
from tandem.protocol.adapters import AdapterSpec
from tandem.protocol.control import Refused
from tandem.protocol.kv_blocks import BLOCK_SIZE, DISK_BLOCK_SIZE
from tandem.protocol.logprobs import PromptLogprobs, joined
from tandem.protocol.pictures import Picture, hashed
from tandem.protocol.quarantine import QuarantineRecord
from tandem.protocol.request import EngineRequest
from tandem.protocol.step import NO_CONTINUATION, NO_GRAMMAR, InsertOp, PrefillOp, StepResult
from tandem.speculation.proposers import Proposer

HASHED_AT_ONCE = FIRST_BLOCKS * BLOCK_SIZE
"""Tokens whose blocks are hashed together while a prompt is looked up."""


@dataclass(eq=False, slots=True)
class Sequence:
    """State of a request, sufficient to replay it on a new rank group."""

    request: EngineRequest
    seed: int
    number: int = 0
    """Arrival number: the youngest sequence has the highest."""
    request_id: str = field(init=False)
    prompt_len: int = field(init=False)
    """Number of prompt tokens."""
    max_len: int = field(init=False)
    """Number of tokens at which it ends."""
    samples: bool = field(init=False)
    """False if it ends with its prompt, without output tokens."""
    eos_token_ids: InitVar[frozenset[int]] = frozenset()
    """End-of-sequence tokens of the model, for `stop_token_ids` alone."""
    stop_token_ids: frozenset[int] = field(init=False)
    """Tokens that end it."""
    tokens: list[int] = field(default_factory=list)
    """Prompt tokens, then output tokens."""
    micro_batch: int | None = None
    """Index of its micro-batch; None while it waits."""
    computed: int = 0
    """KV positions on the ranks once all plans sent so far are done."""
    target: int = 0
    """Positions to compute before decoding: `len(tokens)` at its last insertion."""
    inflight: int = 0
    """Tokens expected from plans without results."""
    finished: bool = False
    skipped: int = 0
    """Consecutive steps in which other prompts were computed first."""
    blocked: int = 0
    """Plans in which it was next but had no room."""
    save_points: list[int] = field(default_factory=list)
    """Positions where a prompt chunk must end, to be saved in the prefix cache, ascending."""
    cached: int = 0
    """KV positions restored from the prefix cache at its last insertion."""
    fetched: int = 0
    """KV positions read from disk for it, beyond those cached in memory."""
    awaits_kv: bool = False
    """True while its prefix is read from disk; it cannot join a batch before."""
    awaits_pictures: bool = False
    """True until ranks hold the features that it needs first; it cannot join a batch before."""
    features: Container[str] = ()
    """Keys of the pictures whose features ranks hold. Its prompt is computed up to the first picture that is not among them."""
    encoding: bool = False
    """True while ranks encode one of its pictures."""
    whole_pictures: bool = False
    """True if no chunk of its prompt may end inside a picture."""
    awaits_grammar: bool = False
    """True while its grammar is compiled; the last prompt chunk waits for that."""
    disk_checked: bool = False
    """True once ranks were asked to look for its KV, written by another engine, on their disks."""
    deaths: int = 0
    """Number of rank groups that died while processing it."""
    quarantine_record: QuarantineRecord = field(default_factory=QuarantineRecord)
    """Record of deaths, which may mark it as a suspect."""
    reached: int = 0
    """Positions certainly computed since its last insertion."""
    rested: bool = False
    """True once the ranks have idled for it and survived."""
    announced: bool = False
    """True once its api was sent the notice that it will run alone."""
    noted: bool = False
    """True once its api has acknowledged the notice."""
    yields: bool = False
    """True if cleared of suspicion, so that it makes way for the next suspect."""
    adapter: AdapterSpec | None = None
    """LoRA adapter that it uses; None for the base."""
    departs: bool = False
    """True if it migrates at the end of a disk block, which drafts would pass."""
    proposer: Proposer | None = None
    """Source of its draft tokens; None without drafts."""
    told: int = 0
    """Number of tokens that the draft model has received."""
    _prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    """Log probabilities of prompt tokens received so far."""
    _hashes: list[bytes] = field(default_factory=list)
    """Hashes of its first blocks, as many as were needed."""

    def __post_init__(self, eos_token_ids: frozenset[int]) -> None:
        self.request_id, self.prompt_len = self.request.request_id, len(self.request.prompt)
        params = self.request.params
        self.max_len, self.samples = self.prompt_len + params.max_tokens, params.max_tokens > 0
        self.stop_token_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self.tokens = [*self.request.prompt, *self.request.produced]
        self.awaits_pictures = bool(self.request.pictures)
        if self.request.quarantine_record is not None:
            self.quarantine_record = replace(self.request.quarantine_record)

    @property
    def salt(self) -> bytes:
        """Start of its block hashes: KV of another adapter is not the same."""
        return self.adapter.digest.encode() if self.adapter is not None else b""

    def hashes(self, length: int) -> list[bytes]:
        """Return the hashes of the blocks of its first `length` tokens. Each is computed once."""
        self._hash(length)
        return self._hashes[: length // BLOCK_SIZE]

    def _hash(self, length: int) -> None:
        known = len(self._hashes) * BLOCK_SIZE
        if length - known >= BLOCK_SIZE:
            tokens = hashed(self.tokens[known:length], self.request.pictures, known)
            self._hashes += block_hashes(tokens, self._hashes[-1] if known else self.salt)

    def blocks(self, length: int) -> Iterator[bytes]:
        """Yield the same hashes, computed as far as they are read."""
        for start in range(0, length, HASHED_AT_ONCE):
            self._hash(stop := min(start + HASHED_AT_ONCE, length))
            yield from self._hashes[start // BLOCK_SIZE : stop // BLOCK_SIZE]

    @property
    def held_back(self) -> bool:
        """True while it cannot join a batch."""
        return self.awaits_kv or self.awaits_pictures

    @property
    def whole(self) -> bool:
        """True if it needs hidden states of all prompt positions, so it cannot use the prefix cache."""
        return self.request.pooling == "mean" or self.scores

    @property
    def may_be_tried(self) -> bool:
        """True for a suspect that may run alone once next."""
        return self.quarantine_record.suspect and (self.rested or not self.quarantine_record.rests)

    @property
    def expected(self) -> bool:
        """True unless its api has yet to acknowledge the notice."""
        return self.noted or self.request.quarantine_record is None

    @property
    def produced(self) -> int:
        """Number of output tokens."""
        return len(self.tokens) - self.prompt_len

    def append(self, tokens: Items[int]) -> str | None:
        """Append new tokens until one of them ends the sequence; return the finish reason, or None while it continues."""
        for token in tokens:
            self.tokens.append(token)
            if token in self.stop_token_ids and self.produced > self.request.params.min_tokens:
                return "stop"
            if len(self.tokens) >= self.max_len:
                return "length"
        return None

    @property
    def decoding(self) -> bool:
        """True once its whole prompt is computed or planned."""
        return self.computed >= self.target

    @property
    def complete(self) -> bool:
        """True if the tokens in flight reach `max_tokens`, so no further step is needed."""
        return len(self.tokens) + self.inflight >= self.max_len

    def got(self, positions: int) -> None:
        """Record the positions that ranks have certainly computed."""
        self.reached = positions
        if self.quarantine_record.end >= 0:
            self.yields |= self.quarantine_record.passed(positions)

    def enter(self, micro_batch: int, cached: int = 0) -> InsertOp:
        """Join `micro_batch` with the first `cached` positions restored from the prefix cache."""
        self.reached, self.yields = cached, False
        self.micro_batch, self.computed, self.target, self.skipped = micro_batch, cached, len(self.tokens), 0
        self.cached = cached
        self.told = len(self.tokens)
        self.awaits_grammar = self.samples and self.request.params.structured_outputs is not None
        adapter = self.adapter.index if self.adapter is not None else 0
        pictures = [one.span for one in self.request.pictures]
        return InsertOp(self.request_id, list(self.tokens), self.prompt_len, self.request.params, adapter, pictures)

    @property
    def scores(self) -> bool:
        """True if log probabilities of its prompt are requested and not yet sent."""
        return self.request.params.prompt_logprobs is not None and not self.produced

    def score(self, start: int, found: PromptLogprobs) -> None:
        """Store log probabilities of the prompt from position `start` on; skip those received before."""
        fresh = found.after(sum(map(len, self._prompt_logprobs)) - start)
        if len(fresh):
            self._prompt_logprobs.append(fresh)

    @property
    def from_disk(self) -> int:
        """Positions of `cached` that were read from disk."""
        return min(self.fetched, self.cached)

    def take_logprobs(self) -> PromptLogprobs | None:
        """Return the log probabilities of the whole prompt and forget them; None if not requested. Call once the prompt is
        computed."""
        if not self.scores:
            return None
        found, self._prompt_logprobs = joined(self._prompt_logprobs), []
        return found

    def drafts(self, most: int) -> list[int]:
        """Return up to `most` draft tokens, within `max_tokens`; empty unless its proposer has all tokens."""
        if self.proposer is None:
            return []
        return self.proposer.drafts(len(self.tokens), min(most, self.room))

    @property
    def room(self) -> int:
        """Maximum useful drafts in its next step; 0 without a proposer."""
        return self.max_len - len(self.tokens) - 1 if self.proposer and not self.departs else 0

    def untold(self) -> list[int]:
        """Return the tokens, except the last, that the draft model has not received."""
        return self.tokens[self.told : -1]

    def hear(self, result: StepResult) -> None:
        """Store the draft model's tokens for this sequence, if `result` has any."""
        if self.request_id in result.drafts:
            self.told = len(self.tokens)
            if self.proposer is not None:
                self.proposer.guessed(len(self.tokens), result.drafts[self.request_id])

    def _around(self, position: int) -> Picture | None:
        """Return the picture that must not be divided at `position`."""
        pictures = self.request.pictures if self.whole_pictures else ()
        return next((one for one in pictures if one.start < position < one.stop), None)

    @property
    def computable(self) -> int:
        """Number of positions of its prompt that are not computed, up to the first picture whose features ranks lack."""
        pictures = (one for one in self.request.pictures if one.stop > self.computed and one.key not in self.features)
        return max(next((one.start for one in pictures), self.target) - self.computed, 0)

    def chunk(self, most: int) -> int:
        """Return the length of its next chunk, up to the next save point. It is at most `most`, but where a picture that is not
        divided comes first."""
        stop = self.computed + min(most, self.computable)
        stop = next((point for point in self.save_points if self.computed < point < stop), stop)
        if most > 0 and (one := self._around(stop)) is not None:
            stop = one.start if one.start > self.computed else one.stop
        return stop - self.computed

    def prefill(self, count: int) -> PrefillOp:
        """Return the op of its next chunk, `count` tokens long. Log probabilities that it has are not requested again, though
        replays compute positions again."""
        request, stop = self.request, self.computed + count
        lacks = self.scores and stop > sum(map(len, self._prompt_logprobs))
        scored, last = request.params.prompt_logprobs if lacks else None, stop == self.target
        return PrefillOp(
            self.request_id, self.computed, count, last, request.pooling, self.samples, scored, request.label_token_ids
        )

    def savable(self, points: Iterable[int]) -> list[int]:
        """Return save points; one inside a picture that must not be divided moves to the end of a disk block before it."""
        around = [(point, self._around(point)) for point in points]
        moved = {one.start // DISK_BLOCK_SIZE * DISK_BLOCK_SIZE if one else point for point, one in around}
        return sorted(point for point in moved if point > self.computed and self._around(point) is None)

    def advance(self, count: int) -> None:
        """Record that the next `count` prompt tokens are planned. They are hashed with it, if they are to be cached."""
        self.computed += count
        if self.save_points:
            self._hash(self.computed)
        self.read()

    def read(self) -> None:
        """Pass the known tokens to its proposer."""
        if self.proposer is not None:
            self.proposer.read(self.tokens)

    def leave(self) -> None:
        """Leave its micro-batch; its KV is dropped."""
        self.micro_batch, self.computed, self.awaits_grammar = None, 0, False
        self.awaits_pictures, self.encoding = bool(self.request.pictures), False


def no_token(request_id: str, why: int) -> Refused:
    """Return the refusal for a sequence with error code `why` (< 0) in place of a token."""
    if why == NO_CONTINUATION:
        text = "the output cannot be kept to the form that structured_outputs or the tools ask for: it costs more to follow than "
        text += "is allowed; make it simpler"
        return Refused(request_id, 400, text, code="structured_output_failed", param="structured_outputs")
    if why == NO_GRAMMAR:
        text = "what is needed to keep the output to a form could not be loaded; the server's log says why; try again later"
        return Refused(request_id, 503, text, code="grammar_unavailable")
    text = "the model produced logits that are not finite numbers; check the model's weights and dtype"
    return Refused(request_id, 500, text, code="not_finite")
