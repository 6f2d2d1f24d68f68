"""Cables that are pulled and slowed, between machines of their own (network namespaces)."""

from __future__ import annotations

import json
import re
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from netns import Machines

pytestmark = pytest.mark.slow

HEAD, FAR = "192.168.91.1", "192.168.91.2"


class Cluster:
    """A head that serves, and its only rank-to-rank cable besides the switch."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.device = ""
        self.plug()

    def plug(self) -> None:
        self.device = self.machines.link("h0", "h1", (f"{HEAD}/30", f"{FAR}/30"))

    def unplug(self) -> None:
        self.machines.unlink("h0", self.device)


@pytest.fixture(scope="module")
def cluster(make_machines: Any) -> Cluster:
    return Cluster(make_machines(2))


@pytest.fixture(scope="module")
def server(cluster: Cluster, model: Path, make_server: Any) -> Iterator[Any]:
    """Two stages, one on each machine; activations go over the direct cable, control over the switch."""
    machines = cluster.machines
    hostfile = machines["h0"].home / "hosts.json"
    hostfile.write_text(json.dumps([{"ssh": "h0", "ips": [HEAD]}, {"ssh": "h1", "ips": [FAR]}]))
    log = machines["h0"].home / "log"
    head = machines["h0"].address
    with log.open("w") as errors:
        process = machines.start(
            "h0",
            [
                "python",
                "-m",
                "tandem",
                "serve",
                str(model),
                "--hostfile",
                str(hostfile),
                "--head-address",
                head,
                "--host",
                head,
                "--port",
                "8000",
                "--prefill-chunk",
                "8",
                "--prefix-cache",
                "0",
                "--max-restarts",
                "100",
                "--rejoin-timeout",
                "100",
            ],
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    try:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], 240)
        ready = re.search(r"Tandem is ready: (\S+)", process.stdout.readline() if readable else "")
        assert ready, log.read_text()[-4000:]
        one = make_server(process, ready[1], log)
        one.learn()
        yield one
    finally:
        machines.signal(process, signal.SIGTERM)
        try:
            process.communicate(timeout=240)
        finally:
            process.kill()


def causes(server: Any) -> dict[str, float]:
    return {
        cause: server.metric(f'tandem_gang_failures_total{{cause="{cause}",')
        for cause in ("died", "silent", "link", "stuck", "error", "host", "start")
    }


def test_a_slow_link_is_left_alone(server: Any, cluster: Cluster) -> None:
    """Everything crosses at 0.4 Mbit/s and still comes: nothing is replaced."""
    before = causes(server)
    for machine in ("h0", "h1"):
        namespace = cluster.machines[machine].namespace
        subprocess.run(
            [
                "tc",
                "-n",
                namespace,
                "qdisc",
                "add",
                "dev",
                cluster.device,
                "root",
                "tbf",
                "rate",
                "400kbit",
                "burst",
                "4kb",
                "latency",
                "2s",
            ],
            check=True,
        )
    calls = server.load()
    server.check(calls)
    assert causes(server) == before
    for machine in ("h0", "h1"):
        subprocess.run(
            ["tc", "-n", cluster.machines[machine].namespace, "qdisc", "del", "dev", cluster.device, "root"], check=True
        )


def test_a_link_that_is_cut_between_ranks(server: Any, cluster: Cluster) -> None:
    """Ranks answer the head, but nothing passes between them."""
    before = causes(server)
    calls = server.load()
    server.wait(lambda: calls[0].chunks > 10, "tokens")
    cluster.unplug()
    server.wait(lambda: causes(server) != before, "it is noticed")
    assert causes(server)["link"] == before["link"] + 1, server.tail()
    assert "the link to it brings nothing" in server.log.read_text()
    cluster.plug()
    server.check(calls)
