"""Batches: each line of the input file runs as a job, and its answer becomes a line of an output file.

The journal holds the lines of unfinished batches and their answers. A batch resumed after a restart runs only lines
without an answer, with the same seeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from tandem.crash_guard import start_task
from tandem.errors import RequestError, UnavailableError, invalid
from tandem.server.context import Api
from tandem.server.failures import internal_error
from tandem.server.store.calls import StoredReply
from tandem.server.store.files import KEEP_S, File, Files, Records, disk_trouble
from tandem.server.store.jobs import LINES_AT_ONCE, Job, Jobs
from tandem.server.store.journal import BYTES_AT_ONCE, KEPT_OPEN, LINE, LINE_BYTES, ROWS_AT_ONCE, ClientRecord, Entry
from tandem.server.store.lines import Json, answer_line, failure_line, line_id, parse_lines
from tandem.server.waiting import Stopped, end_tasks, unless
from tandem.system.files import open_private

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

MOST_LINES = 50_000
MOST_ERRORS = 100
"""Most input file errors listed in a batch object."""
MOST_OPEN, MOST_KEPT = 100, 1000
"""Most unfinished batches, and most batches in all, of one client."""
DISK_POLL_S = 1.0
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
_ENDINGS = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed: the batch was cancelled."),
}


class BatchRecord(ClientRecord, kw_only=True):
    """Stored state of a batch. Times are seconds since 1970."""

    endpoint: str
    input_file_id: str
    completion_window: str
    expires_at: float
    metadata: dict[str, str] | None = None
    keep_s: float = KEEP_S
    """Retention of the output files in seconds."""
    status: str = "validating"
    end: str = "completed"
    """Final status that the batch is heading for."""
    times: dict[str, float] = msgspec.field(default_factory=dict)
    """Time of the change to each status."""
    errors: list[Json] = []
    total: int = 0
    """Number of requests in the input file; 0 until they are in the journal."""
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    trouble: Json | None = None
    """Error that currently blocks the batch; None if there is none."""

    def shown(self) -> Json:
        """Return OpenAI's batch object."""
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        times = {f"{name}_at": int(self.times[name]) if name in self.times else None for name in names}
        errors = [*self.errors, *([self.trouble] if self.trouble else ())]
        same = ("endpoint", "status", "input_file_id", "completion_window", "output_file_id", "error_file_id", "metadata")
        return {
            "id": self.id,
            "object": "batch",
            **{name: getattr(self, name) for name in same},
            "errors": {"object": "list", "data": errors} if errors else None,
            "created_at": int(self.created_at),
            "expires_at": int(self.expires_at),
            **times,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
        }


def fault(code: str, message: str, line: int | None = None, param: str | None = None) -> Json:
    """Return an error of OpenAI's batch object."""
    return {"code": code, "line": line, "param": param, "message": message}


