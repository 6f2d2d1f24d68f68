"""Tokenizers from a tokenizer.json, through the tokenizers library, and the bytes of their tokens."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers

from tandem.checkpoints.config import MOST
from tandem.errors import BrokenModel, ServerError
from tandem.json_types import JsonMapping
from tandem.log import Seldom
from tandem.system.files import read_text

_BYTE = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable characters for bytes, mapped to the bytes (openai/gpt-2 `encoder.py`, bytes_to_unicode,
    reversed)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


_ALPHABET = _byte_alphabet()


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Mapping from vocabulary entries to bytes."""

    kind: str
    """`byte_level` (GPT-2's alphabet), `spaces` (SentencePiece: U+2581 for a space, <0xNN> for bytes), or `library` (a
    token's bytes depend on its neighbours; the library decodes)."""
    strips_first_space: bool = False
    """Whether one space at the start of a decoded text is an artefact of encoding, to be removed."""
    byte_fallback: bool = False
    added: Mapping[int, str] = field(default_factory=dict)
    """Texts of added tokens, by id."""

    @property
    def alphabet(self) -> Mapping[str, int]:
        """Characters for the 256 bytes in the kind `byte_level`, mapped to the bytes."""
        return _ALPHABET

    @property
    def has_bytes(self) -> bool:
        """True if each token has fixed bytes, independent of its neighbours."""
        return self.kind != "library"

    def is_added(self, token: int) -> bool:
        """Return True for an added token, whose entry is its text."""
        return token in self.added

    def piece_bytes(self, piece: str, *, added: bool) -> bytes:
        """Return the bytes of the vocabulary entry `piece`; `added`: the entry of an added token."""
        if self.kind == "byte_level":
            if not added and all(c in _ALPHABET for c in piece):
                return bytes(_ALPHABET[c] for c in piece)
            return piece.encode("utf-8", errors="replace")
        if self.byte_fallback and (match := _BYTE.match(piece)):
            return bytes([int(match[1], 16)])
        return piece.replace("\u2581", " ").encode("utf-8", errors="replace")


def scheme_of(decoder: object, added: Mapping[int, str]) -> Scheme:
    """Return the scheme for the `decoder` section of a tokenizer.json."""
    steps = _steps(decoder, "decoders")
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return Scheme(kind="byte_level", added=added)
    if kinds == ["Metaspace"] and steps[0].get("replacement", "\u2581") == "\u2581":
        return Scheme(kind="spaces", strips_first_space=steps[0].get("prepend_scheme", "always") != "never", added=added)
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"} and kinds[0] == "Replace":
        strip = next((step for step in steps if step["type"] == "Strip"), None)
        replace = steps[0]
        spaces = replace.get("pattern") == {"String": "\u2581"} and replace.get("content") == " "
        if spaces and (strip is None or (strip.get("content"), strip.get("start"), strip.get("stop")) == (" ", 1, 0)):
            fallback = "ByteFallback" in kinds
            return Scheme(kind="spaces", strips_first_space=strip is not None, byte_fallback=fallback, added=added)
    return Scheme(kind="library", added=added)


_SHORTENS = {"NFC": 4, "NFKC": 4, "NFKD": 4, "NFD": 1, "Prepend": 1, "ByteLevel": 1}
"""Largest factor by which each normaliser shortens a text in bytes: a letter A of four bytes can become one byte."""
_RARE = frozenset((*range(0x20), 0x7F, 0xC0, 0xC1, *range(0xF1, 0x100)))
"""Bytes that some vocabularies lack: control characters, unassigned planes, and bytes invalid in UTF-8. A text of these
counts as long as any other."""
_KEEPS_ALL = frozenset(("ByteLevel", "Metaspace", "Digits", "Punctuation", "UnicodeScripts", "FixedLength"))
"""Pre-tokenisation steps that drop no text."""


