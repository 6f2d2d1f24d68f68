"""docs/two-machines.md: every command of its first part as it stands there, and what one sees after it."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from hosts import eventually, left_over
from netns import Machines
from pages.commands import blocks

PAGE = Path(__file__).parents[2] / "docs" / "two-machines.md"
WAIT_S = 240.0

pytestmark = [pytest.mark.slow, pytest.mark.demo, pytest.mark.skipif(not PAGE.is_file(), reason="only in a checkout")]


def steps(machines: Machines) -> list[tuple[str, list[str]]]:
    """Each block of commands, with the lines that are to come after it; names and addresses are those of `machines`."""
    found: list[tuple[str, list[str]]] = []
    for language, text in blocks(PAGE, "Two machines, step by step"):
        for written, meant in (
            ("studio", "h0"),
            ("mini", "h1"),
            ("10.0.0.1", machines["h0"].address),
            ("10.0.0.2", machines["h1"].address),
        ):
            text = text.replace(written, meant)
        if language == "bash":
            found.append((text.strip(), []))
        else:
            found[-1][1].extend(text.splitlines())
    return found


def assert_seen(lines: list[str], output: str) -> None:
    """Each line is there, in order; `...` stands for anything, and runs of blanks for one another."""
    rest = output
    for line in lines:
        words = [r"\s+".join(map(re.escape, part.split())) for part in line.split("...")]
        pattern = r"[^\n]*?".join(r"\s*" + one for one in words)
        seen = re.search(pattern, rest)
        assert seen, f"{line!r} does not come in:\n{rest}"
        rest = rest[seen.end() :]


def started(machines: Machines, command: str, log: Path) -> subprocess.Popen[str]:
    """The server, when it has said all that it says at its start, or has ended."""
    with log.open("w") as file:
        server = machines.start(
            "h0", ["sh", "-c", f"exec {command}"], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
    eventually(lambda: "stop  Ctrl-C" in log.read_text() or server.poll() is not None, what=log.read_text)
    return server


@pytest.mark.skipif(shutil.which("curl") is None, reason="not installed: curl")
def test_the_page_from_top_to_bottom(machines: Machines) -> None:
    found = steps(machines)
    server: subprocess.Popen[str] | None = None
    log = machines["h0"].home / "serve.log"
    asked = ""
    try:
        for commands, lines in found:
            if commands.startswith("make setup"):  # this checkout is set up; the last line is what can be run
                commands = commands.splitlines()[-1]
            if commands.startswith("tandem serve"):
                server = started(machines, commands, log)
                assert_seen(lines, log.read_text())
                continue
            asked = commands if commands.startswith("curl") else asked
            assert_seen(lines, machines.run("h0", commands, timeout=WAIT_S).stdout)
        assert server is not None
        machines.cut("h1")
        waiting = machines.start("h0", ["sh", "-c", asked], stdout=subprocess.PIPE)
        try:
            eventually(lambda: "its machine cannot be reached" in log.read_text(), what=log.read_text)
        finally:
            machines.heal("h1")
        assert "Paris" in waiting.communicate(timeout=WAIT_S)[0]
        machines.signal(server, signal.SIGINT)
        assert server.wait(WAIT_S) == 0
        eventually(lambda: not left_over(machines), 60, lambda: left_over(machines))
    finally:
        if server is not None and server.poll() is None:
            machines.signal(server, signal.SIGKILL)
            server.wait(WAIT_S)
