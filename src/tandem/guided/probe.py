"""Compiles one grammar in a process of its own, which may hang, crash or eat memory without harm to anybody.

Run as a script with `{"grammar": ..., "special": {name: id}}` on standard input; prints what is wrong with the grammar,
or nothing. It does what ranks do with a grammar, over a vocabulary of single bytes and with a smaller stack, so that
what compiles here compiles there. Imports nothing of Tandem, to start quickly.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

SECONDS = 5
MEMORY_BYTES = 2 * 1024**3
STACK_BYTES = 8 * 1024**2


class _Bytes:
    """A vocabulary with a token for each byte, and the model's special tokens at their places."""

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
    """What a grammar may cost, here and on ranks: about 20 ms a step, and 50 MB."""
    return LLParserLimits(max_lexer_states=25_000, verbose_errors=False)


def trouble(grammar: str, special: dict[str, int]) -> str:
    """What is wrong with the grammar; empty if nothing."""
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(special)))
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        return matcher.get_error() or "it cannot be compiled"
    return "" if any(mask) else "nothing matches it"


def main() -> None:
    """Read a task, write the answer."""
    for kind, most in ((resource.RLIMIT_CPU, SECONDS), (resource.RLIMIT_AS, MEMORY_BYTES)):
        with contextlib.suppress(ValueError, OSError):  # macOS does not limit address space; the parent's clock is left
            resource.setrlimit(kind, (most, most))
    task = json.load(sys.stdin)
    found: list[str] = []
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: found.append(trouble(task["grammar"], task["special"])))
    thread.start()
    thread.join()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
