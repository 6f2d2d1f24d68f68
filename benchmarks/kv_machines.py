"""Machines for two replicas on one: each has a directory of its own at the same path, and a network of its own too.

Ranks are started there as people do (`tandem rank --join`), so this needs neither ssh nor agents, but root on Linux.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Self

from harness import Server, free_port, tandem_server

from tandem.launchers.manual import make_token
from tandem.processes.interpreter import module_command

COUNT = 2


class Machines:
    """Two of them; use as a context manager."""

    def __init__(self, directory: Path | None, *, network: bool, pin: bool) -> None:
        """`directory`: what they keep is in it, by default among temporary files. `network`: each has an address of its
        own, on a bridge. `pin`: each computes on a core of its own."""
        self.base = Path(tempfile.mkdtemp(prefix="tandem-kv-", dir=directory))
        self.disk, self._token, self._pin = self.base / "kv", self.base / "token", pin
        self._switch = _new_switch() if network else ""
        self.address = f"10.214.{self._switch[4:]}.254" if network else "127.0.0.1"
        """Of the server, for them."""
        make_token(str(self._token))

    def __enter__(self) -> Self:
        self.disk.mkdir()
        for number in range(COUNT):
            self.own(number).mkdir()
        if self._switch:
            self._connect()
        return self

    def _connect(self) -> None:
        switch, device = self._switch, self._switch
        _run(f"ip -n {switch} link add br0 type bridge")
        _run(f"ip -n {switch} link set br0 up")
        _run(f"ip link add {device} type veth peer name head netns {switch}")
        _run(f"ip -n {switch} link set head master br0 up")
        _run(f"ip addr add {self.address}/24 dev {device}")
        _run(f"ip link set {device} up")
        for number in range(COUNT):
            space = f"{switch}-{number}"
            _run(f"ip netns add {space}")
            _run(f"ip -n {switch} link add m{number} type veth peer name eth0 netns {space}")
            _run(f"ip -n {switch} link set m{number} master br0 up")
            _run(f"ip -n {space} link set lo up")
            _run(f"ip -n {space} addr add {self.address.removesuffix('254')}{number + 1}/24 dev eth0")
            _run(f"ip -n {space} link set eth0 up")

    def own(self, number: int) -> Path:
        """What a machine has at `disk`."""
        return self.base / str(number)

    def serve(self, model: str, *, replicas: int, **flags: object) -> Server:
        """A server whose ranks are there: one on each, of `replicas` rank groups."""
        port = free_port()
        ranks = [self._rank(number, port + number * (replicas > 1)) for number in range(COUNT)]
        layout = {"data_parallel_size": replicas} if replicas > 1 else {"pipeline_parallel_size": COUNT}
        return tandem_server(
            Path(model),
            1,
            beside=ranks,
            launcher="manual",
            token_file=self._token,
            join_port=port,
            kv_disk=self.disk,
            **layout,
            **flags,
        )

    def _rank(self, number: int, port: int) -> list[str]:
        enter = ["ip", "netns", "exec", f"{self._switch}-{number}"] if self._switch else []
        bind = f'mount --make-rprivate / && mount --bind {self.own(number)} {self.disk} && exec "$@"'
        core = ["taskset", "-c", str(number)] if self._pin else []
        return [
            *enter,
            "unshare",
            "--mount",
            "sh",
            "-c",
            bind,
            "sh",
            *core,
            *module_command(
                "tandem.cli.main",
                "rank",
                "--join",
                f"{self.address}:{port}",
                "--token-file",
                str(self._token),
                "--log-level",
                "WARNING",
            ),
        ]

    def __exit__(self, *exc: object) -> None:
        spaces = [*(f"{self._switch}-{number}" for number in range(COUNT)), self._switch] if self._switch else []
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
        if self._switch:
            subprocess.run(["ip", "link", "del", self._switch], capture_output=True)
        shutil.rmtree(self.base, ignore_errors=True)


def _new_switch() -> str:
    """A namespace that nobody else has, whose number is that of a subnet."""
    for number in range(1, 255):
        name = f"tdkv{number}"
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
        if made.returncode == 0:
            return name
        if "File exists" not in made.stderr:
            raise SystemExit(f"network namespaces cannot be made here: {made.stderr.strip()}")
    raise SystemExit("254 sets of machines are there already: `ip netns list`")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr.strip()}")
