"""What a check of firstlight is, what it is told, and what comes of it. No mlx."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import Struct

from tandem.errors import TandemError

Figures = dict[str, str | int | float | bool]
"""What a check measured, in the order in which a person should read it."""
Verdict = Literal["ok", "failed", "does not apply", "no answer"]
"""`no answer`: its process died, or did not end in time."""


class Differs(TandemError):
    """A check saw something else than it expects. The message says both."""

    def __init__(self, message: str, figures: Figures | None = None) -> None:
        super().__init__(message)
        self.figures = figures or {}


def judged(problems: list[str], figures: Figures) -> Figures:
    """The figures. Raises Differs if there are problems."""
    if problems:
        raise Differs("; ".join(problems), figures)
    return figures


class NotApplicable(TandemError):
    """A check means nothing here; the message says why."""


class Task(Struct, frozen=True, kw_only=True):
    """What a check's process is told."""

    entry: str
    """Module and function, `package.module:function`; it takes the task and returns figures."""
    result: str
    """File that the outcome is written to."""
    directory: str
    """Of the whole run, for what checks leave to later ones."""
    model: str
    """Directory of the model that is served."""
    hostfile: str = ""
    """MLX's hosts file; empty without one."""
    random: bool = False
    """The model's weights are random: `model` makes it."""
    options: dict[str, Any] = {}
    """What a part of a check is told besides."""


class Finding(Struct, frozen=True, kw_only=True):
    """What a check's process found."""

    verdict: Verdict
    detail: str = ""
    """Why it is not ok, in one line."""
    figures: Figures = {}


class Outcome(Finding, frozen=True, kw_only=True):
    """A finding with its name, as reports keep it."""

    name: str
    seconds: float
    attempts: int = 1
    """How many times it was begun: a run that is killed in the middle of a check tries that check once more."""


@dataclass(frozen=True)
class Check:
    """One of the checks."""

    name: str
    """As `--only` and reports have it."""
    entry: str
    """As `Task.entry`, within `tandem.firstlight.checks`."""
    deadline_s: float
    """Seconds after which its process is killed: many times what it takes, since a machine may be busy."""
    title: str
    """What it tries, as reports and tables name it."""
    proves: str
    """What is known when it is ok."""
    public: bool = field(default=False, kw_only=True)
    """The table of docs/where.md has it; docs/firstlight.md has them all."""
    hosts: bool = field(default=False, kw_only=True)
    """It needs a hosts file."""
    risky: bool = field(default=False, kw_only=True)
    """It may end in a GPU that hangs or a machine that restarts: only with `--risky`."""


def resolve(entry: str) -> Callable[[Task], Figures]:
    """The function that an entry names."""
    module, _, function = entry.partition(":")
    found: Callable[[Task], Figures] = getattr(importlib.import_module(f"tandem.firstlight.checks.{module}"), function)
    return found
