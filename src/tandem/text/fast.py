"""Tokenizers that are a tokenizer.json, through the tokenizers library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from tandem.errors import BrokenModel
from tandem.text.longest_token import longest_token
from tandem.text.token_bytes import Scheme, scheme_of


class FastBackend:
    """`tandem.text.tokenizer.Backend` on tokenizers.Tokenizer. Raises `BrokenModel` for a damaged file."""

    def __init__(self, path: Path) -> None:
        try:
            text = path.read_text(encoding="utf-8")
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            added = self._tokenizer.get_added_tokens_decoder()
            given = json.loads(text)
            self.scheme: Scheme = scheme_of(given.get("decoder"), {i: token.content for i, token in added.items()})
            vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
            self.longest_token = longest_token(given, self.scheme, vocabulary)
        except BaseException as error:
            # A panic of the library is no Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise BrokenModel(
                f"{path}: cannot be read: {' '.join(str(error).split())[:300]}", param=path.name
            ) from error
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        # Lone surrogates, which JSON can smuggle in, are not text that the library takes.
        clean = text.encode("utf-8", errors="replace").decode("utf-8")
        # Unlike `encode`, this lets other threads run meanwhile: a long prompt must not stop the event loop.
        [encoding] = self._tokenizer.encode_batch_fast([clean], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def piece(self, token: int) -> str | None:
        """The vocabulary's entry, None for an id that is not in use."""
        return self._tokenizer.id_to_token(token) if token < self.vocab_size else None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of token ids, by the library's decoder."""
        return self._tokenizer.decode(
            [i for i in ids if 0 <= i < self.vocab_size], skip_special_tokens=skip_special_tokens
        )
