"""`tandem up`, `restart`, `down`, `logs` and `replica`: control of background servers."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from tandem.cli.address import local_port, server_url
from tandem.cli.hosts.sync import sync_workers
from tandem.cli.processes import prepared
from tandem.cli.screen import replicas_table, screen
from tandem.cli.serve import GRACE_S, checked
from tandem.cli.startup import farewell, progress_lines
from tandem.cli.status import Look, as_json, look_at, look_at_port
from tandem.config.legacy import COMBINED, MAPPED
from tandem.config.loading import to_json
from tandem.config.settings import Settings
from tandem.env import SECRET_VARIABLES, set_variables, variables
from tandem.errors import UsageError
from tandem.processes.interpreter import module_command
from tandem.protocol.codec import UNREADABLE
from tandem.protocol.supervisor_messages import AddReplica, Done, DrainReplica, ListReplicas, ReplicaList, RollingRestart
from tandem.supervision.children import MODULE
from tandem.supervision.control_socket import ask, control_path
from tandem.supervision.record import DEFAULT_NAME, Background, digest, known_names

POLL_S = 0.2
TAIL = 20
"""Lines of the log to show for a server that did not start."""
GENERAL = ("model_argument", "profile", "config", "quant")
"""Arguments of the settings that are no setting's flag."""


def run_up(arguments: argparse.Namespace) -> int:
    """Start a server and wait until it is ready; do nothing if it runs with the same settings, unless --replace is given.

    Raises UsageError.
    """
    place = _place(arguments)
    options = {name: value for name, value in vars(arguments).items() if name.startswith("setting_") or name in GENERAL}
    names = [one for one in variables() if one in (*MAPPED, *COMBINED) or one.startswith("TANDEM_")]
    given = {name: variables()[name] for name in names if name not in SECRET_VARIABLES}  # read before a .env adds its own
    settings = checked(prepared(arguments))
    record = place.record() if place.runs() else None
    if not arguments.replace and record is not None and record.settings == digest(settings):
        return _runs_already(place)
    started = _StartedWith({**options, "setting_api_key": None}, given, os.getcwd(), len(settings.server.api_key))
    return _start(place, settings, started, arguments, replace=arguments.replace)


def _place(arguments: argparse.Namespace) -> Background:
    """Return the background server named with or without --name. Raises UsageError."""
    typed = getattr(arguments, "server", None)
    if typed and arguments.name not in (None, typed):
        raise UsageError(f"{typed} and --name {arguments.name} name two servers; give one", param="name")
    return Background(typed or arguments.name or DEFAULT_NAME)


def run_restart(arguments: argparse.Namespace) -> int:
    """End a server and start it with the options it was started with; files are read anew.

    With --rolling its processes are replaced one at a time while it serves. Raises UsageError.
    """
    place = _place(arguments)
    try:
        had = msgspec.json.decode(place.kept() or b"", type=_StartedWith)
    except UNREADABLE:
        raise UsageError(f"{place.name} was never started by this version: `tandem up MODEL` starts a server") from None
    os.chdir(had.directory)
    set_variables({name: value for name, value in had.variables.items() if name not in variables()})
    settings = checked(prepared(argparse.Namespace(**had.options)))
    if len(settings.server.api_key) < had.keys:
        raise UsageError(
            f"{place.name} was started with {had.keys} API key(s), which are not kept: set "
            "TANDEM_API_KEY again, or start it with --api-key-file",
            param="api_key",
        )
    if arguments.rolling:
        return _roll(place, settings, arguments)
    return _start(place, settings, had, arguments, replace=True)


def _roll(place: Background, settings: Settings, arguments: argparse.Namespace) -> int:
    """Replace a server's api and replicas one at a time while it serves; return the exit code. Raises UsageError."""
    record = place.record()
    if not place.runs() or record is None:
        raise UsageError(f"no server named {place.name} runs, so that nothing can be replaced; `tandem restart` starts it")
    sync_workers(settings, files=arguments.sync)
    path = control_path(record.port)
    before = ask(path, ListReplicas())
    ask(path, RollingRestart(to_json(settings)))
    assert isinstance(before, ReplicaList)
    seen, kind, rolling, code = before.events[-1].number if before.events else 0, "", True, 0
    try:
        while rolling and not arguments.no_wait:
            reply = ask(path, ListReplicas(events_after=seen))
            assert isinstance(reply, ReplicaList)
            for event in reply.events:
                seen, kind = event.number, event.kind if event.kind.startswith("rolling_") else kind
                if event.kind.startswith(("rolling_", "replica_ready")):
                    print(f"{place.name}: {event.text}{f' ({event.replica})' if event.replica is not None else ''}", flush=True)
            rolling = reply.rolling
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        print(f"\n{place.name} goes on restarting; `tandem status` shows how far it is", file=sys.stderr)
        code = 130
    if kind == "rolling_failed":
        return 3
    place.write(msgspec.structs.replace(record, settings=digest(settings), drain_timeout=settings.process.drain_timeout))
    return code


class _StartedWith(msgspec.Struct, frozen=True):
    """Origin of a server's settings, stored for `tandem restart`."""

    options: dict[str, str | list[str] | None]
    """Parsed arguments, without API keys."""
    variables: dict[str, str]
    directory: str
    """Working directory, in which relative paths and a `.env` are looked up."""
    keys: int
    """Number of its API keys, which are not stored."""


def _until_ready(place: Background, alive: Callable[[], bool]) -> Look:
    """Show the server's progress until it is ready or `alive()` is false. Return its last state."""
    seen = look_at(place, 0.0)
    with progress_lines() as show:
        while alive() and not seen.ready:
            show(seen.statuses)
            time.sleep(POLL_S)
            seen = look_at(place, 0.0)
    return seen


