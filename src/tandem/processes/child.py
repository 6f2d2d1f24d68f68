"""Child processes that never outlive their parent: Python modules with a payload and a lifeline on standard input."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from tandem.crash_guard import start_thread
from tandem.errors import SpawnError
from tandem.processes.interpreter import module_command
from tandem.system.state import process_state

PR_SET_PDEATHSIG = 1
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP)
"""Signals that a program's own fault brings about."""
GUARD = """cat >/dev/null; [ "$(ps -o ppid= -p $$ | tr -d ' ')" = "$0" ] && kill -9 "$0" """
_spawner = ThreadPoolExecutor(1, thread_name_prefix="spawn")
"""Thread that starts all children: on Linux the parent-death signal fires when the thread that started a child ends."""


class ChildProcess:
    """A Python module in its own process.

    The payload (settings and keys: arguments hold no secrets) is written to its standard input first. The pipe then stays
    open as a lifeline: when this process ends for any reason, the pipe closes and the child exits.
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
        """Start `python -m module arguments...` and send `payload`, which must not contain a newline.

        `env` is the child's whole environment; it inherits the descriptors `pass_fds`. `output` is a descriptor for its
        stdout and stderr; None inherits both. Raises SpawnError.
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
        except (OSError, MemoryError, RuntimeError) as error:  # RuntimeError: no thread can be started
            raise SpawnError(f"the {name} cannot be started: {str(error) or 'out of memory'}") from error
        self.tell(payload)

    def tell(self, payload: bytes) -> None:
        """Send another payload, without a newline, for the child's `receive_payload`. Does nothing once the child has ended."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:  # by `wait`
            return
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
        """Return a phrase such as `exited with code 1` or `was killed (SIGKILL)`."""
        if (code := self._process.returncode) is None:
            return "is running"
        if code >= 0:
            return f"exited with code {code}"
        return f"{'crashed' if -code in CRASHES else 'was killed'} ({signal.Signals(-code).name})"

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def retire(self) -> None:
        """Send SIGUSR1, on which an api accepts no further connections and ends with its last one."""
        self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process."""
        self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the process to end, then close the lifeline. Return False after `timeout_s` seconds."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        return True


class NoPayload(SystemExit):
    """The parent ended before its payload was complete. Unless caught, exit silently with code 1."""


def receive_payload() -> bytes:
    """Return the parent's next payload; runs in the child. Call before `watch_lifeline`. Raises NoPayload."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        raise NoPayload(1)
    return line[:-1]


@contextlib.contextmanager
def guarded_lifeline(platform: str = sys.platform) -> Iterator[None]:
    """Have the child killed when the parent ends, even during code that holds the GIL; runs in the child.

    On Linux `watch_lifeline` suffices. Elsewhere a shell reads the lifeline too. When it closes, the shell kills this
    process if that is still the shell's parent.
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
    """Have the kernel kill this process when its parent dies. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def lines_of_parent(end_s: float) -> Iterator[bytes]:
    """Yield the lines that the parent writes; runs in the child. The process exits `end_s` seconds after the end of its input
    at the latest, even while a line is handled."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            lines.put(line)
        lines.put(b"")
        time.sleep(end_s)
        os._exit(1)

    start_thread(read, name="requests", on_failure=lambda _: os._exit(1))
    return iter(lines.get, b"")


def watch_lifeline(on_loss: Callable[[], None] | None = None) -> None:
    """Call `on_loss` when the parent ends, or exit at once if it is None; runs in the child.

    A thread reads the pipe. Code that holds the GIL (such as MLX's ring start-up) delays this thread. Without `on_loss`,
    Linux's parent-death signal therefore kills the process too.
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
