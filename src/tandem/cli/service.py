"""`tandem service`: a launchd agent or a systemd user unit that keeps a server running."""

from __future__ import annotations

import argparse
import math
import os
import plistlib
import pwd
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn
from xml.parsers.expat import ExpatError

from tandem.cli.processes import prepared
from tandem.cli.serve import checked
from tandem.config.options import RENAMED, options
from tandem.env import EXTRA_VARIABLES, SECRET_VARIABLES, child_environment, state_dir, variable, variables
from tandem.errors import UsageError
from tandem.processes.interpreter import code_command, module_command
from tandem.supervision.record import Background
from tandem.system.files import withheld_folder
from tandem.system.tools import find_tool

OPEN_FILES = 65536
PAUSE_S = 10
"""Seconds before a failed server is restarted."""
MISTAKE = 2
"""Exit code of a user's mistake, which a restart cannot fix."""


@dataclass(frozen=True)
class Service:
    """A server that the system's service manager keeps running."""

    name: str
    command: tuple[str, ...]
    directory: Path
    """Working directory, to which relative paths in its options refer."""
    log: Path
    variables: Mapping[str, str]
    stop_s: int = 60
    """Seconds to drain and exit before it is killed."""


def launchd_label(name: str) -> str:
    """Return the launchd label of a service."""
    return f"io.github.mlx-tandem.{name}"


def launchd_agent(service: Service, **keys: str) -> bytes:
    """Return the property list of a launchd agent, with additional `keys`.

    `Interactive` exempts it from throttling; `SuccessfulExit` restarts it only after failures.
    """
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
            **keys,
        }
    )


def serve() -> NoReturn:
    """Run `tandem` with this process's arguments under launchd, and exit with 0 for a user's mistake.

    launchd restarts on any nonzero exit code and cannot exclude one, but a restart cannot fix a mistake.
    """
    from tandem.cli.main import main

    try:
        code: str | int | None = main()
    except SystemExit as error:
        code = error.code
    if code == MISTAKE:
        print("tandem: not started again until `tandem service install` is given anew", file=sys.stderr)
    sys.exit(0 if code == MISTAKE else code)


