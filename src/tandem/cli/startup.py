"""What a terminal shows while a server starts: a line for each rank, and at the end where it is and what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

PHASES = {"fetch": "download", "load": "load", "check": "self-check of ranks and links"}
"""Phases of `LoadProgress`, as a person reads them."""


class Starting(Protocol):
    """Shows how far engines are."""

    def __call__(self, engines: Mapping[int, Any]) -> None:
        """`engines`: the status of each engine by its number, None where there is none yet."""


@contextmanager
def progress_lines() -> Iterator[Starting]:
    """Live lines on standard error if that is a terminal; they are gone when the block ends. Elsewhere nothing."""
    if not sys.stderr.isatty():
        yield lambda engines: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=30), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as lines:
        tasks: dict[str, TaskID] = {"": lines.add_task("starting", total=None)}

        def show(engines: Mapping[int, Any]) -> None:
            several = len(engines) > 1
            found = {f"replica {number}, rank {one.rank}" if several else f"rank {one.rank}": one
                     for number, status in engines.items() if status is not None for one in status.loading}
            details = [status.detail for status in engines.values() if status is not None and status.detail]
            lines.update(tasks[""], description=details[0] if details else "starting", visible=not found)
            for name, one in found.items():
                if name not in tasks:
                    tasks[name] = lines.add_task(name)
                lines.update(tasks[name], description=f"{name}: {PHASES.get(one.phase, one.phase)}",
                             total=one.total or None, completed=one.done)

        yield show


def farewell(address: str, *, stop: str) -> str:
    """What can be done with a server that is ready, a line each."""
    body = '{"messages": [{"role": "user", "content": "Hello!"}]}'
    return (f"  page  {address}/ui\n"
            f"  try   curl {address}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"
            f"  stop  {stop}")
