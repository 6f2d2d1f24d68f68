"""Faults of a storm that hit no process: drained replicas, whose requests migrate, and a KV folder in which bits flip,
files are cut or vanish, and which is full now and then."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from tandem.errors import TandemError
from tandem.protocol.supervisor_messages import AddReplica, DrainReplica, ListReplicas, ReplicaList
from tandem.supervision.control_socket import ask, control_path

SMALL = 1 << 30
"""Bytes: a smaller file system is there for the storm alone, and is filled."""


class Disk:
    """Faults of a directory of `--kv-disk` while servers use it."""

    def __init__(self, place: Path) -> None:
        """`place`: a folder for it; on a small file system of its own, that is filled too."""
        self.directory = place / "kv"
        self._ballast = place / "ballast"
        self._ways: list[Callable[[random.Random], str]] = [self._flip, self._flip, self._cut, self._delete, self._empty]
        if shutil.disk_usage(place).total < SMALL:
            self._ways += [self._fill] * 2

    def hurt(self, rng: random.Random) -> str:
        """Do one thing to it; returns what. A full disk is so until the next one."""
        self._ballast.unlink(missing_ok=True)
        if not self.directory.exists():
            self.directory.mkdir(mode=0o700)
            return "disk: the directory is back"
        try:
            return rng.choice(self._ways)(rng)
        except OSError as error:  # a server deletes what is too much
            return f"disk: {type(error).__name__}"

    def _parts(self, rng: random.Random, share: float) -> list[Path]:
        every = sorted(self.directory.glob("*/*.kv"))
        return rng.sample(every, int(len(every) * share))

    def _flip(self, rng: random.Random) -> str:
        for part in self._parts(rng, 0.3):
            with part.open("r+b") as file:
                at = rng.randrange(part.stat().st_size)
                file.seek(at)
                [byte] = file.read(1)
                file.seek(at)
                file.write(bytes([byte ^ 1 << rng.randrange(8)]))
        return "disk: bits flip"

    def _cut(self, rng: random.Random) -> str:
        for part in self._parts(rng, 0.2):
            with part.open("r+b") as file:
                file.truncate(rng.randrange(part.stat().st_size))
        return "disk: parts are cut"

    def _delete(self, rng: random.Random) -> str:
        for part in self._parts(rng, 0.4):
            part.unlink()
        return "disk: parts vanish"

    def _empty(self, rng: random.Random) -> str:
        shutil.rmtree(self.directory)
        if rng.random() < 0.5:
            return "disk: the directory vanishes"
        self.directory.mkdir(mode=0o700)
        return "disk: the directory is emptied"

    def _fill(self, rng: random.Random) -> str:
        try:
            with self._ballast.open("wb") as file:
                while True:
                    file.write(bytes(1 << 14))
                    file.flush()
        except OSError:
            return "disk: it is full"


def move(port: int, rng: random.Random) -> str:
    """Drain a replica, and have another one added; returns what was done."""
    path = control_path(port)
    try:
        listed = ask(path, ListReplicas())
        assert isinstance(listed, ReplicaList)
        running = [one.replica for one in listed.replicas if one.state == "running"]
        if len(running) < 2:
            return "no replica to drain"
        ask(path, DrainReplica(rng.choice(running)))
        ask(path, AddReplica())
    except TandemError as error:
        return f"no drain: {error.message}"
    return "drain of a replica"
