"""A run of the self-test: checks one after the other, each in a process with a deadline, and a journal of the outcomes.

The journal is written through to the disk before anything else goes on. A check that was begun and has no outcome died
together with the run, or with the machine. The next run goes on behind it: it tries such a check once more, but not if
the machine has been restarted meanwhile, since the check may be why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from tandem.diagnostics.selftest.check import Check, CheckResult
from tandem.diagnostics.tasks import MODULE, Task, TaskProcess
from tandem.errors import SpawnError
from tandem.protocol.codec import UNREADABLE
from tandem.system.files import write_private

MOST_ATTEMPTS = 2
RESTARTED = "the machine was restarted while it ran; `tandem selftest --fresh` tries it again"
KILLED = "it was killed in the middle of it, twice; `tandem selftest --fresh` tries it again"

Listener = Callable[[Check, CheckResult | None], None]
"""Called when a check begins (None), and when it has ended."""


class Run(Struct, kw_only=True):
    """Content of the journal."""

    question: dict[str, object]
    """Subject of the run; a journal about another subject is discarded."""
    begun: dict[str, list[str]] = field(default_factory=dict)
    """Check -> the machine's boot id at each attempt."""
    outcomes: dict[str, CheckResult] = field(default_factory=dict)
    """Outcomes of all checks that have ended, by name."""


class RunJournal:
    """The file of one run."""

    def __init__(self, path: Path, question: dict[str, object], *, boot: str, fresh: bool = False) -> None:
        """Go on with the file if it is about the same `question`, else begin it. Raises OSError."""
        self._path, self._boot = path, boot
        path.parent.mkdir(parents=True, exist_ok=True)
        earlier = None if fresh else _read(path)
        self._run = earlier if earlier is not None and earlier.question == question else Run(question=question)
        self._save()

    @property
    def outcomes(self) -> dict[str, CheckResult]:
        """Outcomes of all checks that have ended, by name."""
        return self._run.outcomes

    def reopen(self, names: Collection[str]) -> None:
        """Forget these checks if all have ended; otherwise the interrupted run continues."""
        if self.outcomes.keys() >= set(names):
            self.forget(names)

    def forget(self, names: Iterable[str]) -> None:
        """Forget the outcomes of these checks, and that they were begun."""
        for name in names:
            self.outcomes.pop(name, None)
            self._run.begun.pop(name, None)
        self._save()

    def lost(self, name: str) -> CheckResult | None:
        """Return the outcome of a check that is not tried again, since it was begun and never ended; else None."""
        boots = self._run.begun.get(name, [])
        if not boots or name in self.outcomes:
            return None
        detail = RESTARTED if boots[-1] != self._boot else KILLED if len(boots) >= MOST_ATTEMPTS else ""
        return CheckResult(name=name, verdict="no answer", detail=detail, seconds=0.0, attempts=len(boots)) if detail else None

    def begin(self, name: str) -> int:
        """Note that a check begins; returns the number of the attempt, from 1."""
        boots = self._run.begun.setdefault(name, [])
        boots.append(self._boot)
        self._save()
        return len(boots)

    def end(self, outcome: CheckResult) -> None:
        """Note the outcome of a check."""
        self.outcomes[outcome.name] = outcome
        self._save()

    def _save(self) -> None:
        """Replace the file, durably: a panic may follow."""
        write_private(self._path, msgspec.json.encode(self._run))


def _read(path: Path) -> Run | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Run)
    except (FileNotFoundError, *UNREADABLE):
        return None


def run_checks(
    checks: Sequence[Check], journal: RunJournal, task: Task, *, seconds: float, listener: Listener, module: str = MODULE
) -> list[CheckResult]:
    """Return the outcomes of those of `checks` that have ended, in their order; none begins after `seconds`.

    Outcomes of an earlier run are taken over. All checks get `task`; `module` is the entry point of their processes.
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
                journal.forget([check.name])  # it was not the check that ended the run
                raise
        journal.end(outcome)
        listener(check, outcome)
    return [journal.outcomes[check.name] for check in checks if check.name in journal.outcomes]


def make(check: Check, attempt: int, task: Task, module: str) -> CheckResult:
    """Make one check in a process of its own."""
    task = replace(task, entry=check.entry, result=str(Path(task.directory) / f"{check.name}.json"))
    began = time.monotonic()
    try:
        with TaskProcess(task, name=check.name, module=module) as process:
            finding = process.finding(check.deadline_s)
    except SpawnError as error:
        return CheckResult(name=check.name, verdict="failed", detail=error.message, seconds=0.0, attempts=attempt)
    return CheckResult(
        name=check.name,
        verdict=finding.verdict,
        detail=finding.detail,
        figures=finding.figures,
        seconds=round(time.monotonic() - began, 1),
        attempts=attempt,
    )
