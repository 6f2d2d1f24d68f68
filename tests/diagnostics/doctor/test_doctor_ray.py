"""`tandem doctor --ray`: what the cluster says of its nodes, and probes that come there through Ray."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tandem.diagnostics.doctor.evidence import Evidence, Finding
from tandem.diagnostics.doctor.examine import RAY, hosts_of
from tandem.launchers.ray.driver import new_cluster
from tandem.launchers.ray.nodes import RayNode


def node(address: str, mlx: float = 1, trouble: str = "") -> RayNode:
    resources = {"mlx": mlx} if mlx else {}
    return RayNode(f"id of {address}", address, "", resources, resources, trouble)


def found(*nodes: RayNode) -> list[Finding]:
    return RAY.findings(Evidence([], "here", ray=list(nodes)))


def test_nodes_as_they_should_be():
    [one] = found(node("10.0.0.1"), node("10.0.0.2", 2))
    assert (one.verdict, one.detail) == ("ok", "2 node(s), 3 device(s) for ranks, 3 of them free")
    assert RAY.findings(Evidence([], "here"))[0].verdict == "skip"


def test_faults_of_nodes_come_with_their_remedy():
    [lost] = found(node("10.0.0.1"), node("10.0.0.2", trouble="is lost"))
    assert (lost.verdict, lost.where, lost.detail) == ("fail", "10.0.0.2", "is lost")
    assert "--node-ip-address" in lost.remedy
    [loopback] = found(node("10.0.0.1"), node("127.0.0.1"))
    assert (loopback.verdict, "loopback" in loopback.detail) == ("fail", True)
    [idle] = found(node("10.0.0.1"), node("10.0.0.2", 0))
    assert (idle.verdict, idle.where) == ("warn", "10.0.0.2")
    assert "--resources='{\"mlx\": 1}'" in idle.remedy
    assert [one.verdict for one in found(node("10.0.0.1", 0), node("10.0.0.2", 0))] == ["fail", "fail"]


def test_each_address_is_one_host():
    nodes = [node("10.0.0.1"), node("10.0.0.1"), node("10.0.0.2", 0), node("10.0.0.3", trouble="is lost")]
    hosts = hosts_of(nodes, {one.node_id: ("run", one.node_id) for one in nodes})
    assert [(one.name, one.ranks) for one in hosts] == [("10.0.0.1", 1), ("10.0.0.2", 0)]
    assert hosts[0].command == ("run", "id of 10.0.0.1")


@pytest.mark.slow
def test_a_real_cluster_is_looked_at():
    pytest.importorskip("ray")
    with new_cluster(2) as address:
        done = subprocess.run(
            [sys.executable, "-m", "tandem", "doctor", "--ray", address, "--json", "--port", "0"],
            capture_output=True,
            text=True,
            timeout=240,
        )
    said = json.loads(done.stdout or "{}")
    assert said, done.stderr
    verdicts = {one["check"]: (one["verdict"], one["detail"]) for one in said["findings"]}
    assert verdicts["ray"] == ("ok", "1 node(s), 2 device(s) for ranks, 2 of them free")
    assert verdicts["versions"][0] == "ok"
    assert len(said["hosts"]) == 1
    assert said["ok"], said


@pytest.mark.slow
def test_no_cluster_is_said_in_one_line():
    pytest.importorskip("ray")
    done = subprocess.run(
        [sys.executable, "-m", "tandem", "doctor", "--ray", "127.0.0.1:9"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 2
    assert "nothing answers there" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
