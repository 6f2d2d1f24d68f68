"""Trials of grammars before a request is accepted: only what compiles soon is sent to the ranks."""

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
"""Seconds on the clock that a process which tries a grammar may take."""
REMEMBERED = 512
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
        self._sandbox: Sandbox | None = None
        self._trying = threading.Lock()

    def accept(self, form: StructuredOutputs) -> StructuredOutputs:
        """Return `form` as a grammar that is known to be good. Raises ValueError, saying why, when there is none, and
        UnavailableError when it could not be tried.
        """
        self.require_bytes()
        grammar = grammar_of(form)
        self.check(grammar)
        return StructuredOutputs(grammar=grammar)

    def require_bytes(self) -> None:
        """Raise ValueError when no grammar can be followed with this tokenizer."""
        if not self._has_bytes:
            raise ValueError(
                "the tokens of this model's tokenizer have no bytes of their own, so that no grammar can be followed"
            )

    def check(self, grammar: str) -> None:
        """Raise ValueError, saying why, when llguidance refuses the grammar or takes too long over it, and
        UnavailableError when it could not be tried.
        """
        trouble = self.known(grammar)
        if trouble is None:
            trouble = self.judge(grammar, self._ask(self.task(grammar)))
        if trouble:
            raise ValueError(trouble)

    def _ask(self, task: SandboxTask) -> TaskReply | SandboxEnded:
        """Run a task in the sandbox of this check, which is kept for more."""
        with self._trying:
            if self._sandbox is None or not (self._sandbox.usable and self._sandbox.alive):
                self._sandbox = Sandbox(subprocess.DEVNULL)
                weakref.finalize(self, self._sandbox.end)
            return self._sandbox.ask(task.encoded(), task.wall_s)

    def task(self, grammar: str) -> SandboxTask:
        """Return the task that tries the grammar."""
        arguments: dict[str, object] = {"grammar": grammar, "special": self.special}
        return SandboxTask(PROBE, "tried", arguments, "", CPU_S, MEMORY_BYTES, TIMEOUT_S)

    def known(self, grammar: str) -> str | None:
        """Return what is wrong with a grammar that was tried, empty if nothing; None when it was not tried lately."""
        with self._lock:
            return self._known.get(grammar)

    def judge(self, grammar: str, reply: TaskReply | SandboxEnded) -> str:
        """Return what is wrong with the grammar of that task, empty if nothing, and remember it. Raises
        UnavailableError when it could not be tried."""
        match reply:
            case TaskDone():
                trouble = " ".join(reply.decoded(str).split())[:MAX_WORDS]
            case SandboxEnded(over_limits=True) | TaskBroken(name="MemoryError" | "PanicException"):
                trouble = TOO_COMPLEX
            case SandboxEnded() | TaskBroken() | TaskRefused():
                how = "refused it"  # what an exception says may quote the grammar
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
