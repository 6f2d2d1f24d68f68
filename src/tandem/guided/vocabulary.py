"""Model vocabulary in llguidance's form, and grammars compiled over it. A rank has one for all micro-batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache

from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from tandem.guided.compile_probe import STACK_BYTES, limits
from tandem.guided.grammar import grammar_of
from tandem.protocol.request import StructuredOutputs
from tandem.text.tokenizer import Tokenizer

KEPT = 16
"""Compiled grammars cached for later requests. A maliciously costly one takes up to 50 MB."""
THREADS = 4
"""Number of threads that compute the masks of a batch."""
COMPILING = 2
"""Grammars compiled concurrently, so that a costly one does not delay the rest."""


class Vocabulary:
    """Vocabulary with threads that compile grammars over it. The tokenizer is loaded with the first one."""

    def __init__(
        self, load: Callable[[], Tokenizer], vocab_size: int, eos: Sequence[int], ready: Callable[[str], object] = lambda _: None
    ) -> None:
        """Store the collaborators. `load` returns the tokenizer; `vocab_size`: width of the logits. `eos`: ids allowed where
        a grammar can end; ids beyond the logits are ignored. `ready` is called from any thread with a request id once its
        matcher is built or has failed."""
        self._load = load
        self.vocab_size = vocab_size
        self.eos = tuple(token for token in eos if token < vocab_size)
        self.ready = ready
        """Callback with the id of a request whose matcher is built or has failed."""
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._compiled = lru_cache(KEPT)(self._compile)
        self._threads = ThreadPoolExecutor(COMPILING, "grammars")

    @cached_property
    def executor(self) -> LLExecutor:
        """Threads that compute the masks of a batch."""
        return LLExecutor(num_threads=THREADS)

    def matcher(self, form: StructuredOutputs, produced: Sequence[int]) -> Future[LLMatcher]:
        """Return a future of the matcher of `form` after the tokens `produced`; in error state if consuming them fails."""
        before = threading.stack_size(4 * STACK_BYTES)  # larger than in the trial compilation
        try:
            return self._threads.submit(self._matcher, form, list(produced))
        finally:
            threading.stack_size(before)

    def _matcher(self, form: StructuredOutputs, produced: list[int]) -> LLMatcher:
        # Copies share the lexer's cached states.
        matcher = self._compiled(grammar_of(form)).deep_copy()
        if produced:
            matcher.consume_tokens(produced)
        return matcher

    def _compile(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._vocabulary(), grammar, log_level=0, limits=limits())

    def _vocabulary(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                entries = Entries(self._load(), self.vocab_size, self.eos)
                self._tokenizer = LLTokenizer(TokenizerWrapper(entries), eos_token=list(self.eos))
                entries.fallback = self._tokenizer.greedy_tokenize
            return self._tokenizer


class Entries:
    """Tokenizer with the interface that `TokenizerWrapper` expects."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted({token for token in (*tokenizer.special_ids, *eos) if token < vocab_size})
        self._special = frozenset(self.special_token_ids)
        self.eos_token_id = eos[0]
        self.fallback: Callable[[str], list[int]] | None = None

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that a grammar forces, in the model's own tokenization if that is exact.

        Otherwise use the fallback: SentencePiece adds a leading space, and text may contain names of special tokens.
        """
        tokens = self._tokenizer.encode(text, False)
        same = b"".join(self.tokens[token] for token in tokens) == text.encode()
        if self.fallback is None or (same and self._special.isdisjoint(tokens)):
            return tokens
        return self.fallback(text)
