"""Drafts by prompt lookup: the continuation of the last earlier match of the sequence's final n-gram.

Pure. The index grows with the sequence, so the cost per token is constant.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

CANDIDATES = 8
"""Maximum earlier matches compared, latest first, as they predict best."""


class NgramIndex:
    """Tokens of one sequence, and the latest position of each of its n-grams."""

    def __init__(self, shortest: int, longest: int) -> None:
        """Create an empty index. A match has at least `shortest` tokens equal to the sequence's last ones. The longest match,
        up to `longest` tokens, wins; then the latest."""
        self._shortest, self._longest = shortest, longest
        self._tokens: list[int] = []
        self._latest: dict[int, int] = {}
        """Hash of `shortest` tokens -> position after their latest occurrence."""
        self._before: array[int] = array("q")
        """[tokens]: position after the previous occurrence, -1 for none. Hashes may collide, so tokens are compared."""
        self._at = -1
        self._matched = 0

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def prediction(self) -> int | None:
        """Predicted next token; None without a match."""
        return self._tokens[self._at] if self._at >= 0 else None

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the sequence."""
        for token in tokens:
            self._append(token)

    def drafts(self, most: int) -> list[int]:
        """Return up to `most` predicted tokens. A match near the end continues into the drafts, so short cycles fill them."""
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
        """Return the position after the best match, and its length in tokens; (-1, 0) without one."""
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
        """Return the number of tokens before `at` that equal the sequence's last ones, up to `longest`."""
        tokens, end = self._tokens, len(self._tokens)
        most = min(self._longest, at)
        return next((n for n in range(most) if tokens[at - 1 - n] != tokens[end - 1 - n]), most)
