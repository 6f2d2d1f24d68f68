"""The model's vocabulary as llguidance wants it, and grammars compiled over it: what a rank keeps for all its lanes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from tandem.guided.grammar import grammar_of
from tandem.guided.probe import STACK_BYTES, limits
from tandem.protocol.request import StructuredOutputs
from tandem.text.tokenizer import Tokenizer

KEPT = 16
"""Compiled grammars that are kept for requests to come. One that a client makes costly on purpose takes up to 50 MB."""
THREADS = 4


class Vocabulary:
    """Compiles grammars in a thread of its own. The tokenizer is loaded for the first one."""

    def __init__(self, load: Callable[[], Tokenizer], vocab_size: int, eos: Sequence[int]) -> None:
        """`vocab_size` is the width of the logits, `eos` the ids that may follow where a grammar can end;
        those beyond the logits, which config.json may name, are left out."""
        self._load = load
        self.vocab_size = vocab_size
        self.eos = tuple(token for token in eos if token < vocab_size)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None

    @property
    def executor(self) -> LLExecutor:
        """Threads that compute the masks of a batch."""
        if self._executor is None:
            self._executor = LLExecutor(num_threads=THREADS)
        return self._executor

    def matcher(self, form: StructuredOutputs, produced: Sequence[int]) -> Future[LLMatcher]:
        """A matcher of `form` that has taken in the tokens `produced`; in an error state if that is impossible."""
        if self._thread is None:
            before = threading.stack_size(4 * STACK_BYTES)  # more than the grammar was tried with
            self._thread = ThreadPoolExecutor(1, "grammars")
            self._thread.submit(lambda: None).result()  # starts the thread
            threading.stack_size(before)
        return self._thread.submit(self._compile, form, list(produced))

    def _compile(self, form: StructuredOutputs, produced: list[int]) -> LLMatcher:
        grammar = grammar_of(form)
        if grammar not in self._compiled:
            self._compiled[grammar] = LLMatcher(self._vocabulary(), grammar, log_level=0, limits=limits())
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        # Copies share what the lexer has learnt so far.
        matcher = self._compiled[grammar].deep_copy()
        if produced:
            matcher.consume_tokens(produced)
        return matcher

    def _vocabulary(self) -> LLTokenizer:
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
        """Tokens of text that a grammar forces, as the model would write it where the tokenizer allows that.

        SentencePiece puts a space before a text, and any tokenizer takes the names of special tokens for those.
        """
        tokens = self._tokenizer.encode(text, False)
        same = b"".join(self.tokens[token] for token in tokens) == text.encode()
        if self.fallback is None or (same and self._special.isdisjoint(tokens)):
            return tokens
        return self.fallback(text)
