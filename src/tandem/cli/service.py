"""`tandem service`: a launchd agent or a systemd user unit that keeps a server running."""

from __future__ import annotations

import argparse
import math
import os
import plistlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from xml.parsers.expat import ExpatError

from tandem.checkpoints.resolve import expect
from tandem.cli.processes import prepared
from tandem.cli.serve import checked
from tandem.config.options import options
from tandem.env import EXTRA_VARIABLES, SECRET_VARIABLES, child_environment, state_dir, variable, variables
from tandem.errors import UsageError
from tandem.processes.interpreter import module_command
from tandem.supervision.record import Background
from tandem.system.tools import find_tool

OPEN_FILES = 65536
PAUSE_S = 10
"""Seconds until a failed server is restarted."""
MISTAKE = 2
"""Exit code for a mistake of the user's, which a restart would not mend."""


@dataclass(frozen=True)
class Service:
    """A server that the system keeps running."""

    name: str
    command: tuple[str, ...]
    directory: Path
    """Working directory, below which relative paths of its options are."""
    log: Path
    variables: Mapping[str, str]
    stop_s: int = 60
    """Seconds to drain and end before it is killed."""


def launchd_label(name: str) -> str:
    """Return launchd's name of a service."""
    return f"io.github.mlx-tandem.{name}"


def launchd_agent(service: Service) -> bytes:
    """Return the property list. `Interactive`: not slowed down; `SuccessfulExit`: restarted after failures alone."""
    return plistlib.dumps(
        {
            "Label": launchd_label(service.name),
            "ProgramArguments": list(service.command),
            "WorkingDirectory": str(service.directory),
            "EnvironmentVariables": dict(service.variables),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": PAUSE_S,
            "ProcessType": "Interactive",
            "ExitTimeOut": service.stop_s,
            "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},
            "HardResourceLimits": {"NumberOfFiles": OPEN_FILES},
            "StandardOutPath": str(service.log),
            "StandardErrorPath": str(service.log),
        }
    )


def systemd_unit(service: Service) -> str:
    """Return the unit for the user's own systemd."""
    variables = "".join(f"Environment={_quoted(f'{name}={value}')}\n" for name, value in service.variables.items())
    return f"""[Unit]
Description=Tandem, server {service.name}
After=network-online.target

[Service]
ExecStart={_command(service.command)}
WorkingDirectory={_specifiers(str(service.directory))}
{variables}StandardOutput=append:{_specifiers(str(service.log))}
StandardError=inherit
Restart=on-failure
RestartPreventExitStatus={MISTAKE}
RestartSec={PAUSE_S}
TimeoutStopSec={service.stop_s}
KillMode=mixed
LimitNOFILE={OPEN_FILES}

[Install]
WantedBy=default.target
"""


def _command(words: Sequence[str]) -> str:
    return " ".join(_quoted(word).replace("$", "$$") for word in words)


def _quoted(text: str) -> str:
    """Return a word of a unit, quoted as in systemd.syntax(7)."""
    return '"' + _specifiers(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _specifiers(text: str) -> str:
    return text.replace("%", "%%")


_TOOL_S = 60.0
_END_S, _POLL_S = 30.0, 0.5
"""Seconds that launchd may take beyond a service's own time to end, and between two checks."""
NOBODY = "Where nobody is logged in, as in a container or behind su and sudo, nobody keeps services: log in, or use `tandem up`"
_PID = re.compile(r"^\s*pid = (\d+)", re.MULTILINE)


def _ran(*words: str, timeout_s: float | None = _TOOL_S) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [find_tool(words[0]) or words[0], *words[1:]],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{' '.join(words)}: {error}") from error


def _must(*words: str, timeout_s: float | None = _TOOL_S) -> None:
    done = _ran(*words, timeout_s=timeout_s)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise UsageError(f"{' '.join(words)}: {said[-1] if said else f'exit code {done.returncode}'}")


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o600)


class Launchd:
    """launchd agents of the user, in the session at the screen if there is one, else in the background session."""

    tool = "launchctl"
    hint = (
        "launchd agents need the permission for the local network (System Settings, Privacy & Security), if ranks "
        "run on other machines too"
    )

    def file(self, name: str) -> Path:
        """Return the file that describes the service."""
        return Path.home() / "Library" / "LaunchAgents" / f"{launchd_label(name)}.plist"

    def install(self, service: Service) -> None:
        """Write the file and start the service. Raises UsageError."""
        if self.file(service.name).exists():
            self.uninstall(service.name)
        _write(self.file(service.name), launchd_agent(service))
        done = _ran(self.tool, "bootstrap", f"gui/{os.getuid()}", str(self.file(service.name)))
        if done.returncode:  # over ssh there may be nobody at the screen
            with _or_nothing(self, service.name):
                _must(self.tool, "bootstrap", f"user/{os.getuid()}", str(self.file(service.name)))

    def uninstall(self, name: str) -> None:
        """Stop the service and remove its file. Raises UsageError."""
        for place in self._places(name):
            _ran(self.tool, "bootout", place)
        end = time.monotonic() + self._stop_s(name) + _END_S
        while any(_ran(self.tool, "print", place).returncode == 0 for place in self._places(name)):
            if time.monotonic() > end:  # until it ends by itself, no other of its name can start
                raise UsageError(f"{name} has not ended yet; give the command again in a minute")
            time.sleep(_POLL_S)
        self.file(name).unlink(missing_ok=True)

    def pid(self, name: str) -> int | None:
        """Return the process id of the service; None when it does not run."""
        for place in self._places(name):
            done = _ran(self.tool, "print", place)
            if done.returncode == 0 and (match := _PID.search(done.stdout)):
                return int(match[1])
        return None

    def _places(self, name: str) -> list[str]:
        return [f"{domain}/{os.getuid()}/{launchd_label(name)}" for domain in ("gui", "user")]

    def _stop_s(self, name: str) -> float:
        """Return the seconds after which launchd kills the installed service."""
        try:
            return float(plistlib.loads(self.file(name).read_bytes())["ExitTimeOut"])
        except (OSError, ValueError, TypeError, KeyError, ExpatError):  # the user has changed it
            return _TOOL_S


