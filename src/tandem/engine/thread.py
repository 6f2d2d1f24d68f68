"""An engine in its own thread, for the Python API.

Only that thread uses the engine. Other threads submit calls and get their results through futures. So Ctrl-C or garbage
collection in those threads cannot interrupt the engine's work.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from copy import copy
from functools import partial
from typing import TypeVar

from tandem.config.settings import Settings
from tandem.crash_guard import start_thread
from tandem.engine.build_layout import RankGroupLayout
from tandem.engine.engine import Engine, EngineStopped
from tandem.errors import OverloadedError, RequestError, ServerError, TandemError, UnavailableError
from tandem.executors.executor import Progress, do_nothing
from tandem.protocol.control import EngineMessage, Output, Refused
from tandem.protocol.request import EngineRequest
from tandem.transport.mailbox import Mailbox

log = logging.getLogger(__name__)

T = TypeVar("T")
Event = Output | Exception
"""Event of a request: an output or an error. The last has a finish reason or is an error."""
Sink = Callable[[Event], object]
"""Callback for a request's events, run in the engine's thread. Raises RuntimeError once its event loop is closed."""
CLOSED = "this LLM is closed"


class EngineThread:
    """Engine in a thread, with thread-safe methods to start it, submit requests and end it."""

    def __init__(self, settings: Settings, layout: RankGroupLayout) -> None:
        """Create the engine; `start` loads the model."""
        self.engine = Engine(settings, layout)
        self._calls: Mailbox[Callable[[], None]] = Mailbox()
        self._held: deque[tuple[EngineRequest, Sink]] = deque()
        """Requests waiting for room in the scheduler's queue."""
        self._sinks: dict[str, Sink] = {}
        self._closing = False
        self._ended: Exception | None = None
        """Error that ended the thread; None while it runs."""
        self._pid = os.getpid()
        self._news: queue.SimpleQueue[tuple[int, int, int, str] | Exception | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    # --- for any thread ---

    def start(self, progress: Progress | None = None) -> None:
        """Load the model and wait for it; call `progress` in the calling thread. Raises UsageError or RankFailure."""
        self._thread = start_thread(self._run, name="engine")
        try:
            while (news := self._news.get()) is not None:
                if isinstance(news, Exception):
                    raise news
                if progress is not None:
                    progress(*news)
        except BaseException:
            self.close()
            raise

    def submit(self, requests: Sequence[EngineRequest], sink: Sink) -> Future[None]:
        """Queue all requests or none. The future's result raises RequestError if one is refused.

        Requests without room in the scheduler's queue wait here.
        """
        return self.call(partial(self._submit, requests, sink))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests without further events; ignore finished ones. Returns at once."""
        if request_ids := list(request_ids):
            self._calls.put(partial(self._abort, request_ids))

    def call(self, work: Callable[[Engine], T]) -> Future[T]:
        """Run `work(engine)` in the engine's thread. The future's result raises what `work` raises."""
        if os.getpid() != self._pid:
            raise UnavailableError(
                "this LLM belongs to the process that this one was forked from; make another here, or start processes by `spawn`"
            )
        future: Future[T] = Future()
        self._calls.put(partial(self._do, work, future))
        if self._ended is not None:  # the thread may have ended before the call was queued
            raise _again(self._ended)
        return future

    def close(self) -> None:
        """End running requests with UnavailableError, then all ranks and the thread. Idempotent."""
        if os.getpid() != self._pid:
            return
        self._closing = True
        self._calls.put(do_nothing)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # --- the engine's thread ---

    def _run(self) -> None:
        ended: Exception = UnavailableError(CLOSED)
        try:
            self.engine.rank_group.on_wait = self.engine.executor.on_wait = self.take
            self.engine.start(lambda *progress: self._news.put(progress))
            self._news.put(None)
            self.engine.serve(self)
        except EngineStopped:
            pass
        except TandemError as error:
            ended = error
        except Exception as error:
            log.exception("the engine has ended")
            ended = ServerError(f"the engine has ended: {type(error).__name__}: {error}")
        finally:
            self._end(ended)

    def _end(self, error: Exception) -> None:
        self._ended = error
        for sink in [*self._sinks.values(), *(sink for _, sink in self._held)]:
            _tell(sink, _again(error))
        self._sinks.clear()
        for call in self._calls.take():  # later calls see `_ended`
            call()
        try:
            self.engine.close()
        except Exception:
            log.exception("the engine could not be closed")
        self._news.put(error)
        self._calls.close()

    @property
    def socket(self) -> object:
        """Socket that is readable when other threads have queued calls."""
        return self._calls.socket

    def take(self, *, replacing: bool = False) -> None:
        """Run the queued calls of other threads. Raises EngineStopped once closed."""
        for call in self._calls.take():
            call()
        if self._closing:
            raise EngineStopped

    def _do(self, work: Callable[[Engine], T], future: Future[T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            if self._ended is not None:
                raise _again(self._ended)
            future.set_result(work(self.engine))
        except Exception as error:  # noqa: BLE001 - it is raised again where it was called from
            future.set_exception(error)

    def _submit(self, requests: Sequence[EngineRequest], sink: Sink, engine: Engine) -> None:
        admitted: list[str] = []
        try:
            for request in requests:
                if self._held or not self._entered(request, sink):
                    self._held.append((request, sink))
                admitted.append(request.request_id)
        except RequestError:
            self._abort(admitted)
            raise

    def _entered(self, request: EngineRequest, sink: Sink) -> bool:
        """Queue a request in the engine; return False if its queue is full. Raises RequestError."""
        try:
            self.engine.submit(request)
        except OverloadedError:
            return False
        self._sinks[request.request_id] = sink
        return True

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if self._sinks.pop(request_id, None) is not None:
                self.engine.abort(request_id)
        gone = set(request_ids)
        if any(request.request_id in gone for request, _ in self._held):
            self._held = deque(pair for pair in self._held if pair[0].request_id not in gone)

    def deliver(self, messages: Sequence[EngineMessage]) -> None:
        """Call the sinks of outputs and errors; then queue requests that waited for room."""
        for message in messages:
            if not isinstance(message, Output | Refused) or (sink := self._sinks.get(message.request_id)) is None:
                continue
            if isinstance(message, Refused) or message.finish_reason:
                del self._sinks[message.request_id]
            if not _tell(sink, message.as_error() if isinstance(message, Refused) else message):
                self._abort([message.request_id])
        self._fill()

    def _fill(self) -> None:
        """Queue waiting requests in the engine while it has room."""
        while self._held:
            request, sink = self._held[0]
            try:
                if not self._entered(request, sink):
                    return
            except RequestError as error:
                _tell(sink, error)
            self._held.popleft()


def _tell(sink: Sink, event: Event) -> bool:
    """Call the sink with an event; return False if its event loop is closed."""
    try:
        sink(event)
    except RuntimeError:
        return False
    return True


def _again(error: Exception) -> Exception:
    """Copy an error without its traceback, for another caller to raise."""
    return copy(error).with_traceback(None)
