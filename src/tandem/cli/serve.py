"""`tandem serve`: engines and an API server process as children of one supervisor.

The supervisor holds the listening socket, so the API process can be replaced without refusing a connection. An API or engine
process that dies, is stopped or hangs is replaced. A single engine that exits with `EXIT_FAILED` ends the server. Children
exit when their standard input closes, so none outlives a killed supervisor.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tandem.checkpoints.resolve import expect
from tandem.checkpoints.stored import demo_path
from tandem.cli.address import local_url
from tandem.cli.arguments import say
from tandem.cli.hosts.sync import sync_workers
from tandem.cli.options import vllm_mlx
from tandem.cli.processes import prepared
from tandem.cli.startup import farewell, progress_lines
from tandem.config.loading import from_json
from tandem.config.settings import Settings
from tandem.env import engine_socket_path
from tandem.errors import UsageError
from tandem.launchers.host_addresses import ranks_of
from tandem.launchers.host_facts import launched_process_group
from tandem.launchers.hostfile import read_hostfile
from tandem.launchers.ray.driver import new_cluster
from tandem.printable import printable
from tandem.processes.child import ChildProcess
from tandem.protocol import supervisor_messages as messages
from tandem.protocol.control import EngineStatus
from tandem.protocol.events import History
from tandem.server.cache.warm_file import warm_bodies
from tandem.server.chats.texts import check_templates
from tandem.server.connections.tls import Certificate
from tandem.server.listener import listen
from tandem.server.store.journal import make_directory
from tandem.supervision.api import ApiProcess
from tandem.supervision.control_socket import ControlServer, control_path
from tandem.supervision.engine_pool import EnginePool, several, with_names
from tandem.supervision.engines import EngineSet
from tandem.system.origin import build

log = logging.getLogger("tandem.cli")

POLL_S = 0.1
GRACE_S = 10.0
"""Seconds after `drain_timeout` in which children must exit before they are killed."""
FRESH_S = 1.5
"""Seconds after which each engine has surely reported its status again."""
HURRY_S = 3.0
"""Seconds to end after a second signal."""


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal and return the exit code. Raises UsageError before starting anything."""
    settings = checked(prepared(arguments, quiet=True))
    sync_workers(settings)
    return serve(settings)


def run_launcher(arguments: argparse.Namespace) -> int:
    """Serve like vllm-mlx's launcher, with one tensor-parallel rank per host; print the equivalent command.

    Raises UsageError.
    """
    words = vllm_mlx.translate(arguments.words[arguments.words.index(vllm_mlx.COMMAND) + 1 :])
    if arguments.setting_hostfile is None and (group := launched_process_group()).rank is not None:
        raise vllm_mlx.by_hand(words, group)
    if arguments.setting_hostfile is not None and arguments.setting_tensor_parallel_size is None:
        hosts = str(len(read_hostfile(arguments.setting_hostfile[-1]).hosts))
        arguments.setting_tensor_parallel_size = [hosts]
        words += ["--tensor-parallel-size", hosts]
    print(f"tandem: this is `tandem serve {shlex.join(words)}`", file=sys.stderr)
    return run(arguments)


def checked(settings: Settings) -> Settings:
    """Return the settings, with names for all of several models. Raises UsageError without a model, or for an unknown name."""
    if settings.model.model == "demo" and not demo_path().exists():
        from tandem.cli.model import fetched  # imports the screen's library

        fetched("demo", None, None)
    if several(settings):
        return with_names(settings)
    if not settings.model.model:
        before = "; it stands before --served-name, which takes several words" * bool(settings.model.served_name)
        raise UsageError(f"no model is given: `tandem serve MODEL` takes a directory, a GGUF file, a hub id or demo{before}")
    if "/" not in settings.model.model:
        expect(settings.model.model)
    return settings


def serve(settings: Settings, on_listening: Callable[[Settings], None] = lambda settings: None) -> int:
    """Serve until a signal and return the exit code. `on_listening` receives the settings with the bound port.

    Raises UsageError.
    """
    if settings.server.tls_cert is not None:
        Certificate(settings.server.tls_cert, settings.server.tls_key)  # the API process would report it only later
    if settings.server.journal is not None:
        make_directory(Path(settings.server.journal))  # likewise
    warm_bodies(settings)  # likewise
    check_templates(settings)  # an invalid template would fail every chat request
    listener = listen(settings.server.host, settings.server.port)
    with listener, _with_cluster(settings) as settings:
        completed = _completed(settings, listener)
        on_listening(completed)
        return Supervisor(completed, listener).run()


@contextmanager
def _with_cluster(settings: Settings) -> Iterator[Settings]:
    """Yield the settings; for `--ray-address new` start a Ray cluster for the duration and set its address."""
    parallel = settings.parallel
    if parallel.ray_address != "new":
        yield settings
        return
    with new_cluster(parallel.data_parallel_size * ranks_of(parallel)) as address:
        yield dataclasses.replace(settings, parallel=dataclasses.replace(parallel, ray_address=address))


