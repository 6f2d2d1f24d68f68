"""Worker processes for what is large or costly in a request, so that the event loop and its clients never wait for it.

They are started when there is work, kept for more, killed when the client who wanted it leaves, and end by their own
limits of time and memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TypeVar

import msgspec

from tandem.env import child_environment
from tandem.errors import RequestError, ServerError, SpawnError, UnavailableError
from tandem.log import Seldom
from tandem.processes.child import ChildProcess
from tandem.server.failures import refused
from tandem.server.workers.child import CPU_S, EXIT_MEMORY, MEMORY_BYTES
from tandem.server.workers.tasks import FILES_AWAY, Broken, Refused, Reply, Task
from tandem.server.workers.turns import Turns

logger = logging.getLogger(__name__)
seldom = Seldom(logger)

AT_ONCE = 2
WALL_S = 120.0
"""Seconds on the clock for one task."""
MODULE = "tandem.server.workers.child"
_OWN_ENDS = frozenset({EXIT_MEMORY, -signal.SIGXCPU, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL,
                       -signal.SIGTRAP})
"""Exit codes of a process that its task has ended."""
_decode = msgspec.msgpack.Decoder(Reply).decode
Answer = TypeVar("Answer")


class Worker:
    """One worker process, from its first task on. `ask` blocks; `end` may come from another thread at any time."""

    def __init__(self) -> None:
        self.usable = True
        """True if the process can be asked again."""
        self._process: ChildProcess | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()

    @property
    def alive(self) -> bool:
        """True if the process runs, or will once it is asked."""
        return self._process is None or self._process.poll() is None

    def ask(self, task: bytes) -> Reply:
        """Return its reply. Raises RequestError when the task ends the process, UnavailableError for another end."""
        try:
            connection = self._started()
            with contextlib.suppress(BrokenPipeError):
                connection.send_bytes(task)
            reply: Reply = _decode(connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise self._ended() from None
        except (OSError, SpawnError) as error:  # no memory, no descriptor
            if self.usable:
                logger.error("a worker process failed: %s; its request is refused with 503", error)
            self.end()
            raise _unavailable() from None
        if reply.last:
            self.end()
        return reply

    def _started(self) -> Connection:
        with self._lock:
            if not self.usable:
                raise _unavailable()
            if self._connection is None:
                self._connection, theirs = Pipe()
                with theirs:
                    environment = child_environment({"TOKENIZERS_PARALLELISM": "false"})
                    self._process = ChildProcess(MODULE, b"", env=environment, name="worker",
                                                 arguments=(str(theirs.fileno()),), pass_fds=(theirs.fileno(),))
            return self._connection

    def _ended(self) -> RequestError:
        with self._lock:
            wanted = not self.usable
            assert self._process is not None
            self._process.wait(5.0)
            code, how = self._process.poll(), self._process.describe_exit()
        self.end()
        if code in _OWN_ENDS:
            return RequestError(f"The request takes more than {CPU_S} s of computing or {MEMORY_BYTES // 2**30} GiB of "
                                "memory before a model can work on it; make it smaller.", code="request_too_expensive")
        if not wanted:
            logger.error("a worker process %s; its request is refused with 503, the next gets another one", how)
        return _unavailable()

    def late(self) -> None:
        """End a process that neither reads its task nor answers, so that whoever waits for it goes on."""
        logger.error("a worker process does not answer within %.0f s; its request is refused with 503", WALL_S)
        self.end()

    def end(self) -> None:
        """Kill it. Safe to call again."""
        with self._lock:
            self.usable = False
            if self._process is not None:
                self._process.kill()
                self._process.wait(5.0)
            self._connection = None  # closed as soon as nobody reads from it


class Workers:
    """The worker processes of one api. Belongs to one event loop."""

    def __init__(self) -> None:
        self._turns = Turns(AT_ONCE)
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self._threads = ThreadPoolExecutor(2 * AT_ONCE, "workers")
        self._closed = False

    async def ask(self, group: str, task: Task, answer: type[Answer]) -> Answer:
        """What a worker makes of the task; the worker is killed when this is cancelled. `group` says for whom it is.

        Raises RequestError: what the worker finds, or that it ran into its limits; UnavailableError, OverloadedError.
        """
        frame = msgspec.msgpack.encode(task)
        async with self._turns.turn(group, len(frame)):
            reply = await self._reply(frame)
        if isinstance(reply, Refused) and reply.code == FILES_AWAY:
            seldom.error("a worker process cannot load the tokenizer: %s; large requests get 503 until its files are "
                         "mended", reply.message)
            raise UnavailableError("The tokenizer cannot be loaded; try again later.", retry_after=30.0,
                                   code=FILES_AWAY)
        if isinstance(reply, Refused):
            raise refused(reply.status, reply.message, param=reply.param, code=reply.code)
        if isinstance(reply, Broken):
            logger.error("unexpected %s in a worker process; its request ends with status 500, all else goes on; "
                         "please report it\n%s", reply.name, reply.frames)
            raise ServerError("Internal server error", code="internal_error")
        return msgspec.msgpack.decode(reply.answer, type=answer)

    async def _reply(self, frame: bytes) -> Reply:
        if self._closed:
            raise _unavailable()
        while self._idle and not self._idle[-1].alive:
            self._threads.submit(self._idle.pop().end)
        worker = self._idle.pop() if self._idle else Worker()
        self._busy.add(worker)
        loop = asyncio.get_running_loop()
        late = loop.call_later(WALL_S, self._threads.submit, worker.late)
        try:
            return await loop.run_in_executor(self._threads, worker.ask, frame)
        except asyncio.CancelledError:
            self._threads.submit(worker.end)  # in a thread: it waits for the process
            worker.usable = False
            raise
        finally:
            late.cancel()
            self._busy.discard(worker)
            if worker.usable:
                self._idle.append(worker)

    async def close(self) -> None:
        """End all."""
        self._closed = True
        for worker in (*self._busy, *self._idle):
            self._threads.submit(worker.end)
        await asyncio.to_thread(self._threads.shutdown)


def _unavailable() -> UnavailableError:
    return UnavailableError("The request could not be read now, as the machine is busy; try again shortly.",
                            retry_after=5.0, code="worker_unavailable")
