"""An answer on the screen while it comes: markdown, block by block."""

from __future__ import annotations

import sys
import termios
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

FRAMES = 12
"""Most drawings a second."""


class AnswerView:
    """What is finished (blocks between blank lines) is printed for good; the block that grows is drawn again and again.

    So an answer may be longer than the screen, and its beginning can be scrolled to.
    """

    def __init__(self, console: Console) -> None:
        """Nothing is shown."""
        self._console = console
        self._block, self._fenced, self._reasoning = "", False, False
        self._live: Live | None = None

    def add(self, text: str, *, reasoning: bool = False) -> None:
        """More of the answer."""
        if reasoning != self._reasoning:
            self.close()
            self._reasoning = reasoning
        for line in text.splitlines(keepends=True):
            self._block += line
            if line.endswith("\n"):
                last = self._block.splitlines()[-1].strip()
                if last.startswith(("```", "~~~")):
                    self._fenced = not self._fenced
                if not last and not self._fenced:
                    self._print()
        self._draw()

    def close(self) -> None:
        """The answer is over."""
        self._print()
        self._fenced = False

    def _print(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._block.strip():
            self._console.print(self._drawn())
        self._block = ""

    def _draw(self) -> None:
        if not self._block.strip():
            return
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=FRAMES, transient=True,
                              vertical_overflow="crop")
            self._live.start()
        self._live.update(self._drawn())

    def _drawn(self) -> RenderableType:
        if self._reasoning:
            return Text(self._block.strip("\n"), style="dim italic")
        return Markdown(self._block)


@contextmanager
def unechoed() -> Iterator[None]:
    """What is typed meanwhile does not show; Ctrl-C goes on to work."""
    with ExitStack() as stack:
        with suppress(termios.error, ValueError, OSError):  # no terminal
            stream = sys.stdin.fileno()
            before = termios.tcgetattr(stream)
            stack.enter_context(suppress(termios.error))  # it may be gone by then
            stack.callback(termios.tcsetattr, stream, termios.TCSANOW, before)
            termios.tcsetattr(stream, termios.TCSANOW, [*before[:3], before[3] & ~termios.ECHO, *before[4:]])
        yield
