"""Access to the process's environment; no other module reads it.

A search in this file therefore finds every variable that changes Tandem's behaviour.
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
"""Variables withheld from child processes, which get settings over a pipe."""

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
"""`TANDEM_` variables that are not derived from the name of a setting. The last two belong to the vLLM plugin."""

_LONGEST_RUNTIME_DIR, _LONGEST_GIVEN = 64, 81
"""Longest runtime directory by default, and by TANDEM_RUNTIME_DIR, in bytes.

macOS limits the path of a Unix socket to 103 bytes. The longest socket name fits behind the second; all systems use the same
limits.
"""


_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with a container's memory limit in bytes: cgroup version 2, and version 1."""


def machine_memory() -> int:
    """Return the bytes of this machine's memory, or of its container's memory limit if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in _LIMITS:
        with suppress(OSError, ValueError):  # "max" means no limit
            total = min(total, int(Path(file).read_text()))
    return total


def variables() -> dict[str, str]:
    """Return a copy of the whole environment."""
    return dict(os.environ)


def variable(name: str) -> str | None:
    """Return the value of a variable; None when it is unset or empty."""
    return os.environ.get(name) or None


def set_default(name: str, value: str) -> None:
    """Set a variable of this process and its future children, unless it is set."""
    os.environ.setdefault(name, value)


def set_variables(values: Mapping[str, str]) -> None:
    """Set variables of this process for libraries that read them at start-up, such as MLX."""
    os.environ.update(values)


def child_environment(overrides: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Return the environment for a child process: this one's without secrets, with `overrides` (None removes a variable)."""
    environment = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    environment["PYTHONUNBUFFERED"] = "1"
    for name, value in (overrides or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def runtime_dir() -> Path:
    """Return the directory for this user's sockets, created with mode 0700 and short enough for Unix sockets.

    TANDEM_RUNTIME_DIR, else `tandem` in XDG_RUNTIME_DIR, else `tandem-UID` in the temporary directory. Raises
    PermissionError when another user owns the directory or can access it, OSError when TANDEM_RUNTIME_DIR is too long for
    socket names.
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
        shared = Path("/tmp")  # `_private_dir` checks that the directory below it is private
    return _private_dir(shared / name)


def engine_socket_path(port: int) -> Path:
    """Return the default path of the engine's socket for the API server on `port`."""
    return runtime_dir() / f"engine-{port}.sock"


def _private_dir(path: Path) -> Path:
    """Create `path` if needed and return it. Raises PermissionError unless this user owns it with mode 0700."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise PermissionError(f"{path} must be your own directory with mode 0700 (set TANDEM_RUNTIME_DIR to another)")
    return path


def cache_dir() -> Path:
    """Return the directory for converted and downloaded models; does not create it.

    TANDEM_CACHE, else `tandem` in XDG_CACHE_HOME, else ~/.cache/tandem.
    """
    return _user_dir("TANDEM_CACHE", "XDG_CACHE_HOME", "~/.cache")


def state_dir() -> Path:
    """Return the directory for files that outlast a process (logs and records of background servers); does not create it.

    TANDEM_STATE_DIR, else `tandem` in XDG_STATE_HOME, else ~/.local/state/tandem.
    """
    return _user_dir("TANDEM_STATE_DIR", "XDG_STATE_HOME", "~/.local/state")


def _user_dir(own: str, base: str, usual: str) -> Path:
    """Return the directory in variable `own`, else `tandem` in the directory in variable `base`, else `tandem` in `usual`."""
    return Path(variable(own) or f"{variable(base) or usual}/tandem").expanduser()