def _completed(settings: Settings, listener: socket.socket) -> Settings:
    """Return the settings with the bound port (0 selects a free one) and an engine socket named after the port."""
    port = listener.getsockname()[1]
    usual = engine_socket_path(port)
    for left in usual.parent.glob(f"{usual.stem}-*{usual.suffix}"):  # left by engines killed with their supervisor
        left.unlink(missing_ok=True)
    process = dataclasses.replace(settings.process, engine_socket=settings.process.engine_socket or str(usual))
    return dataclasses.replace(settings, server=dataclasses.replace(settings.server, port=port), process=process)


def _kept(old: Settings, new: Settings) -> Settings:
    """Return `new` with the addresses of `old`, for a rolling restart. Raises UsageError for what it cannot change."""
    changed = {
        "the model": (new.model, new.models, new.named) != (old.model, old.models, old.named),
        "--host or --port": (new.server.host, new.server.port or old.server.port) != (old.server.host, old.server.port),
        "--tls-cert": (new.server.tls_cert is None) != (old.server.tls_cert is None),
        "--data-parallel-size": new.parallel.data_parallel_size != old.parallel.data_parallel_size,
    }
    parallel = dataclasses.replace(new.parallel, ray_address=old.parallel.ray_address)
    changed["a setting of engines, with several models,"] = bool(old.named) and (parallel, new.scheduler) != (
        old.parallel,
        old.scheduler,
    )
    if what := ", ".join(name for name, different in changed.items() if different):
        raise UsageError(f"{what} has changed, which a rolling restart cannot do; `tandem restart` takes it over")
    process = dataclasses.replace(new.process, engine_socket=old.process.engine_socket)
    return dataclasses.replace(
        new, server=dataclasses.replace(new.server, port=old.server.port), parallel=parallel, process=process
    )


