"""Runs checks one after the other, each in a process of its own with a deadline, and notes what comes of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tandem.env import child_environment
from tandem.errors import SpawnError
from tandem.firstlight.check import Check, Finding, Outcome, Task
from tandem.firstlight.child import MODULE
from tandem.firstlight.journal import Journal
from tandem.processes.child import ChildProcess

TAIL = 4096
"""Bytes of what a process wrote, from the end, in which its last words are looked for."""
Listener = Callable[[Check, Outcome | None], None]
"""Called when a check begins (None), and when it has ended."""


class Director:
    """Makes checks, and keeps the journal."""

    def __init__(self, journal: Journal, task: Task, *, module: str = MODULE) -> None:
        """`task` is what all checks are told; `module` is the entry point of their processes."""
        self._journal, self._task, self._module = journal, task, module

    def run(self, checks: Sequence[Check], *, seconds: float, listener: Listener) -> list[Outcome]:
        """Outcomes of those of `checks` that have ended, in their order; none begins when `seconds` have passed.

        What an earlier run has found is taken over.
        """
        end = time.monotonic() + seconds
        for check in checks:
            if check.name in self._journal.outcomes:
                continue
            outcome = self._journal.lost(check.name)
            if outcome is None:
                if time.monotonic() >= end:
                    continue
                listener(check, None)
                attempt = self._journal.begin(check.name)
                try:
                    outcome = self._made(check, attempt)
                except KeyboardInterrupt:
                    self._journal.again([check.name])  # it was not the check that ended the run
                    raise
            self._journal.end(outcome)
            listener(check, outcome)
        return [self._journal.outcomes[one.name] for one in checks if one.name in self._journal.outcomes]

    def _made(self, check: Check, attempt: int) -> Outcome:
        result, log = (Path(self._task.directory) / f"{check.name}.{kind}" for kind in ("json", "log"))
        result.unlink(missing_ok=True)
        task = replace(self._task, entry=check.entry, result=str(result))
        began = time.monotonic()
        with log.open("wb") as output:
            try:
                child = ChildProcess(self._module, msgspec.json.encode(task), env=child_environment(), name=check.name,
                                     output=output.fileno())
            except SpawnError as error:
                return Outcome(name=check.name, verdict="failed", detail=error.message, seconds=0.0, attempts=attempt)
            try:
                ended = child.wait(check.deadline_s)
            finally:
                child.kill()
                child.wait(10.0)
        finding = _finding(result, child.describe_exit() if ended else "", check.deadline_s, log)
        return Outcome(name=check.name, verdict=finding.verdict, detail=finding.detail, figures=finding.figures,
                       seconds=round(time.monotonic() - began, 1), attempts=attempt)


def _finding(result: Path, ended: str, deadline_s: float, log: Path) -> Finding:
    """What the process left, or what is to be said of one that left nothing."""
    try:
        return msgspec.json.decode(result.read_bytes(), type=Finding)
    except FileNotFoundError:
        pass
    lines = [line for line in log.read_bytes()[-TAIL:].decode(errors="replace").splitlines() if line.strip()]
    words = f": {lines[-1].strip()}" if lines else ""
    return Finding(verdict="no answer", detail=(f"its process {ended}" if ended else
                                                f"it did not come back within {deadline_s:g} s") + words)
