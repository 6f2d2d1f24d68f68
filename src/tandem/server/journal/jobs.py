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
from typing import Any

from msgspec import Struct
from starlette.types import ASGIApp, Message, Scope

from tandem.borders import start_task
from tandem.errors import OverloadedError, RequestError, ServerError, UnavailableError
from tandem.server.context import Api
from tandem.server.engines.residents import LOAD_FAILED
from tandem.server.failures import error_response, internal_error
from tandem.server.ids import new_id
from tandem.server.journal.event_log import EventLog
from tandem.server.journal.journal import Accepted, Answered, Dropped, Entry, Journal, JournalError

logger = logging.getLogger(__name__)

MOST_OPEN = 1024
"""Most jobs that are not answered yet."""
READY_POLL_S = 0.2
EVERY_S = 1.0
"""Seconds between two syncs of `everysec`, and two looks at what can be dropped."""
CANCELLED = "request_cancelled"
"""Code of the error that a cancelled request ends with."""
_TRANSIENT = (429, 503)


class StoredReply(Struct, frozen=True):
    """An HTTP response with a JSON body."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(eq=False)
class Job:
    """A request that is being answered."""

    entry: Entry
    accepted: asyncio.Future[None]
    """Done when a crash can no longer lose it."""
    reply: asyncio.Future[StoredReply]
    cancelled: asyncio.Event
    waited_for: bool
    """A client is there that hears of a failure, and may try again."""
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
        self._sync = server.journal_sync
        self._keep_s = server.journal_keep_hours * 3600
        self._journal = Journal(Path(server.journal))
        self._by_key = {(self._owner(entry.group), entry.key): entry
                        for entry in self._journal.entries.values() if entry.key}
        self._jobs: dict[str, Job] = {}
        self._lock = asyncio.Lock()
        self._synced = 0
        self._next_size = 0

    # --- life ---

    async def start(self) -> None:
        """Take up what an earlier process had accepted and not answered."""
        pending = [entry for entry in self._journal.entries.values() if entry.answer is None]
        if pending:
            logger.info("the journal has %d requests that are not answered; they go on", len(pending))
        for entry in pending:
            self._run(entry, waited_for=False)
        self._keeper = start_task(self._keep(), name="journal")

    async def close(self) -> None:
        """End; what is not answered is taken up by the next process."""
        tasks = [self._keeper, *(job.task for job in self._jobs.values() if job.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.release(UnavailableError("The server is shutting down.", code="shutting_down"))
        self._journal.close()

    def release(self, error: RequestError) -> None:
        """Have nobody wait any longer: the server ends."""
        for job in self._jobs.values():
            for future in (job.accepted, job.reply):
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # nobody need be waiting for it

    # --- requests ---

    def start_job(self, group: str, route: str, body: bytes, *, key: str = "", background: bool = False) -> Job:
        """Accept a POST of `body` to `route`; once `accepted` is done, it will be answered.

        Raises UnavailableError (no engine, disk full), OverloadedError.
        """
        self._api.check()
        if len(self._jobs) >= MOST_OPEN:
            raise OverloadedError(f"{len(self._jobs)} journalled requests are not answered yet; try again later.")
        record = Accepted(new_id("req"), group, key, request_digest(route, body), route, body, time.time(), background)
        try:
            self._journal.append(record)
        except JournalError:
            self._api.metrics.journal_errors.inc()
            raise
        entry = self._journal.entries[record.id]
        if key:
            self._by_key[self._owner(group), key] = entry
        return self._run(entry, waited_for=not background)

    def find(self, group: str, name: str) -> Entry | None:
        """The request of this client with this id or Idempotency-Key."""
        entry = self._by_key.get((self._owner(group), name)) or self._journal.entries.get(name)
        return entry if entry is not None and self._owner(entry.group) == self._owner(group) else None

    def job(self, entry: Entry) -> Job | None:
        """The job of a request that is not answered yet."""
        return self._jobs.get(entry.id)

    def request(self, entry: Entry) -> Accepted:
        """What was asked. Raises JournalError when it is damaged."""
        record = self._journal.load(entry.request)
        assert isinstance(record, Accepted)
        return record

    def answer(self, entry: Entry) -> StoredReply:
        """The answer of a request that has one. Raises UnavailableError if not, JournalError when it is damaged."""
        if entry.answer is None:
            raise UnavailableError("The request is left for the next start of the server.", retry_after=10.0,
                                   code="shutting_down")
        record = self._journal.load(entry.answer)
        assert isinstance(record, Answered)
        return StoredReply(record.status, record.body)

    def forget(self, entry: Entry) -> None:
        """Stop a request, if it still runs, and keep nothing of it. Raises JournalError."""
        self._drop(entry)
        if (job := self._jobs.get(entry.id)) is not None:
            job.cancelled.set()

    def _owner(self, group: str) -> str:
        """Who may see an answer: anyone, when there are no API keys."""
        return group if self._api.keys else ""

    def _drop(self, entry: Entry) -> None:
        if entry.id in self._journal.entries:
            self._journal.append(Dropped(entry.id))
        self._forget_key(entry)

    def _forget_key(self, entry: Entry) -> None:
        name = (self._owner(entry.group), entry.key)
        if self._by_key.get(name) is entry:
            del self._by_key[name]

    # --- running ---

    def _run(self, entry: Entry, *, waited_for: bool) -> Job:
        loop = asyncio.get_running_loop()
        job = Job(entry, loop.create_future(), loop.create_future(), asyncio.Event(), waited_for)
        job.reply.add_done_callback(lambda _: job.log.wake())
        self._jobs[entry.id] = job
        job.task = start_task(self._work(job), name=f"job-{entry.id}", on_failure=lambda _: _broken(job))
        return job

    async def _work(self, job: Job) -> None:
        try:
            await self._flush()
            if not job.accepted.done():
                job.accepted.set_result(None)
            reply = await self._outcome(job)
            kept = await self._settle(job, reply)
        except RequestError as error:
            reply, kept = reply_of(error), True
            with contextlib.suppress(JournalError):
                self._drop(job.entry)
            if not job.accepted.done():
                job.accepted.set_exception(error)
                job.accepted.exception()  # nobody need wait for it
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
            reply = reply_of(_cancelled()) if job.cancelled.is_set() else await self._call(job)
            if job.cancelled.is_set():
                return reply_of(_cancelled())
            final = reply.status not in _TRANSIENT or LOAD_FAILED.encode() in reply.body
            if job.waited_for or final or self._api.draining:
                return reply
            pause = dict(reply.headers).get(b"retry-after", b"1")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(job.cancelled.wait(), min(float(pause), 10.0))

    async def _settle(self, job: Job, reply: StoredReply) -> bool:
        """Write down how it ended; False when the answer could not be kept."""
        entry = job.entry
        if entry.id not in self._journal.entries:
            return True  # it is to be forgotten
        if self._api.draining and reply.status in _TRANSIENT:
            return True  # for the next process
        try:
            if job.waited_for and reply.status != 200:
                self._drop(entry)
            else:
                self._journal.append(Answered(entry.id, reply.status, reply.body))
                await self._flush()
        except RequestError as error:
            self._api.metrics.journal_errors.inc()
            logger.error("the answer of %s is kept in memory alone: %s", entry.id, error.message)
            return False
        return True

    async def _call(self, job: Job) -> StoredReply:
        """The routes' response to the request."""
        record = self.request(job.entry)
        assert self.app is not None
        messages = [{"type": "http.request", "body": record.body, "more_body": False}]
        response: list[Message] = []

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await job.cancelled.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            response.append(message)

        scope = self._scope(record, job)
        try:
            await self.app(scope, receive, send)
        except RequestError as error:
            return reply_of(error)
        except Exception as error:  # noqa: BLE001 - an edge as in the gate: nothing may take the server down
            return reply_of(internal_error(error, record.route))
        finally:
            self._api.release(scope)
        body = b"".join(message.get("body", b"") for message in response)
        return StoredReply(response[0]["status"], body, tuple(response[0]["headers"]))

    def _scope(self, record: Accepted, job: Job) -> Scope:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(record.body)).encode())]
        return {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1",
                "method": "POST", "scheme": "http", "path": record.route, "raw_path": record.route.encode(),
                "root_path": "", "query_string": b"", "headers": headers, "client": None, "server": None,
                "app": self.root, "state": {}, "tandem.group": record.group, "tandem.trusted": True, "tandem.job": job}

    # --- the file ---

    async def _flush(self) -> None:
        """Wait until the disk has what was appended, if that is the policy; many waiters share one sync."""
        target = self._journal.end
        if self._sync == "always":
            async with self._lock:
                if self._synced < target:
                    await self._sync_file()

    async def _sync_file(self) -> None:
        try:
            self._synced = await asyncio.to_thread(self._journal.sync_file)
        except OSError as error:
            self._api.metrics.journal_errors.inc()
            raise JournalError(f"The journal cannot be synced ({error.strerror}), so the request cannot be kept safe.",
                               retry_after=30.0, code="journal_unavailable") from None

    async def _keep(self) -> None:
        """Sync now and then, drop old answers, rewrite the file when most of it is dead."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                if self._sync == "everysec" and self._synced < self._journal.end:
                    async with self._lock:
                        await self._sync_file()
                for entry in self._journal.expire(self._keep_s):
                    self._forget_key(entry)
            except JournalError as error:
                logger.error("%s", error.message)
            if self._journal.wasteful and self._journal.end > self._next_size:
                async with self._lock:
                    await self._compact()
            self._api.metrics.journal_bytes.set(self._journal.end)
            self._api.metrics.journal_open.set(len(self._jobs))

    async def _compact(self) -> None:
        before = self._journal.end
        compaction = None
        try:
            compaction = self._journal.compaction()
            await asyncio.to_thread(compaction.copy, list(self._journal.spans()))
            self._journal.replace(compaction)
        except OSError as error:
            logger.error("the journal cannot be rewritten: %s", error.strerror)
            if compaction is not None:
                compaction.abandon()
            self._next_size = before * 2
            return
        self._next_size, self._synced = 0, self._journal.end
        logger.info("the journal was rewritten: %d bytes of %d were needed", self._journal.end, before)


def _broken(job: Job) -> None:
    """Its work has failed in a way that nobody foresaw: whoever waits hears so."""
    for future in (job.accepted, job.reply):
        if not future.done():
            future.set_exception(ServerError("Internal server error", code="internal_error"))
            future.exception()  # nobody need be waiting for it


def _cancelled() -> RequestError:
    error = RequestError("The request was cancelled.", code=CANCELLED)
    error.status = 409
    return error


def request_digest(route: str, body: bytes) -> bytes:
    """What tells two requests apart."""
    return hashlib.blake2b(route.encode() + b"\0" + body, digest_size=16).digest()


def reply_of(error: RequestError) -> StoredReply:
    """An error as the server answers it."""
    response = error_response(error)
    return StoredReply(response.status_code, bytes(response.body), tuple(response.raw_headers))
