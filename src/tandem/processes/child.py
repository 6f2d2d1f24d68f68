"""Child processes that never outlive their parent: Python modules with a payload and a lifeline on standard input."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from tandem.crash_guard import start_thread
from tandem.errors import SpawnError
from tandem.processes.interpreter import module_command
from tandem.system.state import process_state

PR_SET_PDEATHSIG = 1
GUARD = """cat >/dev/null; [ "$(ps -o ppid= -p $$ | tr -d ' ')" = "$0" ] && kill -9 "$0" """
_spawner = ThreadPoolExecutor(1, thread_name_prefix="spawn")
"""Starts all children: Linux takes the end of the thread that started one for the end of its parent."""


class ChildProcess:
    """A Python module in a process of its own.

    The payload (settings and keys: nothing secret stands in arguments) goes first down its standard input, which then
    stays open as a lifeline: when this process ends, however it ends, the pipe closes and the child goes too.
    """

    def __init__(
        self,
        module: str,
        payload: bytes,
        *,
        env: Mapping[str, str],
        name: str,
        arguments: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
        output: int | None = None,
    ) -> None:
        """Start `python -m module arguments...`.

        `payload` must not contain a newline; `env` is the child's whole environment, `pass_fds` are files that it
        inherits. What it writes goes to the file `output`, if one is given. Raises SpawnError.
        """
        self.name = name
        command = module_command(module, *arguments)
        try:
            self._process = _spawner.submit(
                subprocess.Popen,
                command,
                stdin=subprocess.PIPE,
                env=dict(env),
                start_new_session=True,
                pass_fds=tuple(pass_fds),
                stdout=output,
                stderr=output,
            ).result()
        except (OSError, MemoryError, RuntimeError) as error:  # RuntimeError: not even a thread can be had
            raise SpawnError(f"the {name} cannot be started: {str(error) or 'out of memory'}") from error
        self.tell(payload)

    def tell(self, payload: bytes) -> None:
        """Send one more payload, without a newline in it, for the child's `receive_payload`. Does nothing for a child
        that has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(payload + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self._process.poll()

    @property
    def stopped(self) -> bool:
        """True while the process is stopped, by SIGSTOP or a debugger."""
        return self.poll() is None and process_state(self.pid) in ("T", "t")

    def describe_exit(self) -> str:
        """Return in words how the process ended."""
        code = self._process.returncode
        if code is None:
            return "is running"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL, which ends a stopped process too."""
        self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the process; False if `timeout_s` seconds pass first. Closes the lifeline afterwards."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        return True


class NoPayload(SystemExit):
    """The parent went before its payload was whole. Ends the process without a word, unless it is caught."""


def receive_payload() -> bytes:
    """In the child: the next payload that the parent sent. Call it before `watch_lifeline`.

    Raises NoPayload.
    """
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        raise NoPayload(1)
    return line[:-1]


@contextlib.contextmanager
def guarded_lifeline(platform: str = sys.platform) -> Iterator[None]:
    """In the child, around code that keeps the interpreter lock: its end is not put off when the parent goes meanwhile.

    Linux does that by itself (`watch_lifeline`). Elsewhere a shell reads the lifeline too, and kills this process when
    it closes, if this process is still its parent.
    """
    if platform == "linux":
        yield
        return
    guard = subprocess.Popen(
        ["/bin/sh", "-c", GUARD, str(os.getpid())],
        stdin=0,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(guard.pid, signal.SIGKILL)
        guard.wait()


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def watch_lifeline(on_loss: Callable[[], None] | None = None) -> None:
    """Watch the parent, in the child: when it ends call `on_loss`, or exit at once if there is none.

    A thread reads the pipe. Code that keeps the interpreter lock (MLX's ring start-up does) would stop it, so on Linux
    the kernel is asked for a signal as well.
    """

    def wait() -> None:
        while os.read(0, 4096):
            pass
        if on_loss is None:
            os._exit(1)
        on_loss()

    if on_loss is None:
        die_with_parent()
    start_thread(wait, name="lifeline")
