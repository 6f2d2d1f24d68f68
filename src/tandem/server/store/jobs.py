"""The runner of jobs: requests in the journal that are answered even if no client waits, also after a restart.

A job runs its request through the routes as if it had come over HTTP: one of a client, or a line of a batch. An
endpoint with background requests of its own calls `Jobs.start_job`, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from fastapi import Request
from msgspec.structs import replace
from starlette.types import ASGIApp

from tandem.crash_guard import start_task
from tandem.errors import OverloadedError, RequestError, TooLargeError, UnavailableError
from tandem.server.context import Api, new_id
from tandem.server.failures import cancelled, internal_error
from tandem.server.store.calls import StoredReply, call, reply_of
from tandem.server.store.journal import LINE, Entry, Journal
from tandem.server.store.writer import Writer
from tandem.server.waiting import end_tasks
from tandem.server.workers.fair_semaphore import FairSemaphore

logger = logging.getLogger(__name__)

MOST_OPEN = 2048
"""Most requests that are not answered yet. A client may have as many as there are places left, and the same holds for
their bytes and --journal-max-gb."""
READY_POLL_S = 0.2
EVERY_S = 1.0
"""Interval in seconds of expiry checks, of syncs with `everysec`, and of retried writes."""
LINES_AT_ONCE = 32
"""Lines of all batches that are asked for at once, shared among clients."""
MOST_WAITING = 100 * LINES_AT_ONCE
"""Lines of one client that may wait for their turn: those of as many batches as it may have."""


class EventLog:
    """Whole server-sent events; the first has the number 0. Belongs to one event loop."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self._change = asyncio.Event()

    def restart(self, events: bytes) -> None:
        """Replace all events, because the job restarts."""
        self.events.clear()
        self.add(events)

    def add(self, events: bytes) -> None:
        """Append any number of events."""
        self.events += [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]
        self.wake()

    def wake(self) -> None:
        """Wake all that wait in `changed`."""
        self._change.set()
        self._change = asyncio.Event()

    async def changed(self, timeout_s: float) -> bool:
        """Wait for the next change; False if there is none within `timeout_s` seconds."""
        try:
            await asyncio.wait_for(self._change.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


@dataclass(eq=False)
class Job:
    """A request that is being answered."""

    entry: Entry
    reply: asyncio.Future[StoredReply]
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    waited_for: bool = False
    """True while clients wait for the reply: they get a failure and may retry, so the job does not."""
    task: asyncio.Task[None] | None = None
    log: EventLog = field(default_factory=EventLog)
    """Events of routes that write some while they work on a job."""
    on_pause: Callable[[StoredReply | None], None] = lambda refusal: None
    """Called with the refusal that makes the job wait, and with None when it tries again."""


class Jobs:
    """All journalled requests, and the journal itself. Belongs to the event loop that called `start`."""

    def __init__(self, api: Api) -> None:
        """Open the journal that the settings name. Raises ConfigError."""
        server = api.settings.server
        assert server.journal is not None
        self.app: ASGIApp | None = None
        """The routes, behind keys and journal."""
        self.root: object = None
        """The application, as routes expect it in their scope."""
        self._api = api
        self._keep_s = server.journal_keep_hours * 3600
        self.journal = Journal(Path(server.journal), server.journal_sync, max_bytes=server.journal_max_gb * 2**30)
        self._writer = Writer(self.journal, api.metrics.journal_errors.inc)
        self.write = self._writer.run
        """Calls a method of the journal."""
        self.on_tidy: list[Callable[[], Awaitable[object]]] = []
        """Called each time expired answers are dropped."""
        self.lines_bytes: Counter[str] = Counter()
        """Bytes in the journal of the lines and answers of batches, by the batch's id."""
        self._semaphore = FairSemaphore(LINES_AT_ONCE, MOST_WAITING)
        self._jobs: dict[str, Job] = {}
        self._coming: dict[str, Entry] = {}
        """Requests that are just being written down."""
        self._max_bytes = int(server.journal_max_gb * 2**30)
        api.metrics.journal_bytes.set_function(self.journal.size)
        api.metrics.journal_open.set_function(lambda: len(self._jobs))
        api.at_end.append(self.release)

    # --- life ---

    async def start(self) -> None:
        """Resume requests that an earlier process accepted and did not answer."""
        pending = await self.write(self.journal.pending)
        if pending:
            logger.info("Resuming %d unanswered requests of the journal", len(pending))
        for entry in pending:
            self._run(entry, waited_for=False)
        self._expiry = start_task(self._expire(), name="journal-expiry")

    async def close(self) -> None:
        """End all jobs; the next process resumes those without an answer."""
        await end_tasks(self._expiry, *(job.task for job in self._jobs.values()))
        self.release(UnavailableError("The server is shutting down.", code="shutting_down"))
        await self._writer.close()

    def release(self, error: RequestError) -> None:
        """Give `error` to all clients that wait, as the server ends."""
        for job in self._jobs.values():
            if not job.reply.done():
                job.reply.set_exception(error)
                job.reply.exception()  # nobody need be waiting for it

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            for tidy in self.on_tidy:
                await tidy()
            while await self._writer.tidy(self._keep_s, self.lines_bytes.total()):
                pass  # what comes in must not outrun it

    # --- requests ---

    async def start_job(
        self,
        group: str,
        route: str,
        body: bytes,
        *,
        key: str = "",
        background: bool = False,
        outline: bytes = b"",
        counted: bool = False,
    ) -> tuple[Entry, bool]:
        """Accept a POST of `body` to `route`, which is answered even if the server is killed; its entry, and True.

        Where the client has a request with this key already, return that one, and False. `outline` is the JSON to show
        while there is no answer. `counted`: the client's quota includes the request already. Raises UnavailableError
        (no engine, disk full), OverloadedError, TooLargeError.
        """
        entry = Entry(
            0,
            new_id("req"),
            group,
            key,
            request_digest(route, body),
            route,
            time.time(),
            int(background),
            outline,
            size=len(body),
        )
        refusal = self._refusal(entry, counted)
        self._coming[entry.id] = entry
        accepted = None
        try:
            accepted = await self.write(self.journal.accept, entry, body, everybody=not self._api.keys, refusal=refusal)
        finally:
            del self._coming[entry.id]
            if not counted and refusal is None and (accepted is None or accepted.id != entry.id):
                self._api.quotas.give_back(group)
        # Calls are answered in their order: the answer of a job that has just ended is part of the entry.
        if accepted.status is None and accepted.id not in self._jobs:
            self._run(accepted, waited_for=not background)
        elif background and accepted.digest == entry.digest and (job := self._jobs.get(accepted.id)) is not None:
            job.waited_for = False
        return accepted, accepted.id == entry.id

    async def find(self, group: str, name: str) -> Entry | None:
        """The request of a client (of anyone, without API keys) with this id or Idempotency-Key, or None.

        Raises JournalError.
        """
        return await self.write(self.journal.find, group, name, everybody=not self._api.keys)

    def job(self, entry: Entry) -> Job | None:
        """The job of a request that is not answered yet, or None."""
        return self._jobs.get(entry.id)

    async def reply(self, entry: Entry, job: Job | None) -> StoredReply | None:
        """The answer to a request whose job was `job`; None before there is one.

        Raises the error that ended the job, JournalError, and ServerError for a damaged answer.
        """
        if job is not None:
            return job.reply.result() if job.reply.done() else None
        if entry.status is None:
            raise UnavailableError(
                "The request is left for the next start of the server.", retry_after=10.0, code="shutting_down"
            )
        return StoredReply(entry.status, await self.write(self.journal.reply, entry))

    async def forget(self, entry: Entry) -> None:
        """Stop a request that still runs, and delete it with its answer. Raises JournalError."""
        await self.write(self.journal.drop, entry)
        if (job := self._jobs.get(entry.id)) is not None:
            job.cancelled.set()

    def _refusal(self, entry: Entry, counted: bool) -> RequestError | None:
        """The error for a new request that cannot be accepted now; else None, and the client's quota counts it.

        With `counted` the quota has counted the request before.
        """
        opened = [*(job.entry for job in self._jobs.values()), *self._coming.values()]
        mine = [other.size for other in opened if other.group == entry.group]
        used = sum(other.size for other in opened) + sum(mine) + 2 * entry.size
        try:
            self._api.check()
            if 2 * entry.size > self._max_bytes:
                raise TooLargeError(
                    f"The request body has {entry.size} bytes; a journalled one may have half of "
                    f"--journal-max-gb, {self._max_bytes // 2} bytes."
                )
            if len(opened) + len(mine) + 2 > MOST_OPEN or used > self._max_bytes:
                raise OverloadedError(
                    f"{len(mine)} journalled requests of yours, with {sum(mine)} bytes, are not "
                    "answered yet; what is left of the journal is for other clients. Try again "
                    "later."
                )
            if not counted:
                self._api.quotas.accept(entry.group, waits=bool(entry.background))
        except RequestError as error:
            return error
        return None

    # --- running ---

    def _run(self, entry: Entry, *, waited_for: bool) -> None:
        entry = replace(entry, outline=b"")  # it may be large, and there may be many
        job = Job(entry, asyncio.get_running_loop().create_future(), waited_for=waited_for)
        job.reply.add_done_callback(lambda _: job.log.wake())
        self._jobs[entry.id] = job
        job.task = start_task(self._work(job), name=f"job-{entry.id}")

    async def _work(self, job: Job) -> None:
        await self.answer(job)
        del self._jobs[job.entry.id]

    async def answer(self, job: Job) -> None:
        """Run a job to its end, and store its answer."""
        try:
            reply = await self._outcome(job)
        except Exception as error:  # noqa: BLE001 - an edge as in the gate: the client must be told
            reply = reply_of(internal_error(error, job.entry.route))
        await self._settle(job, reply)

    async def _outcome(self, job: Job) -> StoredReply:
        """Return the final reply. Refusals are retried unless a connected client can retry itself."""
        while True:
            if not job.waited_for and job.entry.background != LINE:
                await self._until_ready(job)
            try:
                reply = reply_of(cancelled()) if job.cancelled.is_set() else await self._call(job)
            except RequestError as error:
                reply = reply_of(error)
            if job.cancelled.is_set():
                return reply_of(cancelled())
            if job.waited_for or reply.retry_s is None:
                return reply
            job.on_pause(reply)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(job.cancelled.wait(), reply.retry_s)
            job.on_pause(None)

    async def _until_ready(self, job: Job) -> None:
        """Wait until an engine can take requests, or the job is cancelled."""
        while not self._api.ready() and not job.cancelled.is_set():
            await asyncio.sleep(READY_POLL_S)

    async def _settle(self, job: Job, reply: StoredReply) -> None:
        """Store the answer, and give it to whoever waits, though the journal may not take it before a later try."""
        entry = job.entry
        told_only = job.waited_for and reply.status != 200
        writable = True
        while not (self._api.draining and reply.status in (429, 503)):  # that is for the next process
            try:
                if told_only:
                    await self.write(self.journal.drop, entry)
                else:
                    await self.write(self.journal.answer, entry, reply.status, reply.body)
                break
            except Exception as error:  # noqa: BLE001 - the client must be told, whatever becomes of the journal
                if writable:
                    logger.error("Answer to %s cannot be stored: %s; trying again until it can", entry.id, error)
                    job.on_pause(reply_of(error if isinstance(error, RequestError) else internal_error(error, "the journal")))
                writable = False
                if told_only:
                    break
            if not job.reply.done():
                job.reply.set_result(reply)
            await asyncio.sleep(EVERY_S)
        if not writable:
            job.on_pause(None)
        if not job.reply.done():
            job.reply.set_result(reply)

    async def _call(self, job: Job) -> StoredReply:
        """Run the request through the routes and return its response. Raises their errors."""
        entry = job.entry
        assert self.app is not None
        line = entry.background == LINE
        # A client's request was counted by its quota when it was accepted; a line counts when it is asked for.
        more = {"tandem.seed": entry.id} | ({} if line else {"tandem.job": job})
        async with self._semaphore.turn(entry.group) if line else contextlib.nullcontext():
            if line:  # those without a turn need not look
                await self._until_ready(job)
            body = await self.write(self.journal.request, entry)
            return await call(self._api, self.app, self.root, entry.route, body, entry.group, job.cancelled, more)


def get_jobs(http: Request) -> Jobs | None:
    """The jobs of the application that serves this request; None without a journal."""
    return cast("Jobs | None", http.app.state.jobs)


def request_digest(route: str, body: bytes) -> bytes:
    """Hash of a request: the same for the same route and body."""
    return hashlib.blake2b(body, digest_size=16, key=route.encode()).digest()
