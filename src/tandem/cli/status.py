"""`tandem status`: the servers in the background, their replicas and ranks."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tandem.cli.address import checked_url, local_port
from tandem.cli.screen import can_watch, event_lines, models_table, ranks_table, replicas_table, screen, watch
from tandem.errors import UsageError
from tandem.protocol.control import EngineStatus
from tandem.protocol.events import Event
from tandem.protocol.supervisor import ListReplicas, ModelInfo, ReplicaInfo, ReplicaList
from tandem.supervision.control import ask, control_path
from tandem.supervision.probe import StatusProbe
from tandem.supervision.record import Background, known_names

PROBE_S = 3.0
"""Seconds that an engine gets to say how it is: on a busy machine more than one."""
NEWS_S = 0.6
"""Seconds after which an engine surely has said something new."""
_SHOWN_EVENTS = 8
_WIDTH = 140
"""Columns of tables that do not go to a terminal."""


@dataclass
class Replica:
    """One engine."""

    info: ReplicaInfo
    status: EngineStatus | None
    asked_at: float
    tokens_per_s: float | None = None

    @property
    def state(self) -> str:
        """`ready`, `starting` and so on; `unreachable` if it does not answer."""
        if self.info.state != "running":
            return self.info.state
        return "unreachable" if self.status is None else self.status.state

    @property
    def detail(self) -> str:
        """What it is about, or waits for; empty while it serves."""
        return self.info.detail if self.status is None else self.status.detail or self.status.degraded


@dataclass
class Look:
    """A server as it is just now."""

    name: str
    runs: bool
    pid: int | None = None
    address: str = ""
    model: str = ""
    started_at: float | None = None
    replicas: list[Replica] = field(default_factory=list)
    models: list[ModelInfo] = field(default_factory=list)
    """Where there are several; any of them can be loaded."""
    events: list[Event] = field(default_factory=list)
    """What happened since it began, the oldest first."""
    announced: bool = False
    """The server has said that it is ready; engines may be so before its api has heard of them."""

    @property
    def ready(self) -> bool:
        """Every replica takes requests."""
        begun = self.announced and bool(self.replicas or self.models)
        return begun and all(one.state == "ready" for one in self.replicas)

    @property
    def state(self) -> str:
        """In a word."""
        if not self.runs:
            return "down"
        if self.ready:
            return "ready"
        return next((one.state for one in self.replicas if one.state != "ready"), "starting")

    @property
    def detail(self) -> str:
        """What the first engine that is not ready is about."""
        return next((one.detail for one in self.replicas if one.state != "ready" and one.detail), "")

    @property
    def running(self) -> int:
        """Requests under way."""
        return sum(one.status.running + one.status.queued for one in self.replicas if one.status is not None)


def run(arguments: argparse.Namespace) -> int:
    """Print; 0 if everything that was asked for is ready. Raises UsageError."""
    if arguments.url is not None:
        arguments.port = local_port(checked_url(arguments.url))
    looks, console = _looks(arguments), screen(_WIDTH, highlight=False, markup=False)
    if arguments.json:
        print(json.dumps([as_json(look) for look in looks], indent=2))
    elif not looks:
        print("no server runs in the background; `tandem up MODEL` starts one")
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
    return [look_at(Background(name), arguments.interval) for name in names]


def _next_picture(arguments: argparse.Namespace) -> RenderableType:
    time.sleep(NEWS_S)
    try:
        return Group(*map(_picture, _looks(arguments)))
    except UsageError as error:  # it may come back
        return Text(error.message, "red")


def look_at(place: Background, interval: float) -> Look:
    """The server of that name. Tokens a second are counted over `interval` seconds, at least `NEWS_S`; 0 leaves them
    out."""
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
            look.replicas = []  # it has only just begun, or is about to end
    return look


def look_at_port(port: int, interval: float = 0.0) -> Look:
    """The server on a port of this machine, however it was started. Raises UsageError."""
    look = Look(f"port {port}", True, address=f"127.0.0.1:{port}")
    _fill(look, port, interval)
    return look


def _fill(look: Look, port: int, interval: float) -> None:
    reply = ask(control_path(port), ListReplicas())
    assert isinstance(reply, ReplicaList)
    look.models, look.announced, look.events = reply.models, reply.announced, reply.events
    probes = {info.replica: StatusProbe(info.endpoint) for info in reply.replicas if info.pid is not None}
    try:
        look.replicas = [Replica(info, probes[info.replica].ask(PROBE_S) if info.replica in probes else None,
                                 time.monotonic()) for info in reply.replicas]
        if interval:
            _count(look.replicas, probes, interval)
    finally:
        for probe in probes.values():
            probe.close()
    if not look.models:
        look.model = next((one.status.model for one in look.replicas if one.status is not None), look.model)


def _count(replicas: list[Replica], probes: dict[int, StatusProbe], interval: float) -> None:
    """Ask once more after `interval` seconds, for the tokens a second of each engine that answers both times."""
    time.sleep(max(interval, NEWS_S))
    for one in replicas:
        if one.status is not None and (now := probes[one.info.replica].ask(PROBE_S)) is not None:
            seconds = (time.monotonic() - now.age_s) - (one.asked_at - one.status.age_s)
            tokens = now.generated_tokens - one.status.generated_tokens
            one.tokens_per_s = tokens / seconds if seconds > 0 else 0.0


def as_json(look: Look) -> dict[str, Any]:
    """Return what is known of a server; the fields of replicas, ranks and events are those of /v1/status and others."""
    replicas = []
    for one in look.replicas:
        entry: dict[str, Any] = {"replica": one.info.replica, "model": one.info.model or look.model,
                                 "role": one.info.role,
                                 "state": one.state, "pid": one.info.pid,
                                 "process_restarts": one.info.restarts, "tokens_per_s": one.tokens_per_s,
                                 "detail": one.detail}
        if (status := one.status) is not None:
            entry |= {name: getattr(status, name) for name in ("running", "queued", "kv_tokens_used",
                                                               "kv_tokens_total", "restarts", "stages")}
            entry["ranks"] = [{name: getattr(rank, name) for name in rank.__struct_fields__ if name != "replica"}
                              for rank in status.ranks]
        replicas.append(entry)
    facts = {key: value for key, value in asdict(look).items() if key not in ("replicas", "models", "events")}
    models = [{name: getattr(one, name) for name in ("model", "state", "detail", "needs", "max_context", "keep")}
              for one in look.models]
    names = ("number", "at", "kind", "level", "text", "remedy", "replica", "rank", "model", "request_id")
    events = [{name: getattr(one, name) for name in names} for one in look.events]
    return {**facts, "state": look.state, "models": models, "replicas": replicas, "events": events}


def _picture(look: Look) -> Group:
    """Return what `--json` has, as tables."""
    view = as_json(look)
    since = f", for {_span(time.time() - look.started_at)}" if look.started_at else ""
    process = f", process {look.pid}" if look.pid else ""
    where = f" at {look.address} (model {look.model}{process}{since})" if look.runs else ""
    parts: list[RenderableType] = [Text(f"{look.name}: {look.state}{where}", "bold")]
    if look.models:
        parts.append(models_table([_model(look, model) for model in look.models]))
    if replicas := view["replicas"]:
        ranks = [{**rank, "replica": replica["replica"]} for replica in replicas for rank in replica.get("ranks", ())]
        parts += [replicas_table(replicas), *([ranks_table(ranks)] if ranks else [])]
    details = {f"model {model.model}": model.detail for model in look.models}
    details |= {f"replica {replica['replica']}": replica["detail"] for replica in replicas}
    parts += [Text(f"{name}: {detail}") for name, detail in details.items() if detail]
    return Group(*parts, *event_lines(view["events"][-_SHOWN_EVENTS:]))


def _model(look: Look, model: ModelInfo) -> dict[str, Any]:
    mine = [replica for replica in look.replicas if replica.info.model == model.model]
    loaded = "loaded" if all(replica.state == "ready" for replica in mine) else "loading"
    return {"id": model.model, "state": loaded if model.state == "running" else model.state, "needs": model.needs,
            "replicas": ", ".join(str(replica.info.replica) for replica in mine) or "-",
            "max_model_len": model.max_context}


def _span(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min" if minutes else "a moment"
