"""State of each constrained sequence in its grammar, and masks of the tokens that may come next. NumPy, no MLX."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

from tandem.guided.vocabulary import Vocabulary
from tandem.protocol.request import StructuredOutputs
from tandem.protocol.step import NO_CONTINUATION, NO_GRAMMAR

log = logging.getLogger(__name__)


class Masks(NamedTuple):
    """Token masks of the rows of one step that follow a grammar."""

    rows: list[int]
    bits: npt.NDArray[np.uint32]
    """[rows, vocabulary / 32]: bit i of word j says whether token 32 j + i is allowed."""
    given_up: dict[int, int]
    """Rows without a mask, and the code in place of a token: NO_CONTINUATION, or NO_GRAMMAR when it was not built."""


class Guides:
    """Matchers by request id. They advance with each sampled token; a replay rebuilds them from the tokens so far."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._building: dict[str, Future[LLMatcher]] = {}
        self._matchers: dict[str, LLMatcher | None] = {}
        """By request id; None once the sequence has ended but plans sent ahead still sample for it."""
        self._ends = np.zeros_like(allocate_token_bitmask(1, vocabulary.vocab_size)[0])
        for token in vocabulary.eos:
            self._ends.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._building or request_id in self._matchers

    def add(self, request_id: str, form: StructuredOutputs, produced: Sequence[int]) -> None:
        """Begin a sequence that has produced these tokens. Its grammar is compiled in a thread, which then calls
        `Vocabulary.ready`."""
        building = self._building[request_id] = self._vocabulary.matcher(form, produced)
        # One that was begun for an earlier insertion tells nothing of this one.
        building.add_done_callback(
            lambda done: self._vocabulary.ready(request_id) if self._building.get(request_id) is done else None
        )

    def remove(self, request_id: str) -> None:
        """Forget a sequence, if it is one of these."""
        self._building.pop(request_id, None)
        self._matchers.pop(request_id, None)

    def advance(self, request_id: str, token: int) -> None:
        """Follow a sampled token. Sequences that have been removed meanwhile are ignored."""
        matcher = self._matchers.get(request_id)
        if matcher is None:
            return
        if token < 0 or token in self._vocabulary.eos or not matcher.consume_token(token):
            if matcher.is_error():
                log.error(
                    "a token that the mask allows is not in the grammar: %s; its request goes on without; please report it",
                    matcher.get_error(),
                )
            self._matchers[request_id] = None

    def masks(self, ids: Sequence[str]) -> Masks:
        """Return the masks of those of `ids` that follow a grammar. Waits for grammars that are being compiled.

        Rows of other sequences, of those that are over, and of those given up have no mask.
        """
        given_up: dict[int, int] = {}
        for row, request_id in enumerate(ids):
            if request_id in self._building:
                self._matchers[request_id] = _built(self._building.pop(request_id))
                if self._matchers[request_id] is None:
                    given_up[row] = NO_GRAMMAR
        live = [(row, matcher) for row, name in enumerate(ids) if (matcher := self._matchers.get(name)) is not None]
        bits = allocate_token_bitmask(len(live), self._vocabulary.vocab_size)
        if working := [(matcher, i) for i, (_, matcher) in enumerate(live) if not matcher.is_stopped()]:
            fill_next_token_bitmask_par(self._vocabulary.executor, working, bits)
        for i, (row, matcher) in enumerate(live):
            if matcher.is_error():
                log.warning("Grammar failed: %s; ending its request with an error", matcher.get_error().partition("\n")[0][:200])
                self._matchers[ids[row]] = None
                given_up[row] = NO_CONTINUATION
            elif matcher.is_stopped():
                bits[i] = self._ends
        kept = [i for i, (row, _) in enumerate(live) if row not in given_up]
        return Masks([live[i][0] for i in kept], bits[kept].view(np.uint32), given_up)


def _built(future: Future[LLMatcher]) -> LLMatcher | None:
    """Return the matcher; None where it could not be built: one request must not end a rank."""
    error = future.exception()
    if error is not None:
        log.error(
            "a grammar that was accepted cannot be used: %s: %s; its request ends with an error",
            type(error).__name__,
            str(error)[:200],
        )
        return None
    return future.result()
