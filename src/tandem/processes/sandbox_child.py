"""Process of a `Sandbox`: run tasks from a pipe, one at a time, within limits.

Started as `python -m tandem.processes.sandbox_child FD`. It can be killed at any time; only its current task is lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import resource
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import get_type_hints

import msgspec

from tandem.crash_guard import own_process, start_thread
from tandem.errors import RequestError, TandemError
from tandem.processes.child import receive_payload, watch_lifeline
from tandem.processes.sandbox import EXIT_MEMORY, SandboxTask, TaskBroken, TaskDone, TaskRefused, TaskReply

KEPT_BYTES = 1024**3
"""Resident bytes above which the process exits after a task instead of running another."""
NICENESS = 10
_LOOK_S = 0.1
_MACOS = sys.platform == "darwin"


class ProcessLimits:
    """Limits of the whole process, renewed for each task.

    On Linux the kernel refuses memory; on macOS a thread polls the use of memory and exits the process.
    """

    def __init__(self) -> None:
        self._most_resident = sys.maxsize
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            os.nice(NICENESS)
        if _MACOS:
            start_thread(self._look, name="memory")
        else:
            with contextlib.suppress(OSError):  # under memory pressure Linux then kills this process before the engine
                Path("/proc/self/oom_score_adj").write_text("1000")
        gc.disable()  # a collection would traverse millions of lists, and long-lived objects here form no cycles

    def renew(self, cpu_s: int, memory_bytes: int) -> None:
        """Allow `cpu_s` seconds of processor time and `memory_bytes` more memory from now on."""
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + cpu_s)
        if _MACOS:
            self._most_resident = peak_bytes() + memory_bytes
        else:
            _limit(resource.RLIMIT_AS, address_space() + memory_bytes)

    def lift(self) -> None:
        """Remove the limits until the next task, and return free memory to the system where the C library can."""
        self._most_resident = sys.maxsize
        for kind in (resource.RLIMIT_CPU, *(() if _MACOS else (resource.RLIMIT_AS,))):
            last = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (last, last))
        gc.collect(0)
        if resident_bytes() > KEPT_BYTES // 2:
            gc.collect()
            with contextlib.suppress(AttributeError, OSError):
                ctypes.CDLL(None).malloc_trim(0)

    def _look(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            if peak_bytes() > self._most_resident:
                os._exit(EXIT_MEMORY)


def _limit(kind: int, most: int) -> None:
    """Set a soft limit of `most`, or of the inherited hard limit if that is lower."""
    last = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if last == resource.RLIM_INFINITY else min(most, last), last))


def peak_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if _MACOS else 1024)


def address_space() -> int:
    """Return the size of this process's address space in bytes. Linux only."""
    return int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; on macOS its peak."""
    return peak_bytes() if _MACOS else int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()


def reply_to(task: SandboxTask, limits: ProcessLimits | None) -> TaskReply:
    """Run the task within `limits` (None: unlimited) and return its result or error. Exit the process when memory runs out."""
    try:
        module = importlib.import_module(task.module)
        function = getattr(module, task.function)
        hints = get_type_hints(function)
        arguments = {name: msgspec.convert(value, hints[name], dec_hook=type.__call__) for name, value in task.arguments.items()}
        if task.prepare:
            getattr(module, task.prepare)(**arguments)
        if limits is not None:
            limits.renew(task.cpu_s, task.memory_bytes)
        return TaskDone(answer=msgspec.Raw(msgspec.msgpack.encode(function(**arguments))))
    except RequestError as error:
        return TaskRefused(message=error.message, param=error.param, code=error.code, status=error.status)
    except TandemError as error:
        return TaskRefused(message=error.message, param=error.param, code=None, status=400)
    except MemoryError:
        os._exit(EXIT_MEMORY)
    except BaseException as error:  # noqa: BLE001 - the boundary of the process: the parent logs it
        # BaseException also covers a panic in a Rust library, such as tokenizers.
        return TaskBroken(name=type(error).__name__, message=str(error), frames="".join(traceback.format_tb(error.__traceback__)))


def main() -> None:
    """Run tasks until the parent closes the pipe or memory use requires a new process."""
    own_process()
    receive_payload()
    watch_lifeline()
    connection = Connection(int(sys.argv[1]))
    decode = msgspec.msgpack.Decoder(SandboxTask).decode
    limits: ProcessLimits | None = None
    while True:
        try:
            task = decode(connection.recv_bytes())
        except (EOFError, ConnectionError):
            return
        if limits is None and task.cpu_s:
            limits = ProcessLimits()
        reply = reply_to(task, limits)
        del task
        if limits is not None:
            limits.lift()
            reply.last = resident_bytes() > KEPT_BYTES
        connection.send_bytes(msgspec.msgpack.encode(reply))
        if reply.last:
            return


if __name__ == "__main__":
    main()
