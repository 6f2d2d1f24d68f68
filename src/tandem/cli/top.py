"""`tandem top`: what a server says of itself, in a terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tandem.bench.client import get, get_json
from tandem.cli.address import api_key, server_url
from tandem.cli.screen import screen
from tandem.cli.status import event_line, pace
from tandem.errors import UsageError

TTFT = "tandem_time_to_first_token_seconds"
PLAIN_WIDTH = 120
"""Columns where there is no terminal."""
MAX_REQUESTS, MAX_EVENTS = 10, 6
_COLOURS = dict.fromkeys(("healthy", "ready", "running", "loaded"), "green") | dict.fromkeys(
    ("recovering", "starting", "draining", "loading"), "yellow")


@dataclass(frozen=True)
class Look:
    """The server's answers at one time."""

    at: float
    health: dict[str, Any]
    status: dict[str, Any]
    metrics: dict[str, float]
    """By name, summed over labels; empty where metrics are switched off."""
    events: list[dict[str, Any]]
    """The latest; none from a server that has no /v1/events."""


def look(url: str, key: str) -> Look:
    """Ask the server. Raises UsageError when it does not answer, or not as a Tandem server does."""
    try:
        health, status = get_json(url, "/health", key), get_json(url, "/v1/status", key)
        if not (isinstance(health["status"], str) and isinstance(status["replicas"], list)):
            raise TypeError
    except (ValueError, LookupError, TypeError):
        raise UsageError(f"{url} does not answer as a Tandem server; is --url right?", param="base_url") from None
    metrics: dict[str, float] = {}
    with contextlib.suppress(UsageError, ValueError):  # metrics may be switched off: the rest is worth showing
        for family in text_string_to_metric_families(get(url, "/metrics", key).decode()):
            for sample in family.samples:
                metrics[sample.name] = metrics.get(sample.name, 0.0) + sample.value
    events: list[dict[str, Any]] = []
    with contextlib.suppress(UsageError, ValueError, LookupError):  # of an earlier version
        events = get_json(url, f"/v1/events?limit={MAX_EVENTS}", key)["data"]
    return Look(time.monotonic(), health, status, metrics, events)


