"""Report of a self-test run: a struct stored as JSON, and its Markdown page."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count, product
from string import ascii_lowercase

from msgspec import Struct
from msgspec.structs import replace

from tandem.diagnostics.selftest.check import CHECKS, CLUSTER, CheckResult
from tandem.diagnostics.tasks import Figures, Verdict
from tandem.env import machine_memory, variables
from tandem.launchers.host_facts import chip, installed
from tandem.processes.device import this_device
from tandem.system.tools import output_of
from tandem.version import __version__

_PATTERNS = (
    (re.compile(r"\b[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}\b"), "<id>"),
    (re.compile(r"\b(?:[0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}\b"), "<address>"),
    (re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){3,7}[0-9A-Fa-f]{0,4}(?:%\w+)?(?![\w:])"), "<address>"),
    (re.compile(r"\b(?!127\.0\.0\.1\b)\d{1,3}(?:\.\d{1,3}){3}\b"), "<address>"),
    (re.compile(r"[\w.+-]+@[\w.-]+"), "<name>"),
)
_PATH = re.compile(r"(?<![\w.<:/])~?(?:/(?!v1/)[\w.@+-]+){2,}/?")
"""Matches paths of two or more components, but not `/v1/...` or the path of a URL."""
SHORTEST = 2
"""Minimum length of a name to redact; shorter ones occur in every text."""


def redacted(text: str, names: Iterable[str]) -> str:
    """Replace addresses, paths and ids in `text` by placeholders, and `names` of machines and users by <a>, <b>, ...

    Absolute paths among `names` are replaced whatever characters they contain, such as spaces in a home directory.
    """
    known = dict.fromkeys(names)
    places = [name for name in known if name.startswith("/") and len(name) > SHORTEST]
    for place in sorted(places, key=len, reverse=True):
        text = re.sub(rf"{re.escape(place)}(?:/[\w.@+-]+)*/?", "<path>", text)
    text = _PATH.sub("<path>", text)
    letters = ("".join(word) for length in count(1) for word in product(ascii_lowercase, repeat=length))
    placeholders = {name: f"<{word}>" for name, word in zip((x for x in known if not x.startswith("/")), letters, strict=False)}
    if words := [re.escape(name) for name in placeholders if len(name) >= SHORTEST]:  # all in one pass: <aa> holds a word too
        text = re.sub(rf"(?<![\w.-])(?:{'|'.join(words)})(?![\w-])", lambda match: placeholders[match[0]], text)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


FORMAT = 1
PROFILE = "profile.json"
"""File for measured speeds of a cluster, in the directory of the run and of `--publish`."""
MACHINE = "machine"
"""Name of the check whose figures describe the machine."""
HEAD = ("system", "processor", "cores", "device", "memory GiB", "GPU memory GiB", "python", "mlx", "mlx-lm")
EXIT_OK, EXIT_FAILED, EXIT_UNFINISHED = 0, 1, 3
SIGNS: dict[Verdict, str] = {"ok": "ok", "failed": "**failed**", "does not apply": "does not apply", "no answer": "**no answer**"}


VARIABLES = ("MLX_", "TANDEM_", "CUDA_", "OMP_", "OPENBLAS_", "METAL_")
"""Prefixes of environment variables that affect results or speed."""


def facts() -> Figures:
    """Return the description of this machine that reports start with."""
    device = this_device()
    set_here = sorted(name for name in variables() if name.startswith(VARIABLES))
    return {
        "system": f"{platform.system()} {_system_version()}".strip(),
        "processor": chip() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "device": device.name,
        "gpu": device.gpu,
        "memory GiB": round(machine_memory() / 2**30, 1),
        "GPU memory GiB": round(device.memory_bytes / 2**30, 1) if device.gpu else 0.0,
        **{name: version or "missing" for name, version in installed().items() if name != "tandem"},
        "variables that are set": ", ".join(set_here),
    }


def _system_version() -> str:
    if sys.platform == "darwin":
        return " ".join((output_of(["sw_vers", f"-{name}"]) or "").strip() for name in ("productVersion", "buildVersion"))
    return platform.release().split("-")[0]


class Report(Struct, frozen=True, kw_only=True):
    """Redacted results of a run: no names, addresses or paths."""

    format: int = FORMAT
    tandem: str = __version__
    date: str
    """Date of the run's end, YYYY-MM-DD."""
    platform: str
    """`Linux, CPU`, `Linux, CUDA`, `macOS, CPU` or `macOS, Metal`."""
    machine: Figures
    model: str
    hosts: int
    """Number of machines in the hosts file; 0 without one."""
    wanted: int
    """Number of checks planned for the run."""
    checks: list[CheckResult]

    @property
    def code(self) -> int:
        """Exit code: 0 if all checks ran without failure, 1 after a failure, 3 if checks are left to run."""
        if any(outcome.verdict in ("failed", "no answer") for outcome in self.checks):
            return EXIT_FAILED
        return EXIT_OK if len(self.checks) == self.wanted else EXIT_UNFINISHED


