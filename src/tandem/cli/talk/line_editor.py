"""User input: a line editor with history and multi-line input on a terminal, plain lines elsewhere; handling of Ctrl-C."""

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
    """SIGINT handler that raises KeyboardInterrupt only inside `heard`.

    Python's own handler raises it between any two instructions: also while asyncio sets up a loop, while the terminal's
    modes change, or after the last line of a `try`.
    """

    def __init__(self) -> None:
        """Set the initial state; `deferred` installs the handler."""
        self._raises = self._pressed = False
        self.told: Callable[[], object] = lambda: None
        """Function that the signal handler calls when it defers an interrupt."""

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Context manager that defers interrupts to `heard` and `taken`. Main thread only."""
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
        """Return whether an interrupt was deferred, and clear it."""
        pressed, self._pressed = self._pressed, False
        return pressed

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Context manager that raises KeyboardInterrupt for an interrupt in the block or deferred before it."""
        try:
            self._raises = True
            if self.taken():
                raise KeyboardInterrupt
            yield
        finally:
            self._raises = False

    def each(self, things: Iterator[T]) -> Iterator[T]:
        """Yield each item. KeyboardInterrupt can be raised only while waiting for the next item, not while one is in use."""
        while True:
            with self.heard():
                try:
                    thing = next(things)
                except StopIteration:
                    return
            yield thing


def make_prompt(interrupts: Interrupts) -> Callable[[], str]:
    """Return a function that reads the user's next message from a terminal or a pipe.

    That function raises EOFError and KeyboardInterrupt.
    """
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
        # prompt_toolkit's own SIGINT handler would lose a Ctrl-C before or after it controls the terminal.
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
    if not sys.stdin.isatty() and not text.startswith(("/", QUOTES)):
        text += "\n" + sys.stdin.read()  # what is piped is one message
    return unquoted(text.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))  # whatever the locale


def unquoted(text: str) -> str:
    """Return a message without the quotes that enclose several lines."""
    text = text.strip()
    if text.startswith(QUOTES):
        text = text.removeprefix(QUOTES).removesuffix(QUOTES)
    return text.strip()
