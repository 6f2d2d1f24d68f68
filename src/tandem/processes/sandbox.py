"""Sandbox processes with limits, for work that is large or controlled by untrusted input: one bounded task at a time.

A task names a function by its module, so the caller need not import the function's dependencies (MLX, the planner). A task
that exceeds its limits or crashes ends only its sandbox process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from tempfile import TemporaryFile
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct

from tandem.env import child_environment
from tandem.errors import SpawnError
from tandem.processes.child import ChildProcess

MODULE = "tandem.processes.sandbox_child"
EXIT_MEMORY = 77
"""Exit code of a process whose task exceeded its memory limit."""
OVER_LIMITS = frozenset(
    {EXIT_MEMORY, -signal.SIGXCPU, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGTRAP}
)
"""Exit codes of a process ended by its task: processor time or memory exceeded, stack overflow."""
LONGEST_WORDS = 500
Answer = TypeVar("Answer")


class SandboxTask(Struct, frozen=True):
    """A function to call in a sandbox, and limits for the call."""

    module: str
    function: str
    arguments: dict[str, object]
    """Values by parameter name; the sandbox converts them to the types of the function's annotations."""
    prepare: str = ""
    """Function of the module to call first, with the same arguments but without limits, since it loads trusted files.
    Empty for none."""
    cpu_s: int = 0
    """Seconds of processor time; 0: unlimited."""
    memory_bytes: int = 0
    """Bytes that the task may add to the process's memory; 0: unlimited."""
    wall_s: float = 120.0
    """Wall-clock seconds after which the process is killed."""

    def encoded(self) -> bytes:
        """Return the task in msgpack, as `Sandbox.ask` takes it. Paths become texts."""
        return msgspec.msgpack.encode(self, enc_hook=os.fspath)


class _BaseReply(Struct, kw_only=True):
    last: bool = False
    """True if the process exits after this reply."""


class TaskDone(_BaseReply, tag=True):
    """The function returned."""

    answer: Raw

    def decoded(self, kind: type[Answer]) -> Answer:
        """Return the answer as a value of type `kind`."""
        return msgspec.msgpack.decode(self.answer, type=kind)


class TaskRefused(_BaseReply, tag=True):
    """The function raised a `TandemError`; `message` explains the fault in the request."""

    message: str
    param: str | None
    code: str | None
    status: int

    @property
    def why(self) -> str:
        """Reason why there is no answer."""
        return self.message


class TaskBroken(_BaseReply, tag=True):
    """The function raised an unexpected exception."""

    name: str
    message: str
    """Text of the exception. It may quote a prompt: never log it for a client's request."""
    frames: str

    @property
    def why(self) -> str:
        """Reason why there is no answer."""
        return f"{self.name}: {' '.join(self.message.split())[:LONGEST_WORDS]}"


class SandboxEnded(Struct):
    """The process ended before it replied, or never started."""

    over_limits: bool
    """True if the task caused the end by exceeding its limits."""
    how: str
    """Verb phrase such as `was killed (SIGXCPU)`; empty if `Sandbox.end` was called."""

    @property
    def why(self) -> str:
        """Reason why there is no answer."""
        return f"its process {self.how}"


TaskReply = TaskDone | TaskRefused | TaskBroken
_decode = msgspec.msgpack.Decoder(TaskReply).decode


class Sandbox:
    """One process, started at its first task. `ask` blocks; `end` may be called from another thread at any time."""

    def __init__(self, output: int | None, name: str = "worker") -> None:
        """Store `output`, a descriptor for the process's output, or subprocess.DEVNULL, or None for this one's. Its command
        line has `name`."""
        self.usable = True
        """True while further tasks can be sent."""
        self._output, self._name = output, name
        self._late = ""
        self._process: ChildProcess | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()

    @property
    def alive(self) -> bool:
        """True while the process runs or has not been started yet."""
        return self._process is None or self._process.poll() is None

    def ask(self, task: bytes, wall_s: float) -> TaskReply | SandboxEnded:
        """Send an encoded task and return the reply, or how the process ended. After `wall_s` seconds the process is killed."""
        # A timer, not a timeout of the wait: sending to a suspended process can block too.
        clock = threading.Timer(wall_s, self._end_late, (wall_s,))
        clock.daemon = True
        clock.start()
        try:
            connection = self._started()
            if connection is None:
                return SandboxEnded(False, "")
            with contextlib.suppress(BrokenPipeError):
                connection.send_bytes(task)
            reply: TaskReply = _decode(connection.recv_bytes())
        except (EOFError, ConnectionError):
            return self._ended()
        except (OSError, SpawnError) as error:  # no memory or no descriptor
            how = f"failed: {error}" if self.usable else ""
            self.end()
            return SandboxEnded(False, how)
        finally:
            clock.cancel()
        if reply.last:
            self.end()
        return reply

    def _started(self) -> Connection | None:
        with self._lock:
            if self.usable and self._connection is None:
                self._connection, theirs = Pipe()
                with theirs:
                    environment = child_environment({"TOKENIZERS_PARALLELISM": "false"})
                    self._process = ChildProcess(
                        MODULE,
                        b"",
                        env=environment,
                        name=self._name,
                        output=self._output,
                        arguments=(str(theirs.fileno()), self._name),
                        pass_fds=(theirs.fileno(),),
                    )
            return self._connection if self.usable else None

    def _ended(self) -> SandboxEnded:
        with self._lock:
            wanted = not self.usable
            assert self._process is not None
            self._process.wait(5.0)
            code, how = self._process.poll(), self._process.describe_exit()
        self.end()
        if code in OVER_LIMITS:
            return SandboxEnded(True, how)
        return SandboxEnded(False, self._late or ("" if wanted else how))

    def _end_late(self, wall_s: float) -> None:
        self._late = f"does not answer within {wall_s:.0f} s"
        self.end()

    def end(self) -> None:
        """Kill the process. Idempotent."""
        with self._lock:
            self.usable = False
            if self._process is not None:
                self._process.kill()
                self._process.wait(5.0)
            self._connection = None  # closed by garbage collection once `ask` has stopped reading it


def run_once(task: SandboxTask) -> TaskReply | SandboxEnded:
    """Run one task in its own process. Return the reply, or how the process ended, with its last line of output."""
    with TemporaryFile() as output:
        sandbox = Sandbox(output.fileno())
        try:
            reply = sandbox.ask(task.encoded(), task.wall_s)
        finally:
            sandbox.end()
        if isinstance(reply, SandboxEnded):
            output.seek(0)
            lines = output.read().decode(errors="replace").split("\n")
            said = [line.strip() for line in lines if line.strip()]
            reply.how = ": ".join([reply.how, *said[-1:]])[:LONGEST_WORDS]
        return reply