@dataclass
class _Running:
    """Runtime state of an unfinished batch."""

    record: BatchRecord
    task: asyncio.Task[None] | None = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the batch is cancelled."""
    asked: int = 0
    """Number of lines being run."""
    waiting: set[Job] = field(default_factory=set)
    """Jobs of lines that wait after a refusal."""

    def pause(self, job: Job, refusal: StoredReply | None) -> None:
        """Note that a line waits after `refusal`, or (None) is retried; if all lines wait, the batch shows the reason."""
        if refusal is None:
            self.waiting.discard(job)
            return
        self.waiting.add(job)
        if len(self.waiting) == self.asked:
            error = msgspec.json.decode(refusal.body)["error"]
            self.record.trouble = fault(error["code"], f"The batch waits: {error['message']}")


class Batches(Records[BatchRecord]):
    """All batches of all clients, and their files. Use only on the event loop that called `start`."""

    def __init__(self, api: Api, jobs: Jobs) -> None:
        """Read the stored batches and files. Raises ConfigError if the files' directory is unusable."""
        super().__init__(jobs, BatchRecord)
        server = api.settings.server
        assert server.journal is not None
        reading = [batch.input_file_id for batch in self._open() if not batch.total]
        self.files = Files(
            jobs,
            Path(server.journal) / "files",
            max_bytes=server.files_max_gb * 2**30,
            sync=server.journal_sync != "no",
            reading=reading,
        )
        jobs.on_tidy.append(self.files.drop_expired)
        self._api = api
        self._accepting = asyncio.Lock()
        self._running: dict[str, _Running] = {}
        self._leftovers: asyncio.Task[None] | None = None

    # --- life ---

    async def start(self) -> None:
        """Count the bytes of all batch lines, then resume the batches of an earlier process.

        The journal's size limit excludes these bytes, so they must be known before it is first enforced.
        """
        batches = self._open()
        still_open = {batch.id for batch in batches}
        over = []
        for batch_id, owner, size in await self._jobs.write(self._jobs.journal.batches_with_lines):
            self._jobs.lines_bytes[batch_id] = size
            if batch_id not in still_open:
                over.append((batch_id, owner))
        self._leftovers = start_task(self._drop_over(over), name="batch-leftovers")
        if batches:
            logger.info("Resuming %d unfinished batches", len(batches))
        for batch in batches:
            self._begin(batch)

    async def close(self) -> None:
        """Stop all batches; the next process resumes unfinished ones."""
        await end_tasks(self._leftovers, *(running.task for running in self._running.values()))
        self.files.close()

    def _open(self) -> list[BatchRecord]:
        return [batch for batch in self.of(None) if batch.status in OPEN]

    # --- requests of clients ---

    async def create(self, batch: BatchRecord) -> None:
        """Accept and start a batch over an existing file. Raises RequestError."""
        async with self._accepting:  # so that concurrent calls respect the limits
            source = self.files.find(batch.input_file_id, None)
            self.files.check_room(batch.owner, source.bytes if source is not None else 0)
            mine = self.of(batch.owner)
            if sum(other.status in OPEN for other in mine) >= MOST_OPEN:
                raise RequestError(
                    f"At most {MOST_OPEN} batches of one client may be open; wait for one to end, or cancel one.",
                    code="too_many_batches",
                )
            over = [other.id for other in mine if other.status not in OPEN]
            await self.remove(*over[: max(0, len(mine) - MOST_KEPT + 1)])
            self.files.reading[batch.input_file_id] += 1
            try:
                await self.put(batch)
            except BaseException:
                await self.files.end_reading(batch.input_file_id)
                raise
        self._begin(batch)

    async def cancel(self, batch: BatchRecord) -> None:
        """Cancel a batch; finished answers are kept. Raises RequestError for a finished batch."""
        if batch.status not in OPEN:
            raise invalid("batch_id", f"A batch with the status '{batch.status}' cannot be cancelled.")
        if batch.status in ("validating", "in_progress"):
            batch.end = "cancelled"
            self._enter(batch, "cancelling")
            try:
                await self.put(batch)
            finally:
                if batch.id not in self._running:
                    self._begin(batch)  # its task had ended with an internal error
                self._running[batch.id].stop.set()

    # --- one batch ---

    def _begin(self, batch: BatchRecord) -> None:
        batch.errors = []  # drop errors of an earlier attempt
        running = self._running[batch.id] = _Running(batch)
        if batch.status == "cancelling":
            running.stop.set()
        running.task = start_task(self._work(running), name=batch.id)

    async def _work(self, running: _Running) -> None:
        batch = running.record
        try:
            while batch.status in OPEN:
                await self._through(batch, lambda: self._advance(running))
            await self._through(batch, lambda: self._drop_lines(batch.id, batch.owner))
        except Exception as error:  # noqa: BLE001 - outermost handler, as in the gate: the client sees the error
            internal_error(error, "a batch")
            batch.errors = [fault("internal_error", "Internal server error; a restart of the server goes on with the batch.")]
        finally:
            del self._running[batch.id]

    async def _advance(self, running: _Running) -> None:
        """Take a batch to its next status; can be repeated after a failure. Raises OSError, JournalError."""
        if not running.record.total:
            await self._import(running.record)
        elif running.record.status == "finalizing":
            await self._publish(running.record)
        else:
            await self._answer(running)

    async def _through(self, batch: BatchRecord, step: Callable[[], Awaitable[Result]]) -> Result:
        """Run `step` and return its result; retry while disk or journal fail, showing the error in the batch."""
        while True:
            try:
                outcome = await step()
            except (OSError, UnavailableError) as error:
                code, why = disk_trouble(error) if isinstance(error, OSError) else (error.code or "", error.message)
                if batch.trouble is None:
                    logger.error("%s waits: %s; it goes on as soon as that has changed", batch.id, why)
                batch.trouble = fault(code, f"The batch waits: {why.rstrip('.')}.")
                await asyncio.sleep(DISK_POLL_S)
            else:
                batch.trouble = None
                return outcome

    def _enter(self, batch: BatchRecord, status: str) -> None:
        batch.status, batch.trouble = status, None
        batch.times.setdefault(status, time.time())

    async def _turn(self, batch: BatchRecord, status: str) -> None:
        self._enter(batch, status)
        await self._through(batch, lambda: self.put(batch))

    async def _import(self, batch: BatchRecord) -> None:
        """Validate the input file and write its lines to the journal. Raises OSError, JournalError."""
        await self._drop_lines(batch.id, batch.owner)  # drop lines of an earlier attempt
        errors: list[Json] = []
        total = 0
        blocks = _blocks(self.files.path(batch.input_file_id), batch, self._api.max_body)
        try:
            while len(errors) < MOST_ERRORS and (block := await self.files.in_thread(next, blocks, None)):
                lines, faults = block
                errors += faults
                total += len(lines) + len(faults)
                if not errors:
                    await self._jobs.write(self._jobs.journal.add_lines, lines)
                    self._jobs.lines_bytes[batch.id] += sum(len(body) + LINE_BYTES for _, body in lines)
        except FileNotFoundError:
            if not self.files.directory.exists():
                raise  # the disk may be mounted again
            errors = [fault("files_lost", "The file was removed before it was read. Send it again, for another batch.")]
        if not total and not errors:
            errors = [fault("empty_file", "There are no requests in the file.", param="input_file_id")]
        batch.total, batch.errors = total, errors[:MOST_ERRORS]
        await self._turn(batch, "failed" if errors else "in_progress" if batch.end == "completed" else "cancelling")
        await self.files.end_reading(batch.input_file_id)

    async def _drop_over(self, over: list[tuple[str, str]]) -> None:
        """Delete the lines of finished batches; retry while the journal fails."""
        for batch_id, owner in over:
            while True:
                try:
                    await self._drop_lines(batch_id, owner)
                    break
                except UnavailableError:  # the writer logs it
                    await asyncio.sleep(DISK_POLL_S)

    async def _drop_lines(self, batch_id: str, owner: str) -> None:
        while await self._jobs.write(self._jobs.journal.drop_lines, batch_id, owner):
            pass  # in small steps, so that other journal calls need not wait long
        self._jobs.lines_bytes.pop(batch_id, None)

    async def _answer(self, running: _Running) -> None:
        """Run all unanswered lines, until all are answered, or the batch is cancelled or expires."""
        batch = running.record
        batch.completed, batch.failed, self._jobs.lines_bytes[batch.id] = await self._jobs.write(
            self._jobs.journal.count_lines, batch.id, batch.owner
        )
        if batch.end == "completed":
            try:
                await unless(running.stop.wait(), self._ask(running), max(batch.expires_at - time.time(), 0.0))
            except Stopped:
                batch.end = "cancelled" if running.stop.is_set() else "expired"
        await self._turn(batch, "finalizing")

    async def _ask(self, running: _Running) -> None:
        batch = running.record
        places = asyncio.Semaphore(LINES_AT_ONCE)
        tasks: set[asyncio.Task[None]] = set()
        last = 0

        def end(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            places.release()

        try:
            while entries := await self._jobs.write(self._jobs.journal.open_lines, batch.id, batch.owner, last):
                for entry in entries:
                    await places.acquire()
                    task = start_task(self._ask_line(running, entry), name=entry.id)
                    tasks.add(task)
                    task.add_done_callback(end)
                last = entries[-1].number
            await asyncio.gather(*tasks)
        finally:
            await end_tasks(*tasks)

    async def _ask_line(self, running: _Running, entry: Entry) -> None:
        batch = running.record
        job = Job(entry, asyncio.get_running_loop().create_future())
        job.on_pause = functools.partial(running.pause, job)
        running.asked += 1
        try:
            await self._jobs.answer(job)
        finally:
            running.asked -= 1
            running.waiting.discard(job)
        reply = job.reply.result()
        batch.completed += reply.status == 200
        batch.failed += reply.status != 200
        batch.trouble = None
        self._jobs.lines_bytes[batch.id] += len(reply.body)

    async def _publish(self, batch: BatchRecord) -> None:
        """Write the output files and finish the batch; with damaged answers, return to `in_progress`.

        Raises OSError, JournalError.
        """
        outs: dict[str, BinaryIO] = {}
        counts: Counter[str] = Counter()
        last = 0
        try:
            while lines := await self._jobs.write(self._jobs.journal.answered_lines, batch.id, batch.owner, last):
                counts += await self.files.in_thread(self._write, batch, lines, outs)
                last = lines[-1][0].number
            if counts["damaged"]:
                logger.error("%d lines of %s are damaged; computing them again", counts["damaged"], batch.id)
                batch.status = "in_progress"
                return
            now = time.time()
            for kind, out in outs.items():
                size = out.tell()
                file_id = f"file-{hashlib.blake2b(f'{batch.id} {kind}'.encode(), digest_size=16).hexdigest()}"
                await self.files.in_thread(self.files.place, out, file_id)
                await self.files.put(
                    File(
                        id=file_id,
                        owner=batch.owner,
                        filename=f"{batch.id}_{kind}.jsonl",
                        purpose="batch_output",
                        bytes=size,
                        created_at=now,
                        expires_at=now + batch.keep_s,
                    )
                )
                setattr(batch, f"{kind}_file_id", file_id)
        finally:
            for out in outs.values():
                with contextlib.suppress(OSError):  # else removed at the next start
                    out.close()
                    Path(out.name).unlink(missing_ok=True)
        batch.completed, batch.failed = counts["output"], counts["error"]
        if lost := batch.total - batch.completed - batch.failed:
            batch.errors = [
                fault(
                    "lines_lost", f"{lost} requests were lost as the disk damaged the journal; send them again, in another batch."
                )
            ]
        await self._turn(batch, batch.end)

    def _write(self, batch: BatchRecord, lines: list[tuple[Entry, bytes]], outs: dict[str, BinaryIO]) -> Counter[str]:
        """Append result lines to the files in `outs` by kind (`output`, `error`), opening them when needed.

        Return the number of lines by kind, including `damaged`. Raises OSError.
        """
        counts: Counter[str] = Counter()
        for entry, body in lines:
            custom_id = str(entry.outline, "utf-8", "replace") if isinstance(entry.outline, bytes) else ""
            if entry.id != line_id(batch.id, custom_id):
                continue  # damaged: its custom_id is unknown
            if entry.status is not None:
                kind = "output" if entry.status == 200 else "error"
                text = answer_line(entry.id, custom_id, entry.status, body)
            elif batch.end == "completed":
                counts["damaged"] += 1
                continue
            else:
                kind, text = "error", failure_line(entry.id, custom_id, *_ENDINGS[batch.end])
            if kind not in outs:
                outs[kind] = open_private(self.files.directory / f"{batch.id}.{kind}.tmp", "wb")
            outs[kind].write(text)
            counts[kind] += 1
        return counts


def _blocks(path: Path, batch: BatchRecord, longest: int) -> Iterator[tuple[list[tuple[Entry, bytes]], list[Json]]]:
    """Yield the requests and errors of an input file in blocks. `longest`: most bytes of a line. Raises OSError."""
    lines: list[tuple[Entry, bytes]] = []
    faults: list[Json] = []
    size = 0
    with path.open("rb") as file:
        for number, line in parse_lines(file, MOST_LINES, longest):
            if not isinstance(line, ValueError) and line.url != batch.endpoint:
                line = ValueError(f"'url' is not the batch's endpoint {batch.endpoint}")
            if isinstance(line, ValueError):
                faults.append(fault("invalid_request", f"line {number}: {line}.", number))
            else:
                name, custom_id = line_id(batch.id, line.custom_id), line.custom_id.encode()
                entry = Entry(0, name, batch.owner, batch.id, b"", line.url, KEPT_OPEN, LINE, custom_id)
                lines.append((entry, line.body))
                size += len(line.body)
            if size > BYTES_AT_ONCE or len(lines) == ROWS_AT_ONCE or len(faults) == MOST_ERRORS:
                yield lines, faults
                lines, faults, size = [], [], 0
    if lines or faults:
        yield lines, faults
