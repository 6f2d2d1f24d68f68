"""Pool of sandboxed worker processes for large or costly parts of requests, which would block the event loop.

Workers start on demand and are reused. They are killed when the client disconnects, or at their time and memory limits.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tandem.errors import RequestError, ServerError, UnavailableError
from tandem.log import Seldom
from tandem.processes.sandbox import Sandbox, SandboxEnded, SandboxTask, TaskBroken, TaskRefused, TaskReply
from tandem.server.chats.texts import FILES_AWAY
from tandem.server.failures import refused
from tandem.server.workers.fair_semaphore import FairSemaphore

logger = logging.getLogger(__name__)
seldom = Seldom(logger)

AT_ONCE = 2
CPU_S = 20
"""CPU time limit of one task, in seconds."""
MEMORY_BYTES = 3 * 1024**3
"""Most memory, in bytes, that one task may add to its process."""
WALL_S = 120.0
"""Wall-clock limit of one task, in seconds."""
WORK = "tandem.server.workers.work"
Answer = TypeVar("Answer")


class Workers:
    """Worker processes of one api. Not thread-safe: use on one event loop."""

    def __init__(self, most_waiting: int = 0) -> None:
        """`most_waiting`: as for `FairSemaphore`."""
        self._semaphore = FairSemaphore(AT_ONCE, most_waiting)
        self._idle: list[Sandbox] = []
        self._busy: set[Sandbox] = set()
        self._threads = ThreadPoolExecutor(2 * AT_ONCE, "workers")
        self._closed = False

    async def ask(
        self, group: str, function: str, arguments: Mapping[str, object], answer: type[Answer], *, prepare: str = ""
    ) -> Answer:
        """Run a function of `work.py` in a worker and return its result; cancelling kills the worker.

        `group`: client group, for fairness. `prepare`: function run first, outside the memory limit. Raises RequestError
        (from the function, or over the limits), UnavailableError, OverloadedError, ServerError.
        """
        task = SandboxTask(WORK, function, dict(arguments), prepare, CPU_S, MEMORY_BYTES, WALL_S)
        reply = await self.reply(group, task)
        if isinstance(reply, SandboxEnded):
            if reply.over_limits:
                raise RequestError(
                    f"The request takes more than {CPU_S} s of computing or {MEMORY_BYTES // 2**30} GiB "
                    "of memory before a model can work on it; make it smaller.",
                    code="request_too_expensive",
                )
            if reply.how:
                logger.error("a worker process %s; its request is refused with 503, the next gets another one", reply.how)
            raise _unavailable()
        if isinstance(reply, TaskRefused) and reply.code == FILES_AWAY:
            seldom.error(
                "a worker process cannot load the tokenizer: %s; large requests get 503 until its files are mended", reply.message
            )
            raise UnavailableError("The tokenizer cannot be loaded; try again later.", retry_after=30.0, code=FILES_AWAY)
        if isinstance(reply, TaskRefused):
            raise refused(reply.status, reply.message, param=reply.param, code=reply.code)
        if isinstance(reply, TaskBroken):
            logger.error(
                "unexpected %s in a worker process; its request ends with status 500, all else goes on; please report it\n%s",
                reply.name,
                reply.frames,
            )
            raise ServerError("Internal server error", code="internal_error")
        return reply.decoded(answer)

    async def reply(self, group: str, task: SandboxTask) -> TaskReply | SandboxEnded:
        """Wait for a slot, run `task` in a worker, and return its reply. Raises UnavailableError, OverloadedError."""
        frame = task.encoded()
        async with self._semaphore.turn(group, len(frame)):
            if self._closed:
                raise _unavailable()
            while self._idle and not self._idle[-1].alive:
                self._threads.submit(self._idle.pop().end)
            worker = self._idle.pop() if self._idle else Sandbox(subprocess.DEVNULL)  # libraries may quote a prompt
            self._busy.add(worker)
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, worker.ask, frame, task.wall_s)
            except asyncio.CancelledError:
                self._threads.submit(worker.end)  # in a thread: it waits for the process
                worker.usable = False
                raise
            finally:
                self._busy.discard(worker)
                if worker.usable:
                    self._idle.append(worker)

    async def close(self) -> None:
        """Stop all workers and wait for them to exit."""
        self._closed = True
        for worker in (*self._busy, *self._idle):
            self._threads.submit(worker.end)
        await asyncio.to_thread(self._threads.shutdown)


def _unavailable() -> UnavailableError:
    return UnavailableError(
        "The request could not be read now, as the machine is busy; try again shortly.",
        retry_after=5.0,
        code="worker_unavailable",
    )
