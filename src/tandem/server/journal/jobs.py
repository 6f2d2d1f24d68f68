"""Requests that are answered even if nobody waits: kept in the journal, run again after a restart, their answers kept.

A job runs its request through the routes as if it had come over HTTP. `Jobs.start_job` is all that an endpoint with
background requests of its own needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from fastapi import Request
from msgspec.structs import replace
from starlette.types import ASGIApp

from tandem.borders import start_task
from tandem.errors import OverloadedError, RequestError, TooLargeError, UnavailableError
from tandem.server.context import Api, new_id
from tandem.server.failures import cancelled, internal_error
from tandem.server.journal.calls import StoredReply, call, reply_of
from tandem.server.journal.journal import Entry, Journal
from tandem.server.journal.writer import Writer
from tandem.server.waiting import end_tasks

logger = logging.getLogger(__name__)

MOST_OPEN = 2048
"""Most requests that are not answered yet. A client may have as many as there are places left, and the same holds for
their bytes and --journal-max-gb."""
READY_POLL_S = 0.2
EVERY_S = 1.0
"""Seconds between two looks at what can be dropped, and two syncs of `everysec`."""


class EventLog:
    """Whole server-sent events, the first has the number 0. Belongs to one event loop."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self._change = asyncio.Event()

    def restart(self, events: bytes) -> None:
        """The job begins (again)."""
        self.events.clear()
        self.add(events)

    def add(self, events: bytes) -> None:
        """What has come: any number of events."""
        self.events += [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]
        self.wake()

    def wake(self) -> None:
        """Have all followers look."""
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
    cancelled: asyncio.Event
    waited_for: bool
    """All its clients hear of a failure, and may try again."""
    task: asyncio.Task[None] | None = None
    log: EventLog = field(default_factory=EventLog)
    """Events of routes that write some as they work on a job."""


