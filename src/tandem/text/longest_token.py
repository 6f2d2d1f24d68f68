"""How much text one token can stand for, read off tokenizer.json. Pure.

A text with more bytes than the context's tokens can stand for need not be tokenised to be refused. Where a tokenizer
may leave text out, or write any amount of it as one token, there is no such bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tandem.text.token_bytes import Scheme

_SHORTENS = {"NFC": 4, "NFKC": 4, "NFKD": 4, "NFD": 1, "Prepend": 1, "ByteLevel": 1}
"""By how much these make a text shorter at most, in bytes: the letter A of four bytes becomes one of one byte."""
_RARE = frozenset((*range(0x20), 0x7F, 0xC0, 0xC1, *range(0xF1, 0x100)))
"""Bytes that some vocabularies lack: of control characters, of planes without characters, and of no UTF-8 at all. A
text that is made of them is held to be as long as any other."""
_KEEPS_ALL = frozenset(("ByteLevel", "Metaspace", "Digits", "Punctuation", "UnicodeScripts", "FixedLength"))
"""Steps before tokenising that drop nothing."""


def longest_token(tokenizer: Mapping[str, Any], scheme: Scheme, pieces: Iterable[str]) -> int | None:
    """Bytes, for the content of tokenizer.json and the entries of its vocabulary; None where there is no bound."""
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
    # Upper bounds: the mark for a space counts as the three bytes that it has, a byte's stand-in as its two.
    return shortens * max(len(piece.encode("utf-8", "replace")) for piece in known)


_SPLITS = frozenset(("Split", behaviour) for behaviour in ("Isolated", "MergedWithPrevious", "MergedWithNext",
                                                           "Contiguous"))


def _knows_all_bytes(model: Mapping[str, Any], scheme: Scheme, known: set[str]) -> bool:
    """Whatever the text, nothing of it is dropped or becomes an unknown token that swallows its neighbours."""
    if model.get("type") not in ("BPE", "Unigram"):
        return False
    if scheme.kind == "byte_level":
        return all(sign in known for sign, byte in scheme.alphabet.items() if byte not in _RARE)
    return bool(model.get("byte_fallback")) and {f"<0x{byte:02X}>" for byte in range(256)} <= known


def _steps(part: Any, inner: str) -> list[Mapping[str, Any]]:
    if not isinstance(part, Mapping):
        return []
    if part.get("type") == "Sequence":
        return [step for one in part.get(inner, ()) for step in _steps(one, inner)]
    return [part]