def longest_token(tokenizer: JsonMapping, scheme: Scheme, pieces: Iterable[str]) -> int | None:
    """Return the most bytes of text per token, from tokenizer.json's content and the vocabulary; None if unbounded."""
    shortens = 1
    for step in _steps(tokenizer.get("normalizer"), "normalizers"):
        kind = step.get("type")
        if kind == "Replace":
            old, new = step.get("pattern", {}).get("String"), step.get("content")
            if not isinstance(old, str) or not isinstance(new, str) or len(new.encode()) < len(old.encode()):
                return None
        elif kind not in _SHORTENS:
            return None
        shortens *= _SHORTENS.get(str(kind), 1)
    for step in _steps(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") not in _KEEPS_ALL and (step.get("type"), step.get("behavior")) not in _SPLITS:
            return None
    if any(token.get("lstrip") or token.get("rstrip") for token in tokenizer.get("added_tokens", ())):
        return None
    known = set(pieces)
    if not known or not _knows_all_bytes(tokenizer.get("model", {}), scheme, known):
        return None
    # Upper bounds: the space mark counts as three bytes, a byte's character as two.
    return shortens * max(len(piece.encode("utf-8", "replace")) for piece in known)


_SPLITS = frozenset(("Split", behaviour) for behaviour in ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"))


def _knows_all_bytes(model: JsonMapping, scheme: Scheme, known: set[str]) -> bool:
    """Return True if the vocabulary covers all bytes, so that no text becomes an unknown token."""
    if model.get("type") not in ("BPE", "Unigram"):
        return False
    if scheme.kind == "byte_level":
        return all(sign in known for sign, byte in scheme.alphabet.items() if byte not in _RARE)
    return bool(model.get("byte_fallback")) and {f"<0x{byte:02X}>" for byte in range(256)} <= known


def _steps(part: object, inner: str) -> list[JsonMapping]:
    """Return the steps of a part of tokenizer.json; those of a sequence, which may be nested, are its entry `inner`."""
    if not isinstance(part, Mapping):
        return []
    if part.get("type") == "Sequence":
        return [step for nested in part.get(inner, ()) for step in _steps(nested, inner)]
    return [part]


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
            content = json.loads(text)
            self.scheme: Scheme = scheme_of(content.get("decoder"), {i: token.content for i, token in added.items()})
            vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
            self.longest_token = longest_token(content, self.scheme, vocabulary)
        except BaseException as error:
            if not _is_the_librarys(error):
                raise
            why = " ".join(str(getattr(error, "strerror", None) or error).split())[:300]
            raise BrokenModel(f"{path}: cannot be read: {why}", param=path.name) from error
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text. Raise ServerError if the library fails."""
        # JSON can contain lone surrogates, which the library rejects.
        clean = text.encode("utf-8", errors="replace").decode("utf-8")
        with _failures():
            # Unlike `encode`, this releases the GIL: a long prompt must not block the event loop.
            [encoding] = self._tokenizer.encode_batch_fast([clean], add_special_tokens=add_special_tokens)
            return list(encoding.ids)

    def piece(self, token: int) -> str | None:
        """Return the vocabulary entry of an id; None for an unused id."""
        return self._tokenizer.id_to_token(token) if token < self.vocab_size else None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of token ids, from the library's decoder. Raise ServerError if the library fails."""
        with _failures():
            return self._tokenizer.decode([i for i in ids if 0 <= i < self.vocab_size], skip_special_tokens=skip_special_tokens)


def _is_the_librarys(error: BaseException) -> bool:
    """Return whether the library raised `error`: any Exception, or its panic, a BaseException recognised by name."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def _failures() -> Iterator[None]:
    """Convert the library's errors to ServerError. Their texts may quote a prompt, so they are neither logged nor sent."""
    try:
        yield
    except BaseException as error:
        if not _is_the_librarys(error):
            raise
        seldom.log(
            logging.ERROR,
            "the tokenizers library failed (%s); the request ends with status 500, all else goes "
            "on; please report it, with the model's name",
            type(error).__name__,
            kind=type(error).__name__,
        )
        raise ServerError(
            "The model's tokenizer failed on this request's text; other texts are answered.", code="tokenizer_failed"
        ) from None
