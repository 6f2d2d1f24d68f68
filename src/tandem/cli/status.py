"""`tandem status`: background servers, their replicas and ranks."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from rich.console import Group, RenderableType
from rich.text import Text

from tandem.cli.address import checked_url, local_port
from tandem.cli.arguments import DEFAULT_URL
from tandem.cli.screen import can_watch, event_lines, models_table, ranks_table, replicas_table, screen, watch
from tandem.errors import UsageError
from tandem.json_types import JsonObject
from tandem.protocol.control import EngineStatus
from tandem.protocol.events import Event
from tandem.protocol.supervisor_messages import ListReplicas, ModelInfo, ReplicaInfo, ReplicaList
from tandem.supervision.control_socket import ask, control_path
from tandem.supervision.record import DEFAULT_NAME, Background, known_names
from tandem.supervision.status_probe import StatusProbe
from tandem.system.origin import MEND, build

PROBE_S = 3.0
"""Timeout in seconds of an engine's status; longer than the API server's, since a busy machine delays the answer."""
NEWS_S = 0.6
"""Seconds after which an engine has surely published a new status."""
_SHOWN_EVENTS = 8
_WIDTH = 140
"""Columns if the output is no terminal."""
_UNITS = "a token is about a word; room: tokens used, of all; memory: of the model's part, of tokens, and the highest so far"


@dataclass
class Replica:
    """One engine, with its status if it answers."""

    info: ReplicaInfo
    status: EngineStatus | None
    asked_at: float
    tokens_per_s: float | None = None

    @property
    def state(self) -> str:
        """State of the engine, such as `ready` or `starting`; `unreachable` if it does not answer."""
        if self.info.state != "running":
            return self.info.state
        return "unreachable" if self.status is None else self.status.state

    @property
    def detail(self) -> str:
        """Current activity, or the cause of a wait; empty while it serves."""
        return self.info.detail if self.status is None else self.status.detail or self.status.degraded


@dataclass
class Look:
    """State of a server at one time."""

    name: str
    runs: bool
    pid: int | None = None
    address: str = ""
    model: str = ""
    started_at: float | None = None
    replicas: list[Replica] = field(default_factory=list)
    models: list[ModelInfo] = field(default_factory=list)
    """Models of a server with several; else empty."""
    events: list[Event] = field(default_factory=list)
    """Events since the server's start, oldest first."""
    build: str = ""
    """Version and digest of its supervisor's code."""
    announced: bool = False
    """True once the server has announced that it is ready, which follows the engines being ready."""

    @property
    def ready(self) -> bool:
        """True when every replica accepts requests."""
        begun = self.announced and bool(self.replicas or self.models)
        return begun and all(replica.state == "ready" for replica in self.replicas)

    @property
    def state(self) -> str:
        """State of the server: `down`, `ready`, or that of the first replica that is not ready."""
        if not self.runs:
            return "down"
        if self.ready:
            return "ready"
        return next((replica.state for replica in self.replicas if replica.state != "ready"), "starting")

    @property
    def detail(self) -> str:
        """Current activity of the first replica that is not ready."""
        return next((replica.detail for replica in self.replicas if replica.state != "ready" and replica.detail), "")

    @property
    def statuses(self) -> dict[int, EngineStatus | None]:
        """Status by replica number; None for one that does not answer."""
        return {replica.info.replica: replica.status for replica in self.replicas}

    @property
    def running(self) -> int:
        """Requests running or queued."""
        return sum(status.running + status.queued for status in self.statuses.values() if status is not None)


def run(arguments: argparse.Namespace) -> int:
    """Print the servers; return 0 if all of them are ready, else 1. Raises UsageError."""
    if arguments.url is not None:
        arguments.port = local_port(checked_url(arguments.url))
    looks, console = _looks(arguments), screen(_WIDTH, highlight=False, markup=False)
    if arguments.json:
        print(json.dumps([as_json(look) for look in looks], indent=2))
    elif not looks:
        print("no server runs in the background, nor at port 8000; `tandem up demo` starts one")
    elif arguments.watch and can_watch(console):
        watch(Group(*map(_picture, looks)), lambda: _next_picture(arguments), console)
    else:
        for part in [part for look in looks for part in _picture(look).renderables]:
            console.print(part, soft_wrap=isinstance(part, Text))
    return 0 if looks and all(look.ready for look in looks) else 1


