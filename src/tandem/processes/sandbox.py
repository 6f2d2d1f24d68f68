"""Processes with limits, for work that is large or that strangers decide about: one task after the other, each bounded.

A task names a function by its module, so that whoever asks need not import what the work needs (MLX, the planner). A
task that passes its limits, or crashes, ends the process and nothing else.
"""

from __future__ import annotations

import contextlib
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
"""Exit code of a process whose task took more memory than it may."""
OVER_LIMITS = frozenset(
    {EXIT_MEMORY, -signal.SIGXCPU, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGTRAP}
)
"""Exit codes of a process that its task has ended: time or memory used up, the stack full."""
LONGEST_WORDS = 500
Answer = TypeVar("Answer")


class SandboxTask(Struct, frozen=True):
    """A function to call in a sandbox, and what the call may use."""

    module: str
    function: str
    arguments: dict[str, object]
    """By parameter name; the sandbox converts them to the types that the function's annotations name."""
    prepare: str = ""
    """A function of the module to call first with the same arguments and without limits, as it loads our own files."""
    cpu_s: int = 0
    """Seconds of processor time; 0: unlimited."""
    memory_bytes: int = 0
    """Memory that the task may add to the process; 0: unlimited."""
    wall_s: float = 120.0
    """Seconds on the clock until the process is killed."""

    def encoded(self) -> bytes:
        """Return the task as `Sandbox.ask` takes it."""
        return msgspec.msgpack.encode(self)


class _BaseReply(Struct, kw_only=True):
    last: bool = False
    """The process ends after this reply."""


class TaskDone(_BaseReply, tag=True):
    """The function returned."""

    answer: Raw

    def decoded(self, kind: type[Answer]) -> Answer:
        """Return the answer as a value of the type `kind`."""
        return msgspec.msgpack.decode(self.answer, type=kind)


class TaskRefused(_BaseReply, tag=True):
    """The function raised an error of ours, which says what is wrong with the request."""

    message: str
    param: str | None
    code: str | None
    status: int

    @property
    def why(self) -> str:
        """Why there is no answer."""
        return self.message


class TaskBroken(_BaseReply, tag=True):
    """The function raised something unexpected."""

    name: str
    message: str
    """Words of the exception. They may quote a prompt: never log them for a client's request."""
    frames: str

    @property
    def why(self) -> str:
        """Why there is no answer."""
        return f"{self.name}: {' '.join(self.message.split())[:LONGEST_WORDS]}"


class SandboxEnded(Struct):
    """The process ended before it replied, or never started."""

    over_limits: bool
    """The task is to blame: it used up what it may."""
    how: str
    """End of the process as the end of a sentence; empty where `Sandbox.end` was called."""

    @property
    def why(self) -> str:
        """Why there is no answer."""
        return f"its process {self.how}"


TaskReply = TaskDone | TaskRefused | TaskBroken
_decode = msgspec.msgpack.Decoder(TaskReply).decode


class Sandbox:
    """One process, started for its first task. `ask` blocks; `end` may come from another thread at any time."""

    def __init__(self, output: int) -> None:
        """`output`: file descriptor for what the process prints, or subprocess.DEVNULL."""
        self.usable = True
        """True while another task can be sent."""
        self._output = output
        self._late = ""
        self._process: ChildProcess | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()

    @property
    def alive(self) -> bool:
        """True while the process runs or has yet to be started."""
        return self._process is None or self._process.poll() is None

    def ask(self, task: bytes, wall_s: float) -> TaskReply | SandboxEnded:
        """Send a task, encoded, and wait for the reply, at most `wall_s` seconds."""
        # Not a timeout of the wait: a suspended process does not read its task either.
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
        except (OSError, SpawnError) as error:  # no memory, no descriptor
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
                        name="worker",
                        output=self._output,
                        arguments=(str(theirs.fileno()),),
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
        """Kill the process. Safe to call again."""
        with self._lock:
            self.usable = False
            if self._process is not None:
                self._process.kill()
                self._process.wait(5.0)
            self._connection = None  # closed once nothing reads from it


def run_once(task: SandboxTask) -> TaskReply | SandboxEnded:
    """Run one task in a process of its own. Returns the reply, or how the process ended, with its last line of output."""
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
