"""Incremental detokenisation with stop strings, on top of a `Tokenizer`."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tandem.text.tokenizer import Tokenizer


class TextStream:
    """Converts a stream of tokens to text incrementally.

    Results of `push` and `finish` add up to the decoded text of all tokens, cut at the first stop string. How tokens
    are divided into pushes makes no difference. Text is held back while it ends in an incomplete character or a
    possible start of a stop string. The first stop string is the one that ends first; of several that end together, the
    longest.

    With `continues` the text follows a prompt, so a leading space, which some tokenizers remove, is kept. Special
    tokens are skipped except for the ids in `shown`.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, continues: bool = False, shown: frozenset[int] = frozenset()
    ) -> None:
        self._pieces: _Bytes | _Library = (
            _Bytes(tokenizer, tokenizer.special_ids - shown, strip=tokenizer.scheme.strips_first_space and not continues)
            if tokenizer.scheme.has_bytes
            else _Library(tokenizer, not shown)
        )
        self._stop = tuple(s for s in stop if s)
        self._held = ""
        self.stopped = False
        """True after a stop string; later calls return an empty text."""
        self.matched: str | None = None
        """Stop string that ended the text; None if there is none."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the new text that cannot change any more, possibly empty."""
        if self.stopped:
            return ""
        return self._scan(self._pieces.push(token_ids))

    def finish(self) -> str:
        """Return the rest of the text, with incomplete characters as U+FFFD."""
        if self.stopped:
            return ""
        text = self._scan(self._pieces.finish())
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _scan(self, new: str) -> str:
        text = self._held + new
        if first := self._first_stop(text):
            start, stop = first
            self.stopped, self.matched, self._held = True, stop, ""
            return text[:start]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        """Return start and text of the stop string that ends first in `text` (of several, the longest); None if there
        is none."""
        starts = ((text.find(stop), stop) for stop in self._stop)
        occurrences = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if not occurrences:
            return None
        _, start, stop = min(occurrences)
        return start, stop


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class _Bytes:
    """Decoder for tokens with fixed bytes: incremental UTF-8."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], *, strip: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = strip

    def push(self, token_ids: Sequence[int]) -> str:
        return self._first(self._decoder.decode(b"".join(self._token_bytes(i) for i in token_ids if i not in self._skipped)))

    def finish(self) -> str:
        return self._first(self._decoder.decode(b"", final=True))

    def _first(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class _Library:
    """Decoder for tokens without fixed bytes, through the library.

    Decodes a window of recent tokens with and without the new ones, and returns the difference (as
    text-generation-inference does). A text that ends in U+FFFD may be incomplete and is held back.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._window, self._read = 0, 0

    def push(self, token_ids: Sequence[int]) -> str:
        self._ids += token_ids
        return self._new(final=False)

    def finish(self) -> str:
        return self._new(final=True)

    def _new(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._window : self._read], self._skip)
        after = self._tokenizer.decode(self._ids[self._window :], self._skip)
        if len(after) <= len(before) or (after.endswith("\ufffd") and not final):
            return ""
        self._window, self._read = self._read, len(self._ids)
        return after[len(before) :]
