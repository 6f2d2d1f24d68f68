"""`tandem bench comm` between machines, without machines."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from tandem.diagnostics.collectives.measure import HostsBench
from tandem.diagnostics.doctor.probe_messages import Reserve, ReservedPorts
from tandem.diagnostics.doctor.probe_session import ProbeLink, ProbeLost
from tandem.launchers.hostfile import read_hostfile


def test_every_pair_of_machines_is_timed_once(tmp_path: Path) -> None:
    """Of four machines, one of them with two ranks and so with a pair of its own."""
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([{"ssh": name} for name in ("a", "b", "c", "d", "a")]))
    bench = HostsBench(read_hostfile(str(hosts)), None, 240)
    assert bench.names == ["a", "b", "c", "d"]
    assert bench.pairs() == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (2, 3)]


@pytest.mark.slow
def test_comm_that_is_interrupted_ends_its_probes_at_once(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([{"ssh": "localhost"}, {"ssh": "127.0.0.1"}]))
    ended: list[ProbeLost] = []

    def ask(name: str) -> None:
        with pytest.raises(ProbeLost) as lost:
            bench.ask(name, Reserve(2), ReservedPorts, 100)
        ended.append(lost.value)

    with HostsBench(read_hostfile(str(hosts)), None, 240) as bench:
        bench.links = {name: ProbeLink(name, ["sleep", "300"]) for name in ("a", "b")}
        asking = threading.Thread(target=bench.each, args=(ask, list(bench.links)))
        asking.start()
        time.sleep(1)
    asking.join(60)
    assert not asking.is_alive() and len(ended) == 2, "the probes' own time, 100 s, is waited for"
