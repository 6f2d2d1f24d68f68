"""An engine in a thread of its own, within a program that may have many: what the Python API stands on.

All that is done with the engine is done in that thread. Others hand in work and hear of the outcome, so neither Ctrl-C
nor the garbage collector, which come at any point of any of them, can leave it half done.
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

from tandem.borders import start_thread
from tandem.config.settings import Settings
from tandem.engine.engine import Engine
from tandem.engine.layout import GangLayout
from tandem.errors import OverloadedError, RequestError, ServerError, TandemError, UnavailableError
from tandem.executors.base import Progress, do_nothing
from tandem.protocol.control import EngineMessage, Output, Refused
from tandem.protocol.request import EngineRequest
from tandem.transport.mailbox import Mailbox

log = logging.getLogger(__name__)

T = TypeVar("T")
Event = Output | Exception
"""What comes of a request: the last is an output with a finish reason, or an error."""
Sink = Callable[[Event], object]
"""Where the events of a request go. Called in the engine's thread; RuntimeError says that nobody listens any more."""
CLOSED = "this LLM is closed"


class _Closing(BaseException):
    """Leaves whatever the engine is at."""


class EngineThread:
    """Starts, feeds, looks after and ends an engine. Threads may share one."""

    def __init__(self, settings: Settings, layout: GangLayout) -> None:
        """Nothing is started."""
        self.engine = Engine(settings, layout)
        self._calls: Mailbox[Callable[[], None]] = Mailbox()
        self._held: deque[tuple[EngineRequest, Sink]] = deque()
        """Requests for which the queue has had no room yet."""
        self._sinks: dict[str, Sink] = {}
        self._closing = False
        self._ended: Exception | None = None
        """Why nothing can be asked of it any more."""
        self._pid = os.getpid()
        self._news: queue.SimpleQueue[tuple[int, int, int, str] | Exception | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    # --- for any thread ---

    def start(self, progress: Progress | None = None) -> None:
        """Load the model, and call `progress` meanwhile, in this thread. Raises UsageError or RankFailure."""
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
        """Queue all of them, or none: the future's result raises RequestError when one is refused.

        Those for which the queue has no room are kept here until it has.
        """
        return self.call(partial(self._submit, requests, sink))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests without a further event. Those that are over are ignored. Returns at once."""
        if request_ids := list(request_ids):
            self._calls.put(partial(self._abort, request_ids))

    def call(self, work: Callable[[Engine], T]) -> Future[T]:
        """Have the engine's thread do something with the engine. The result raises what `work` raises."""
        future: Future[T] = Future()
        self._calls.put(partial(self._do, work, future))
        if os.getpid() != self._pid:
            raise UnavailableError("this LLM belongs to the process that this one was forked from; make another here, "
                                   "or start processes by `spawn`")
        if self._ended is not None:  # perhaps before the call was there
            raise _again(self._ended)
        return future

    def close(self) -> None:
        """End the requests that run (with UnavailableError), all ranks, and the thread. Idempotent."""
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
            self.engine.gang.on_wait = self.engine.executor.on_wait = self._meanwhile
            self.engine.start(lambda *progress: self._news.put(progress))
            self._news.put(None)
            while True:
                self._meanwhile()
                self._deliver(self.engine.pump(0.0))
                self._fill()
                self.engine.sleep(self._calls.socket)
        except _Closing:
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
        for call in self._calls.take():  # those that come later see that it has ended
            call()
        try:
            self.engine.close()
        except Exception:
            log.exception("the engine could not be closed")
        self._news.put(error)
        self._calls.close()

    def _meanwhile(self) -> None:
        """Take what has been handed in; also while ranks are being replaced."""
        for call in self._calls.take():
            call()
        if self._closing:
            raise _Closing

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
        """Queue a request; False where there is no room. Raises RequestError."""
        try:
            self.engine.submit(request)
        except OverloadedError:
            return False
        self._sinks[request.request_id] = sink
        return True

    def _fill(self) -> None:
        """Queue what has been waiting for room."""
        while self._held:
            request, sink = self._held[0]
            try:
                if not self._entered(request, sink):
                    return
            except RequestError as error:
                _tell(sink, error)
            self._held.popleft()

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if self._sinks.pop(request_id, None) is not None:
                self.engine.abort(request_id)
        gone = set(request_ids)
        if any(request.request_id in gone for request, _ in self._held):
            self._held = deque(one for one in self._held if one[0].request_id not in gone)

    def _deliver(self, messages: Sequence[EngineMessage]) -> None:
        for message in messages:
            if not isinstance(message, Output | Refused) or (sink := self._sinks.get(message.request_id)) is None:
                continue
            if isinstance(message, Refused) or message.finish_reason:
                del self._sinks[message.request_id]
            if not _tell(sink, message.as_error() if isinstance(message, Refused) else message):
                self._abort([message.request_id])


def _tell(sink: Sink, event: Event) -> bool:
    """False when nobody listens any more: an event loop that has been closed."""
    try:
        sink(event)
    except RuntimeError:
        return False
    return True


def _again(error: Exception) -> Exception:
    """`error` for another to raise, who adds his own traceback."""
    return copy(error).with_traceback(None)
