"""`tandem selftest`: run every check in its own process, and write a one-page report."""

from __future__ import annotations

import argparse
import datetime
import getpass
import hashlib
import math
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from tandem.checkpoints.resolve import resolve
from tandem.descriptors import raise_limit
from tandem.diagnostics.selftest.check import CHECKS, CLUSTER, Check, CheckResult, chosen
from tandem.diagnostics.selftest.report import PROFILE, Report, facts, make_report, page
from tandem.diagnostics.selftest.run import RunJournal, run_checks
from tandem.diagnostics.tasks import Task
from tandem.env import state_dir
from tandem.errors import ConfigError, ModelNotFound
from tandem.launchers.hostfile import Hostfile, read_hostfile
from tandem.system.awake import keep_awake
from tandem.system.files import file_errors, try_lock
from tandem.system.identity import boot_id
from tandem.version import __version__

MINUTES, DAY = 5.0, 1440.0
"""Default of `--minutes`, without and with `--cluster`."""
FULL, QUICK = [2048, 30000], [64, 256]
"""Tokens of the prompts of `--cluster`."""
TINY = "tiny"
"""Subdirectory of the run's directory for the random model."""
MODEL = "model"
"""Name of the check that creates the random model."""


def run(arguments: argparse.Namespace) -> int:
    """Run the checks and report. Return 0 if all passed, 1 if one failed, 3 if some remain. Raises UsageError."""
    if arguments.list:
        for check in CHECKS:
            extra = " (needs --hostfile)" if check.hosts else " (needs --risky)" if check.risky else ""
            print(f"{check.name:14} {check.title}{extra}\n{'':14} proves: {check.proves}")
        return 0
    if arguments.quick and not arguments.cluster:
        raise ConfigError("--quick: is about --cluster; give it, or --minutes and --only for other runs", param="quick")
    arguments.hostfile = arguments.cluster or arguments.hostfile
    if arguments.minutes is None:
        arguments.minutes = DAY if arguments.cluster else MINUTES
    only = _only(arguments) or (list(CLUSTER) if arguments.cluster else None)
    file = read_hostfile(arguments.hostfile, "--cluster" if arguments.cluster else "--hostfile") if arguments.hostfile else None
    if arguments.cluster and file and len({host.ssh for host in file.hosts}) < 2:
        raise ConfigError(f"--cluster {file.path}: has one machine; name two or more, or leave it out", param="cluster")
    if arguments.publish:
        with suppress(OSError):  # told by `_output`
            Path(arguments.publish).expanduser().mkdir(exist_ok=True)
        arguments.output = str(Path(arguments.publish) / "selftest.md")
    output = _output(arguments.output, "--publish" if arguments.publish else "--output")
    raise_limit()
    directory = state_dir() / "firstlight"
    task, name = _task(arguments, directory)
    for path in (task.directory, task.model, task.hostfile):
        if not path.isprintable():  # false also for bytes that are not UTF-8
            raise ConfigError(
                f"{path!r}: no path that checks can be told; move it, or name another directory "
                "(TANDEM_STATE_DIR for that of the runs)"
            )
    remedy = "make room, or name another directory with TANDEM_STATE_DIR"
    with file_errors(f"{directory}: cannot be written", remedy, kind=ConfigError), _alone(directory):
        keep_awake()  # the run lasts minutes without user input
        return _run(arguments, only, output, file, task, name)


def _run(
    arguments: argparse.Namespace, only: list[str] | None, output: Path, file: Hostfile | None, task: Task, name: str
) -> int:
    if only is not None and task.random:
        only.append(MODEL)  # no other check creates the model
    checks = chosen(hosts=file is not None, risky=arguments.risky, only=only)
    if arguments.cluster and not arguments.quick:
        checks = [replace(check, deadline_s=60 * DAY) for check in checks]
    here = facts()
    question: dict[str, object] = {
        "tandem": __version__,
        "model": task.model,
        "facts": here,
        "options": task.options,
        "hostfile": hashlib.sha256(repr(replace(file, path="")).encode()).hexdigest() if file else "",
    }
    journal = RunJournal(Path(task.directory) / "run.json", question, boot=boot_id(), fresh=arguments.fresh)
    journal.reopen([check.name for check in checks])
    _note(_beginning(journal, checks, name))
    try:
        run_checks(checks, journal, task, seconds=60 * arguments.minutes, listener=_tell)
    except KeyboardInterrupt:
        _note("interrupted: the same command goes on")
        raise
    # The journal also has outcomes of earlier runs, perhaps of checks that no longer exist.
    outcomes = [journal.outcomes[check.name] for check in CHECKS if check.name in journal.outcomes]
    wanted = {check.name for check in checks} | {outcome.name for outcome in outcomes}
    date, hosts, names = datetime.date.today().isoformat(), len(file.hosts) if file else 0, private_names(file)
    report = make_report(outcomes, wanted=len(wanted), date=date, facts=here, model=name, hosts=hosts, names=names)
    return _write(report, output, Path(task.directory) / PROFILE if arguments.publish else None)


