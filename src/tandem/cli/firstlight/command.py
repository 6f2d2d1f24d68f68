"""`tandem firstlight`: every check in a process of its own, and a report of one page."""

from __future__ import annotations

import argparse
import datetime
import getpass
import math
import socket
import sys
from pathlib import Path

import msgspec

from tandem.checkpoints.resolve import resolve
from tandem.descriptors import raise_limit
from tandem.env import state_dir
from tandem.errors import ConfigError, ModelNotFound
from tandem.firstlight.catalogue import CHECKS, chosen
from tandem.firstlight.check import Check, Outcome, Task
from tandem.firstlight.director import Director
from tandem.firstlight.facts import facts
from tandem.firstlight.journal import Journal
from tandem.firstlight.report import Report, make_report, page
from tandem.launchers.hostfile import Hostfile, read_hostfile
from tandem.system.identity import boot_id
from tandem.version import __version__

TINY = "tiny"
"""Directory of the random model, within that of the run."""
MODEL = "model"
"""The check that makes it."""


def run(arguments: argparse.Namespace) -> int:
    """Check and report; 0 if nothing is wrong, 1 if something is, 3 if checks are left. Raises UsageError."""
    if arguments.list:
        for one in CHECKS:
            extra = " (needs --hostfile)" if one.hosts else " (needs --risky)" if one.risky else ""
            print(f"{one.name:14} {one.title}{extra}\n{'':14} proves: {one.proves}")
        return 0
    only = _only(arguments)
    output = Path(arguments.output).expanduser()
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no directory {output.parent}; make it, or name another file",
                          param="output")
    directory = state_dir() / "firstlight"
    raise_limit()
    file = read_hostfile(arguments.hostfile) if arguments.hostfile else None
    task, name = _task(arguments, directory)
    if only is not None and task.random:
        only.append(MODEL)  # nothing else makes it
    checks = chosen(hosts=file is not None, risky=arguments.risky, only=only)
    here = facts()
    question = {"tandem": __version__, "model": name, "hostfile": arguments.hostfile or "", "facts": here}
    journal = Journal(directory / "run.jsonl", question, boot=boot_id(), fresh=arguments.fresh)
    journal.reopen([one.name for one in checks])
    _note(_beginning(journal, checks, name))
    Director(journal, task).run(checks, seconds=60 * arguments.minutes, listener=_tell)
    found = [journal.outcomes[one.name] for one in CHECKS if one.name in journal.outcomes]  # of earlier runs too
    wanted = {one.name for one in checks} | journal.outcomes.keys()
    report = make_report(found, wanted=len(wanted), date=datetime.date.today().isoformat(), facts=here, model=name,
                         hosts=len(file.hosts) if file else 0, names=_names(file))
    return _write(report, output)


def _only(arguments: argparse.Namespace) -> list[str] | None:
    """The names that --only has; None without it. Raises ConfigError."""
    if not 0 < arguments.minutes < math.inf:
        raise ConfigError(f"--minutes {arguments.minutes}: must be above 0", param="minutes")
    only = [one.strip() for one in arguments.only.split(",")] if arguments.only is not None else None
    known = {one.name: one for one in CHECKS}
    for one in only or ():
        if one not in known:
            raise ConfigError(f"--only {one}: is no check; `tandem firstlight --list` names them", param="only")
        if known[one].hosts and not arguments.hostfile:
            raise ConfigError(f"--only {one}: needs several machines; give --hostfile", param="only")
        if known[one].risky and not arguments.risky:
            raise ConfigError(f"--only {one}: may lock the GPU up; give --risky if that is wanted", param="only")
    return only


def _task(arguments: argparse.Namespace, directory: Path) -> tuple[Task, str]:
    """What checks are told, and what the model is called."""
    directory.mkdir(parents=True, exist_ok=True)
    hostfile = str(Path(arguments.hostfile).expanduser().resolve()) if arguments.hostfile else ""
    try:
        files = resolve(arguments.model)
    except ModelNotFound:
        if arguments.model != "demo":
            raise
        _note("the demo model is not on this machine (`tandem model get demo`): a tiny one with random weights is made")
        return Task(entry="", result="", directory=str(directory), model=str(directory / TINY), hostfile=hostfile,
                    random=True), "tiny, with random weights"
    return Task(entry="", result="", directory=str(directory), model=str(files.path), hostfile=hostfile), files.name


def _beginning(journal: Journal, checks: list[Check], model: str) -> str:
    done = sum(one.name in journal.outcomes for one in checks)
    if done:
        return f"{done} of {len(checks)} checks were made before; going on behind them (--fresh begins anew)"
    return f"{len(checks)} checks, model {model}; if this is interrupted, the same command goes on"


def _tell(check: Check, outcome: Outcome | None) -> None:
    if outcome is None:
        _note(f"... {check.title}")
    else:
        why = f": {outcome.detail}" if outcome.detail else ""
        _note(f"{outcome.verdict}: {check.name}, {outcome.seconds:g} s{why}")


def _names(file: Hostfile | None) -> list[str]:
    """What people and machines are called here."""
    own = socket.gethostname()
    hosts = [part for one in (file.hosts if file else ()) for part in one.ssh.split("@")]
    return [own, own.partition(".")[0], *_user(), *hosts]


def _user() -> list[str]:
    try:
        return [getpass.getuser()]
    except (KeyError, OSError):  # a container's user may have no name
        return []


def _write(report: Report, output: Path) -> int:
    text = page(report)
    other = output.with_suffix(".json")
    output.write_text(text)
    other.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    print(text)
    _note(f"written to {output} and {other}")
    if report.code == 3:
        _note(f"{report.wanted - len(report.checks)} checks are left: give the same command again")
    return report.code


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


