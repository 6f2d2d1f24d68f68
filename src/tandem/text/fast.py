"""Tokenizers that are a tokenizer.json, through the tokenizers library."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tokenizers

from tandem.checkpoints.config import MOST
from tandem.errors import BrokenModel, ServerError
from tandem.log import Seldom
from tandem.system.files import read_text
from tandem.text.longest_token import longest_token
from tandem.text.token_bytes import Scheme, scheme_of

seldom = Seldom(logging.getLogger(__name__))


class FastBackend:
    """`tandem.text.tokenizer.Backend` on tokenizers.Tokenizer. Raises `BrokenModel` for a damaged file."""

    def __init__(self, path: Path) -> None:
        try:
            text = read_text(path, MOST)
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            added = self._tokenizer.get_added_tokens_decoder()
            given = json.loads(text)
            self.scheme: Scheme = scheme_of(given.get("decoder"), {i: token.content for i, token in added.items()})
            vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
            self.longest_token = longest_token(given, self.scheme, vocabulary)
        except BaseException as error:
            if not _is_the_librarys(error):
                raise
            why = " ".join(str(getattr(error, "strerror", None) or error).split())[:300]
            raise BrokenModel(f"{path}: cannot be read: {why}", param=path.name) from error
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Raises ServerError where the library fails on it."""
        # Lone surrogates, which JSON can smuggle in, are not text that the library takes.
        clean = text.encode("utf-8", errors="replace").decode("utf-8")
        with _failures():
            # Unlike `encode`, this lets other threads run meanwhile: a long prompt must not stop the event loop.
            [encoding] = self._tokenizer.encode_batch_fast([clean], add_special_tokens=add_special_tokens)
            return list(encoding.ids)

    def piece(self, token: int) -> str | None:
        """The vocabulary's entry, None for an id that is not in use."""
        return self._tokenizer.id_to_token(token) if token < self.vocab_size else None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of token ids, by the library's decoder. Raises ServerError where that fails."""
        with _failures():
            return self._tokenizer.decode(
                [i for i in ids if 0 <= i < self.vocab_size], skip_special_tokens=skip_special_tokens
            )


def _is_the_librarys(error: BaseException) -> bool:
    """Not somebody who wants to end this process: a panic of the library is no Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def _failures() -> Iterator[None]:
    """What the library raises ends one request. Its words may quote a prompt, and are neither logged nor sent."""
    try:
        yield
    except BaseException as error:
        if not _is_the_librarys(error):
            raise
        seldom.log(logging.ERROR, "the tokenizers library failed (%s); the request ends with status 500, all else goes "
                   "on; please report it, with the model's name", type(error).__name__, kind=type(error).__name__)
        raise ServerError("The model's tokenizer failed on this request's text; other texts are answered.",
                          code="tokenizer_failed") from None