class Supervisor:
    """Parent process of the engines and the API process: starts, health-checks and ends them."""

    def __init__(self, settings: Settings, listener: socket.socket) -> None:
        self._settings = settings
        self._listener = listener
        self._history = History()
        self._build = build()  # before the code on disk may change
        self._engines: EngineSet | EnginePool = (
            EnginePool(settings, history=self._history) if several(settings) else EngineSet(settings, history=self._history)
        )
        self._api = ApiProcess(settings, listener, self._history)
        self._rolling: Settings | None = None
        """Settings of the new processes during a rolling restart."""
        self._rolls_from: float | None = None
        self._over = ""
        """Reason why no engine can be started any more; empty until then."""
        self._signals = 0
        self._reached = 0
        """Number of replicas that the API process is connected to, as last reported."""

    def run(self) -> int:
        """Serve until a signal, or until a child fails permanently. Return the exit code. Raises UsageError."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._control = ControlServer(control_path(self._settings.server.port), self._answer)
        try:
            self._engines.start()
            self._api.start()
            code = self._wait_until_ready()
            if code is None:
                code = self._watch()
            return self._end(code)
        finally:
            self._control.close()
            for child in self._children:
                child.kill()
                child.wait(GRACE_S)
            self._engines.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1

    def _answer(self, request: messages.SupervisorRequest) -> messages.SupervisorReply:
        """Answer a request of the control socket. Raises UsageError."""
        if isinstance(request, messages.ListReplicas):
            if self._api.heard(request.api):
                self._reached = request.reached
                if self._api.replacing and (request.reached or not self._engines.children):
                    self._api.take_over()
            models, budget = (self._engines.models(), self._engines.budget) if isinstance(self._engines, EnginePool) else ([], {})
            return messages.ReplicaList(
                self._engines.infos(),
                models,
                budget,
                self._over,
                self._engines.announced,
                self._history.after(request.events_after),
                self._rolling is not None,
                self._build,
                request.number,
            )
        if isinstance(request, messages.NoteEvent):
            self._history.take([request.event])
            return messages.Done()
        if isinstance(request, messages.AddReplica):
            return messages.Done(self._engines.add(request.role))
        if isinstance(request, messages.DrainReplica):
            return messages.Done(self._engines.drain(request.replica))
        if isinstance(request, messages.RollingRestart):
            self._begin_rolling(from_json(request.settings))
            return messages.Done()
        if not isinstance(self._engines, EnginePool):
            raise UsageError("this server has one model, which stays loaded")
        if isinstance(request, messages.LoadModel):
            return messages.Done(model=self._engines.load(request.model))
        return messages.Done(model=self._engines.unload(request.model))

    def _begin_rolling(self, settings: Settings) -> None:
        """Begin to replace the api, then the engines one at a time. Raises UsageError if `settings` need a full restart."""
        if self._rolling is not None or not self._engines.announced:
            raise UsageError("the server is still starting or restarting; try again when it is ready")
        settings = _kept(self._settings, settings)
        self._api.replace(settings)
        self._rolling, self._rolls_from = settings, None
        self._history.note("rolling_begun", "a rolling restart has begun: the api is replaced first")

    def _roll(self) -> None:
        """Go on with a rolling restart, if one is under way and what was replaced last serves."""
        if self._rolling is None or self._api.replacing:
            return
        now, went_back = time.monotonic(), self._api.settings is not self._rolling
        if not went_back and self._rolls_from is None:
            self._engines.roll(self._rolling)
            self._rolls_from = now + FRESH_S  # by then each api makes its requests wait instead of fail
        if not went_back:
            running = sum(info.state == "running" for info in self._engines.infos())
            if now < (self._rolls_from or 0.0) or self._reached < running or not self._engines.roll_on():
                return
            self._settings = self._rolling
            if not self._engines.went_back:
                self._history.note("rolling_done", "all processes but the supervisor were replaced")
        self._rolling = None

    @property
    def _children(self) -> list[ChildProcess]:
        return [*self._api.children, *self._engines.children]

    def _wait_until_ready(self) -> int | None:
        """Return None once all replicas accept requests, else an exit code."""
        with progress_lines() as show:
            while (code := self._look()) is None:
                states = self._engines.statuses()
                show(states)
                ready = [status for status in states.values() if status is not None and status.state == "ready"]
                if states and len(ready) == len(states) <= self._reached:
                    break
        if code is None:
            self._announce(ready)
        return code

    def _announce(self, engines: list[EngineStatus]) -> None:
        self._engines.announced = True
        self._history.note("server_ready", f"the server is ready: {', '.join(sorted({engine.model for engine in engines}))}")
        host, port = self._settings.server.host, self._settings.server.port
        scheme = "http" if self._settings.server.tls_cert is None else "https"
        log.info("Uvicorn running on %s://%s:%d (Press CTRL+C to quit)", scheme, f"[{host}]" if ":" in host else host, port)
        address = local_url(scheme, host, port)
        parts, hosts = len(engines[0].ranks), [printable(rank.host) for engine in engines for rank in engine.ranks]
        where = ", ".join(hosts if len(hosts) < 5 else dict.fromkeys(hosts))  # machines may have the same name
        models = len(self._engines.models()) if isinstance(self._engines, EnginePool) else 1
        replicas = f", the first of {models} models" if models > 1 else f", {len(engines)} replicas" * (len(engines) > 1)
        say(f"Tandem is ready: {address} (model {engines[0].model}{f', in {parts} parts' * (parts > 1)} on {where}{replicas})")
        stop = "Ctrl-C" if sys.stdin.isatty() else "Ctrl-C or SIGTERM; tandem down, if tandem up started it"
        say(farewell(address, self._settings.server, stop=stop))

    def _watch(self) -> int:
        while (code := self._look()) is None:
            continue
        return code

    def _look(self) -> int | None:
        """Serve the control socket for `POLL_S` and check the children. Return an exit code when the server must end, else
        None."""
        self._control.serve(POLL_S)
        if self._signals:
            return 0
        self._roll()
        return code if (code := self._look_at_engines()) is not None else self._api.look()

    def _look_at_engines(self) -> int | None:
        code = self._engines.look()
        if code is not None:
            self._over = self._engines.last_words or f"its engine ended with code {code}"
        return code

    def _end(self, code: int) -> int:
        """Drain the API process, then end the engines. A second signal ends everything at once. Return `code`."""
        self._history.note(
            "server_draining",
            self._over or "the server was told to end: it finishes what it has",
            level="error" if self._over else "info",
        )
        seen = self._signals and sys.stdout.isatty()
        if seen:
            left = f"; answers under way have {self._settings.process.drain_timeout:g} s to end (Ctrl-C ends them now)"
            say(f"Stopping{left if self._engines.announced else ''}")
        self._end_all(self._api.children, self._while_draining)
        self._end_all(self._engines.children)
        if seen:
            say("Stopped: nothing that the server started runs any more")
        return code

    def _while_draining(self) -> None:
        """Keep engines running for the remaining requests. Set `_over`, which the API process reads, if none can be started."""
        self._control.serve(POLL_S)
        if not self._over:
            self._look_at_engines()

    def _end_all(self, children: list[ChildProcess], meanwhile: Callable[[], None] = lambda: None) -> None:
        for child in children:
            child.terminate()
        deadline = time.monotonic() + self._settings.process.drain_timeout + GRACE_S
        for child in children:
            hurried = killed = False
            while not child.wait(POLL_S):
                meanwhile()
                if self._signals > 1 and not hurried:
                    hurried, deadline = True, min(deadline, time.monotonic() + HURRY_S)
                    child.terminate()  # its second signal: it stops draining and informs its clients
                if not killed and (child.stopped or time.monotonic() > deadline):
                    killed = True
                    log.warning("Killing the %s, which did not end in time; its requests are lost", child.name)
                    child.kill()