class Jobs:
    """All journalled requests. Belongs to the event loop that called `start`."""

    def __init__(self, api: Api) -> None:
        """Open the journal that the settings name. Raises ConfigError."""
        server = api.settings.server
        assert server.journal is not None
        self.app: ASGIApp | None = None
        """The routes, behind keys and journal."""
        self.root: Any = None
        """The application, as routes expect it in their scope."""
        self._api = api
        self._keep_s = server.journal_keep_hours * 3600
        self._journal = Journal(Path(server.journal), server.journal_sync, max_bytes=server.journal_max_gb * 2**30)
        self._writer = Writer(self._journal, api.metrics.journal_errors.inc)
        self._jobs: dict[str, Job] = {}
        self._coming: dict[str, Entry] = {}
        """Requests that are just being written down."""
        self._max_bytes = int(server.journal_max_gb * 2**30)
        api.metrics.journal_bytes.set_function(self._journal.size)
        api.metrics.journal_open.set_function(lambda: len(self._jobs))
        api.at_end.append(self.release)

    # --- life ---

    async def start(self) -> None:
        """Take up what an earlier process had accepted and not answered."""
        pending = await self._writer.run(self._journal.pending)
        if pending:
            logger.info("the journal has %d requests that are not answered; they go on", len(pending))
        for entry in pending:
            self._run(entry, waited_for=False)
        self._keeper = start_task(self._keep(), name="journal-keeper")

    async def close(self) -> None:
        """End; what is not answered is taken up by the next process."""
        await end_tasks(self._keeper, *(job.task for job in self._jobs.values()))
        self.release(UnavailableError("The server is shutting down.", code="shutting_down"))
        await self._writer.close()

    def release(self, error: RequestError) -> None:
        """Have nobody wait any longer: the server ends."""
        for job in self._jobs.values():
            if not job.reply.done():
                job.reply.set_exception(error)
                job.reply.exception()  # nobody need be waiting for it

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            while await self._writer.tidy(self._keep_s):
                pass  # what comes in must not outrun it

    # --- requests ---

    async def start_job(self, group: str, route: str, body: bytes, *, key: str = "", background: bool = False,
                        outline: bytes = b"", counted: bool = False) -> tuple[Entry, bool]:
        """Accept a POST of `body` to `route`: from now on it will be answered, whatever happens.

        `outline` is what is to be shown of it until then. Where the client has a request with this key already, that
        one, and False. `counted`: the client's quota has it already. Raises UnavailableError (no engine, disk full),
        OverloadedError, TooLargeError.
        """
        entry = Entry(0, new_id("req"), group, key, request_digest(route, body), route, time.time(), int(background),
                      outline, size=len(body))
        refusal = self._refusal(entry, counted)
        self._coming[entry.id] = entry
        held = None
        try:
            held = await self._writer.run(self._journal.accept, entry, body, everybody=not self._api.keys,
                                          refusal=refusal)
        finally:
            del self._coming[entry.id]
            if not counted and refusal is None and (held is None or held.id != entry.id):
                self._api.quotas.give_back(group)
        # Calls are answered in their order: had a job for it just ended, the answer would have been found.
        if held.status is None and held.id not in self._jobs:
            self._run(held, waited_for=not background)
        elif background and held.digest == entry.digest and (job := self._jobs.get(held.id)) is not None:
            job.waited_for = False
        return held, held.id == entry.id

    async def find(self, group: str, name: str) -> Entry | None:
        """The request of this client (of anyone, without API keys) with this id or Idempotency-Key.

        Raises JournalError.
        """
        return await self._writer.run(self._journal.find, group, name, everybody=not self._api.keys)

    def job(self, entry: Entry) -> Job | None:
        """The job of a request that is not answered yet."""
        return self._jobs.get(entry.id)

    async def reply(self, entry: Entry, job: Job | None) -> StoredReply | None:
        """The answer to a request that was found with this job, None before there is one.

        Raises what ended its work, JournalError, and ServerError when it is damaged.
        """
        if job is not None:
            return job.reply.result() if job.reply.done() else None
        if entry.status is None:
            raise UnavailableError("The request is left for the next start of the server.", retry_after=10.0,
                                   code="shutting_down")
        return StoredReply(entry.status, await self._writer.run(self._journal.reply, entry))

    async def keep(self, entry: Entry, body: bytes, answer: bytes) -> None:
        """Keep a request that has been answered with status 200. Raises JournalError."""
        await self._writer.run(self._journal.keep, entry, body, answer)

    async def request(self, entry: Entry) -> bytes:
        """What was asked. Raises JournalError, and ServerError when it is damaged."""
        return await self._writer.run(self._journal.request, entry)

    async def forget(self, entry: Entry) -> None:
        """Stop a request, if it still runs, and keep nothing of it. Raises JournalError."""
        await self._writer.run(self._journal.drop, entry)
        if (job := self._jobs.get(entry.id)) is not None:
            job.cancelled.set()

    def _refusal(self, entry: Entry, counted: bool) -> RequestError | None:
        """Why a new request cannot be taken now; where it can, its client's quota counts it, unless it has done so."""
        opened = [*(job.entry for job in self._jobs.values()), *self._coming.values()]
        mine = [one.size for one in opened if one.group == entry.group]
        used = sum(one.size for one in opened) + sum(mine) + 2 * entry.size
        try:
            self._api.check()
            if 2 * entry.size > self._max_bytes:
                raise TooLargeError(f"The request body has {entry.size} bytes; a journalled one may have half of "
                                    f"--journal-max-gb, {self._max_bytes // 2} bytes.")
            if len(opened) + len(mine) + 2 > MOST_OPEN or used > self._max_bytes:
                raise OverloadedError(f"{len(mine)} journalled requests of yours, with {sum(mine)} bytes, are not "
                                      "answered yet; what is left of the journal is for other clients. Try again "
                                      "later.")
            if not counted:
                self._api.quotas.accept(entry.group, waits=bool(entry.background))
        except RequestError as error:
            return error
        return None

    # --- running ---

    def _run(self, entry: Entry, *, waited_for: bool) -> None:
        loop = asyncio.get_running_loop()
        entry = replace(entry, outline=b"")  # it may be large, and there may be many
        job = Job(entry, loop.create_future(), asyncio.Event(), waited_for)
        job.reply.add_done_callback(lambda _: job.log.wake())
        self._jobs[entry.id] = job
        job.task = start_task(self._work(job), name=f"job-{entry.id}")

    async def _work(self, job: Job) -> None:
        try:
            reply = await self._outcome(job)
        except Exception as error:  # noqa: BLE001 - an edge as in the gate: whoever waits must be told
            reply = reply_of(internal_error(error, job.entry.route))
        kept = await self._settle(job, reply)
        if not job.reply.done():
            job.reply.set_result(reply)
        if kept:
            del self._jobs[job.entry.id]  # else the answer is here alone

    async def _outcome(self, job: Job) -> StoredReply:
        """Run it, again and again where that can help and nobody waits who would rather hear of it."""
        while True:
            if not job.waited_for:
                while not self._api.ready() and not job.cancelled.is_set():
                    await asyncio.sleep(READY_POLL_S)
            try:
                reply = reply_of(cancelled()) if job.cancelled.is_set() else await self._call(job)
            except RequestError as error:
                reply = reply_of(error)
            if job.cancelled.is_set():
                return reply_of(cancelled())
            if job.waited_for or reply.retry_s is None or self._api.draining:
                return reply
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(job.cancelled.wait(), reply.retry_s)

    async def _settle(self, job: Job, reply: StoredReply) -> bool:
        """Write down how it ended; False when the answer could not be kept."""
        entry = job.entry
        if self._api.draining and reply.status in (429, 503):
            return True  # for the next process
        told_only = job.waited_for and reply.status != 200
        try:
            if told_only:
                await self._writer.run(self._journal.drop, entry)
            else:
                await self._writer.run(self._journal.answer, entry, reply.status, reply.body)
        except Exception as error:  # noqa: BLE001 - whoever waits must be told, whatever becomes of the journal
            logger.error("how %s ended is known in memory alone (%s); a crash makes it run again", entry.id, error)
            return told_only
        return True

    async def _call(self, job: Job) -> StoredReply:
        """The routes' response to the request. Raises whatever they raise."""
        body = await self._writer.run(self._journal.request, job.entry)
        assert self.app is not None
        entry = job.entry
        more = {"tandem.job": job, "tandem.seed": entry.id}
        return await call(self._api, self.app, self.root, entry.route, body, entry.group, job.cancelled, more)


def get_jobs(http: Request) -> Jobs | None:
    """Those of the application that serves this request; None without a journal."""
    return cast("Jobs | None", http.app.state.jobs)


def request_digest(route: str, body: bytes) -> bytes:
    """What tells two requests apart."""
    return hashlib.blake2b(body, digest_size=16, key=route.encode()).digest()