def run(arguments: argparse.Namespace) -> int:
    """Watch until interrupted; print one picture where that is asked for, or where there is no screen to draw on.

    Raises UsageError.
    """
    if not 0.1 <= arguments.interval <= 3600:
        raise UsageError(f"--interval {arguments.interval}: must be from 0.1 to 3600 seconds", param="interval")
    key = api_key(arguments, url := server_url(arguments))
    before = look(url, key)
    console = screen(PLAIN_WIDTH)
    if arguments.once or not sys.stdout.isatty() or console.is_dumb_terminal:
        time.sleep(arguments.interval)
        console.print(picture(url, before, look(url, key)))
        return 0
    with contextlib.suppress(KeyboardInterrupt), Live(picture(url, before, before), console=console,
                                                      screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(arguments.interval)
            try:
                now = look(url, key)
            except UsageError as error:  # it may come back
                live.update(Group(picture(url, before, before), Text(error.message, "red")), refresh=True)
                continue
            live.update(picture(url, before, now), refresh=True)
            before = now
    return 0


def picture(url: str, before: Look, now: Look) -> RenderableType:
    """Everything on one screen; rates are of the time between the two looks."""
    parts: list[RenderableType] = [_head(url, before, now), _replicas(now), _ranks(now)]
    if len(now.status.get("models", ())) > 1:
        parts.insert(1, _models(now))
    if now.status["requests"]:
        parts.append(_requests(now))
    if now.events:
        parts.append(Text("lately", "bold"))
        parts += [event_line(one["time"], one["level"], "", one["text"], one["remedy"]) for one in now.events]
    return Group(*parts)


def _head(url: str, before: Look, now: Look) -> RenderableType:
    health, status = now.health, now.status
    state = str(health["status"])
    engine = status.get("engine") or {}
    line = Text.assemble((f"{status.get('model', '')} ", "bold"), (state, _COLOURS.get(state, "red")),
                         f" at {url}  up {_duration(status.get('uptime_seconds', 0))}  "
                         f"restarts {health.get('restarts', 0)}")
    hits, asked = engine.get("prefix_hits", 0), engine.get("prefix_queries", 0)
    counts = (f"tokens/s {_rate(before, now, 'tandem_generation_tokens_total')} out, "
              f"{_rate(before, now, 'tandem_prompt_tokens_total')} in   TTFT {_mean(before, now)}   "
              f"running {status.get('num_running', 0)}   waiting {status.get('num_waiting', 0)}   "
              f"prefix hits {hits}/{asked}")
    if drafts := engine.get("draft_tokens", 0):
        counts += f"   drafts accepted {engine.get('accepted_tokens', 0)}/{drafts}"
    detail = Text(str(health.get("detail") or ""), "yellow")
    return Group(line, Text(counts), *([detail] if detail else []))


def _rate(before: Look, now: Look, name: str) -> str:
    if name not in now.metrics:
        return "?"
    seconds = now.at - before.at
    return f"{max(now.metrics[name] - before.metrics.get(name, 0.0), 0.0) / seconds:.1f}" if seconds > 0 else "-"


def _mean(before: Look, now: Look) -> str:
    """Mean time to the first token: of the requests since the last look, or of all."""
    count, total = now.metrics.get(f"{TTFT}_count", 0.0), now.metrics.get(f"{TTFT}_sum", 0.0)
    since = count - before.metrics.get(f"{TTFT}_count", 0.0)
    if since > 0:
        return f"{1000 * (total - before.metrics.get(f'{TTFT}_sum', 0.0)) / since:.0f} ms"
    return f"{1000 * total / count:.0f} ms (all)" if count else "-"


def _models(now: Look) -> Table:
    """Of several."""
    table = _table("model", "state", "context")
    for model in now.status["models"]:
        state = Text(model["state"], _COLOURS.get(model["state"], "") if model["state"] != "failed" else "red")
        table.add_row(Text(model["id"]), state, str(model["max_model_len"] or "-"))
    return table


def _replicas(now: Look) -> Table:
    table = _table("replica", "role", "state", "ranks", "running", "waiting", "KV tokens", "", "restarts")
    for replica in now.status["replicas"]:
        used, total = replica["kv_tokens_used"], replica["kv_tokens_total"]
        state = Text(replica["state"], _COLOURS.get(replica["state"], "red"))
        table.add_row(str(replica["replica"]), replica["role"], state, str(replica["ranks"]), str(replica["running"]),
                      str(replica["queued"]), f"{used}/{total}", _bar(used, total), str(replica["restarts"]))
    return table


def _ranks(now: Look) -> Table:
    """Bars compare ranks: the fullest is the rank with the highest peak."""
    ranks = now.health.get("ranks", [])
    table = _table("rank", "repl", "stage", "layers", "host", "pid", "weights", "KV", "peak", "", "ms/step", "pace")
    most = max((rank["peak_bytes"] for rank in ranks), default=0)
    for rank in ranks:
        first, last = rank["layers"]
        table.add_row(str(rank["rank"]), str(rank["replica"]), str(rank["stage"]), f"{first}-{last - 1}",
                      Text(rank["host"]), str(rank["pid"]), _bytes(rank["weight_bytes"]), _bytes(rank["kv_bytes"]),
                      _bytes(rank["peak_bytes"]), _bar(rank["peak_bytes"], most), f"{1000 * rank['step_s']:.1f}",
                      pace(rank.get("state", "ready"), rank.get("slowdown", 1.0)))
    return table


def _requests(now: Look) -> Table:
    """This key's requests, the oldest first."""
    table = _table("request", "route", "prompt", "tokens", "seconds")
    requests = sorted(now.status["requests"], key=lambda request: -float(request["elapsed_seconds"]))
    for request in requests[:MAX_REQUESTS]:
        table.add_row(Text(request["request_id"]), request["route"], str(request["prompt_tokens"]),
                      str(request["completion_tokens"]), f"{request['elapsed_seconds']:.1f}")
    if len(requests) > MAX_REQUESTS:
        table.add_row(f"and {len(requests) - MAX_REQUESTS} more")
    return table


def _table(*columns: str) -> Table:
    """Narrow enough for 80 columns; host names give way first."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), show_edge=False)
    for name in columns:
        table.add_column(name, no_wrap=True, max_width=24 if name == "host" else None)
    return table


def _bar(part: float, whole: float) -> ProgressBar:
    return ProgressBar(total=max(whole, 1), completed=part, width=8)


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
