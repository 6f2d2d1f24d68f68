"""A worker process: reads tasks from a pipe, one after the other, within limits of its own.

Started as `python -m tandem.server.workers.child FD`. It may be killed at any time; nothing is lost but its task.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from tandem.borders import own_process, start_thread
from tandem.errors import RequestError, UsageError
from tandem.processes.child import receive_payload, watch_lifeline
from tandem.server.workers.tasks import Broken, Done, Refused, Reply, Task

CPU_S = 20
"""Seconds of processor time for one task."""
MEMORY_BYTES = 3 * 1024**3
"""What one task may add to the process. On Linux the kernel refuses more, elsewhere a thread looks."""
KEPT_BYTES = 1024**3
"""Most memory with which a process goes on to its next task."""
NICENESS = 10
EXIT_MEMORY = 77
_LOOK_S = 0.1
_MACOS = sys.platform == "darwin"


class Limits:
    """Limits of the whole process, renewed for each task."""

    def __init__(self) -> None:
        self._most_resident = sys.maxsize
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            os.nice(NICENESS)
        if _MACOS:
            start_thread(self._look, name="memory")
        else:
            with contextlib.suppress(OSError):  # rather this process than the engine
                Path("/proc/self/oom_score_adj").write_text("1000")

    def renew(self) -> None:
        """Give the next task its time and memory."""
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + CPU_S)
        if _MACOS:
            self._most_resident = peak_bytes() + MEMORY_BYTES
        else:
            _limit(resource.RLIMIT_AS, address_space() + MEMORY_BYTES)

    def lift(self) -> None:
        """Remove the limit until the next task."""
        self._most_resident = sys.maxsize
        for kind in (resource.RLIMIT_CPU, *(() if _MACOS else (resource.RLIMIT_AS,))):
            last = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (last, last))

    def _look(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            if peak_bytes() > self._most_resident:
                os._exit(EXIT_MEMORY)


def _limit(kind: int, most: int) -> None:
    """Set a soft limit; where whoever started the server has set a lower hard one, that holds."""
    last = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if last == resource.RLIM_INFINITY else min(most, last), last))


def peak_bytes() -> int:
    """Most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if _MACOS else 1024)


def address_space() -> int:
    """Bytes of addresses that are in use."""
    return int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()


def resident_bytes() -> int:
    """Memory that this process has now; on macOS the most that it has had."""
    return peak_bytes() if _MACOS else int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()


def reply_to(task: Task, limits: Limits) -> Reply:
    """Do the task."""
    from tandem.server.workers.work import answer, prepare

    try:
        prepare(task)
        limits.renew()
        return Done(msgspec.Raw(msgspec.msgpack.encode(answer(task))))
    except RequestError as error:
        return Refused(error.message, error.param, error.code, error.status)
    except UsageError as error:
        return Refused(error.message, error.param, None, 400)
    except MemoryError:
        os._exit(EXIT_MEMORY)
    except BaseException as error:  # noqa: BLE001 - the edge of the process: the parent says so in the log
        # Also what no Exception is: a panic in a library written in Rust, such as tokenizers.
        # Without its message, which may quote a prompt.
        return Broken(type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))


def main() -> None:
    """Work until the parent closes the pipe."""
    own_process()
    receive_payload()
    watch_lifeline()
    limits = Limits()
    connection = Connection(int(sys.argv[1]))
    decode = msgspec.msgpack.Decoder(Task).decode
    import tandem.server.workers.work  # noqa: F401 - takes a second, which is not the first task's

    gc.disable()  # it would look at millions of lists again and again, and nothing here lives in circles for long
    while True:
        try:
            task = decode(connection.recv_bytes())
        except (EOFError, ConnectionError):
            return
        reply = reply_to(task, limits)
        limits.lift()
        del task
        gc.collect(0)
        if resident_bytes() > KEPT_BYTES // 2:
            _give_back()
        reply.last = reply.last or resident_bytes() > KEPT_BYTES
        connection.send_bytes(msgspec.msgpack.encode(reply))
        if reply.last:
            return


def _give_back() -> None:
    """Return what is free to the system, where the C library can."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    main()
