"""Grammar state of each constrained sequence, and masks of allowed next tokens. NumPy only, no MLX."""

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
    """uint32 [rows, ceil(vocabulary / 32)]: bit i of word j is 1 if token 32 j + i is allowed."""
    given_up: dict[int, int]
    """Row -> error code in place of a token: NO_CONTINUATION, or NO_GRAMMAR if the grammar was not built."""


class Guides:
    """Grammar matchers by request id. They advance with each sampled token; a replay rebuilds them from the output tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._building: dict[str, Future[LLMatcher]] = {}
        self._matchers: dict[str, LLMatcher | None] = {}
        """Matchers by request id; None once the sequence has ended but earlier plans still sample for it."""
        self._ends = np.zeros_like(allocate_token_bitmask(1, vocabulary.vocab_size)[0])
        for token in vocabulary.eos:
            self._ends.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._building or request_id in self._matchers

    def add(self, request_id: str, form: StructuredOutputs, produced: Sequence[int]) -> None:
        """Add a sequence with output tokens `produced`. A thread compiles its grammar and then calls `Vocabulary.ready`."""
        building = self._building[request_id] = self._vocabulary.matcher(form, produced)
        # Ignore a compilation started for an earlier insertion.
        building.add_done_callback(
            lambda done: self._vocabulary.ready(request_id) if self._building.get(request_id) is done else None
        )

    def remove(self, request_id: str) -> None:
        """Remove a sequence; unknown ids are ignored."""
        self._building.pop(request_id, None)
        self._matchers.pop(request_id, None)

    def advance(self, request_id: str, token: int) -> None:
        """Advance the matcher by a sampled token. Removed sequences are ignored."""
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
        """Return the masks of those `ids` that follow a grammar. Waits for grammars being compiled.

        Rows of other, ended and failed sequences have no mask.
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
    """Return the matcher; None if its construction failed, which must not end the rank."""
    error = future.exception()
    if error is not None:
        log.error(
            "a grammar that was accepted cannot be used: %s: %s; its request ends with an error",
            type(error).__name__,
            str(error)[:200],
        )
        return None
    return future.result()