def _looks(arguments: argparse.Namespace) -> list[Look]:
    if arguments.port is not None:
        return [look_at_port(arguments.port, arguments.interval)]
    named = arguments.server or arguments.name
    names = [named] if named else [name for name in known_names() if Background(name).runs()]
    if not names:
        with suppress(UsageError):  # no `tandem serve` in the foreground either
            return [look_at_port(local_port(DEFAULT_URL), arguments.interval)]
    return [look_at(Background(name), arguments.interval) for name in names]


def _next_picture(arguments: argparse.Namespace) -> RenderableType:
    time.sleep(NEWS_S)
    try:
        return Group(*map(_picture, _looks(arguments)))
    except UsageError as error:  # temporary failures are shown, not fatal
        return Text(error.message, "red")


def look_at(place: Background, interval: float) -> Look:
    """Return the state of a background server.

    Tokens per second are measured over `interval` seconds, at least `NEWS_S`; 0 omits them.
    """
    if not place.runs():
        return Look(place.name, False)
    look, record = Look(place.name, True), place.record()
    if record is not None:
        host = f"[{record.host}]" if ":" in record.host else record.host
        look.pid, look.model, look.started_at = record.pid, record.model, record.started_at
        look.address = f"{record.scheme}://{host}:{record.port}"
        try:
            _fill(look, record.port, interval)
        except UsageError:
            look.replicas = []  # the server is just starting or about to end
    return look


def look_at_port(port: int, interval: float = 0.0) -> Look:
    """Return the state of the server on a port of this machine, started in any way. Raises UsageError."""
    look = Look(f"port {port}", True, address=f"127.0.0.1:{port}")
    _fill(look, port, interval)
    return look


def _fill(look: Look, port: int, interval: float) -> None:
    reply = ask(control_path(port), ListReplicas())
    assert isinstance(reply, ReplicaList)
    look.models, look.announced, look.events, look.build = reply.models, reply.announced, reply.events, reply.build
    probes = {info.replica: StatusProbe(info.endpoint) for info in reply.replicas if info.pid is not None}
    try:
        look.replicas = [
            Replica(info, probes[info.replica].ask(PROBE_S) if info.replica in probes else None, time.monotonic())
            for info in reply.replicas
        ]
        if interval:
            _count(look.replicas, probes, interval)
    finally:
        for probe in probes.values():
            probe.close()
    if not look.models:
        look.model = next((replica.status.model for replica in look.replicas if replica.status is not None), look.model)


def _count(replicas: list[Replica], probes: dict[int, StatusProbe], interval: float) -> None:
    """Wait `interval` seconds, at least `NEWS_S`, query again, and set the tokens per second of each engine."""
    time.sleep(max(interval, NEWS_S))
    for replica in replicas:
        if replica.status is not None and (now := probes[replica.info.replica].ask(PROBE_S)) is not None:
            seconds = (time.monotonic() - now.age_s) - (replica.asked_at - replica.status.age_s)
            tokens = now.generated_tokens - replica.status.generated_tokens
            replica.tokens_per_s = tokens / seconds if seconds > 0 else 0.0


