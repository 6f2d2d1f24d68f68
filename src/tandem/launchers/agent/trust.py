"""Identity of this machine and its trusted peers: CURVE keys in files that only this user can read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq
from msgspec import Struct

from tandem.env import state_dir
from tandem.errors import ConfigError, UsageError
from tandem.protocol.codec import UNREADABLE
from tandem.system.files import write_private

T = TypeVar("T")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


class Identity(Struct, frozen=True):
    """A CURVE25519 key pair in Z85 encoding."""

    public: str
    secret: str


class Peer(Struct, frozen=True):
    """A machine paired with this one."""

    public: str
    address: str = ""
    """HOST:PORT of an agent's session socket when last seen; empty for heads."""


class Trust:
    """Key files of one role (`agent` or `head`) of this user."""

    def __init__(self, role: str) -> None:
        self._directory = state_dir() / role

    def identity(self) -> Identity:
        """Return this machine's keys, generated at the first call. Raises ConfigError for an unreadable file."""
        path = self._directory / "identity.json"
        if (known := _read(path, Identity)) is not None:
            return known
        public, secret = zmq.curve_keypair()
        identity = Identity(public.decode(), secret.decode())
        _write(path, identity)
        return identity

    def peers(self) -> dict[str, Peer]:
        """Trusted peers by name. Raises ConfigError for an unreadable file."""
        return _read(self._directory / "peers.json", dict[str, Peer]) or {}

    def changed_at(self) -> tuple[int, int]:
        """Return a value that changes with each change of `peers`: mtime and inode, or zeros without a file."""
        try:
            status = (self._directory / "peers.json").stat()
        except OSError:
            return 0, 0
        return status.st_mtime_ns, status.st_ino

    def add(self, name: str, peer: Peer) -> None:
        """Add a peer, replacing one of the same name. Raises ConfigError for an unreadable file."""
        _write(self._directory / "peers.json", {**self.peers(), name: peer})

    def forget(self, name: str) -> None:
        """Remove a peer. Raises UsageError if there is none of that name."""
        peers = self.peers()
        if name not in peers:
            raise UsageError(f"{name} is not paired; there is: {', '.join(peers) or 'none'}")
        _write(self._directory / "peers.json", {key: peer for key, peer in peers.items() if key != name})


def checked_name(name: str) -> str:
    """Return the name. Raises ConfigError unless it is up to 63 letters, digits and ._-."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a machine's name: use up to 63 letters, digits and ._-", param="name")
    return name


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"{path} cannot be read: {error}; delete it to begin anew") from None


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(path, msgspec.json.encode(content))
