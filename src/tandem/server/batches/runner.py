"""Batches on their way: each line of a file is a request to the routes, and its answer a line of another file.

A line is answered when it stands in one of the two files of results. Whoever takes a batch up again, after the api was
killed say, asks for the others alone, with seeds that follow from batch and line.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tandem.borders import start_task
from tandem.config.settings import ServerSettings
from tandem.errors import RequestError
from tandem.server.batches.files import File, Files, disk_trouble, read_records, write_record
from tandem.server.batches.lines import Line, answer_line, failure_line
from tandem.server.batches.records import OPEN, BatchRecord, FilesLost, Results, fault, faults
from tandem.server.context import Api
from tandem.server.failures import internal_error
from tandem.server.journal.calls import StoredReply, call
from tandem.server.journal.jobs import READY_POLL_S, Jobs
from tandem.server.waiting import Stopped, end_tasks, unless
from tandem.server.workers.turns import Turns

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

AT_ONCE = 32
"""Lines of all batches that are asked for at once, shared among clients."""
RUNNING = 8
"""Batches that run at once, shared among clients. One whose lines are all refused for now gives its place back."""
EVERY_S, DISK_POLL_S = 10.0, 1.0
MOST_OPEN, MOST_KEPT = 100, 1000
"""Batches of one client that are not over, and of all of its."""
_ENDINGS = {"expired": ("batch_expired", "This request could not be executed before the completion window expired."),
            "cancelled": ("batch_cancelled", "This request was not executed: the batch was cancelled.")}


class Batches:
    """All batches and files of all clients. Belongs to the event loop that called `start`."""

    def __init__(self, api: Api, jobs: Jobs) -> None:
        """Read what there is. Raises ConfigError."""
        server: ServerSettings = api.settings.server
        assert server.journal is not None
        self.files = Files(Path(server.journal) / "files", max_bytes=server.files_max_gb * 2**30,
                           sync=server.journal_sync != "no")
        self._api, self._jobs = api, jobs
        self._directory = self.files.directory
        self._batches = {batch.id: batch for batch in read_records(self._directory, "batch_*.json", BatchRecord)}
        begun = {batch.id for batch in self._batches.values() if batch.status in OPEN}
        for path in self._directory.glob("batch_*"):
            if path.suffix != ".json" and path.stem not in begun:
                path.unlink(missing_ok=True)  # of one that was just beginning, or had just ended
        self._accepting = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: dict[str, asyncio.Event] = {}

    # --- life ---

    async def start(self) -> None:
        """Go on with what an earlier process has begun."""
        self._places, self._turns = Turns(RUNNING), Turns(AT_ONCE, RUNNING * AT_ONCE)
        begun = [batch for batch in self._batches.values() if batch.status in OPEN]
        if begun:
            logger.info("%d batches are not over; they go on", len(begun))
        for batch in sorted(begun, key=lambda one: one.created_at):
            self._begin(batch)
        self._keeper = start_task(self._keep(), name="batch-keeper")

    async def close(self) -> None:
        """End; what is not over is taken up by the next process."""
        await end_tasks(self._keeper, *self._tasks.values())
        self.files.thread.shutdown()

    async def _keep(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                await self._in_thread(self.files.drop_expired)
            await asyncio.sleep(EVERY_S)

    async def _in_thread(self, work: Callable[..., Result], *given: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.files.thread, work, *given)

    # --- what clients ask ---

    def of(self, owner: str | None) -> list[BatchRecord]:
        """Batches of a client, of everybody for None, the oldest first."""
        mine = [batch for batch in self._batches.values() if owner in (None, batch.owner)]
        return sorted(mine, key=lambda batch: (batch.created_at, batch.id))

    def find(self, batch_id: str, owner: str | None) -> BatchRecord | None:
        """A batch of a client, of anybody for None."""
        batch = self._batches.get(batch_id)
        return batch if batch is not None and owner in (None, batch.owner) else None

    async def create(self, batch: BatchRecord) -> None:
        """Accept a batch over a file that is there. Raises RequestError, OSError."""
        async with self._accepting:  # those that come together are counted one by one
            await self._accept(batch)
        self._begin(batch)

    async def _accept(self, batch: BatchRecord) -> None:
        self.files.check_room(batch.owner)
        mine = self.of(batch.owner)
        if sum(one.status in OPEN for one in mine) >= MOST_OPEN:
            raise RequestError(f"At most {MOST_OPEN} batches of one client may be open; wait for one to end, or cancel "
                               "one.", code="too_many_batches")
        over = [one for one in mine if one.status not in OPEN]
        for old in over[:max(0, len(mine) - MOST_KEPT + 1)]:
            del self._batches[old.id]
            await self._in_thread((self._directory / f"{old.id}.json").unlink, True)
        # A link of its own: the client may delete the file, and its time may be over before the batch's.
        results = Results(self._directory, batch)
        try:
            await self._in_thread(_link, self.files.path(batch.input_file_id), results.source)
            await self._save(batch)
        except OSError:
            await self._in_thread(results.clear)
            raise
        self._batches[batch.id] = batch

    async def cancel(self, batch: BatchRecord) -> None:
        """Stop a batch that runs; answers that are there stay. Raises RequestError for one that is over, OSError."""
        if batch.status not in OPEN:
            raise RequestError(f"A batch with the status '{batch.status}' cannot be cancelled.", param="batch_id",
                               code="invalid_value")
        if batch.status in ("validating", "in_progress"):
            batch.end, batch.status = "cancelled", "cancelling"
            if batch.id in self._cancelled:
                self._cancelled[batch.id].set()
            else:
                self._begin(batch)  # an error had ended it
            await self._turn(batch, batch.status)

    async def _save(self, batch: BatchRecord) -> None:
        path = self._directory / f"{batch.id}.json"
        await self._in_thread(functools.partial(write_record, path, batch, sync=self.files.sync))

    async def _turn(self, batch: BatchRecord, status: str) -> None:
        batch.status = status
        batch.times.setdefault(status, time.time())
        await self._save(batch)

    # --- one batch ---

    def _begin(self, batch: BatchRecord) -> None:
        self._cancelled[batch.id] = asyncio.Event()
        if batch.status == "cancelling":
            self._cancelled[batch.id].set()
        self._tasks[batch.id] = start_task(self._work(batch), name=batch.id)

    async def _work(self, batch: BatchRecord) -> None:
        results = Results(self._directory, batch)
        try:
            await self._through(batch, results, self._run)
        except FilesLost:
            logger.error("files of %s were removed while it ran; it fails", batch.id)
            batch.trouble, batch.errors = None, [fault("files_lost", "Files of the batch were removed while it ran. "
                                                       "Send the file again, for another batch.")]
            with contextlib.suppress(OSError):  # the next process finds out for itself
                await self._turn(batch, "failed")
            await self._in_thread(results.clear)
        except Exception as error:  # noqa: BLE001 - an edge as in the gate: the client must be told
            internal_error(error, "a batch")
            batch.errors = [fault("internal_error", "Internal server error; a restart of the server goes on with the "
                                  "batch.")]
        finally:
            self._tasks.pop(batch.id, None)
            self._cancelled.pop(batch.id, None)

    async def _through(self, batch: BatchRecord, results: Results, step: Callable[..., Any], *given: Any) -> Any:
        """What a step returns, once the disk takes it; meanwhile the batch says what is wrong. Raises FilesLost."""
        while True:
            try:
                outcome = await step(batch, results, *given)
            except OSError as error:
                if batch.status in ("validating", "in_progress", "cancelling"):
                    await self._in_thread(results.check)
                code, why = disk_trouble(error)
                if batch.trouble is None:
                    logger.error("%s waits: %s; it goes on as soon as that has changed", batch.id, why)
                batch.trouble = fault(code, f"The batch waits: {why}.")
                await asyncio.sleep(DISK_POLL_S)
            else:
                batch.trouble = None
                return outcome

    async def _run(self, batch: BatchRecord, results: Results) -> None:
        """From wherever it is to its end; may be begun again at any time. Raises OSError."""
        if not batch.total or batch.errors:
            async with self._places.turn(batch.owner):
                if not await self._validated(batch, results):
                    return
        if batch.status in ("in_progress", "cancelling"):
            if batch.end == "completed" and not await self._answered(batch, results):
                batch.end = "cancelled" if self._cancelled[batch.id].is_set() else "expired"
            if batch.end != "completed":
                batch.trouble = None
                await self._fill(batch, results)
            await self._in_thread(results.check)
            await self._turn(batch, "finalizing")
        await self._finalize(batch, results)

    async def _validated(self, batch: BatchRecord, results: Results) -> bool:
        batch.total, batch.errors = await self._in_thread(faults, results.source, batch.endpoint, self._api.max_body)
        if batch.errors:
            await self._turn(batch, "failed")
            await self._in_thread(results.clear)
            return False
        if batch.status == "validating":
            await self._turn(batch, "in_progress")
        return True

    async def _count(self, batch: BatchRecord, results: Results) -> set[str]:
        """Whose answers are there."""
        done = await self._in_thread(results.done)
        batch.completed, batch.failed = len(done["output"]), len(done["error"])
        return done["output"] | done["error"]

    async def _answered(self, batch: BatchRecord, results: Results) -> bool:
        """Ask for all that is left; False when it was cancelled, or its time was over."""
        left_s = max(batch.expires_at - time.time(), 0.0)
        try:
            await unless(self._cancelled[batch.id].wait(), self._ask(batch, results), left_s)
        except Stopped:
            return False
        return True

    async def _ask(self, batch: BatchRecord, results: Results) -> None:
        """Ask for all lines, giving the place back for as long as all of them are refused. Raises OSError."""
        done: set[str] | None = None
        offset = 0
        while True:
            async with self._places.turn(batch.owner):
                if done is None:
                    done = await self._count(batch, results)
                try:
                    await self._ask_all(batch, results, done, offset)
                    return
                except _AllRefused as refused:
                    offset, pause = refused.offset, refused.pause_s
                    batch.trouble = refused.trouble
            await asyncio.sleep(pause)

    async def _ask_all(self, batch: BatchRecord, results: Results, done: set[str], offset: int) -> None:
        """Ask for the lines from byte `offset` on, and note in `done` whose answers are there. Raises _AllRefused."""
        lines = self._left(results, done, offset)
        reading = asyncio.Lock()
        asked: dict[str, int] = {}
        """Byte offset of each line that a worker has, by its custom_id."""
        refused: set[str] = set()

        async def ask() -> None:
            while True:
                async with reading:
                    following = await anext(lines, None)
                if following is None:
                    return
                start, line = following
                asked[line.custom_id] = start
                while (pause := (reply := await self._reply(batch, line)).retry_s) is not None:
                    refused.add(line.custom_id)
                    if len(refused) == len(asked):
                        raise _AllRefused(reply, min(asked.values()), pause)
                    await asyncio.sleep(pause)
                    refused.remove(line.custom_id)
                kind = "output" if reply.status == 200 else "error"
                text = answer_line(batch.line_id(line.custom_id), line.custom_id, reply.status, reply.body)
                await self._through(batch, results, self._append, kind, text)
                batch.completed += kind == "output"
                batch.failed += kind == "error"
                del asked[line.custom_id]
                done.add(line.custom_id)

        workers = [asyncio.ensure_future(ask()) for _ in range(min(AT_ONCE, batch.total))]
        try:
            await asyncio.gather(*workers)
        finally:
            await end_tasks(*workers)

    async def _left(self, results: Results, done: set[str], offset: int) -> AsyncIterator[tuple[int, Line]]:
        """Requests without an answer from byte `offset` on, each with the byte at which it begins. Raises OSError."""
        while (found := await self._in_thread(results.left, done, offset))[0]:
            for one in found[0]:
                yield one
            offset = found[1]

    async def _append(self, batch: BatchRecord, results: Results, kind: str, text: bytes) -> None:
        await self._in_thread(results.append, kind, text)

    async def _reply(self, batch: BatchRecord, line: Line) -> StoredReply:
        """The answer to one try of a request, as soon as the server is ready and it is the client's turn."""
        assert self._jobs.app is not None
        seed = {"tandem.seed": f"{batch.id}:{batch.line_id(line.custom_id)}"}
        while not self._api.ready():
            await asyncio.sleep(READY_POLL_S)
        async with self._turns.turn(batch.owner):
            return await call(self._api, self._jobs.app, self._jobs.root, line.url, line.body, batch.owner,
                              asyncio.Event(), seed)

    async def _fill(self, batch: BatchRecord, results: Results) -> None:
        """A line for each request that has not been run. Raises OSError."""
        done, offset = await self._count(batch, results), 0
        while True:
            lines, offset = await self._in_thread(results.left, done, offset)
            if not lines:
                return
            text = b"".join(failure_line(batch.line_id(line.custom_id), line.custom_id, *_ENDINGS[batch.end])
                            for _, line in lines)
            await self._in_thread(results.append, "error", text)
            batch.failed += len(lines)

    async def _finalize(self, batch: BatchRecord, results: Results) -> None:
        """Make the results files of the client's. Raises OSError."""
        now = time.time()
        for kind, path in results.paths.items():
            file_id = batch.file_id(kind)
            if path.exists() and path.stat().st_size:
                try:
                    published, size = await self._in_thread(results.publish, kind)
                except OSError:
                    batch.status = "in_progress"  # what is damaged is computed again
                    raise
                file = File(id=file_id, owner=batch.owner, filename=f"{batch.id}_{kind}.jsonl", purpose="batch_output",
                            bytes=size, created_at=now, expires_at=now + batch.keep_s)
                await self._in_thread(self.files.add, file, published)
            elif self.files.find(file_id, None) is None:
                continue
            setattr(batch, f"{kind}_file_id", file_id)
        await self._turn(batch, batch.end)
        await self._in_thread(results.clear)


class _AllRefused(Exception):
    """Every line that a batch asks for is refused for now."""

    def __init__(self, reply: StoredReply, offset: int, pause_s: float) -> None:
        """`offset` is the byte from which on lines are to be asked for again."""
        super().__init__()
        error = msgspec.json.decode(reply.body)["error"]
        self.offset, self.pause_s = offset, pause_s
        self.trouble = fault(error["code"], f"The batch waits: {error['message']}")


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # not every kind of disk has links
        shutil.copy(source, target)
