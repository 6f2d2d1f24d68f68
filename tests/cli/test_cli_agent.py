"""Machines without ssh between them: found, paired by a code, written into a hosts file, served on and examined."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from netns import Machines
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow
CODE = re.compile(r"code (\d{3} \d{3}): ")
ASK = """
import json, urllib.request
body = {"model": "default", "prompt": "a", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(),
                                 {"Content-Type": "application/json"})
print(json.load(urllib.request.urlopen(request, timeout=240))["usage"]["completion_tokens"])
"""


class Agents:
    """`tandem agent` on h1 and h2; h0 is the head, and may not use ssh."""

    def __init__(self, machines: Machines, directory: Path) -> None:
        self.machines = machines
        self.directory = directory
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, *options: str) -> str | None:
        """Start an agent; the code that it shows, if it does."""
        with (self.directory / f"{name}.log").open("a") as log:
            agent = self.machines.start(name, ["python", "-m", "tandem", "agent", *options], stdout=subprocess.PIPE, stderr=log)
        self.processes[name] = agent
        assert agent.stdout is not None
        listens = agent.stdout.readline()
        assert f"agent {name} listens on ports 29640 and 29641" in listens, self.log(name)
        if "nobody" not in listens and "--pair" not in options:
            return None
        found = CODE.match(agent.stdout.readline())
        assert found
        return found[1]

    def stop(self, name: str, number: int = signal.SIGTERM) -> int:
        process = self.processes.pop(name)
        self.machines.signal(process, number)
        return process.wait(240)

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def hosts(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.machines.run("h0", ["python", "-m", "tandem", "hosts", *words], check=check)

    def found(self) -> dict[str, dict]:
        """Both agents. On a busy machine one may not answer in the seconds that are listened for: again."""
        for _ in range(10):
            found = {one["name"]: one for one in json.loads(self.hosts("find", "--json").stdout)}
            if {"h1", "h2"} <= set(found):
                break
        return found

    def pair(self, name: str, code: str) -> subprocess.CompletedProcess[str]:
        """With an agent by its name, which is found likewise."""
        for _ in range(10):
            done = self.hosts("pair", name, "--code", code, check=False)
            if "answered within" not in done.stderr:
                break
        return done


@pytest.fixture(scope="module")
def agents(make_machines, tmp_path_factory) -> Iterator[Agents]:
    machines = make_machines(3)
    (machines["h0"].home / ".ssh" / "id_ed25519").unlink()
    agents = Agents(machines, tmp_path_factory.mktemp("agents"))
    yield agents
    for name in list(agents.processes):
        agents.stop(name)


@pytest.fixture(scope="module")
def paired(agents) -> Agents:
    """Found by name, and paired with the code that each shows."""
    codes = {name: agents.start(name) for name in ("h1", "h2")}
    assert {name: one["paired"] for name, one in agents.found().items()} == {"h1": False, "h2": False}
    guess = agents.pair("h1", "000000" if codes["h1"] != "000 000" else "000001")
    assert (guess.returncode, "the code is wrong" in guess.stderr) == (2, True)
    for name, code in codes.items():
        assert f"paired with {name}" in agents.pair(name, code or "").stdout
    return agents


def test_found_machines_say_what_they_are(paired):
    peers = paired.machines["h0"].home / ".local" / "state" / "tandem" / "head" / "peers.json"
    before = peers.read_text()
    peers.write_text(before.replace(paired.machines["h1"].address, "10.9.9.9"))  # as if it had moved since
    found = paired.found()
    assert json.loads(peers.read_text()) == json.loads(before)
    assert {name: one["paired"] for name, one in found.items()} == {"h1": True, "h2": True}
    one = found["h1"]
    address = paired.machines["h1"].address
    assert one["addresses"] == [address]
    assert f"eth0 {address}/24" in one["links"]
    assert one["memory_bytes"] > 1 << 30
    assert one["chip"]
    assert any("h2" in paired.hosts("find").stdout for _ in range(10))


def test_a_model_is_served_over_agents_alone(paired, tmp_path):
    machines = paired.machines
    hostfile = tmp_path / "hosts.json"
    paired.hosts("write", str(hostfile))
    written = json.loads(hostfile.read_text())["hosts"]
    assert written == [{"ssh": f"agent:{name}", "ips": [machines[name].address]} for name in ("h1", "h2")]
    model = tiny_model(tmp_path / "model")
    up = machines.run(
        "h0", ["python", "-m", "tandem", "up", str(model), "--hostfile", str(hostfile), "--max-context", "64"], timeout=240
    )
    try:
        assert "default is ready" in up.stdout
        said = machines.run("h0", ["python", "-m", "tandem", "status", "--json", "--interval", "0"]).stdout
        assert [rank["host"] for rank in json.loads(said)[0]["replicas"][0]["ranks"]] == ["h1", "h2"]
        assert machines.run("h0", ["python", "-c", ASK]).stdout.strip() == "8"
        [head] = [pid for pid, line in machines.processes("h0", "tandem.cli.processes server").items()]
    finally:
        if not machines.processes("h0", "tandem.cli.processes server"):
            print(machines.run("h0", ["python", "-m", "tandem", "logs"], check=False).stdout)
    os.kill(head, signal.SIGKILL)
    deadline = time.monotonic() + 240
    while any(
        machines.processes(name, "tandem.executors.worker") or machines.processes(name, "rank-host") for name in ("h1", "h2")
    ):
        assert time.monotonic() < deadline, "ranks outlive their head"
        time.sleep(0.2)
    assert machines.processes("h1", "tandem agent")


def test_the_doctor_comes_over_agents(paired, tmp_path):
    hostfile = tmp_path / "hosts.json"
    paired.hosts("write", str(hostfile))
    command = ["python", "-m", "tandem", "doctor", "--hostfile", str(hostfile), "--json"]
    done = paired.machines.run("h0", command, timeout=240)
    assert json.loads(done.stdout)["ok"]


def test_an_agent_trusts_nobody_else(paired, tmp_path):
    """h2 is not paired with h1, and one that has been forgotten does not get in either."""
    machines = paired.machines
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([{"ssh": "agent:h1"}]))
    doctor = ["python", "-m", "tandem", "doctor", "--hostfile", str(hostfile), "--json"]
    said = json.loads(machines.run("h2", doctor, check=False).stdout)
    assert "tandem hosts pair h1" in [one for one in said["findings"] if one["check"] == "ssh"][0]["remedy"]
    paired.stop("h1")
    machines.run("h1", ["python", "-m", "tandem", "agent", "--forget", "h0"])
    code = paired.start("h1")
    said = json.loads(machines.run("h0", doctor, check=False).stdout)
    [found] = [one for one in said["findings"] if one["check"] == "ssh" and one["verdict"] == "fail"]
    assert found["detail"] == "its agent does not answer" and found["remedy"].startswith("on h1: tandem agent ")
    paired.hosts("pair", machines["h1"].address, "--code", code or "")
    assert json.loads(machines.run("h0", doctor, check=False).stdout)["ok"]


def test_cables_get_subnets(paired, tmp_path):
    machines = paired.machines
    device = machines.link("h1", "h2", ("10.254.0.1/30", "10.254.0.2/30"))
    try:
        written = json.loads(paired.hosts("write", "-").stdout)["hosts"]
        assert [one["ips"] for one in written] == [["10.254.0.1"], ["10.254.0.2"]]
        done = paired.hosts("write", "-", "agent:h1", "agent:h2", "--cable", "agent:h1:x0=agent:h2:x0")
        assert "sudo ip addr add 10.254.0.5/30 dev x0" in done.stderr
    finally:
        machines.unlink("h1", device)
