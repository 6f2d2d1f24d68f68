"""Where the user types: with history and several lines on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import Protocol

from tandem.cli.talk.conversation import COMMANDS
from tandem.cli.talk.interrupts import Interrupts
from tandem.env import state_dir

QUOTES = '"""'


class Prompt(Protocol):
    """Asks for what the user says next."""

    def __call__(self) -> str:
        """It. Raises EOFError, and KeyboardInterrupt."""


def make_prompt(interrupts: Interrupts) -> Prompt:
    """One that fits to standard input."""
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
    words = WordCompleter([one.split()[0] for one in COMMANDS], sentence=True)
    session: PromptSession[str] = PromptSession(history=FileHistory(str(history)), key_bindings=keys, multiline=True,
                                                completer=words, complete_while_typing=False,
                                                prompt_continuation="... ")
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
    """Without the quotes around several lines."""
    text = text.strip()
    if text.startswith(QUOTES):
        text = text.removeprefix(QUOTES).removesuffix(QUOTES)
    return text.strip()
