"""Tokenizers without tokenizer.json (SentencePiece, tiktoken, Python code), through transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from tandem.errors import BrokenModel
from tandem.text.fast import Scheme, scheme_of


class HFBackend:
    """`tandem.text.tokenizer.Backend` on transformers. Raises `BrokenModel` if it cannot load the files."""

    def __init__(self, path: Path, *, trust_remote_code: bool) -> None:
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code)
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            raise BrokenModel(f"{path}: the tokenizer cannot be loaded: {text}") from error
        self.special_ids = frozenset(self._tokenizer.all_special_ids)
        added = {i: str(token) for i, token in self._tokenizer.added_tokens_decoder.items()}
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        decoder = json.loads(fast.to_str()).get("decoder") if fast is not None else None
        self.scheme: Scheme = scheme_of(decoder, added)
        self.vocab_size = len(self._tokenizer)
        self.longest_token: int | None = None  # normalisation before tokenisation is unknown

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""
        clean = text.encode("utf-8", errors="replace").decode("utf-8")
        return list(self._tokenizer.encode(clean, add_special_tokens=add_special_tokens))

    def piece(self, token: int) -> str | None:
        """Return the vocabulary entry of an id; None for an unused id."""
        piece = self._tokenizer.convert_ids_to_tokens(token) if token < self.vocab_size else None
        return piece if isinstance(piece, str) else None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of token ids, from transformers."""
        known = [i for i in ids if 0 <= i < self.vocab_size]
        return str(self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))
