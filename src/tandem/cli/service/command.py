"""`tandem service install|uninstall|status`."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path

from tandem.checkpoints.resolve import expect
from tandem.cli.processes import prepared
from tandem.cli.serve import checked
from tandem.cli.service.managers import Manager, manager
from tandem.cli.service.units import Service
from tandem.config.options import options
from tandem.env import EXTRA_VARIABLES, SECRET_VARIABLES, state_dir, variable, variables
from tandem.errors import UsageError
from tandem.processes.interpreter import module_command
from tandem.supervision.record import Background

_KEPT = ("PATH", "HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "XDG_CACHE_HOME", "XDG_STATE_HOME")
"""Variables that a service gets from whoever installs it, beside Tandem's own."""
_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
"""In an address, before the name of the machine."""
END_S = 30.0
"""Seconds beyond `drain_timeout` that a service gets to end."""


def run(arguments: argparse.Namespace) -> int:
    """One of the actions. Raises UsageError."""
    place = Background(arguments.name)  # checks the name
    holder = manager()
    if arguments.action == "install":
        return _install(arguments, holder, place.name)
    if arguments.action == "uninstall":
        return _uninstall(holder, place.name)
    return _status(holder, place.name)


def _install(arguments: argparse.Namespace, holder: Manager, name: str) -> int:
    if arguments.setting_api_key:
        raise UsageError("--api-key: every user of this machine could read it in the service's arguments; give "
                         "--api-key-file", param="api_key")
    settings = checked(prepared(arguments))
    if variable("TANDEM_API_KEY") and settings.server.api_key_file is None:
        raise UsageError("TANDEM_API_KEY: keys of the environment do not go along, and the service would let everybody "
                         "in; give --api-key-file, or unset it", param="api_key")
    if settings.model.model:
        expect(settings.model.model)
    environment = _environment()
    log = _log(name)
    command = module_command("tandem", "serve", *serve_words(arguments.words))
    stop_s = math.ceil(settings.process.drain_timeout + END_S)
    for text in (*command, str(Path.cwd()), str(log), *environment.values()):
        if not text.isprintable():  # no unit and no property list can hold it; bytes that are not UTF-8 are among these
            raise UsageError(f"{text!r}: a service's options, directories and variables must be printable text")
    try:
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        holder.install(Service(name, tuple(command), Path.cwd(), log, environment, stop_s))
    except OSError as error:
        raise UsageError(f"{error.filename}: cannot be written: {error.strerror or error}; {name} is not installed"
                         ) from None
    print(f"{name} is installed ({holder.file(name)}) and starting; its log is {log}")
    print(f"`tandem service status` shows whether it runs, `tandem status --port {settings.server.port}` how it is")
    if holder.hint:
        print(holder.hint)
    if variable("HF_TOKEN"):
        print("HF_TOKEN does not go along: `hf auth login` keeps it where the service finds it, if the model needs it")
    return 0


def _environment() -> dict[str, str]:
    """Variables that go along, for everybody to read who may read the service's file. Raises UsageError."""
    known = {*_KEPT, *EXTRA_VARIABLES, *(option.variable for option in options())} - {*SECRET_VARIABLES}
    kept = {key: value for key, value in variables().items() if key in known}
    for key, value in kept.items():
        if _PASSWORD.search(value):
            raise UsageError(f"{key}: has a password in it, which would stand in the service's file; unset it, or take "
                             "the password out")
    return kept


def serve_words(words: Sequence[str]) -> list[str]:
    """The options for `tandem serve` among the words `service install ...`."""
    kept: list[str] = []
    rest = iter(words[list(words).index("install") + 1:])
    for word in rest:
        if word == "--name":
            next(rest, None)
        elif not word.startswith("--name="):
            kept.append(word)
    return kept


def _log(name: str) -> Path:
    return state_dir() / "services" / f"{name}.log"


def _uninstall(holder: Manager, name: str) -> int:
    if not holder.file(name).exists():
        print(f"{name} is not installed")
        return 0
    holder.uninstall(name)
    print(f"{name} is stopped and taken away; its log stays: {_log(name)}")
    return 0


def _status(holder: Manager, name: str) -> int:
    if not holder.file(name).exists():
        print(f"{name} is not installed; `tandem service install MODEL` does it")
        return 1
    pid = holder.pid(name)
    print(f"{name}: {f'runs (process {pid})' if pid else 'does not run'}; {holder.file(name)}; log {_log(name)}")
    return 0 if pid else 1
