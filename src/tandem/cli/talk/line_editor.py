"""Input of the user: with history and several lines on a terminal, plain lines elsewhere; and Ctrl-C meanwhile."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from tandem.cli.talk.conversation import COMMANDS
from tandem.env import state_dir

QUOTES = '"""'
T = TypeVar("T")


class Interrupts:
    """Handler of SIGINT that raises KeyboardInterrupt within `heard` alone.

    Python raises it between any two instructions: also while asyncio sets up a loop, a terminal is taken, or after the
    last line of a `try`.
    """

    def __init__(self) -> None:
        """Change nothing; `deferred` installs the handler."""
        self._raises = self._pressed = False
        self.told: Callable[[], object] = lambda: None
        """Function that the signal handler calls when an interrupt is kept for later."""

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Keep interrupts in the block for `heard` and `taken`. For the main thread."""
        before = signal.signal(signal.SIGINT, self._press)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _press(self, _number: int, _frame: FrameType | None) -> None:
        if self._raises:
            self._raises = False
            raise KeyboardInterrupt
        self._pressed = True
        self.told()

    def taken(self) -> bool:
        """Return whether an interrupt was kept, and forget it."""
        pressed, self._pressed = self._pressed, False
        return pressed

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Raise KeyboardInterrupt for an interrupt in the block, and for one kept before."""
        try:
            self._raises = True
            if self.taken():
                raise KeyboardInterrupt
            yield
        finally:
            self._raises = False

    def each(self, things: Iterator[T]) -> Iterator[T]:
        """Yield all of `things`. KeyboardInterrupt may come while the next one is awaited, not while one is used."""
        while True:
            with self.heard():
                try:
                    thing = next(things)
                except StopIteration:
                    return
            yield thing


def make_prompt(interrupts: Interrupts) -> Callable[[], str]:
    """Return a function that reads the user's next message, as fits standard input. It raises EOFError and
    KeyboardInterrupt."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _plain
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        text = event.current_buffer.text
        if text.lstrip().startswith(QUOTES) and text.count(QUOTES) < 2:
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    state_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
    history = state_dir() / "chat_history"
    history.touch(mode=0o600)
    words = WordCompleter([usage.split()[0] for usage in COMMANDS], sentence=True)
    session: PromptSession[str] = PromptSession(
        history=FileHistory(str(history)),
        key_bindings=keys,
        multiline=True,
        completer=words,
        complete_while_typing=False,
        prompt_continuation="... ",
    )
    app = session.app

    def leave() -> None:
        if app.future is not None and not app.future.done() and interrupts.taken():
            app.exit(exception=KeyboardInterrupt)

    def ask() -> str:
        # Without prompt_toolkit's handler of Ctrl-C: it drops one that comes before or after the terminal is its own.
        text = session.prompt(">>> ", pre_run=leave, handle_sigint=False)
        if interrupts.taken():
            raise KeyboardInterrupt
        return unquoted(text)

    interrupts.told = lambda: app.loop.call_soon_threadsafe(leave) if app.loop is not None else None
    return ask


def _plain() -> str:
    text = input("> " if sys.stdin.isatty() else "")
    while text.lstrip().startswith(QUOTES) and text.count(QUOTES) < 2:
        text += "\n" + input()
    return unquoted(text)


def unquoted(text: str) -> str:
    """Return a message without the quotes around several lines."""
    text = text.strip()
    if text.startswith(QUOTES):
        text = text.removeprefix(QUOTES).removesuffix(QUOTES)
    return text.strip()