def as_json(look: Look) -> JsonObject:
    """Return all facts about a server, as `--json` prints them."""
    replicas = []
    for replica in look.replicas:
        entry: JsonObject = {
            "replica": replica.info.replica,
            "model": replica.info.model or look.model,
            "role": replica.info.role,
            "state": replica.state,
            "pid": replica.info.pid,
            "process_restarts": replica.info.restarts,
            "tokens_per_s": replica.tokens_per_s,
            "detail": replica.detail,
        }
        if (status := replica.status) is not None:
            entry |= {
                name: getattr(status, name)
                for name in ("running", "queued", "kv_tokens_used", "kv_tokens_total", "restarts", "stages")
            }
            entry["ranks"] = [
                {name: getattr(rank, name) for name in rank.__struct_fields__ if name != "replica"} for rank in status.ranks
            ]
        replicas.append(entry)
    facts = {key: value for key, value in asdict(look).items() if key not in ("replicas", "models", "events")}
    models = [
        {name: getattr(model, name) for name in ("model", "state", "detail", "needs", "max_context", "keep")}
        for model in look.models
    ]
    names = ("number", "at", "kind", "level", "text", "remedy", "replica", "rank", "model", "request_id")
    events = [{name: getattr(event, name) for name in names} for event in look.events]
    return {**facts, "state": look.state, "notes": _builds(look), "models": models, "replicas": replicas, "events": events}


def _picture(look: Look) -> Group:
    """Return the facts of `as_json` as tables."""
    view = as_json(look)
    since = f", for {_span(time.time() - look.started_at)}" if look.started_at else ""
    process = f", process {look.pid}" if look.pid else ""
    where = f" at {look.address} (model {look.model}{process}{since})" if look.runs else ""
    name = "server" if look.name == DEFAULT_NAME else look.name
    parts: list[RenderableType] = [Text(f"{name}: {look.state}{where}", "bold")]
    if look.models:
        parts.append(models_table([_model(look, model) for model in look.models]))
    if replicas := view["replicas"]:
        ranks = [{**rank, "replica": replica["replica"]} for replica in replicas for rank in replica.get("ranks", ())]
        parts += [replicas_table(replicas), *([ranks_table(ranks)] if ranks else [])]
        parts += [Text(_UNITS, "dim")] if ranks else []
        parts += [Text(f"{_part(rank)}: {rank['wiring']}") for rank in ranks if rank.get("wiring")]
        encoders = [(_part(rank), rank["encoder_pid"]) for rank in ranks if rank.get("encoder_pid")]
        parts += [Text(f"{part}: pictures are encoded in process {pid}") for part, pid in encoders]
    named = {replica["replica"]: f"replica {replica['replica']}: " if len(replicas) > 1 else "" for replica in replicas}
    parts += [Text(f"{named[replica['replica']]}{replica['detail']}") for replica in replicas if replica["detail"]]
    parts += [Text(line, "yellow") for line in view["notes"]]
    alone = {"replica": None} if len(replicas) == 1 else {}
    return Group(*parts, *event_lines([{**event, **alone} for event in view["events"][-_SHOWN_EVENTS:]]))


def _part(rank: JsonObject) -> str:
    return f"part {rank['rank'] + 1} ({rank['host']})"


def _builds(look: Look) -> list[str]:
    """Return a line for each process whose code is not that of this command or of its engine."""
    lines, here = [], build()
    for replica in look.replicas:
        if (status := replica.status) is None or not status.build:
            continue
        if status.build != here:
            took = "`tandem restart --rolling` takes it"
            lines.append(f"replica {replica.info.replica} runs Tandem {status.build}, installed is {here}: {took}")
        lines += [
            f"part {rank.rank + 1} ({rank.host}): runs Tandem {rank.build}, its engine {status.build}: {MEND}"
            for rank in status.ranks
            if rank.build not in ("", status.build)
        ]
    if not lines and look.build not in ("", here):
        lines = [f"supervisor of Tandem {look.build}, replicas of {here}: `tandem restart` replaces it too"]
    return lines


def _model(look: Look, model: ModelInfo) -> JsonObject:
    mine = [replica for replica in look.replicas if replica.info.model == model.model]
    loaded = "loaded" if all(replica.state == "ready" for replica in mine) else "loading"
    return {
        "id": model.model,
        "state": loaded if model.state == "running" else model.state,
        "needs": model.needs,
        "detail": model.detail,
        "replicas": ", ".join(str(replica.info.replica) for replica in mine) or "-",
        "max_model_len": model.max_context,
    }


def _span(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min" if minutes else "a moment"