def make_report(
    outcomes: Sequence[CheckResult], *, wanted: int, date: str, facts: Figures, model: str, hosts: int, names: Iterable[str]
) -> Report:
    """Return a report with redacted `outcomes`. `facts` are copied unredacted."""
    known = list(names)

    def clean(outcome: CheckResult) -> CheckResult:
        figures = {name: redacted(value, known) if isinstance(value, str) else value for name, value in outcome.figures.items()}
        return replace(outcome, detail=redacted(outcome.detail, known), figures=figures)

    machine, checks = {name: facts[name] for name in HEAD if name in facts}, list(map(clean, outcomes))
    platform, model = platform_of(facts), redacted(model, known)
    return Report(date=date, platform=platform, machine=machine, model=model, hosts=hosts, wanted=wanted, checks=checks)


def platform_of(facts: Figures) -> str:
    """Return the column of docs/checks.md for this machine."""
    system = "macOS" if str(facts.get("system", "")).startswith("Darwin") else str(facts.get("system", "?")).split()[0]
    if not facts.get("gpu"):
        return f"{system}, CPU"
    return f"{system}, Metal" if system == "macOS" else f"{system}, CUDA"


def page(report: Report) -> str:
    """Return the report as Markdown, about one page. Figures of several machines are tables below the others."""
    titles = {check.name: check for check in CHECKS}
    counts = Counter(outcome.verdict for outcome in report.checks)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in SIGNS if counts[verdict])
    left = report.wanted - len(report.checks)
    lines = [
        f"# Self-test: {report.platform}",
        "",
        f"{report.date}, Tandem {report.tandem}, model {report.model}"
        f"{f', {report.hosts} hosts' if report.hosts else ''}: {summary}{f', {left} left' if left else ''}.",
        "",
        "; ".join(f"{name} {value}" for name, value in report.machine.items()) + ".",
        "",
        "| check | | s | found |",
        "|---|---|---|---|",
    ]
    sections: list[str] = []
    for outcome in report.checks:
        title = titles[outcome.name].title if outcome.name in titles else outcome.name
        again = f" (attempt {outcome.attempts})" if outcome.attempts > 1 else ""
        figures = [
            f"{name}: {_shown(value)}" for name, value in outcome.figures.items() if outcome.name != MACHINE or name not in HEAD
        ]
        below = report.hosts and outcome.name in CLUSTER and any(": " in name for name in outcome.figures)
        if below:
            sections += ["", f"## {title[0].upper()}{title[1:]}", "", *_tables(outcome.figures)]
        text = "; ".join(filter(None, [outcome.detail, *([] if below else figures)]))
        lines.append(f"| {title} | {SIGNS[outcome.verdict]}{again} | {outcome.seconds:g} | {_cell(text)} |")
    return "\n".join([*lines, *sections]) + "\n"


def _tables(figures: Figures) -> list[str]:
    """Return figures named `ROW: COLUMN` as tables, one for each set of columns, and the others as a line."""
    rows: dict[str, dict[str, str]] = {}
    for name, value in figures.items():
        row, _, column = name.rpartition(": ")
        rows.setdefault(row, {})[column] = _cell(_shown(value))
    plain = rows.pop("", {})
    lines = ["; ".join(f"{name}: {value}" for name, value in plain.items()) + ".", ""] if plain else []
    for columns in dict.fromkeys(map(tuple, rows.values())):
        lines += [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        lines += [f"| {row} | {' | '.join(cells.values())} |" for row, cells in rows.items() if tuple(cells) == columns]
        lines.append("")
    return lines[:-1]


def _shown(value: str | int | float | bool) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
