"""The model's vocabulary in llguidance's form, and grammars compiled over it; a rank keeps one for all its micro-batches."""

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
"""Compiled grammars that are kept for requests to come. One that a client makes costly on purpose takes up to 50 MB."""
THREADS = 4
"""Threads that compute the masks of a batch."""
COMPILING = 2
"""Grammars that are compiled at once, so that a costly one does not hold up the others."""


class Vocabulary:
    """Compiles grammars in threads of its own. The tokenizer is loaded for the first one."""

    def __init__(
        self, load: Callable[[], Tokenizer], vocab_size: int, eos: Sequence[int], ready: Callable[[str], object] = lambda _: None
    ) -> None:
        """`vocab_size` is the width of the logits, `eos` the ids that may follow where a grammar can end;
        those beyond the logits, which config.json may name, are left out. `ready` is called with a request's id, in any
        thread, when its matcher is built or cannot be."""
        self._load = load
        self.vocab_size = vocab_size
        self.eos = tuple(token for token in eos if token < vocab_size)
        self.ready = ready
        """Called with the id of a request that need not wait for its matcher."""
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._compiled = lru_cache(KEPT)(self._compile)
        self._threads = ThreadPoolExecutor(COMPILING, "grammars")

    @cached_property
    def executor(self) -> LLExecutor:
        """Threads that compute the masks of a batch."""
        return LLExecutor(num_threads=THREADS)

    def matcher(self, form: StructuredOutputs, produced: Sequence[int]) -> Future[LLMatcher]:
        """Return a matcher of `form` that has consumed the tokens `produced`; in error state if that fails."""
        before = threading.stack_size(4 * STACK_BYTES)  # more than the grammar was tried with
        try:
            return self._threads.submit(self._matcher, form, list(produced))
        finally:
            threading.stack_size(before)

    def _matcher(self, form: StructuredOutputs, produced: list[int]) -> LLMatcher:
        # Copies share what the lexer has learnt so far.
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
    """A tokenizer in the form that `TokenizerWrapper` asks for."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted({token for token in (*tokenizer.special_ids, *eos) if token < vocab_size})
        self._special = frozenset(self.special_token_ids)
        self.eos_token_id = eos[0]
        self.fallback: Callable[[str], list[int]] | None = None

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of text that a grammar forces, as the model would write it where the tokenizer allows that.

        SentencePiece puts a space before a text, and any tokenizer takes the names of special tokens for those.
        """
        tokens = self._tokenizer.encode(text, False)
        same = b"".join(self.tokens[token] for token in tokens) == text.encode()
        if self.fallback is None or (same and self._special.isdisjoint(tokens)):
            return tokens
        return self.fallback(text)
