"""Engine process, started by `tandem engine`: signals, messages of apis, and status."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec

from tandem.config.settings import Settings
from tandem.engine.build_layout import plan_layout, say_what_is_idle
from tandem.engine.engine import Engine, EngineStopped
from tandem.engine.ipc_server import Client, Inbound, IPCServer
from tandem.env import engine_socket_path
from tandem.errors import EngineStuck, RankFailure, RequestError
from tandem.processes.child import watch_lifeline
from tandem.protocol import control
from tandem.protocol.adapters import AdapterChanged, ChangeAdapter
from tandem.protocol.cached_prefixes import QueryCache
from tandem.protocol.events import History
from tandem.protocol.keys import ClusterKeys
from tandem.protocol.request import EngineRequest

log = logging.getLogger(__name__)

SHOW_S = 0.2
"""Seconds between updates of the loading progress."""
LOG_S = 10.0
"""Seconds between log lines of a rank's loading progress."""
PUBLISH_S = 0.5
"""Seconds between updates of the published status."""
FETCHED_S = 30.0
"""Seconds to stay alive so that other replicas can fetch the KV of the last migrated requests."""
EXIT_OK, EXIT_FAILED, EXIT_STUCK = 0, 3, 4
"""Exit codes. With EXIT_STUCK a restarted process may serve with the same settings."""


class EngineService:
    """Exchange of messages between IPC server and engine, until `stop`."""

    def __init__(self, settings: Settings, lending: ClusterKeys | None = None) -> None:
        """Check model and layout, and open the socket. `lending`: keys for KV transfers, as for `Engine`. Raises UsageError."""
        self._settings = settings
        layout = plan_layout(settings)
        say_what_is_idle(settings, layout)
        self._engine = Engine(settings, layout, lending=lending)
        self._engine.rank_group.on_wait = self.take
        path = Path(settings.process.engine_socket or engine_socket_path(settings.server.port))
        self._ipc_server = IPCServer(path, self._engine.status(), self._engine.metrics.text)
        self._owners: dict[str, Client] = {}
        self._handed: dict[str, Client] = {}
        """Migrated requests whose KV other replicas may still fetch, with their api."""
        self._handed_at = 0.0
        self._stopping = threading.Event()
        self.serving = False
        self._deadline: float | None = None
        self._published = 0.0
        self._loading = _Loading(self._publish, self._engine.rank_group.history)

    def stop(self) -> bool:
        """Drain: refuse new requests, finish running ones within `drain_timeout`, then end.

        Return False if there is nothing to drain: still loading, or already stopping.
        """
        drain = self.serving and not self._stopping.is_set()
        self._stopping.set()
        return drain

    def run(self, report: Callable[[str], None]) -> int:
        """Load the model and serve until stopped; return the exit code. Raises UsageError for mistakes in settings or model."""
        try:
            self._engine.start(self._loading)
            log.info(
                "engine ready: %s, %d rank(s), %d micro-batch(s), KV cache of %d tokens",
                self._engine.layout.served_name,
                len(self._engine.layout.ranks),
                self._engine.layout.micro_batches,
                self._engine.status().kv_tokens_total,
            )
            self.serving = True
            self._publish()
            self._engine.serve(self)
        except EngineStopped:
            pass
        except EngineStuck as stuck:
            log.error("%s; ending this process, since the step cannot be ended without it", stuck.message)
            self._ipc_server.close()
            # Exit at once: a clean exit would wait for the stuck thread.
            os._exit(EXIT_STUCK)
        except RankFailure as failure:
            log.error("%s; ending this engine and failing its requests", failure.message)
            report(failure.message)
            self.deliver(self._engine.failures(failure))
            return EXIT_FAILED
        finally:
            self._engine.close()
            self._ipc_server.close()
        return EXIT_OK

    # --- called by the engine's loop ---

    @property
    def socket(self) -> object:
        """Socket that is readable when messages of apis have arrived."""
        return self._ipc_server.inbox.socket

    def take(self, *, replacing: bool = False) -> None:
        """Pass messages of apis to the engine and publish the status when due. Raises EngineStopped once drained."""
        if replacing:
            self._handed.clear()
        for client, message in self._ipc_server.receive(0.0):
            self._handle(client, message)
        if self._ipc_server.status.state != self._engine.state or time.monotonic() - self._published > PUBLISH_S:
            self._publish()
        if self._over():
            raise EngineStopped

    def _over(self) -> bool:
        if not self._stopping.is_set():
            return False
        if self._deadline is None:
            self._deadline = time.monotonic() + self._settings.process.drain_timeout
            self._engine.drain()
            self._publish()
        now = time.monotonic()
        if now > self._handed_at + FETCHED_S:
            self._handed.clear()
        return (self._engine.idle and not self._handed) or now > self._deadline

    def _handle(self, client: Client, message: Inbound) -> None:
        if isinstance(message, control.Submit):
            self._submit(client, message.request)
        elif isinstance(message, control.Abort):
            self._handed.pop(message.request_id, None)
            if self._owners.get(message.request_id) == client:
                del self._owners[message.request_id]
                self._engine.abort(message.request_id, answered=message.answered)
        elif isinstance(message, control.QuarantineAck):
            if self._owners.get(message.request_id) == client and not message.resting:
                self._engine.noted(message.request_id)
        elif isinstance(message, control.PictureContent):
            self._engine.pictures.give(message)
        elif isinstance(message, QueryCache):
            self._engine.query_cache(message, partial(self._ipc_server.send, client))
        elif isinstance(message, ChangeAdapter):
            self._engine.adapters.ask(message, partial(self._changed, client))
        elif isinstance(message, control.HandOver):
            for request_id in [request_id for request_id, owner in self._owners.items() if owner == client]:
                self._engine.hand_over(request_id)
        elif isinstance(message, control.Neighbours):
            self._engine.meet(message)
        else:
            self._handed = {name: owner for name, owner in self._handed.items() if owner != client}
            for request_id in [request_id for request_id, owner in self._owners.items() if owner == client]:
                del self._owners[request_id]
                self._engine.abort(request_id)

    def _changed(self, client: Client, answer: AdapterChanged) -> None:
        """Answer a change of adapters, after a status that shows it."""
        self._publish()
        self._ipc_server.send(client, answer)

    def _submit(self, client: Client, request: EngineRequest) -> None:
        try:
            self._engine.submit(request)
        except RequestError as error:
            self._engine.metrics.refused.labels(str(error.status)).inc()
            retry_after = getattr(error, "retry_after", None)
            refused = control.Refused(request.request_id, error.status, error.message, error.code, error.param, retry_after)
            self._ipc_server.send(client, refused)
            return
        self._owners[request.request_id] = client

    def deliver(self, messages: list[control.EngineMessage]) -> None:
        """Send messages to their apis, batched per api since sending costs more than encoding."""
        batches: dict[Client, list[control.EngineMessage]] = {}
        ended = False
        for message in messages:
            if not isinstance(message, control.OfRequest):
                continue
            over = isinstance(message, control.Refused | control.HandedOver) or (
                isinstance(message, control.Output) and message.finish_reason is not None
            )
            ended |= over
            owner = self._owners.pop(message.request_id, None) if over else self._owners.get(message.request_id)
            if isinstance(message, control.HandedOver) and owner is not None and self._engine.rank_group.lends:
                self._handed[message.request_id], self._handed_at = owner, time.monotonic()
            if owner is not None:
                batches.setdefault(owner, []).append(message)
        if ended:
            self._publish()  # publish first, so that clients never see a finished request as running
        for client, batch in batches.items():
            self._ipc_server.send(client, *batch)

    def _publish(self) -> None:
        status = self._engine.status()
        if not self.serving:
            status = msgspec.structs.replace(status, loading=list(self._loading.ranks.values()))
        self._ipc_server.status = status
        self._published = time.monotonic()