def _output(name: str, flag: str) -> Path:
    """Return the report's path. Raises ConfigError if it cannot be written, before minutes are spent."""
    output = Path(name).expanduser()
    other = output.with_suffix(".json") if output.name else output
    why = (
        "is a directory"
        if output.is_dir()
        else f"there is no directory {output.parent}; make it"
        if not output.parent.is_dir()
        else "is the place of the JSON that stands beside the page"
        if other == output
        else f"{other} is a directory"
        if other.is_dir()
        else _unwritable(output) or _unwritable(other)
    )
    if why:
        raise ConfigError(f"{flag} {output}: {why}; name another file, such as selftest.md", param=flag.strip("-"))
    return output


def _unwritable(path: Path) -> str:
    new = not path.exists()
    try:
        path.open("ab").close()
        if new:
            path.unlink()
    except OSError as error:
        return f"cannot be written: {error.strerror or error}"
    return ""


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Context manager that locks the directory, since concurrent runs would share the journal. Raises ConfigError, OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("ab") as file:
        if not try_lock(file):
            raise ConfigError(
                f"another `tandem selftest` runs in {directory}; wait for it, or name another directory with TANDEM_STATE_DIR"
            )
        yield


def _only(arguments: argparse.Namespace) -> list[str] | None:
    """Return the names in --only; None without it. Raises ConfigError."""
    if not 0 < arguments.minutes < math.inf:
        raise ConfigError(f"--minutes {arguments.minutes}: must be above 0", param="minutes")
    only = [check.strip() for check in arguments.only.split(",")] if arguments.only is not None else None
    known = {check.name: check for check in CHECKS}
    for name in only or ():
        if name not in known:
            raise ConfigError(f"--only {name}: is no check; `tandem selftest --list` names them", param="only")
        if known[name].hosts and not arguments.hostfile:
            raise ConfigError(f"--only {name}: needs several machines; give --hostfile", param="only")
        if known[name].risky and not arguments.risky:
            raise ConfigError(f"--only {name}: may lock the GPU up; give --risky if that is wanted", param="only")
    return only


def _task(arguments: argparse.Namespace, directory: Path) -> tuple[Task, str]:
    """Return the task that all checks receive, and the model's name. Raises UsageError."""
    hostfile = str(Path(arguments.hostfile).expanduser().resolve()) if arguments.hostfile else ""
    prompts = {"prompts": QUICK if arguments.quick else FULL} if arguments.cluster else {}
    task = Task(entry="", result="", directory=str(directory), model="", hostfile=hostfile, options=prompts)
    try:
        files = resolve(arguments.model)
    except ModelNotFound:
        if arguments.model != "demo":
            raise
        _note("the demo model is not on this machine (`tandem model get demo`): a tiny one with random weights is made")
        return msgspec.structs.replace(task, model=str(directory / TINY), random=True), "tiny, with random weights"
    return msgspec.structs.replace(task, model=str(files.path)), files.name


def _beginning(journal: RunJournal, checks: list[Check], model: str) -> str:
    done = sum(check.name in journal.outcomes for check in checks)
    if done:
        return f"{done} of {len(checks)} checks were made before; going on behind them (--fresh begins anew)"
    return f"{len(checks)} checks, model {model}; if this is interrupted, the same command goes on"


def _tell(check: Check, outcome: CheckResult | None) -> None:
    if outcome is None:
        _note(f"... {check.title}")
    else:
        why = f": {outcome.detail}" if outcome.detail else ""
        _note(f"{outcome.verdict}: {check.name}, {outcome.seconds:g} s{why}")


def private_names(file: Hostfile | None) -> list[str]:
    """Return the names of users, machines and folders to remove from reports."""
    own = socket.gethostname()
    hosts = [part for host in (file.hosts if file else ()) for part in host.ssh.split("@")]
    return [own, own.partition(".")[0], *_user(), *hosts, os.path.expanduser("~"), str(state_dir())]


def _user() -> list[str]:
    try:
        return [getpass.getuser()]
    except (KeyError, OSError):  # the user of a container may have no name
        return []


def _write(report: Report, output: Path, profile: Path | None) -> int:
    text = page(report)
    other = output.with_suffix(".json")
    print(text, flush=True)
    remedy = "give the command again with --minutes 0.001 and another file: what was found is kept"
    with file_errors(f"--output {output}: cannot be written", remedy, param="output", kind=ConfigError):
        output.write_text(text)
        other.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
        if profile and profile.exists():
            (output.parent / PROFILE).write_bytes(profile.read_bytes())
            _note(f"{output.parent / PROFILE} has your names of the machines; `tandem plan MODEL --profile` reads it")
    _note(f"written to {output} and {other}")
    if report.code == 3:
        _note(f"{report.wanted - len(report.checks)} checks are left: give the same command again")
    return report.code


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
