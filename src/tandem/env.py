"""The only place that reads the process's environment.

Everything else gets what it needs from here, so that a search in this file answers what the outside can change.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

SECRET_VARIABLES = ("TANDEM_API_KEY",)
"""Never handed on to child processes: settings travel to them over a pipe."""

EXTRA_VARIABLES = (
    "TANDEM_CONFIG",
    "TANDEM_PROFILE",
    "TANDEM_CACHE",
    "TANDEM_RUNTIME_DIR",
    "TANDEM_STATE_DIR",
    "TANDEM_BASE_URL",
    "TANDEM_VLLM",
    "TANDEM_BASE_PORT",
)
"""Variables with our prefix that are not made from the name of a setting; the last two are the vLLM plugin's."""

_LONGEST_RUNTIME_DIR, _LONGEST_GIVEN = 64, 81
"""Bytes. macOS allows 103 bytes for the path of a Unix socket, on which all systems agree here; the longest name of a
socket fits behind the second."""


_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""A container's limit of memory: control groups of version 2, and of version 1."""


def machine_memory() -> int:
    """Bytes of this machine's memory, or of a container's part of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in _LIMITS:
        with suppress(OSError, ValueError):  # "max": there is no limit
            total = min(total, int(Path(file).read_text()))
    return total


def variables() -> dict[str, str]:
    """A copy of the whole environment."""
    return dict(os.environ)


def variable(name: str) -> str | None:
    """One variable; None when it is unset or empty."""
    return os.environ.get(name) or None


def set_default(name: str, value: str) -> None:
    """Set a variable of this process, and of its children to come, unless it is set."""
    os.environ.setdefault(name, value)


def set_variables(values: Mapping[str, str]) -> None:
    """Set variables of this process that a library reads when it starts, such as MLX's."""
    os.environ.update(values)


def child_environment(overrides: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """The environment for a child process: ours without secrets, with `overrides` (None takes a variable away)."""
    environment = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    environment["PYTHONUNBUFFERED"] = "1"
    for name, value in (overrides or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def runtime_dir() -> Path:
    """Directory for this user's sockets: made on first use, mode 0700, short enough for Unix sockets.

    TANDEM_RUNTIME_DIR, else `tandem` in XDG_RUNTIME_DIR, else one with the user's id in the temporary directory.
    Raises PermissionError when the directory is not this user's own or is open to others, OSError for a path that is
    too long for what is in it.
    """
    explicit = variable("TANDEM_RUNTIME_DIR")
    if explicit is not None:
        if len(os.fsencode(explicit)) > _LONGEST_GIVEN:
            raise OSError(
                errno.ENAMETOOLONG,
                f"TANDEM_RUNTIME_DIR is longer than the {_LONGEST_GIVEN} bytes that "
                "leave room for a socket's name on macOS; choose a shorter path",
                explicit,
            )
        return _private_dir(Path(explicit))
    base = variable("XDG_RUNTIME_DIR")
    if base is not None and os.access(base, os.W_OK | os.X_OK) and len(os.fsencode(base)) + 7 <= _LONGEST_RUNTIME_DIR:
        return _private_dir(Path(base) / "tandem")
    name = f"tandem-{os.getuid()}"
    shared = Path(tempfile.gettempdir())
    if len(os.fsencode(shared / name)) > _LONGEST_RUNTIME_DIR:
        shared = Path("/tmp")  # the directory below it is private, and checked to be
    return _private_dir(shared / name)


def engine_socket_path(port: int) -> Path:
    """Where the engine behind the api on `port` listens, unless the settings name another place."""
    return runtime_dir() / f"engine-{port}.sock"


def _private_dir(path: Path) -> Path:
    """`path` as a directory that this user owns and nobody else can enter."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise PermissionError(f"{path} must be your own directory with mode 0700 (set TANDEM_RUNTIME_DIR to another)")
    return path


def cache_dir() -> Path:
    """Directory for converted and downloaded models, not created here.

    TANDEM_CACHE, else `tandem` in XDG_CACHE_HOME, else ~/.cache/tandem.
    """
    return _user_dir("TANDEM_CACHE", "XDG_CACHE_HOME", "~/.cache")


def state_dir() -> Path:
    """Directory for what outlasts a process (logs and records of servers in the background), not created here.

    TANDEM_STATE_DIR, else `tandem` in XDG_STATE_HOME, else ~/.local/state/tandem.
    """
    return _user_dir("TANDEM_STATE_DIR", "XDG_STATE_HOME", "~/.local/state")


def _user_dir(own: str, base: str, usual: str) -> Path:
    """Return the directory that the variable `own` names, else `tandem` in that of `base`, else in `usual`."""
    return Path(variable(own) or f"{variable(base) or usual}/tandem").expanduser()
