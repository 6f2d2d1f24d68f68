"""Which bytes a token stands for, read off the decoder section of tokenizer.json. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_BYTE = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes (openai/gpt-2 `encoder.py`, bytes_to_unicode), reversed."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


_ALPHABET = _byte_alphabet()


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How vocabulary entries become bytes."""

    kind: str
    """`byte_level` (GPT-2's alphabet), `spaces` (SentencePiece: U+2581 for a space, <0xNN> for bytes), or `library`
    (tokens have no bytes of their own; the library decodes)."""
    strips_first_space: bool = False
    """One space at the start of a text is an artefact of encoding and is left out."""
    byte_fallback: bool = False
    added: Mapping[int, str] = field(default_factory=dict)
    """Added tokens, which stand for themselves."""

    @property
    def alphabet(self) -> Mapping[str, int]:
        """Stand-ins for the 256 bytes, in the kind `byte_level`."""
        return _ALPHABET

    @property
    def has_bytes(self) -> bool:
        """Tokens stand for bytes of their own, whatever their neighbours."""
        return self.kind != "library"

    def is_added(self, token: int) -> bool:
        """The token was added to the vocabulary and stands for itself."""
        return token in self.added

    def piece_bytes(self, piece: str, *, added: bool) -> bytes:
        """Bytes of a vocabulary entry."""
        if self.kind == "byte_level":
            if not added and all(c in _ALPHABET for c in piece):
                return bytes(_ALPHABET[c] for c in piece)
            return piece.encode("utf-8", errors="replace")
        if self.byte_fallback and (match := _BYTE.match(piece)):
            return bytes([int(match[1], 16)])
        return piece.replace("\u2581", " ").encode("utf-8", errors="replace")


def scheme_of(decoder: object, added: Mapping[int, str]) -> Scheme:
    """The scheme of tokenizer.json's `decoder` section."""
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return Scheme(kind="byte_level", added=added)
    if kinds == ["Metaspace"] and steps[0].get("replacement", "\u2581") == "\u2581":
        return Scheme(
            kind="spaces", strips_first_space=steps[0].get("prepend_scheme", "always") != "never", added=added
        )
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"} and kinds[0] == "Replace":
        strip = next((step for step in steps if step["type"] == "Strip"), None)
        replace = steps[0]
        spaces = replace.get("pattern") == {"String": "\u2581"} and replace.get("content") == " "
        if spaces and (strip is None or (strip.get("content"), strip.get("start"), strip.get("stop")) == (" ", 1, 0)):
            fallback = "ByteFallback" in kinds
            return Scheme(kind="spaces", strips_first_space=strip is not None, byte_fallback=fallback, added=added)
    return Scheme(kind="library", added=added)


def _steps(decoder: object) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _steps(inner)]
    return [decoder]
