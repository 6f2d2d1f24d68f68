"""Runner of jobs: journaled requests that complete even without a connected client, and after a restart.

A job runs a client's request, or a line of a batch, through the routes as if it had come over HTTP. Endpoints with
background requests call `Jobs.start_job`.
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
"""Most unanswered requests. One client may use at most half of what the others leave free; the same holds for bytes
and --journal-max-gb."""
READY_POLL_S = 0.2
EVERY_S = 1.0
"""Interval in seconds of expiry checks, of syncs with `everysec`, and of retried writes."""
LINES_AT_ONCE = 32
"""Most concurrent lines over all batches, shared fairly among clients."""
MOST_WAITING = 100 * LINES_AT_ONCE
"""Most waiting lines of one client: enough for all batches that it may have."""


class EventLog:
    """Log of complete server-sent events, numbered from 0. Not thread-safe: use on one event loop."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self._change = asyncio.Event()

    def restart(self, events: bytes) -> None:
        """Replace all events, for a restarted job."""
        self.events.clear()
        self.add(events)

    def add(self, events: bytes) -> None:
        """Append the events in `events`, each terminated by an empty line."""
        self.events += [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]
        self.wake()

    def wake(self) -> None:
        """Wake all tasks that wait in `changed`."""
        self._change.set()
        self._change = asyncio.Event()

    async def changed(self, timeout_s: float) -> bool:
        """Wait for the next change; return False if there is none within `timeout_s` seconds."""
        try:
            await asyncio.wait_for(self._change.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


@dataclass(eq=False)
class Job:
    """A journaled request in progress."""

    entry: Entry
    reply: asyncio.Future[StoredReply]
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    waited_for: bool = False
    """True if a client waits for the reply: it gets a failure and can retry, so the job does not retry."""
    task: asyncio.Task[None] | None = None
    log: EventLog = field(default_factory=EventLog)
    """Events so far, for routes that stream (background responses)."""
    on_pause: Callable[[StoredReply | None], None] = lambda refusal: None
    """Callback: gets the refusal when the job starts to wait, and None when it retries."""


class Jobs:
    """All journaled requests, and the journal. Use only on the event loop that called `start`."""

    def __init__(self, api: Api) -> None:
        """Open the journal of the settings. Raises ConfigError."""
        server = api.settings.server
        assert server.journal is not None
        self.app: ASGIApp | None = None
        """ASGI application of the routes, without authentication and idempotency."""
        self.root: object = None
        """FastAPI application for the scope's `app`."""
        self._api = api
        self._keep_s = server.journal_keep_hours * 3600
        self.journal = Journal(Path(server.journal), server.journal_sync, max_bytes=server.journal_max_gb * 2**30)
        self._writer = Writer(self.journal, api.metrics.journal_errors.inc)
        self.write = self._writer.run
        """Calls a method of the journal in its thread (see `Writer.run`)."""
        self.on_tidy: list[Callable[[], Awaitable[object]]] = []
        """Callbacks for each expiry check."""
        self.lines_bytes: Counter[str] = Counter()
        """Bytes in the journal of batch lines and their answers, by batch id."""
        self._semaphore = FairSemaphore(LINES_AT_ONCE, MOST_WAITING)
        self._jobs: dict[str, Job] = {}
        self._coming: dict[str, Entry] = {}
        """Requests being written to the journal, by id."""
        self._max_bytes = int(server.journal_max_gb * 2**30)
        api.metrics.journal_bytes.set_function(self.journal.size)
        api.metrics.journal_open.set_function(lambda: len(self._jobs))
        api.at_end.append(self.release)

    # --- life ---

    async def start(self) -> None:
        """Resume requests that an earlier process accepted but did not answer."""
        pending = await self.write(self.journal.pending)
        if pending:
            logger.info("Resuming %d unanswered requests of the journal", len(pending))
        for entry in pending:
            self._run(entry, waited_for=False)
        self._expiry = start_task(self._expire(), name="journal-expiry")

    async def close(self) -> None:
        """Cancel all jobs; the next process resumes those without an answer."""
        await end_tasks(self._expiry, *(job.task for job in self._jobs.values()))
        self.release(UnavailableError("The server is shutting down.", code="shutting_down"))
        await self._writer.close()

    def release(self, error: RequestError) -> None:
        """Fail all waiting replies with `error`, at shutdown."""
        for job in self._jobs.values():
            if not job.reply.done():
                job.reply.set_exception(error)
                job.reply.exception()  # marks it as retrieved, as no client may be waiting

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            for tidy in self.on_tidy:
                await tidy()
            while await self._writer.tidy(self._keep_s, self.lines_bytes.total()):
                pass  # repeat until below the size limit, or new answers could outpace it

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
        """Journal and start a POST of `body` to `route`; return its entry and True.

        If the client has a request with this `key` already, return that one and False. `outline`: JSON to show until there
        is an answer. `counted`: the client's quota includes the request already. Raises UnavailableError (no engine, disk
        full), OverloadedError, TooLargeError.
        """
        entry = new_entry(new_id("req"), group, route, body, time.time(), key, int(background), outline)
        refusal = self._refusal(entry, counted)
        self._coming[entry.id] = entry
        accepted = None
        try:
            accepted = await self.write(self.journal.accept, entry, body, everybody=not self._api.keys, refusal=refusal)
        finally:
            del self._coming[entry.id]
            if not counted and refusal is None and (accepted is None or accepted.id != entry.id):
                self._api.quotas.give_back(group)
        # The journal processes calls in order, so the entry has the answer of a job that has just ended.
        if accepted.status is None and accepted.id not in self._jobs:
            self._run(accepted, waited_for=not background)
        elif background and accepted.digest == entry.digest and (job := self._jobs.get(accepted.id)) is not None:
            job.waited_for = False
        return accepted, accepted.id == entry.id

    async def find(self, group: str, name: str) -> Entry | None:
        """Return the client's request with this id or Idempotency-Key, or None; without API keys, any client's.

        Raises JournalError.
        """
        return await self.write(self.journal.find, group, name, everybody=not self._api.keys)

    def job(self, entry: Entry) -> Job | None:
        """Return the job of an unanswered request, else None."""
        return self._jobs.get(entry.id)

    async def reply(self, entry: Entry, job: Job | None) -> StoredReply | None:
        """Return the answer to a request whose job was `job` (None: answered before), or None if not answered yet.

        Raises the error that ended the job, JournalError, or ServerError for a damaged answer.
        """
        if job is not None:
            return job.reply.result() if job.reply.done() else None
        if entry.status is None:
            raise UnavailableError(
                "The request is left for the next start of the server.", retry_after=10.0, code="shutting_down"
            )
        return StoredReply(entry.status, await self.write(self.journal.reply, entry))

    async def forget(self, entry: Entry) -> None:
        """Cancel a request if it runs, and delete it with its answer. Raises JournalError."""
        await self.write(self.journal.drop, entry)
        if (job := self._jobs.get(entry.id)) is not None:
            job.cancelled.set()

    def check_size(self, size: int) -> None:
        """Raise TooLargeError if a body of `size` bytes is too large for the journal."""
        if 2 * size > self._max_bytes:
            raise TooLargeError(
                f"The request body has {size} bytes; a journalled one may have half of "
                f"--journal-max-gb, {self._max_bytes // 2} bytes."
            )

    def _refusal(self, entry: Entry, counted: bool) -> RequestError | None:
        """Return the error if a new request cannot be accepted now; else count it in the client's quota and return None.

        `counted`: the quota includes the request already.
        """
        opened = [*(job.entry for job in self._jobs.values()), *self._coming.values()]
        mine = [other.size for other in opened if other.group == entry.group]
        used = sum(other.size for other in opened) + sum(mine) + 2 * entry.size
        try:
            self._api.check()
            self.check_size(entry.size)
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
        entry = replace(entry, outline=b"")  # outlines may be large; do not keep one per job
        job = Job(entry, asyncio.get_running_loop().create_future(), waited_for=waited_for)
        job.reply.add_done_callback(lambda _: job.log.wake())
        self._jobs[entry.id] = job
        job.task = start_task(self._work(job), name=f"job-{entry.id}")

    async def _work(self, job: Job) -> None:
        await self.answer(job)
        del self._jobs[job.entry.id]

    async def answer(self, job: Job) -> None:
        """Run a job to its end and store its answer."""
        try:
            reply = await self._outcome(job)
        except Exception as error:  # noqa: BLE001 - outermost handler, as in the gate: the client needs an answer
            reply = reply_of(internal_error(error, job.entry.route))
        await self._settle(job, reply)

    async def _outcome(self, job: Job) -> StoredReply:
        """Run a job until its reply is final. Refusals are retried, unless a connected client can retry."""
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
        """Wait until the api can serve requests, or the job is cancelled."""
        while not self._api.ready() and not job.cancelled.is_set():
            await asyncio.sleep(READY_POLL_S)

    async def _settle(self, job: Job, reply: StoredReply) -> None:
        """Store the answer and resolve `job.reply`; if the journal fails, resolve at once and retry storing.

        A failure that a waiting client gets is not stored: its request is deleted, so that the client can retry.
        """
        entry = job.entry
        told_only = job.waited_for and reply.status != 200
        writable = True
        while not (self._api.draining and reply.status in (429, 503)):  # left for the next process
            try:
                if told_only:
                    await self.write(self.journal.drop, entry)
                else:
                    await self.write(self.journal.answer, entry, reply.status, reply.body)
                break
            except Exception as error:  # noqa: BLE001 - the client gets its answer whatever fails in the journal
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
        """Run the request through the routes and return the response. Raises JournalError, OverloadedError."""
        entry = job.entry
        assert self.app is not None
        line = entry.background == LINE
        # A client's request was counted in its quota when accepted; a batch line counts when it runs.
        more = {"tandem.seed": entry.id} | ({} if line else {"tandem.job": job})
        async with self._semaphore.turn(entry.group) if line else contextlib.nullcontext():
            if line:  # poll for readiness only with a slot
                await self._until_ready(job)
            body = await self.write(self.journal.request, entry)
            return await call(self._api, self.app, self.root, entry.route, body, entry.group, job.cancelled, more)


def needs_journal(what: str, other: str, param: str | None = None, code: str = "unsupported_parameter") -> RequestError:
    """Return the error for something that needs a journal, on a server without one; `other`: what to do instead."""
    message = f"{what} a journal: start the server with --journal DIR (docs/background-work.md), or {other}."
    return RequestError(message, param=param, code=code)


def get_jobs(http: Request) -> Jobs | None:
    """Return the jobs of the application that serves this request; None without a journal."""
    return cast("Jobs | None", http.app.state.jobs)


def new_entry(
    name: str, group: str, route: str, body: bytes, created: float, key: str = "", background: int = 0, outline: bytes = b""
) -> Entry:
    """Return the journal's entry for a request with the id `name`; the others are fields of `Entry`."""
    return Entry(0, name, group, key, request_digest(route, body), route, created, background, outline, size=len(body))


def request_digest(route: str, body: bytes) -> bytes:
    """Return the 16-byte hash of a request's route and body."""
    return hashlib.blake2b(body, digest_size=16, key=route.encode()).digest()
