"""Is a grammar fit to be sent to the ranks? Asked before a request is accepted."""

from __future__ import annotations

import json
import logging
import subprocess
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tandem.env import child_environment
from tandem.guided import probe
from tandem.guided.grammar import grammar_of
from tandem.processes.interpreter import script_command
from tandem.protocol.request import StructuredOutputs
from tandem.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""Seconds that the process which tries a grammar may take, start included."""
REMEMBERED = 512
AT_ONCE = 2
MAX_WORDS = 400
TOO_COMPLEX = "it is too complex to be compiled"


class GrammarCheck:
    """Tries each grammar once. Threads may share one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._has_bytes = tokenizer.scheme.has_bytes
        self.special = {tokenizer.token_text(token): token for token in sorted(tokenizer.special_ids)}
        """Ids of special tokens by their text. A grammar may name them, as `<|name|>` or `<[id]>`."""
        self._known: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()
        self.threads = ThreadPoolExecutor(AT_ONCE, "grammar-check")
        """Where `accept` can be called without holding up anything else."""

    def accept(self, form: StructuredOutputs) -> StructuredOutputs:
        """`form` as a grammar that is known to be good. Raises ValueError, saying why, when there is none."""
        if not self._has_bytes:
            raise ValueError("the tokens of this model's tokenizer have no bytes of their own, so that no grammar can "
                             "be followed")
        grammar = grammar_of(form)
        self.check(grammar)
        return StructuredOutputs(grammar=grammar)

    def check(self, grammar: str) -> None:
        """Raise ValueError, saying why, when llguidance refuses the grammar or takes too long over it."""
        with self._lock:
            trouble = self._known.get(grammar)
        if trouble is None:
            trouble = self._ask(grammar)
            with self._lock:
                self._known[grammar] = trouble
                while len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)
        if trouble:
            raise ValueError(trouble)

    def _ask(self, grammar: str) -> str:
        task = json.dumps({"grammar": grammar, "special": self.special})
        # A script, which imports nothing of Tandem's; the environment must find llguidance as it does here.
        command = script_command(str(Path(probe.__file__)))
        try:
            done = subprocess.run(command, input=task, text=True, capture_output=True, timeout=TIMEOUT_S, check=False,
                                  env=child_environment())
        except subprocess.TimeoutExpired:
            return TOO_COMPLEX
        try:
            [trouble] = json.loads(done.stdout)
        except ValueError:
            if done.returncode > 0:
                log.error("a grammar could not be tried: %s; its request is refused", done.stderr.strip()[-MAX_WORDS:])
            return TOO_COMPLEX
        return " ".join(str(trouble).split())[:MAX_WORDS]
