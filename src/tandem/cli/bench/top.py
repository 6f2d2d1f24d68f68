"""`tandem top`: live state of a server, polled over HTTP."""

from __future__ import annotations

import argparse
import contextlib
import time
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tandem.cli.address import find_server
from tandem.cli.screen import (
    can_watch,
    coloured,
    event_lines,
    models_table,
    narrow_table,
    ranks_table,
    replicas_table,
    screen,
    watch,
)
from tandem.errors import UsageError
from tandem.json_types import JsonObject
from tandem.system.http_client import ServerClient

TTFT = "tandem_time_to_first_token_seconds"
PLAIN_WIDTH = 120
"""Columns if the output is no terminal."""
MAX_REQUESTS, MAX_EVENTS = 10, 6


@dataclass(frozen=True)
class ServerSample:
    """Answers of the server at one time."""

    at: float
    health: JsonObject
    status: JsonObject
    metrics: dict[str, float]
    """Values by name, summed over labels; empty if metrics are disabled."""
    events: list[JsonObject]
    """Latest events; empty for a server without /v1/events."""


def look(server: ServerClient) -> ServerSample:
    """Query the server. Raises UsageError when it does not answer, or is no Tandem server."""
    try:
        health, status = server.get_json("/health"), server.get_json("/v1/status")
        if not (isinstance(health["status"], str) and isinstance(status["replicas"], list)):
            raise TypeError
    except (ValueError, LookupError, TypeError):
        raise UsageError(f"{server.url} does not answer as a Tandem server; is --url right?", param="base_url") from None
    metrics: dict[str, float] = {}
    with contextlib.suppress(UsageError, ValueError):  # metrics may be disabled; the rest is still useful
        for family in text_string_to_metric_families(server.get("/metrics").decode()):
            for sample in family.samples:
                metrics[sample.name] = metrics.get(sample.name, 0.0) + sample.value
    events: list[JsonObject] = []
    with contextlib.suppress(UsageError, ValueError, LookupError):  # an earlier version has no events
        events = server.get_json(f"/v1/events?limit={MAX_EVENTS}")["data"]
    return ServerSample(time.monotonic(), health, status, metrics, events)


def run(arguments: argparse.Namespace) -> int:
    """Refresh until Ctrl-C. With --once, or without a terminal, print one state. Raises UsageError."""
    if not 0.1 <= arguments.interval <= 3600:
        raise UsageError(f"--interval {arguments.interval}: must be from 0.1 to 3600 seconds", param="interval")
    server, console = find_server(arguments), screen(PLAIN_WIDTH)
    before = look(server)
    if arguments.once or not can_watch(console):
        time.sleep(arguments.interval)
        console.print(picture(server.url, before, look(server)))
        return 0

    def next_picture() -> RenderableType:
        nonlocal before
        time.sleep(arguments.interval)
        last = before
        try:
            before = look(server)
        except UsageError as error:  # temporary failures are shown, not fatal
            return Group(picture(server.url, last, last), Text(error.message, "red"))
        return picture(server.url, last, before)

    watch(picture(server.url, before, before), next_picture, console)
    return 0


def picture(url: str, before: ServerSample, now: ServerSample) -> RenderableType:
    """Return the full display. Rates refer to the time between the two samples."""
    parts: list[RenderableType] = [
        _head(url, before, now),
        replicas_table(now.status["replicas"]),
        ranks_table(now.health.get("ranks", [])),
    ]
    if len(now.status.get("models", ())) > 1:
        parts.insert(1, models_table(now.status["models"]))
    if now.status["requests"]:
        parts.append(_requests(now))
    return Group(*parts, *event_lines(now.events))


def _head(url: str, before: ServerSample, now: ServerSample) -> RenderableType:
    health, status = now.health, now.status
    state = str(health["status"])
    engine = status.get("engine") or {}
    line = Text.assemble(
        (f"{status.get('model', '')} ", "bold"),
        coloured(state),
        f" at {url}  up {_duration(status.get('uptime_seconds', 0))}  restarts {health.get('restarts', 0)}",
    )
    hits, asked = engine.get("prefix_hits", 0), engine.get("prefix_queries", 0)
    counts = (
        f"tokens/s {_rate(before, now, 'tandem_generation_tokens_total')} out, "
        f"{_rate(before, now, 'tandem_prompt_tokens_total')} in   TTFT {_mean(before, now)}   "
        f"running {status.get('num_running', 0)}   waiting {status.get('num_waiting', 0)}   "
        f"prefix hits {hits}/{asked}"
    )
    if drafts := engine.get("draft_tokens", 0):
        counts += f"   drafts accepted {engine.get('accepted_tokens', 0)}/{drafts}"
    detail = Text(str(health.get("detail") or ""), "yellow")
    return Group(line, Text(counts), *([detail] if detail else []))


def _rate(before: ServerSample, now: ServerSample, name: str) -> str:
    if name not in now.metrics:
        return "?"
    seconds = now.at - before.at
    return f"{max(now.metrics[name] - before.metrics.get(name, 0.0), 0.0) / seconds:.1f}" if seconds > 0 else "-"


def _mean(before: ServerSample, now: ServerSample) -> str:
    """Return the mean time to the first token as text: since the previous sample, or over all requests if there were none."""
    count, total = now.metrics.get(f"{TTFT}_count", 0.0), now.metrics.get(f"{TTFT}_sum", 0.0)
    since = count - before.metrics.get(f"{TTFT}_count", 0.0)
    if since > 0:
        return f"{1000 * (total - before.metrics.get(f'{TTFT}_sum', 0.0)) / since:.0f} ms"
    return f"{1000 * total / count:.0f} ms (all)" if count else "-"


def _requests(now: ServerSample) -> Table:
    """Return a table with a row per request of this API key, oldest first."""
    requests = sorted(now.status["requests"], key=lambda request: -float(request["elapsed_seconds"]))
    table = narrow_table(
        [
            {
                "request": request["request_id"],
                "route": request["route"],
                "prompt": str(request["prompt_tokens"]),
                "tokens": str(request["completion_tokens"]),
                "seconds": f"{request['elapsed_seconds']:.1f}",
            }
            for request in requests[:MAX_REQUESTS]
        ]
    )
    if len(requests) > MAX_REQUESTS:
        table.add_row(f"and {len(requests) - MAX_REQUESTS} more")
    return table


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
