"""Trial compilation of one grammar in a sandbox, where hangs, crashes and memory use are harmless.

Does the same as ranks, over a vocabulary of single bytes and with a smaller stack, so grammars that compile here compile
there. Also measures the cost of a step, since on ranks all sequences wait for the slowest mask. Imports nothing of Tandem, to
start quickly.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

STACK_BYTES = 8 * 1024**2
WALK = 16
"""Number of steps whose masks are measured. They show the later cost of lexemes, as all are prepared at first."""
FURTHER, FURTHER_SECONDS = 400, 1.2
"""Additional steps, and CPU seconds for them. They show the cost of highly ambiguous rules."""
BYTES_A_MASK = 16
"""Bytes assumed per token when the mask cost on ranks is estimated from byte steps; tokens may have more."""
MASK_SECONDS = 0.05
"""Maximum CPU seconds of one mask here. Over a real vocabulary it takes three to five times as long."""
TOO_COSTLY = "its steps take too long to compute; shorten its repetitions, or what it chooses from"


class _ByteVocabulary:
    """Vocabulary with a token per byte, and the model's special tokens at their ids."""

    bos_token_id = None

    def __init__(self, special: dict[str, int]) -> None:
        self._first = max(special.values(), default=-1) + 1
        self.tokens = [b""] * self._first + [bytes([byte]) for byte in range(256)] + [b"<end>"]
        for name, token in special.items():
            self.tokens[token] = name.encode()
        self.eos_token_id = len(self.tokens) - 1
        self.special_token_ids = [*special.values(), self.eos_token_id]

    def __call__(self, text: str) -> list[int]:
        return [self._first + byte for byte in text.encode()]


def limits() -> LLParserLimits:
    """Return the compilation limits, used here and on ranks: about 20 ms per step, and 50 MB."""
    return LLParserLimits(max_lexer_states=25_000, initial_lexer_fuel=400_000, verbose_errors=False)


def trouble(grammar: str, special: dict[str, int]) -> str:
    """Return the grammar's error; empty if it is fine."""
    vocabulary = _ByteVocabulary(special)
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary))
    error, mask, seconds = _walk(tokenizer, grammar, vocabulary.eos_token_id)
    if error:
        return error
    if not any(mask):
        return "nothing matches it"
    # Repeat, as other load on the machine may be the reason.
    if seconds > MASK_SECONDS and _walk(tokenizer, grammar, vocabulary.eos_token_id)[2] > MASK_SECONDS:
        return TOO_COSTLY
    return ""


def _walk(tokenizer: LLTokenizer, grammar: str, eos: int) -> tuple[str, bytes, float]:
    """Return the error within the first steps, the first mask, and the CPU seconds of the slowest mask."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    if matcher.is_error():
        return matcher.get_error() or "it cannot be compiled", b"", 0.0
    first, slowest, end = b"", 0.0, time.thread_time() + FURTHER_SECONDS
    for step in range(WALK + FURTHER):
        if matcher.is_error() or matcher.is_stopped() or (step > WALK and time.thread_time() > end):
            break
        started = time.thread_time()
        mask = matcher.compute_bitmask()
        slowest = max(slowest, time.thread_time() - started)
        first = first if step else mask
        token, started = _last(mask, eos), time.thread_time()
        if token is None or not matcher.consume_token(token):
            break
        if step > WALK:
            slowest = max(slowest, BYTES_A_MASK * (time.thread_time() - started))
    error = f"it is too complex: {matcher.get_error().partition(chr(10))[0]}" if matcher.is_error() else ""
    return error, first, slowest


def _last(mask: bytes, eos: int) -> int | None:
    """Return the largest token id that a mask allows, except `eos`; None if there is none."""
    allowed = int.from_bytes(mask, "little") & ~(1 << eos)
    return allowed.bit_length() - 1 if allowed else None


def tried(grammar: str, special: dict[str, int]) -> str:
    """Return `trouble` of the grammar, computed in a thread with a small stack."""
    before = threading.stack_size(STACK_BYTES)
    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(trouble, grammar, special).result()
    finally:
        threading.stack_size(before)