class Systemd:
    """systemd units of the user."""

    tool = "systemctl"
    hint = "it ends when you log out, unless `loginctl enable-linger` was run once"

    def file(self, name: str) -> Path:
        """Return the file that describes the service."""
        base = variable("XDG_CONFIG_HOME")
        return (Path(base) if base else Path.home() / ".config") / "systemd" / "user" / f"tandem-{name}.service"

    def install(self, service: Service) -> None:
        """Write the file and start the service. Raises UsageError."""
        unit = self.file(service.name)
        try:  # before an earlier one is overwritten
            _must(self.tool, "--user", "daemon-reload")
        except UsageError as error:
            raise UsageError(f"{error.message}; {NOBODY}") from error
        _write(unit, systemd_unit(service).encode())
        with _or_nothing(self, service.name):
            for words in (("daemon-reload",), ("enable", unit.name)):
                _must(self.tool, "--user", *words)
            _must(self.tool, "--user", "restart", unit.name, timeout_s=None)  # an earlier one has its time to drain

    def uninstall(self, name: str) -> None:
        """Stop the service and remove its file. Raises UsageError."""
        unit = self.file(name)
        try:
            _must(self.tool, "--user", "disable", "--now", unit.name, timeout_s=None)
        except UsageError as error:
            raise UsageError(f"{error.message}; {name} is still installed, and may run. {NOBODY}") from error
        unit.unlink(missing_ok=True)
        _ran(self.tool, "--user", "daemon-reload")

    def pid(self, name: str) -> int | None:
        """Return the process id of the service; None when it does not run."""
        done = _ran(self.tool, "--user", "show", "--property=MainPID", "--value", self.file(name).name)
        text = done.stdout.strip()
        return int(text) if text.isdecimal() and int(text) else None


Manager = Launchd | Systemd
"""Service manager: installs a service in place of an earlier one, uninstalls it, and tells its process."""


def manager() -> Manager:
    """Return this system's service manager. Raises UsageError where there is none."""
    chosen = Launchd() if sys.platform == "darwin" else Systemd()
    if find_tool(chosen.tool) is None:
        raise UsageError(
            f"{chosen.tool} is not on this machine, so there is nobody to keep a service running; "
            "`tandem up` starts a server in the background"
        )
    return chosen


@contextmanager
def _or_nothing(holder: Manager, name: str) -> Iterator[None]:
    """Uninstall the service `name` if the block fails: the next login would start it."""
    try:
        yield
    except UsageError as error:
        with suppress(UsageError):
            holder.uninstall(name)
        holder.file(name).unlink(missing_ok=True)
        raise UsageError(f"{error.message}; {name} is not installed. {NOBODY}") from error


_KEPT = ("PATH", "HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "XDG_CACHE_HOME", "XDG_STATE_HOME")
"""Variables that a service inherits from its installer, beside Tandem's own."""
_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
"""Password in a URL, before the host name."""
END_S = 30.0
"""Seconds beyond `drain_timeout` in which a service must end."""


def run(arguments: argparse.Namespace) -> int:
    """Run the action. Raises UsageError."""
    place = Background(arguments.name)  # checks the name
    holder = manager()
    if arguments.action == "install":
        return _install(arguments, holder, place.name)
    if arguments.action == "uninstall":
        return _uninstall(holder, place.name)
    return _status(holder, place.name)


def _install(arguments: argparse.Namespace, holder: Manager, name: str) -> int:
    if arguments.setting_api_key:
        raise UsageError(
            "--api-key: every user of this machine could read it in the service's arguments; give --api-key-file", param="api_key"
        )
    settings = checked(prepared(arguments))
    if variable("TANDEM_API_KEY") and settings.server.api_key_file is None:
        raise UsageError(
            "TANDEM_API_KEY: keys of the environment do not go along, and the service would let everybody "
            "in; give --api-key-file, or unset it",
            param="api_key",
        )
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
        raise UsageError(f"{error.filename}: cannot be written: {error.strerror or error}; {name} is not installed") from None
    print(f"{name} is installed ({holder.file(name)}) and starting; its log is {log}")
    print(f"`tandem service status` shows whether it runs, `tandem status --port {settings.server.port}` how it is")
    print(holder.hint)
    if variable("HF_TOKEN"):
        print("HF_TOKEN does not go along: `hf auth login` keeps it where the service finds it, if the model needs it")
    return 0


def _environment() -> dict[str, str]:
    """Return the variables for the service's file. Raises UsageError for a password, which others could read there."""
    known = {*_KEPT, *EXTRA_VARIABLES, *(option.variable for option in options())} - {*SECRET_VARIABLES}
    kept = {key: value for key, value in variables().items() if key in known}
    for key, value in kept.items():
        if _PASSWORD.search(value):
            raise UsageError(
                f"{key}: has a password in it, which would stand in the service's file; unset it, or take the password out"
            )
    return kept


def serve_words(words: Sequence[str]) -> list[str]:
    """Return the options for `tandem serve` in the words `service install ...`."""
    kept: list[str] = []
    rest = iter(words[list(words).index("install") + 1 :])
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
