"""One request on its way through the scheduler."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from msgspec.structs import replace

from tandem.protocol.control import Refused
from tandem.protocol.logprobs import PromptLogprobs, joined
from tandem.protocol.quarantine import QuarantineRecord
from tandem.protocol.request import EngineRequest
from tandem.protocol.step import NO_CONTINUATION, NO_GRAMMAR, InsertOp, StepResult
from tandem.speculation.proposers import Proposer


@dataclass(eq=False)
class Sequence:
    """Everything the engine knows of a request: enough to start it again from nothing on a new rank group."""

    request: EngineRequest
    seed: int
    number: int = 0
    """Counts arrivals: the youngest sequence has the highest."""
    tokens: list[int] = field(default_factory=list)
    """Prompt, then the tokens produced so far."""
    micro_batch: int | None = None
    """Micro-batch in which it runs; None while it waits."""
    computed: int = 0
    """Positions whose KV the ranks hold once all plans sent so far are done."""
    target: int = 0
    """Positions to compute before it decodes: `len(tokens)` when it was (re)inserted."""
    inflight: int = 0
    """Tokens that plans sent so far will bring."""
    finished: bool = False
    skipped: int = 0
    """Steps in a row in which others' prompts went first."""
    blocked: int = 0
    """Plans in which it was next, but others' sequences left it no room."""
    save_point: int = 0
    """A chunk of its prompt must end here, so that the prefix cache can keep it; 0 for nowhere."""
    cached: int = 0
    """Positions that came from the prefix cache when it was last inserted."""
    fetched: int = 0
    """Positions beyond what was in memory that were read from disk for it."""
    awaits_kv: bool = False
    """True while its prefix is being read from disk; it joins no batch before."""
    awaits_grammar: bool = False
    """True while the grammar is compiled, for which the last chunk of the prompt waits."""
    disk_checked: bool = False
    """Ranks have looked on their disks for what another engine wrote of it, or do."""
    deaths: int = 0
    """rank groups that died while they worked on it."""
    quarantine_record: QuarantineRecord = field(default_factory=QuarantineRecord)
    """Evidence that it kills ranks."""
    reached: int = 0
    """Positions that the ranks have surely computed since it was last inserted."""
    rested: bool = False
    """The ranks have stood idle before it, and survived."""
    announced: bool = False
    """Set once its api was told that it will run alone."""
    noted: bool = False
    """Set once its api has acknowledged that."""
    yields: bool = False
    """Cleared of suspicion; yields its exclusive turn."""
    proposer: Proposer | None = None
    """Source of its drafts; None if it gets none."""
    told: int = 0
    """Tokens that a draft model knows, from its insertion and from plans that name tokens."""
    _prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    """Log probabilities of the prompt's tokens that have come."""

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt, *self.request.produced]
        if self.request.quarantine_record is not None:
            self.quarantine_record = replace(self.request.quarantine_record)

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def whole(self) -> bool:
        """True if it needs the hidden states of all positions, of which the prefix cache keeps KV alone."""
        return self.request.pooling == "mean" or self.scores

    @property
    def may_be_tried(self) -> bool:
        """True for a suspect that may run alone once it is next."""
        return self.quarantine_record.suspect and (self.rested or not self.quarantine_record.rests)

    @property
    def expected(self) -> bool:
        """True unless the request carries a suspicion whose notice its api has not acknowledged."""
        return self.noted or self.request.quarantine_record is None

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def produced(self) -> int:
        """Tokens produced so far."""
        return len(self.tokens) - self.prompt_len

    def end_reason(self, eos_token_ids: Container[int]) -> str | None:
        """Finish reason of the last token; None while the sequence continues."""
        token, params = self.tokens[-1], self.request.params
        stops = token in params.stop_token_ids or (token in eos_token_ids and not params.ignore_eos)
        if stops and self.produced > params.min_tokens:
            return "stop"
        return "length" if self.produced >= params.max_tokens else None

    @property
    def samples(self) -> bool:
        """False for one that ends with its prompt."""
        return self.request.params.max_tokens > 0

    @property
    def decoding(self) -> bool:
        """True once all of the prompt is computed, or planned to be."""
        return self.computed >= self.target

    @property
    def complete(self) -> bool:
        """True when the tokens in flight bring it to its limit, so that it needs no further step."""
        return self.produced + self.inflight >= self.request.params.max_tokens

    def enter(self, micro_batch: int, cached: int = 0) -> InsertOp:
        """Start (again) in `micro_batch`, with the first `cached` positions from the prefix cache."""
        self.reached, self.yields = cached, False
        self.micro_batch, self.computed, self.target, self.skipped = micro_batch, cached, len(self.tokens), 0
        self.cached = cached
        self.told = len(self.tokens)
        self.awaits_grammar = self.samples and self.request.params.structured_outputs is not None
        return InsertOp(self.request_id, list(self.tokens), self.prompt_len, self.request.params)

    @property
    def scores(self) -> bool:
        """True if log probabilities of its prompt, which come with the first token, are wanted."""
        return self.request.params.prompt_logprobs is not None and not self.produced

    def lacks_logprobs(self, stop: int) -> bool:
        """True if positions before `stop` bring log probabilities that have not come: a prompt may be computed
        again."""
        return self.scores and stop > sum(map(len, self._prompt_logprobs))

    def score(self, start: int, found: PromptLogprobs) -> None:
        """Log probabilities of the tokens after the positions from `start` on have come, some maybe once more."""
        fresh = found.after(sum(map(len, self._prompt_logprobs)) - start)
        if len(fresh):
            self._prompt_logprobs.append(fresh)

    @property
    def from_disk(self) -> int:
        """Positions of `cached` that were read from disk for it."""
        return min(self.fetched, self.cached)

    def take_logprobs(self) -> PromptLogprobs | None:
        """Return the log probabilities of the whole prompt once it is computed; None if not wanted."""
        if not self.scores:
            return None
        found, self._prompt_logprobs = joined(self._prompt_logprobs), []
        return found

    def drafts(self, most: int) -> list[int]:
        """Up to `most` tokens that may come next, if all of its tokens are known; never beyond its limit."""
        if self.proposer is None:
            return []
        return self.proposer.drafts(len(self.tokens), min(most, self.room))

    @property
    def room(self) -> int:
        """Most drafts that its next step can use; 0 for one that gets none."""
        return self.request.params.max_tokens - self.produced - 1 if self.proposer else 0

    def untold(self) -> list[int]:
        """Tokens, without the last one, that the draft model has not received."""
        return self.tokens[self.told : -1]

    def hear(self, result: StepResult) -> None:
        """Take the draft model's guesses for this sequence from `result`, if there are any."""
        if self.request_id in result.drafts:
            self.told = len(self.tokens)
            if self.proposer is not None:
                self.proposer.guessed(len(self.tokens), result.drafts[self.request_id])

    def read(self) -> None:
        """Let its proposer see the tokens that are known by now."""
        if self.proposer is not None:
            self.proposer.read(self.tokens)

    def leave(self) -> None:
        """Give up its place; its KV is gone with it."""
        self.micro_batch, self.computed, self.awaits_grammar = None, 0, False


def no_token(request_id: str, why: int) -> Refused:
    """Return the error of a sequence that got `why`, a negative number, in place of a token."""
    if why == NO_CONTINUATION:
        return Refused(
            request_id,
            400,
            "the output cannot be kept to the form that structured_outputs or the tools "
            "ask for: it costs more to follow than is allowed; make it simpler",
            code="structured_output_failed",
            param="structured_outputs",
        )
    if why == NO_GRAMMAR:
        return Refused(
            request_id,
            503,
            "what is needed to keep the output to a form could not be loaded; the server's log says why; try again later",
            code="grammar_unavailable",
        )
    return Refused(
        request_id,
        500,
        "the model produced logits that are not finite numbers; check the model's weights and dtype",
        code="not_finite",
    )
