"""Compilation check of grammars before a request is accepted: only grammars that compile quickly reach the ranks."""

from __future__ import annotations

import logging
import subprocess
import threading
import weakref
from collections import OrderedDict

from tandem.errors import UnavailableError
from tandem.guided.grammar import grammar_of
from tandem.processes.sandbox import Sandbox, SandboxEnded, SandboxTask, TaskBroken, TaskDone, TaskRefused, TaskReply
from tandem.protocol.request import StructuredOutputs
from tandem.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

PROBE = "tandem.guided.compile_probe"
CPU_S = 5
MEMORY_BYTES = 2 * 1024**3
TIMEOUT_S = 30.0
"""Wall-clock limit in seconds of a trial compilation."""
REMEMBERED = 512
MAX_WORDS = 400
TOO_COMPLEX = "it is too complex to be compiled"


class GrammarCheck:
    """Compilation check of grammars in a sandbox, with cached results. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._has_bytes = tokenizer.scheme.has_bytes
        self.special = {tokenizer.token_text(token): token for token in sorted(tokenizer.special_ids)}
        """Special token ids by text. A grammar may refer to them as `<|name|>` or `<[id]>`."""
        self._known: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()
        self._sandbox: Sandbox | None = None
        self._trying = threading.Lock()

    def accept(self, form: StructuredOutputs) -> StructuredOutputs:
        """Return `form` as a checked grammar. Raises ValueError with the reason for an unusable one, and UnavailableError if
        the check could not run."""
        self.require_bytes()
        grammar = grammar_of(form)
        self.check(grammar)
        return StructuredOutputs(grammar=grammar)

    def require_bytes(self) -> None:
        """Raise ValueError if the tokenizer does not support grammars."""
        if not self._has_bytes:
            raise ValueError(
                "the tokens of this model's tokenizer have no bytes of their own, so that no grammar can be followed"
            )

    def check(self, grammar: str) -> None:
        """Raise ValueError with the reason if llguidance rejects the grammar or is too slow on it, and UnavailableError if
        the check could not run."""
        trouble = self.known(grammar)
        if trouble is None:
            trouble = self.judge(grammar, self._ask(self.task(grammar)))
        if trouble:
            raise ValueError(trouble)

    def _ask(self, task: SandboxTask) -> TaskReply | SandboxEnded:
        """Run a task in this check's sandbox, which is reused."""
        with self._trying:
            if self._sandbox is None or not (self._sandbox.usable and self._sandbox.alive):
                self._sandbox = Sandbox(subprocess.DEVNULL)
                weakref.finalize(self, self._sandbox.end)
            return self._sandbox.ask(task.encoded(), task.wall_s)

    def task(self, grammar: str) -> SandboxTask:
        """Return the sandbox task that checks the grammar."""
        arguments: dict[str, object] = {"grammar": grammar, "special": self.special}
        return SandboxTask(PROBE, "tried", arguments, "", CPU_S, MEMORY_BYTES, TIMEOUT_S)

    def known(self, grammar: str) -> str | None:
        """Return the cached error of a grammar, empty if it is fine; None if not checked recently."""
        with self._lock:
            return self._known.get(grammar)

    def judge(self, grammar: str, reply: TaskReply | SandboxEnded) -> str:
        """Return and cache the error that a task's reply reports, empty if the grammar is fine. Raises UnavailableError if
        the check could not run."""
        match reply:
            case TaskDone():
                trouble = " ".join(reply.decoded(str).split())[:MAX_WORDS]
            case SandboxEnded(over_limits=True) | TaskBroken(name="MemoryError" | "PanicException"):
                trouble = TOO_COMPLEX
            case SandboxEnded() | TaskBroken() | TaskRefused():
                how = "refused it"  # the exception text may quote the grammar
                if not isinstance(reply, TaskRefused):
                    how = reply.how if isinstance(reply, SandboxEnded) else f"met {reply.name}"
                if how:
                    log.error("a grammar could not be tried, its process %s; its request is refused with 503", how[-MAX_WORDS:])
                raise UnavailableError(
                    "The grammar could not be tried now, as the machine is busy; try again shortly.",
                    retry_after=5.0,
                    code="grammar_untried",
                )
        with self._lock:
            self._known[grammar] = trouble
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return trouble
