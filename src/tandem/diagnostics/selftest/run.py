"""A run of the self-test: each check in a process with a deadline, and a journal of the outcomes.

The journal is synced to disk before and after each check. A check that began and has no outcome died together with the run or
the machine. The next run retries it once, unless the machine was restarted meanwhile: the check may be the cause.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, field
from msgspec.structs import asdict, replace

from tandem.diagnostics.selftest.check import Check, CheckResult
from tandem.diagnostics.tasks import MODULE, Task, TaskProcess
from tandem.errors import SpawnError
from tandem.protocol.codec import UNREADABLE
from tandem.system.files import write_private

MOST_ATTEMPTS = 2
RESTARTED = "the machine was restarted while it ran; `tandem selftest --fresh` tries it again"
KILLED = "it was killed in the middle of it, twice; `tandem selftest --fresh` tries it again"

Listener = Callable[[Check, CheckResult | None], None]
"""Callback for the begin (None) and the end of a check."""


class Run(Struct, kw_only=True):
    """Content of the journal."""

    question: dict[str, object]
    """Parameters of the run; a journal with other parameters is discarded."""
    begun: dict[str, list[str]] = field(default_factory=dict)
    """Check -> boot id of the machine at each attempt."""
    outcomes: dict[str, CheckResult] = field(default_factory=dict)
    """Outcomes of ended checks by name."""


class RunJournal:
    """Journal file of one run."""

    def __init__(self, path: Path, question: dict[str, object], *, boot: str, fresh: bool = False) -> None:
        """Continue the journal if it has the same `question` and not `fresh`, else start a new one. Raises OSError."""
        self._path, self._boot = path, boot
        path.parent.mkdir(parents=True, exist_ok=True)
        earlier = None if fresh else _read(path)
        self._run = earlier if earlier is not None and earlier.question == question else Run(question=question)
        self._save()

    @property
    def outcomes(self) -> dict[str, CheckResult]:
        """Outcomes of ended checks by name."""
        return self._run.outcomes

    def reopen(self, names: Collection[str]) -> None:
        """Forget these checks if all have ended, so that they run again; otherwise continue the interrupted run."""
        if self.outcomes.keys() >= set(names):
            self.forget(names)

    def forget(self, names: Iterable[str]) -> None:
        """Forget the outcomes and attempts of these checks."""
        for name in names:
            self.outcomes.pop(name, None)
            self._run.begun.pop(name, None)
        self._save()

    def lost(self, name: str) -> CheckResult | None:
        """Return an outcome for a check that began, never ended and is not retried; else None."""
        boots = self._run.begun.get(name, [])
        if not boots or name in self.outcomes:
            return None
        detail = RESTARTED if boots[-1] != self._boot else KILLED if len(boots) >= MOST_ATTEMPTS else ""
        return CheckResult(name=name, verdict="no answer", detail=detail, seconds=0.0, attempts=len(boots)) if detail else None

    def begin(self, name: str) -> int:
        """Record the begin of a check; return the number of the attempt, from 1."""
        boots = self._run.begun.setdefault(name, [])
        boots.append(self._boot)
        self._save()
        return len(boots)

    def end(self, outcome: CheckResult) -> None:
        """Record the outcome of a check."""
        self.outcomes[outcome.name] = outcome
        self._save()

    def _save(self) -> None:
        """Replace the file durably, since a kernel panic may follow."""
        write_private(self._path, msgspec.json.encode(self._run))


def _read(path: Path) -> Run | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Run)
    except (FileNotFoundError, *UNREADABLE):
        return None


def run_checks(
    checks: Sequence[Check], journal: RunJournal, task: Task, *, seconds: float, listener: Listener, module: str = MODULE
) -> list[CheckResult]:
    """Run the checks that have no outcome yet; return all outcomes so far in the order of `checks`.

    No check begins later than `seconds` after the start. All checks get a copy of `task`; `module` is the entry point of their
    processes.
    """
    end = time.monotonic() + seconds
    for check in checks:
        if check.name in journal.outcomes:
            continue
        outcome = journal.lost(check.name)
        if outcome is None:
            if time.monotonic() >= end:
                continue
            listener(check, None)
            attempt = journal.begin(check.name)
            try:
                outcome = make(check, attempt, task, module)
            except KeyboardInterrupt:
                journal.forget([check.name])  # the user interrupted the run, not the check
                raise
        journal.end(outcome)
        listener(check, outcome)
    return [journal.outcomes[check.name] for check in checks if check.name in journal.outcomes]


def make(check: Check, attempt: int, task: Task, module: str) -> CheckResult:
    """Run one check in a subprocess."""
    task = replace(task, entry=check.entry, result=str(Path(task.directory) / f"{check.name}.json"))
    began = time.monotonic()
    try:
        with TaskProcess(task, name=check.name, module=module) as process:
            finding = process.finding(check.deadline_s)
    except SpawnError as error:
        return CheckResult(name=check.name, verdict="failed", detail=error.message, seconds=0.0, attempts=attempt)
    seconds = round(time.monotonic() - began, 1)
    return CheckResult(**asdict(finding), name=check.name, seconds=seconds, attempts=attempt)
