"""Runs checks one after the other, each in a process of its own with a deadline, and notes what comes of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from tandem.errors import SpawnError
from tandem.firstlight.check import Check, Outcome, Task
from tandem.firstlight.child import MODULE, CheckProcess
from tandem.firstlight.journal import Journal

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
        task = replace(self._task, entry=check.entry, result=str(Path(self._task.directory) / f"{check.name}.json"))
        began = time.monotonic()
        try:
            with CheckProcess(task, name=check.name, module=self._module) as process:
                finding = process.finding(check.deadline_s)
        except SpawnError as error:
            return Outcome(name=check.name, verdict="failed", detail=error.message, seconds=0.0, attempts=attempt)
        return Outcome(name=check.name, verdict=finding.verdict, detail=finding.detail, figures=finding.figures,
                       seconds=round(time.monotonic() - began, 1), attempts=attempt)
