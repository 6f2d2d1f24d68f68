"""Output of a server starting in a terminal: a line per part of the model, then its address and the next steps."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from tandem.config.settings import ServerSettings
from tandem.protocol.control import LoadProgress

PHASES = {
    "fetch": "part {}: download",
    "fetched": "part {}: checking the download",
    "load": "part {}: load into memory",
    "check": "computing a first answer over all parts, to check them",
    "warm": "computing examples, so that the first answers are fast",
}
"""Descriptions of the phases of `LoadProgress`, and of a completed `fetch`. Equal ones share a line."""


class Starting(Protocol):
    """Loading progress of an engine; `EngineStatus` implements it."""

    @property
    def loading(self) -> Sequence[LoadProgress]:
        """Progress of each rank."""

    @property
    def detail(self) -> str:
        """Current activity of the engine."""


Show = Callable[[Mapping[int, Starting | None]], None]
"""Function that shows the engines' progress: status by replica number, None before the first answer."""


@contextmanager
def progress_lines() -> Iterator[Show]:
    """Yield a function that updates live lines on stderr until the block ends. No output if that is no terminal."""
    if not sys.stderr.isatty():
        yield lambda engines: None
        return
    from rich.console import Console
    from rich.filesize import decimal
    from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"), TextColumn("{task.fields[size]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as lines:
        starting = lines.add_task("starting", total=None, size="")
        tasks: dict[str, TaskID] = {}
        """Lines by text; each counts its own seconds."""

        def show(engines: Mapping[int, Starting | None]) -> None:
            several = len(engines) > 1
            loading = {
                f"{f'replica {number}, ' if several else ''}{PHASES[phase].format(part.rank + 1)}": part
                for number, status in engines.items()
                if status is not None
                for part in status.loading
                for phase in ("fetched" if part.phase == "fetch" and part.done >= part.total > 0 else part.phase,)
            }
            details = [status.detail for status in engines.values() if status is not None and status.detail]
            other = "starting" if None in engines.values() else "opening the address"
            lines.update(starting, description=details[0] if details else other, visible=not loading)
            for text in tasks.keys() - loading.keys():
                lines.update(tasks[text], visible=False)
            for text, part in loading.items():
                if text not in tasks:
                    tasks[text] = lines.add_task(text, total=None, size="")
                size = f"{decimal(part.done)} of {decimal(part.total)}" if part.total else ""
                lines.update(tasks[text], size=size, visible=True)

        yield show


def farewell(address: str, server: ServerSettings, *, stop: str) -> str:
    """Return the lines printed when a server is ready: the page, an example request, and how to stop it."""
    key = ' -H "Authorization: Bearer $TANDEM_API_KEY"' if server.api_key or server.api_key_file else ""
    body = '{"messages": [{"role": "user", "content": "Hello!"}]}'
    elsewhere = f" (on other machines {address.split(':')[0]}://{socket.gethostname()}:{address.rpartition(':')[2]}/ui)"
    return (
        f"  page  {address}/ui{elsewhere if server.host in ('0.0.0.0', '::') else ''}\n"
        f"  try   curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'\n"
        f"  stop  {stop}"
    )
