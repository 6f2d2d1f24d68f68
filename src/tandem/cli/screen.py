"""Tables and live pictures on standard output."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from tandem.printable import printable


class _Screen(Console):
    """A console that obeys no control character of what it shows: much of it comes from other machines."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of `renderable`, their texts made printable."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def screen(width: int = 160, **options: Any) -> Console:
    """Return a console for standard output, `width` columns wide where that is no terminal."""
    return _Screen(width=None if sys.stdout.isatty() else width, **options)


def plain_table(*headings: str, left: Collection[str]) -> Table:
    """Return a table without lines, its columns flush right but for those of `left`."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    return table
