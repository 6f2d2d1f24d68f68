"""`tandem update`: bring the checkout that this command runs from up to date, and then servers of older code."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

from tandem.cli.arguments import say
from tandem.errors import UsageError
from tandem.printable import printable
from tandem.processes.interpreter import module_command
from tandem.supervision.record import known_names
from tandem.system.files import file_errors
from tandem.system.origin import update_command

CHECKOUT = Path(__file__).parents[4]
SHOWN = 10
"""Limit of the commits that are listed."""


def run(arguments: argparse.Namespace) -> int:
    """Print what is newer and, without --check, take it; then see to servers of older code. Raises UsageError."""
    if not (CHECKOUT / ".git").exists():
        raise UsageError(f"this Tandem is no checkout: {update_command()}; then `tandem restart --rolling --sync`")
    if changed := [line[3:] for line in _git("status", "--porcelain", "--untracked-files=no").splitlines()]:
        named = ", ".join([*changed[:SHOWN], "..."][: len(changed)])
        raise UsageError(f"{CHECKOUT} has local changes ({named}): commit them, or `git stash`; then update again")
    track = "`git switch main`, or `git branch -u origin/main`; then update again"
    upstream = _git("rev-parse", "--abbrev-ref", "@{upstream}", remedy=track).strip()
    _git("fetch", remedy="is there a network? Nothing was changed")
    before, newer = _git("describe", "--always"), _git("log", "--format=  %h %s", "HEAD..@{upstream}").splitlines()
    say(f"{CHECKOUT} is at {before.strip()}; commits that {upstream} has more: {len(newer)}")
    say("\n".join(newer[:SHOWN]))
    # Until the environment is set up, this file has the commit that the last one was for.
    unfinished = CHECKOUT / _git("rev-parse", "--git-path", "tandem-update").strip()
    if (newer or unfinished.exists()) and not arguments.check:
        if newer:
            _git("merge", "--ff-only", "@{upstream}", remedy="`git rebase`, if commits are your own; then update again")
        before = unfinished.read_text() if unfinished.exists() else before
        unfinished.write_text(before)
        try:
            subprocess.run([CHECKOUT / "scripts" / "setup"], check=True)
        except (OSError, subprocess.CalledProcessError, KeyboardInterrupt):
            back = f"update again, or `git reset --keep {before.strip()}` goes back"
            raise UsageError(f"{CHECKOUT} has the new code without its environment: {back}") from None
        unfinished.unlink(missing_ok=True)
    return _see_to_servers(restart=arguments.restart and not arguments.check)


def _git(*words: str, remedy: str = "then update again") -> str:
    """Return what git prints. Raises UsageError with git's reason and the remedy if it fails."""
    with file_errors("git cannot be run", "install it, then update again"):
        done = subprocess.run(["git", "-C", CHECKOUT, *words], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        reason = " ".join(line.strip() for line in done.stderr.splitlines() if not line.startswith("hint:"))
        raise UsageError(f"git {words[0]} in {CHECKOUT}: {reason}; {remedy}")
    return printable(done.stdout)


def _see_to_servers(*, restart: bool) -> int:
    """Print what code servers run; with `restart` bring machines and replicas of older code up to date."""
    status = module_command("tandem", "status", "--json", "--interval", "0")  # by the code that is new
    looked, code = subprocess.run(status, stdout=subprocess.PIPE, check=False), 0
    if not looked.stdout:
        return looked.returncode  # it has printed why
    for server in json.loads(looked.stdout):
        name, notes = server["name"], server["notes"]
        say(f"{name}: {'; '.join(notes) or 'all of it runs Tandem ' + server['build']}")
        if restart and name in known_names() and not all(note.startswith("supervisor") for note in notes):
            rolling = module_command("tandem", "restart", "--rolling", "--sync", "--name", name)
            code = subprocess.run(rolling, check=False).returncode or code
    return code
