"""Is a grammar fit to be sent to the ranks? Asked before a request is accepted."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import threading
from collections import OrderedDict
from pathlib import Path

from tandem.env import child_environment
from tandem.errors import UnavailableError
from tandem.guided import probe
from tandem.guided.grammar import grammar_of
from tandem.processes.interpreter import script_command
from tandem.protocol.request import StructuredOutputs
from tandem.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

TIMEOUT_S = 30.0
"""Seconds on the clock that a process which tries a grammar may take; its own limit is one of processor time."""
REMEMBERED = 512
MAX_WORDS = 400
TOO_COMPLEX = "it is too complex to be compiled"
OWN_ENDS = frozenset({-signal.SIGXCPU, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGILL,
                      -signal.SIGTRAP})
"""Exit codes of a process that the grammar itself has ended: its time is used up, its stack or memory full."""


class Trial:
    """One grammar, tried in a process of its own."""

    def __init__(self, grammar: str, special: dict[str, int]) -> None:
        self._task = json.dumps({"grammar": grammar, "special": special})
        self._process: subprocess.Popen[str] | None = None
        self._ended = False
        self._lock = threading.Lock()

    def run(self) -> str:
        """Return what is wrong with the grammar, or nothing. Raises UnavailableError when it could not be tried."""
        # A script, which imports nothing of Tandem's; the environment must find llguidance as it does here.
        command = script_command(str(Path(probe.__file__)))
        try:
            with self._lock:
                if self._ended:
                    raise _untried()
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                                 stderr=subprocess.PIPE, text=True, env=child_environment())
            with self._process as process:
                try:
                    output, errors = process.communicate(self._task, TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    raise _untried() from None
        except OSError as error:  # no memory, no descriptor
            log.error("a grammar could not be tried: %s; its request is refused with 503", error)
            raise _untried() from None
        if process.returncode in OWN_ENDS:
            return TOO_COMPLEX
        try:
            [trouble] = json.loads(output)
        except ValueError:
            if "MemoryError" in errors or "PanicException" in errors:
                return TOO_COMPLEX
            if not self._ended:
                log.error("a grammar could not be tried, exit code %d: %s; its request is refused with 503",
                          process.returncode, errors.strip()[-MAX_WORDS:])
            raise _untried() from None
        return " ".join(str(trouble).split())[:MAX_WORDS]

    def end(self) -> None:
        """End the trial: its caller has left."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.kill()


def _untried() -> UnavailableError:
    return UnavailableError("The grammar could not be tried now, as the machine is busy; try again shortly.",
                            retry_after=5.0, code="grammar_untried")


class GrammarCheck:
    """Tries each grammar once. Threads may share one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._has_bytes = tokenizer.scheme.has_bytes
        self.special = {tokenizer.token_text(token): token for token in sorted(tokenizer.special_ids)}
        """Ids of special tokens by their text. A grammar may name them, as `<|name|>` or `<[id]>`."""
        self._known: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def accept(self, form: StructuredOutputs) -> StructuredOutputs:
        """`form` as a grammar that is known to be good. Raises ValueError, saying why, when there is none, and
        UnavailableError when it could not be tried.
        """
        self.require_bytes()
        grammar = grammar_of(form)
        self.check(grammar)
        return StructuredOutputs(grammar=grammar)

    def require_bytes(self) -> None:
        """Raise ValueError when no grammar can be followed with this tokenizer."""
        if not self._has_bytes:
            raise ValueError("the tokens of this model's tokenizer have no bytes of their own, so that no grammar can "
                             "be followed")

    def check(self, grammar: str) -> None:
        """Raise ValueError, saying why, when llguidance refuses the grammar or takes too long over it, and
        UnavailableError when it could not be tried.
        """
        trouble = self.known(grammar)
        if trouble is None:
            trouble = self.trial(grammar).run()
            self.remember(grammar, trouble)
        if trouble:
            raise ValueError(trouble)

    def trial(self, grammar: str) -> Trial:
        """A trial of the grammar, to be run."""
        return Trial(grammar, self.special)

    def known(self, grammar: str) -> str | None:
        """Return what is wrong with a grammar, empty if nothing; None when it was not tried lately."""
        with self._lock:
            return self._known.get(grammar)

    def remember(self, grammar: str, trouble: str) -> None:
        """Keep the outcome of a trial."""
        with self._lock:
            self._known[grammar] = trouble
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
