"""Drafts from the sequence itself: what stood after the last place where its last tokens stood before (prompt lookup).

Pure. The index grows with the sequence, so that a token costs the same however long the sequence is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

CANDIDATES = 8
"""Most earlier matches compared, the latest first, as they predict best."""


class NgramIndex:
    """One sequence's tokens, and where its n-grams stood last."""

    def __init__(self, shortest: int, longest: int) -> None:
        """A place counts when at least `shortest` tokens before it are the last ones of the sequence; of several the
        one with the most, up to `longest`, and of equal ones the latest."""
        self._shortest, self._longest = shortest, longest
        self._tokens: list[int] = []
        self._latest: dict[int, int] = {}
        """By the hash of `shortest` tokens: the position after the last place where they stand."""
        self._before: array[int] = array("q")
        """[tokens]: the position after the place before that, -1 for none. Hashes may collide: tokens are compared."""
        self._at = -1
        self._matched = 0

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def prediction(self) -> int | None:
        """The token that is expected next; None where nothing is."""
        return self._tokens[self._at] if self._at >= 0 else None

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the sequence."""
        for token in tokens:
            self._append(token)

    def drafts(self, most: int) -> list[int]:
        """Up to `most` tokens that may come next. A place near the end goes on into the drafts themselves, so that a
        short cycle fills them."""
        if self._at < 0 or most < 1:
            return []
        found = self._tokens[self._at : self._at + most]
        while len(found) < most:
            found.append(found[self._at + len(found) - len(self._tokens)])
        return found

    def _append(self, token: int) -> None:
        tokens, end = self._tokens, len(self._tokens)
        self._before.append(-1)
        if end >= self._shortest:
            key = hash(tuple(tokens[end - self._shortest :]))
            self._before[end] = self._latest.get(key, -1)
            self._latest[key] = end
        goes_on = self.prediction == token
        tokens.append(token)
        if goes_on and self._matched >= self._longest:
            self._at += 1
        else:
            self._at, self._matched = self._look_up()

    def _look_up(self) -> tuple[int, int]:
        """Return the best match and its length in tokens; (-1, 0) without one."""
        best, most = -1, 0
        at = self._latest.get(hash(tuple(self._tokens[-self._shortest :])), -1)
        for _ in range(CANDIDATES):
            if at < 0 or most >= self._longest:
                break
            if (matched := self._match(at)) > most:
                best, most = at, matched
            at = self._before[at]
        return (best, most) if most >= self._shortest else (-1, 0)

    def _match(self, at: int) -> int:
        """How many tokens before `at` are the last ones of the sequence, up to `longest`."""
        tokens, end = self._tokens, len(self._tokens)
        most = min(self._longest, at)
        return next((n for n in range(most) if tokens[at - 1 - n] != tokens[end - 1 - n]), most)