def systemd_unit(service: Service) -> str:
    """Return the unit file for the user's systemd."""
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
    """Return a word quoted as in systemd.syntax(7)."""
    return '"' + _specifiers(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _specifiers(text: str) -> str:
    return text.replace("%", "%%")


_TOOL_S = 60.0
_END_S, _POLL_S = 30.0, 0.5
"""Seconds that launchd may take beyond a service's own `stop_s`, and between two checks."""
DAEMONS = "/Library/LaunchDaemons"
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


def _installed(name: str, how: str, instead: str = "") -> UsageError:
    """Return the error for a service that is installed in the other way."""
    return UsageError(f"{name} is installed {how}; `tandem service uninstall --name {name}` first{instead}", param="system")


class Launchd:
    """launchd agents of the user: in the graphical session if there is one, else in the background session."""

    tool = "launchctl"
    hint = (
        "launchd agents need the permission for the local network (System Settings, Privacy & Security), if ranks "
        "run on other machines too"
    )

    def file(self, name: str) -> Path:
        """Return the path of the service's property list."""
        return Path.home() / "Library" / "LaunchAgents" / f"{launchd_label(name)}.plist"

    def daemon(self, name: str) -> Path:
        """Return the path of the property list of a service that starts at boot, before root installs it."""
        return state_dir() / "services" / f"{launchd_label(name)}.plist"

    def install(self, service: Service) -> None:
        """Write the property list and start the service. Raises UsageError.

        The graphical session accepts agents without a session type. The background session, the only one without a graphical
        login, accepts only agents of its own type.
        """
        if self.daemon(service.name).exists():
            raise _installed(service.name, "with --system", ", or give --system")
        file = self.file(service.name)
        if file.exists():
            self.uninstall(service.name)
        _write(file, launchd_agent(service))
        if _ran(self.tool, "bootstrap", f"gui/{os.getuid()}", str(file)).returncode:
            _write(file, launchd_agent(service, LimitLoadToSessionType="Background"))
            with _or_nothing(self, service.name):
                _must(self.tool, "bootstrap", f"user/{os.getuid()}", str(file))

    def prepare(self, service: Service) -> list[str]:
        """Write the property list of a service that starts at boot; return the commands to run as root. Raises UsageError."""
        if self.file(service.name).exists():
            raise _installed(service.name, "without --system")
        file, user = self.daemon(service.name), pwd.getpwuid(os.getuid()).pw_name
        loaded = [f"sudo launchctl bootout system/{launchd_label(service.name)}"] if file.exists() else []
        variables = {"HOME": str(Path.home()), **service.variables}
        _write(file, launchd_agent(replace(service, variables=variables), UserName=user))
        return [
            *loaded,
            f"sudo install -m 644 -o root -g wheel {shlex.quote(str(file))} {DAEMONS}/",
            f"sudo launchctl bootstrap system {DAEMONS}/{file.name}",
        ]

    def withdraw(self, name: str) -> list[str]:
        """Delete the file of `prepare`; return the commands to run as root."""
        file = self.daemon(name)
        file.unlink()
        return [f"sudo launchctl bootout system/{launchd_label(name)}", f"sudo rm {DAEMONS}/{file.name}"]

    def uninstall(self, name: str) -> None:
        """Stop the service and delete its file. Raises UsageError."""
        for place in self._places(name):
            _ran(self.tool, "bootout", place)
        end = time.monotonic() + self._stop_s(name) + _END_S
        while any(_ran(self.tool, "print", place).returncode == 0 for place in self._places(name)):
            if time.monotonic() > end:  # no other service of that name can start before it has ended
                raise UsageError(f"{name} has not ended yet; give the command again in a minute")
            time.sleep(_POLL_S)
        self.file(name).unlink(missing_ok=True)

    def pid(self, name: str) -> int | None:
        """Return the process id of the service; None if it does not run."""
        for place in (*self._places(name), f"system/{launchd_label(name)}"):
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
        except (OSError, ValueError, TypeError, KeyError, ExpatError):  # the user has edited or deleted the file
            return _TOOL_S


class Systemd:
    """systemd units of the user."""

    tool = "systemctl"
    hint = "it ends when you log out, unless `loginctl enable-linger` was run once"

    def file(self, name: str) -> Path:
        """Return the path of the service's unit file."""
        base = variable("XDG_CONFIG_HOME")
        return (Path(base) if base else Path.home() / ".config") / "systemd" / "user" / f"tandem-{name}.service"

    def install(self, service: Service) -> None:
        """Write the unit file and start the service. Raises UsageError."""
        unit = self.file(service.name)
        try:  # before overwriting an earlier unit
            _must(self.tool, "--user", "daemon-reload")
        except UsageError as error:
            raise UsageError(f"{error.message}; {NOBODY}") from error
        _write(unit, systemd_unit(service).encode())
        with _or_nothing(self, service.name):
            for words in (("daemon-reload",), ("enable", unit.name)):
                _must(self.tool, "--user", *words)
            _must(self.tool, "--user", "restart", unit.name, timeout_s=None)  # no timeout: an earlier service may drain first

    def uninstall(self, name: str) -> None:
        """Stop the service and delete its file. Raises UsageError."""
        unit = self.file(name)
        try:
            _must(self.tool, "--user", "disable", "--now", unit.name, timeout_s=None)
        except UsageError as error:
            raise UsageError(f"{error.message}; {name} is still installed, and may run. {NOBODY}") from error
        unit.unlink(missing_ok=True)
        _ran(self.tool, "--user", "daemon-reload")

    def pid(self, name: str) -> int | None:
        """Return the process id of the service; None if it does not run."""
        done = _ran(self.tool, "--user", "show", "--property=MainPID", "--value", self.file(name).name)
        text = done.stdout.strip()
        return int(text) if text.isdecimal() and int(text) else None


Manager = Launchd | Systemd
"""Service manager: installs, replaces and uninstalls a service, and finds its process."""


def manager() -> Manager:
    """Return this system's service manager. Raises UsageError if there is none."""
    chosen = Launchd() if sys.platform == "darwin" else Systemd()
    if find_tool(chosen.tool) is None:
        raise UsageError(
            f"{chosen.tool} is not on this machine, so there is nobody to keep a service running; "
            "`tandem up` starts a server in the background"
        )
    return chosen


@contextmanager
def _or_nothing(holder: Manager, name: str) -> Iterator[None]:
    """Context manager that uninstalls the service `name` if the block fails; otherwise the next login would start it."""
    try:
        yield
    except UsageError as error:
        with suppress(UsageError):
            holder.uninstall(name)
        holder.file(name).unlink(missing_ok=True)
        raise UsageError(f"{error.message}; {name} is not installed. {NOBODY}") from error


_KEPT = ("PATH", "HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "XDG_CACHE_HOME", "XDG_STATE_HOME")
"""Variables that a service inherits at installation, in addition to Tandem's own."""
_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
"""Pattern of a URL with a password."""
END_S = 30.0
"""Seconds after `drain_timeout` in which a service must exit."""


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen action. Raises UsageError."""
    place = Background(arguments.name)  # raises for an invalid name
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
    _check_places(Path.cwd(), Path(sys.prefix), _log(name), Path(settings.model.model or "."))
    if arguments.system and isinstance(holder, Systemd):
        raise UsageError(
            "--system: is about macOS; on Linux `loginctl enable-linger`, given once, starts a user's services with the machine",
            param="system",
        )
    environment = _environment()
    log = _log(name)
    command = _service_command(serve_words(arguments.words))
    stop_s = math.ceil(settings.process.drain_timeout + END_S)
    service = Service(name, tuple(command), Path.cwd(), log, environment, stop_s)
    for text in (*command, str(Path.cwd()), str(log), *environment.values()):
        if not text.isprintable():  # unit files and property lists cannot hold it; also catches bytes that are not UTF-8
            raise UsageError(f"{text!r}: a service's options, directories and variables must be printable text")
    try:
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if arguments.system and isinstance(holder, Launchd):
            print("Two commands install it, now and for every start of this Mac:", *holder.prepare(service), sep="\n")
            return 0
        holder.install(service)
    except OSError as error:
        raise UsageError(f"{error.filename}: cannot be written: {error.strerror or error}; {name} is not installed") from None
    print(f"{name} is installed ({holder.file(name)}) and starting; its log is {log}")
    print(f"`tandem service status` shows whether it runs, `tandem status --port {settings.server.port}` how it is")
    print(holder.hint)
    if variable("HF_TOKEN"):
        print("HF_TOKEN does not go along: `hf auth login` keeps it where the service finds it, if the model needs it")
    return 0


def _service_command(words: Sequence[str]) -> list[str]:
    """Return the service's command. For Homebrew's Python it uses a path that survives upgrades."""
    if sys.platform != "darwin":
        return module_command("tandem", "serve", *words)
    python, *rest = code_command("from tandem.cli.service import serve; serve()", "serve", *words)
    lasting = re.sub(r"/Cellar/([^/]+)/[^/]+/", r"/opt/\1/", python)
    return [lasting if Path(lasting).exists() else python, *rest]


def _check_places(*paths: Path) -> None:
    """Raise UsageError for a path in a folder that macOS withholds from services."""
    for path in paths:
        if (folder := withheld_folder(path)) is not None:
            raise UsageError(
                f"{path}: macOS closes {folder} to services, as it does Documents, Desktop, Downloads, "
                "iCloud and /Volumes; move it elsewhere below your home (a checkout: `make setup` there "
                "again), and give the command from there"
            )


def _environment() -> dict[str, str]:
    """Return the variables for the service's file. Raises UsageError for one with a password, since the file is readable."""
    former = ("TANDEM_" + name.upper() for name in RENAMED)
    known = {*_KEPT, *EXTRA_VARIABLES, *former, *(option.variable for option in options())} - {*SECRET_VARIABLES}
    kept = {key: value for key, value in variables().items() if key in known}
    for key, value in kept.items():
        if _PASSWORD.search(value):
            raise UsageError(
                f"{key}: has a password in it, which would stand in the service's file; unset it, or take the password out"
            )
    return kept


def serve_words(words: Sequence[str]) -> list[str]:
    """Return the options for `tandem serve` contained in the words `service install ...`."""
    kept: list[str] = []
    rest = iter(words[list(words).index("install") + 1 :])
    for word in rest:
        if word == "--name":
            next(rest, None)
        elif word != "--system" and not word.startswith("--name="):
            kept.append(word)
    return kept


def _log(name: str) -> Path:
    return state_dir() / "services" / f"{name}.log"


def _uninstall(holder: Manager, name: str) -> int:
    if isinstance(holder, Launchd) and holder.daemon(name).exists():
        print(f"Two commands stop {name} and take it away:", *holder.withdraw(name), sep="\n")
        return 0
    if not holder.file(name).exists():
        print(f"{name} is not installed")
        return 0
    holder.uninstall(name)
    print(f"{name} is stopped and taken away; its log stays: {_log(name)}")
    return 0


def _status(holder: Manager, name: str) -> int:
    file = holder.file(name)
    if isinstance(holder, Launchd) and holder.daemon(name).exists():
        file = Path(DAEMONS, file.name)
    elif not file.exists():
        print(f"{name} is not installed; `tandem service install MODEL` does it")
        return 1
    pid = holder.pid(name)
    print(f"{name}: {f'runs (process {pid})' if pid else 'does not run'}; {file}; log {_log(name)}")
    return 0 if pid else 1