class _Loading:
    """Loading progress of the ranks, for the status. Logged when a phase ends or takes long."""

    def __init__(self, changed: Callable[[], None], history: History) -> None:
        """Store the callbacks. `changed` is called when there is new progress to publish."""
        self._history = history
        self.ranks: dict[int, control.LoadProgress] = {}
        self._changed = changed
        self._shown = 0.0
        self._logged: dict[tuple[int, str], float] = {}

    def __call__(self, rank: int, done: int, total: int, phase: str) -> None:
        before, now = self.ranks.get(rank), time.monotonic()
        self.ranks[rank] = control.LoadProgress(rank, done, total, phase)
        if phase == "fetch":
            self._note_download(before, self.ranks[rank])
        if before is None or before.phase != phase or now - self._shown > SHOW_S:
            self._shown = now
            self._changed()
        if total and (done >= total or now - self._logged.setdefault((rank, phase), now) > LOG_S):
            self._logged[rank, phase] = now
            log.info("rank %d: %s %d%% of %.0f MiB", rank, phase, 100 * done // total, total / 2**20)

    def _note_download(self, before: control.LoadProgress | None, now: control.LoadProgress) -> None:
        size = f"{now.total / 2**20:.0f} MiB"
        begun = before is not None and before.phase == "fetch" and before.total > 0
        if now.total and now.done < now.total and not begun:
            self._history.note("download_begun", f"part {now.rank + 1} downloads {size} of the model", rank=now.rank)
        elif begun and now.total and now.done >= now.total and before is not None and before.done < before.total:
            self._history.note("download_done", f"part {now.rank + 1} has downloaded {size} of the model", rank=now.rank)


def run_engine(
    settings: Settings,
    *,
    lifeline: bool = False,
    report: Callable[[str], None] = lambda _: None,
    lending: ClusterKeys | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; with `lifeline` also until standard input closes. Return the exit code.

    `report` is called with the reason if ranks failed. `lending`: keys for KV transfers, as for `Engine`. Call from the main
    thread. Raises UsageError with nothing left running.
    """
    service = EngineService(settings, lending)

    def handle(signum: int, frame: FrameType | None) -> None:
        if not service.stop():
            raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, signal.SIG_IGN if lifeline else handle)
    if lifeline:
        watch_lifeline(lambda: os.kill(os.getpid(), signal.SIGTERM))
    try:
        return service.run(report)
    except KeyboardInterrupt:
        log.info("Stopped at once%s", ": requests under way, if any, are lost" if service.serving else "")
        return 128 + signal.SIGTERM
