"""Launcher for node agents that the user starts with `tandem rank` or `mlx.launch`."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import msgspec

from tandem.config.settings import ParallelSettings
from tandem.errors import ConfigError
from tandem.launchers.hosts import HostsLauncher
from tandem.protocol.codec import UNREADABLE
from tandem.protocol.keys import ClusterKeys
from tandem.system.files import BY_HAND, read_regular

log = logging.getLogger(__name__)

ALL_ADDRESSES = "0.0.0.0"


class ManualLauncher(HostsLauncher):
    """Accepts node agents in any order; surplus ones stand by."""

    def __init__(self, parallel: ParallelSettings) -> None:
        """Read or create the token file, and open the join port. Raises UsageError if either fails."""
        if not parallel.token_file:
            raise ConfigError(
                "--launcher manual needs --token-file FILE: it is made if it is missing; copy it to each "
                "machine for `tandem rank`",
                param="token_file",
            )
        self._token_file = parallel.token_file
        self._told = 0
        super().__init__(
            parallel,
            bind=parallel.head_address or ALL_ADDRESSES,
            port=parallel.join_port,
            keys=make_token(self._token_file),
            tickets=False,
        )

    def bring(self, missing: list[int], *, first: bool) -> None:
        """Log how to start node agents, whenever the number of missing ones changes."""
        if self._told != len(missing):
            self._told = len(missing)
            log.info(
                "waiting for %d rank(s) to join: on each machine run `tandem rank --join THIS-MACHINE:%d "
                "--token-file %s` (a copy of that file)",
                len(missing),
                self.membership.port,
                self._token_file,
            )

    def describe_missing(self, missing: list[int]) -> str:
        """Return an error message with the number of missing node agents, and the remedy."""
        return (
            f"{len(missing)} rank(s) have not joined in time (start_timeout; after a loss rejoin_timeout); run "
            f"`tandem rank --join THIS-MACHINE:{self.membership.port} --token-file FILE` on their machines"
        )


def make_token(path: str) -> ClusterKeys:
    """Return the keys in a token file; create it with fresh keys if missing. Raises ConfigError."""
    try:
        descriptor = os.open(Path(path).expanduser(), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        raise ConfigError(f"--token-file: cannot make {path}: {error.strerror}", param="token_file") from None
    keys = ClusterKeys.generate()
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(keys) + b"\n")
    return keys


def read_token(path: str) -> ClusterKeys:
    """Return the keys in a token file. Raises ConfigError if it is missing, readable by others, or malformed."""
    try:
        file = Path(path).expanduser()
        content, mode = read_regular(file, BY_HAND), file.stat().st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        raise ConfigError(
            f"--token-file: cannot read {path}: {reason}; copy it from the head, which makes it", param="token_file"
        ) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"--token-file: others can read {path}, and whoever has it may join; mend that with `chmod 600 {path}`",
            param="token_file",
        )
    try:
        return msgspec.json.decode(content, type=ClusterKeys)
    except UNREADABLE:
        raise ConfigError(
            f"--token-file: {path} is not a token file; delete it, and let the head make a new one", param="token_file"
        ) from None
