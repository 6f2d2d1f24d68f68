"""The commands of README.md and docs/: what they are, and a shell that runs those of one page in order."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from script_files import script
from served import READY
from tandem.launchers.process_groups import free_ports

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).parent / "commands.toml"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"bash", "sh", "python", "js", "json", "toml", "yaml", "text"}
PATIENCE_S = 240.0


@dataclass(frozen=True)
class Command:
    """A command of a shell, or the text of a block of Python."""

    text: str
    python: bool = False

    @property
    def name(self) -> str:
        """How the table calls it: its first line for Python, else its words without the comment."""
        if self.python:
            return f"python: {self.text.splitlines()[0]}"
        text = self.text.replace("\\\n", " ")
        for found in re.finditer(r"\s#", text):
            try:
                shlex.split(text[: found.start()])
            except ValueError:  # within quotes
                continue
            text = text[: found.start()]
            break
        return " ".join(text.split())

    def is_called(self, name: str) -> bool:
        """Whether the table means it: by its name, or by how that begins, with `...` behind."""
        return self.name.startswith(name[:-3]) if name.endswith("...") else self.name == name


def blocks(page: Path, section: str = "") -> list[tuple[str, str]]:
    """Language and text of each fenced block, of the whole page or of the section with a title."""
    text = page.read_text()
    if section:
        text = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return [(language, textwrap.dedent(block)) for _, language, block in BLOCK.findall(text)]


def commands(page: Path) -> list[Command]:
    """All commands of a page, in order."""
    split, found = script("readme").commands, list[Command]()
    for language, text in blocks(page):
        if language == "python":
            goes_on = "client." in text and "client = " not in text
            before = next((one.text for one in reversed(found) if one.python), "") if goes_on else ""
            found.append(Command(before + text, python=True))
        elif language in ("bash", "sh"):
            found += [Command(one) for one in split(text) if not one.startswith("#") or "\n" in one]
    return found


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@cache
def table() -> dict[str, Any]:
    """Commands that another test runs, those that cannot run here, and what is put in place of words of a page."""
    return tomllib.loads(TABLE.read_text())


def runs_here(page: Path, command: Command) -> bool:
    """Whether the table leaves it to the test that runs pages."""
    entries = [entry for kind in ("elsewhere", "never") for entry in table()[kind] if entry["page"] == name_of(page)]
    return not any(command.is_called(name) for entry in entries for name in entry["commands"])


class Shell:
    """Runs commands of one page in a directory of its own; servers are ended with it."""

    def __init__(self, directory: Path, variables: dict[str, str], put: dict[str, str], address: str) -> None:
        self._directory, self._put, self._other = directory, put, address
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._variables = {**os.environ, "PATH": path, **variables}
        self._server: subprocess.Popen[str] | None = None
        self._address = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._end()
        finally:
            subprocess.run(
                [sys.executable, "-m", "tandem", "down", "--now"],
                cwd=self._directory,
                check=False,
                env=self._variables,
                capture_output=True,
                timeout=PATIENCE_S,
            )

    def run(self, command: Command) -> str:
        """What it prints. Fails if it does."""
        text = command.text
        for written, meant in self._put.items():
            text = text.replace(written, meant)
        serves = re.match(r"tandem serve\b", text) is not None
        if serves or text.startswith("tandem up"):
            self._end()
        address = self._address or self._other
        text = text.replace("http://127.0.0.1:8000", address).replace("https://127.0.0.1:8000", address)
        text = re.sub(r"(^|\n)curl ", r"\1curl -sS -f ", text)
        text = text.replace("tandem doctor", f"tandem doctor --port {free_ports(1)[0]}")  # 8000 may be another test's
        if serves:
            return self._serve(text)
        words = [sys.executable, "-"] if command.python else ["bash", "-o", "pipefail", "-c", text]
        typed = text if command.python else "A question?\n" if "tandem chat" in text else ""
        if not command.python and re.match(r"tandem (logs -f|top(?!.*--once))", text):
            return self._watch(words)
        done = subprocess.run(
            words,
            cwd=self._directory,
            env=self._environment(text),
            input=typed,
            timeout=PATIENCE_S,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}"
        return done.stdout

    def _environment(self, text: str) -> dict[str, str]:
        """With the server of this page, if it has one now, else the one that pages share, for what asks a server."""
        asks = re.match(r"tandem (top|bench|batch|model (ps|load|unload))\b", text)
        return {**self._variables, **({"TANDEM_BASE_URL": self._address or self._other} if asks else {})}

    def _start(self, words: list[str]) -> tuple[subprocess.Popen[str], Path]:
        log = self._directory / f"{time.monotonic_ns()}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                words,
                cwd=self._directory,
                env=self._environment(words[-1]),
                stdout=file,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        return process, log

    def _serve(self, text: str) -> str:
        self._server, log = self._start(["bash", "-c", f"exec {text}"])
        deadline = time.monotonic() + PATIENCE_S
        while (ready := READY.search(log.read_text())) is None:
            assert self._server.poll() is None and time.monotonic() < deadline, f"{text}\n{log.read_text()}"
            time.sleep(0.05)
        self._address = ready[1].replace("//0.0.0.0:", "//127.0.0.1:")
        return log.read_text()

    def _watch(self, words: list[str]) -> str:
        """Of a command that goes on until Ctrl-C, what it says at first."""
        process, log = self._start(words)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not log.read_text().strip():
                assert process.poll() is None and time.monotonic() < deadline, f"{words}: it says nothing"
                time.sleep(0.05)
        finally:
            os.killpg(process.pid, signal.SIGINT)
            code = process.wait(PATIENCE_S)
        assert code in (0, 130, -signal.SIGINT), log.read_text()
        return log.read_text()

    def _end(self) -> None:
        server, self._server, self._address = self._server, None, ""
        if server is not None and server.poll() is None:
            os.killpg(server.pid, signal.SIGINT)
            try:
                assert server.wait(PATIENCE_S) in (0, 130, -signal.SIGINT)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()
                raise
