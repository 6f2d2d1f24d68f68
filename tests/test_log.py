from __future__ import annotations

import ast
import errno
import io
import json
import logging
import os
import re
import socket
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

import tandem
from tandem import log
from tandem.log import Seldom

SOURCES = Path(tandem.__file__).parent
TROUBLE = {"warning", "error", "critical"}
WHOLE = {
    "%s": "the sentence is made elsewhere",
    "replica %d cannot start: %s": "the model's own error, which names its remedy",
    "the %s does not run: %s": "its second half is made with its reason",
}
"""Lines that need no second half."""


def lines_of_trouble() -> Iterator[tuple[str, str]]:
    """Where, and the text of each call that logs a warning or worse."""
    for path in sorted(SOURCES.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or not call.args:
                continue
            holder = getattr(call.func.value, "id", "")
            if call.func.attr in TROUBLE and holder in ("log", "logger", "seldom"):
                yield f"{path.relative_to(SOURCES)}:{call.lineno}", ast.unparse(call.args[0]).strip("'\"f")


def test_every_line_of_trouble_says_what_follows_or_what_to_do() -> None:
    found = list(lines_of_trouble())
    assert len(found) > 50
    short = [f"{where}: {text}" for where, text in found if not re.search("[;:] ", text) and text not in WHOLE]
    assert not short, "write what is, then `: ` or `; `, and what follows or what to do: " + "; ".join(short)


def test_what_anybody_can_bring_about_is_logged_once_a_minute_and_then_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(log.time, "monotonic", lambda: now[0])
    seldom = Seldom(logging.getLogger("tandem.test"))
    for number in range(100):
        seldom.warning("refused %s; nothing follows", number)
    seldom.error("another thing: %s", 100 * "%")
    now[0] += 61
    seldom.warning("refused %s; nothing follows", "again")
    assert [one.getMessage() for one in caplog.records] == [
        "refused 0; nothing follows",
        "another thing: " + 100 * "%",
        "refused again; nothing follows (99 more like it since the last line)",
    ]


def test_kinds_without_end_take_no_memory_without_end(caplog: pytest.LogCaptureFixture) -> None:
    seldom = Seldom(logging.getLogger("tandem.test"))
    for number in range(1000):
        seldom.log(logging.WARNING, "a line", kind=str(number))
    assert len(seldom._seen) < 100


def test_on_a_terminal_a_line_begins_where_a_live_line_of_another_process_stood(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    before = logging.getLogger(log.ROOT).level
    try:
        log.set_up()
        logging.getLogger(f"{log.ROOT}.test").warning("mind the %s", "\x1b[2Jgap\x07\x9b")
    finally:
        monkeypatch.undo()
        log.set_up("WARNING")
        logging.getLogger(log.ROOT).setLevel(before)
    assert terminal.getvalue().startswith(log.ERASE_LINE)
    assert "mind the" in terminal.getvalue() and "gap" in terminal.getvalue()
    assert not any(control in terminal.getvalue() for control in ("\x1b[2J", "\x07", "\x9b"))


def test_a_line_of_json_has_time_with_zone_level_host_and_members(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    before = logging.getLogger(log.ROOT).level
    logger = logging.getLogger(f"{log.ROOT}.test")
    try:
        for log_format in ("json", "text"):
            log.set_up(prefix="[engine 1]", log_format=log_format)
            try:
                raise ValueError("two\nlines")
            except ValueError:
                logger.info("mind the %s", "gap\x1b[2J", extra={"fields": {"status": 200}}, exc_info=log_format == "json")
    finally:
        monkeypatch.undo()
        log.set_up("WARNING")
        logging.getLogger(log.ROOT).setLevel(before)
    first, second, _ = stream.getvalue().split("\n")
    told = json.loads(first)
    assert datetime.fromisoformat(told.pop("time")).tzinfo is not None
    assert "ValueError: two\nlines" in told.pop("exception")
    assert told == {
        "level": "INFO", "logger": "tandem.test", "host": socket.gethostname(), "pid": os.getpid(),
        "process": "engine 1", "message": "mind the gap\x1b[2J", "status": 200,
    }  # fmt: skip
    at, rest = second.split(" ", 1)
    assert datetime.fromisoformat(at).tzinfo is not None
    assert rest == "INFO [engine 1] mind the gap[2J"


def test_a_terminal_that_takes_nothing_more_ends_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("sys.stderr", Gone())
    log.set_up()
    logging.getLogger(f"{log.ROOT}.test").warning("a line")
