"""What systems are told of a service: a launchd agent's property list, and a systemd user unit. Pure."""

from __future__ import annotations

import plistlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

OPEN_FILES = 65536
PAUSE_S = 10
"""Seconds until a server that has failed is started again."""
MISTAKE = 2
"""The exit code for what the user must mend: starting again would not help."""


@dataclass(frozen=True)
class Service:
    """A server that the system keeps running."""

    name: str
    command: tuple[str, ...]
    directory: Path
    """In which it runs: relative paths among its options are below it."""
    log: Path
    variables: Mapping[str, str]
    stop_s: int = 60
    """Seconds that it gets to drain and end before it is killed."""


def launchd_label(name: str) -> str:
    """What launchd calls a service."""
    return f"io.github.mlx-tandem.{name}"


def launchd_agent(service: Service) -> bytes:
    """The property list. `Interactive`: agents are slowed down else; `SuccessfulExit`: only failures start it again."""
    return plistlib.dumps({
        "Label": launchd_label(service.name), "ProgramArguments": list(service.command),
        "WorkingDirectory": str(service.directory), "EnvironmentVariables": dict(service.variables),
        "RunAtLoad": True, "KeepAlive": {"SuccessfulExit": False}, "ThrottleInterval": PAUSE_S,
        "ProcessType": "Interactive", "ExitTimeOut": service.stop_s,
        "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES}, "HardResourceLimits": {"NumberOfFiles": OPEN_FILES},
        "StandardOutPath": str(service.log), "StandardErrorPath": str(service.log)})


def systemd_unit(service: Service) -> str:
    """The unit of the user's own systemd."""
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
    """A word of a unit, as systemd.syntax(7) has it."""
    return '"' + _specifiers(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _specifiers(text: str) -> str:
    return text.replace("%", "%%")
