"""Tables and live displays on standard output: replicas, ranks, models and events of a server."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from tandem.json_types import JsonMapping
from tandem.printable import printable

SLOW = 3.0
"""Smallest slowdown factor of a rank that is shown."""
_COLOURS = (
    dict.fromkeys(("healthy", "ready", "running", "loaded"), "green")
    | dict.fromkeys(("recovering", "starting", "draining", "loading"), "yellow")
    | dict.fromkeys(("unloaded", "unloading", "?"), "")
)
"""Colour by state of a server, replica or model; other states are red."""


class _Screen(Console):
    """Console that removes control characters from its output, much of which comes from other machines."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of `renderable` without control characters in their text."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def screen(width: int = 160, *, highlight: bool = True, markup: bool = True) -> Console:
    """Return a console for standard output, `width` columns wide if that is no terminal."""
    return _Screen(width=None if sys.stdout.isatty() else width, highlight=highlight, markup=markup)


def watch(first: RenderableType, next_picture: Callable[[], RenderableType], console: Console) -> None:
    """Show `first`, then each result of `next_picture`, on the full screen until Ctrl-C."""
    with suppress(KeyboardInterrupt), Live(first, console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(next_picture(), refresh=True)


def can_watch(console: Console) -> bool:
    """Return True if the output is a terminal that supports a full-screen display."""
    return sys.stdout.isatty() and not console.is_dumb_terminal


def plain_table(*headings: str, left: Collection[str]) -> Table:
    """Return a table without lines. Columns are right-aligned except those in `left`."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    return table


def print_table(table: Table, empty: str) -> None:
    """Print a table, or the text `empty` for one without rows."""
    if table.row_count:
        screen(markup=False).print(table)
    else:
        print(empty)


def narrow_table(rows: Sequence[Mapping[str, RenderableType | None]]) -> Table:
    """Return a table for 80 columns that truncates host names first. Columns with only None are omitted."""
    table = Table(box=None, padding=(0, 0, 0, 1))
    headings = [name for name in rows[0] if any(row[name] is not None for row in rows)] if rows else []
    for heading in headings:
        table.add_column(heading.strip(), no_wrap=True, max_width=24 if heading == "host" else None)
    for row in rows:
        cells = ("-" if row[heading] is None else row[heading] for heading in headings)
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
    return table


def coloured(state: str) -> Text:
    """Return the state in its colour."""
    return Text(state, _COLOURS.get(state, "red"))


def replicas_table(replicas: Sequence[JsonMapping]) -> Table:
    """Return a table with a row per replica, whose number shows with several; the bar is the used part of the KV cache."""
    rows: list[dict[str, RenderableType | None]] = []
    for replica in replicas:
        used, total, rate = (replica.get(name) for name in ("kv_tokens_used", "kv_tokens_total", "tokens_per_s"))
        rows.append(
            {
                "replica": str(replica["replica"]) if len(replicas) > 1 else None,
                "role": replica["role"] if any(one["role"] != "both" for one in replicas) else None,
                "state": coloured(replica["state"]),
                "process": _text(replica.get("pid")),
                "parts": _text(replica.get("ranks")),
                "running": _text(replica.get("running")),
                "waiting": _text(replica.get("queued")),
                "room": None if used is None else f"{used} of {total}",
                " ": None if used is None else bar(used, total or 0),
                "tokens/s": None if rate is None else f"{rate:.1f}",
                "restarts": str(replica.get("process_restarts", 0) + replica.get("restarts", 0)),
            }
        )
    return narrow_table(rows)


def ranks_table(ranks: Sequence[JsonMapping]) -> Table:
    """Return a table with a row per rank; bars compare peak memory with the highest peak."""
    most = max((rank["peak_bytes"] for rank in ranks), default=0)
    replicas = [rank["replica"] for rank in ranks]
    wired = any(rank.get("wired_bytes") for rank in ranks)
    return narrow_table(
        [
            {
                "replica": str(rank["replica"]) if len(set(replicas)) > 1 else None,
                "part": f"{replicas[:number].count(rank['replica']) + 1} of {replicas.count(rank['replica'])}",
                "layers": f"{rank['layers'][0]}-{rank['layers'][1] - 1}",
                "host": rank["host"],
                "process": str(rank["pid"]),
                "model": size(rank["weight_bytes"]),
                "locked": size(rank["wired_bytes"]) if wired else None,
                "tokens": size(rank["kv_bytes"]),
                "highest": size(rank["peak_bytes"]),
                " ": bar(rank["peak_bytes"], most),
                "ms/token": f"{1000 * rank['step_s']:.1f}",
                "speed": _pace(rank.get("state", "ready"), rank.get("slowdown", 1.0)),
            }
            for number, rank in enumerate(ranks)
        ]
    )


def models_table(models: Sequence[JsonMapping]) -> Table:
    """Return a table with a row per model."""
    return narrow_table(
        [
            {
                "model": model["id"],
                "state": coloured(model.get("state", "?")),
                "replicas": model.get("replicas"),
                "memory": size(max(model["needs"].values())) if model.get("needs") else None,
                "context": _text(model.get("max_model_len") or None),
                "detail": model.get("detail") or None,
            }
            for model in models
        ]
    )


def event_lines(events: Sequence[JsonMapping]) -> list[Text]:
    """Return a heading, and a line per event with time, text and remedy; empty without events."""
    lines = [Text("lately", "bold")] if events else []
    for event in events:
        style = {"error": "red", "warning": "yellow"}.get(event["level"], "")
        when = time.strftime("%d %b %H:%M:%S", time.localtime(event.get("time", event.get("at"))))
        replica = event.get("replica")
        subject = ", ".join(filter(None, (event.get("model"), None if replica is None else f"replica {replica}")))
        text = f"{subject}: {event['text']}" if subject else event["text"]
        lines.append(Text.assemble(f"  {when}  ", (text, style), f". {event['remedy']}" if event["remedy"] else ""))
    return lines


def _pace(state: str, slowdown: float) -> Text:
    """Return a rank's speed for the table: `usual`, a slowdown factor, or its state if not ready."""
    if state != "ready":
        return Text(state, "red" if state == "lost" else "yellow")
    return Text(f"{slowdown:.1f} x slower", "yellow") if slowdown >= SLOW else Text("usual")


def _text(value: object) -> str | None:
    if value is None:
        return None
    return str(len(value) if isinstance(value, list) else value)


def bar(part: float, whole: float) -> ProgressBar:
    """Return a bar filled to `part` of `whole`."""
    return ProgressBar(total=max(whole, 1), completed=part, width=8)


def size(nbytes: float) -> str:
    """Return a number of bytes as text with a suitable unit."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"