def _runs_already(place: Background) -> int:
    seen = _until_ready(place, place.runs)
    if not seen.ready:
        print(f"tandem: {place.name} did not come up; its log is {place.log}", file=sys.stderr)
        return 3
    print(f"{place.name} runs already with these settings: {seen.address} (model {seen.model})")
    return 0


def _start(place: Background, settings: Settings, started: _StartedWith, arguments: argparse.Namespace, *, replace: bool) -> int:
    """Start a server and return the exit code; with `replace` first end the one that runs. Raises UsageError."""
    if replace or not place.runs():
        sync_workers(settings, files=arguments.sync)  # before anything ends or starts, since it may fail
    if replace:
        run_down(arguments)
    lock = place.lock()
    place.keep(msgspec.json.encode(started))
    place.forget()
    with place.fresh_log() as log:
        # In its own session, so that neither Ctrl-C nor closing the terminal ends it.
        process = subprocess.Popen(
            module_command(MODULE, "server", place.name, str(lock)),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[lock],
            start_new_session=True,
            env={**variables(), "PYTHONUNBUFFERED": "1"},
            cwd=os.getcwd(),
        )
    os.close(lock)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(to_json(settings) + b"\n")
    if arguments.no_wait:
        print(f"{place.name} is starting (process {process.pid}); `tandem status` shows how far it is")
        return 0
    try:
        return _wait(place, settings, process)
    except KeyboardInterrupt:
        print(f"\n{place.name} goes on starting in the background; `{place.down}` ends it", file=sys.stderr)
        return 130


def _wait(place: Background, settings: Settings, process: subprocess.Popen[bytes]) -> int:
    if not sys.stderr.isatty():
        print(f"{place.name} is starting (process {process.pid}); its log is {place.log}", file=sys.stderr, flush=True)
    seen = _until_ready(place, lambda: process.poll() is None)
    if (code := process.poll()) is None:
        print(f"{place.name} is ready: {seen.address} (model {seen.model}); its log is {place.log}")
        print(farewell(seen.address, settings.server, stop=place.down))
        return 0
    sys.stderr.writelines(last_lines(place, TAIL))
    print(f"tandem: {place.name} did not come up (exit code {code}); its log is {place.log}", file=sys.stderr)
    return code if code > 0 else 3


def run_down(arguments: argparse.Namespace) -> int:
    """End a server once it has finished its requests, or at once with --now. Raises UsageError."""
    place = _place(arguments)
    if not place.runs():
        place.forget()
        others = "".join(f"; {name} runs: `{Background(name).down}` ends it" for name in known_names() if Background(name).runs())
        print(f"no server named {place.name} runs{others}")
        return 0
    seen: Look = look_at(place, 0.0)
    record = place.record()
    if record is None:
        raise UsageError(f"{place.name} has just been started; try again in a moment")
    os.kill(record.pid, signal.SIGTERM)
    if arguments.now:
        time.sleep(POLL_S)
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGTERM)
    elif seen.running:
        print(f"{seen.running} request(s) get {record.drain_timeout:g} s to finish (--now drops them)", flush=True)
    deadline = time.monotonic() + 2 * (record.drain_timeout + 2 * GRACE_S)
    while place.runs():
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGKILL)  # its children detect the closed lifeline and exit
        time.sleep(POLL_S / 2)
    place.forget()
    print(f"{place.name} has ended", flush=True)
    return 0


def run_logs(arguments: argparse.Namespace) -> int:
    """Print the end of a server's log, and with --follow new lines until the server ends. Raises UsageError."""
    place = _place(arguments)
    if not place.log.exists():
        raise UsageError(f"{place.name} has no log: `tandem up` has not started a server of that name")
    sys.stdout.writelines(last_lines(place, arguments.lines))
    if not arguments.follow:
        return 0
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # keeps the start of a character until its end is written
    with place.log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        ended = False
        while not ended:
            ended = not place.runs()  # checked before the last read, so that no line is missed
            if os.fstat(file.fileno()).st_size < file.tell():
                file.seek(0)  # the server has rotated its log
            sys.stdout.write(decoder.decode(file.read(), final=ended))
            sys.stdout.flush()
            time.sleep(POLL_S)
    return 0


def last_lines(place: Background, count: int) -> list[str]:
    """Return the last `count` lines of the log."""
    with place.log.open(errors="replace") as file:
        lines = file.readlines()
    return lines[-count:] if count else []


def run_replica(arguments: argparse.Namespace) -> int:
    """List the replicas of a running server, add one, or drain one. Raises UsageError."""
    port = local_port(server_url(arguments))
    if arguments.action == "list":
        screen(markup=False).print(replicas_table(as_json(look_at_port(port))["replicas"]))
    elif arguments.action == "add":
        reply = ask(control_path(port), AddReplica(arguments.role))
        assert isinstance(reply, Done)
        print(f"replica {reply.replica} is starting; it takes requests when `tandem replica list` shows it as ready")
    else:
        _drain(port, arguments.replica)
    return 0


def _drain(port: int, replica: int) -> None:
    others = [other.state for other in look_at_port(port).replicas if other.info.replica != replica]
    if others and "ready" not in others:
        raise UsageError(f"no other replica than {replica} is ready ({', '.join(others)}); wait until one is")
    ask(control_path(port), DrainReplica(replica))
    print(f"replica {replica} drains: it gets no new requests and ends when it has none left")
