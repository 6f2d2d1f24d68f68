"""`tandem doctor` over three machines: nothing is wrong until something is planted, and then just that is found."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from netns import Machines, sh
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow
PORT = 32330


@dataclass
class Cluster:
    machines: Machines
    model: Path
    hostfile: Path

    def doctor(self, *options: str) -> tuple[int, dict]:
        words = [
            "python",
            "-m",
            "tandem",
            "doctor",
            "--hostfile",
            str(self.hostfile),
            "--model",
            str(self.model),
            "--ports",
            str(PORT),
            "--json",
            *options,
        ]
        done = self.machines.run("h0", words, timeout=240, check=False)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def cluster(make_machines, tmp_path_factory) -> Cluster:
    machines = make_machines(3)
    directory = tmp_path_factory.mktemp("doctor")
    hostfile = directory / "hosts.json"
    hostfile.write_text(json.dumps([{"ssh": name, "ips": [machines[name].address]} for name in machines.names]))
    return Cluster(machines, tiny_model(directory / "model"), hostfile)


def shim(machines: Machines, name: str, file: str, text: str) -> Path:
    """A file in a directory that Python there looks into first."""
    directory = machines[name].home / "shim"
    (directory / file).parent.mkdir(parents=True, exist_ok=True)
    (directory / file).write_text(text)
    machines.set_variables(name, {"PYTHONPATH": f"{directory}:{machines.variables['h0']['PYTHONPATH']}"})
    return directory


def unshim(machines: Machines, name: str) -> None:
    machines.set_variables(name, {"PYTHONPATH": machines.variables["h0"]["PYTHONPATH"]})
    shutil.rmtree(machines[name].home / "shim")


@contextlib.contextmanager
def mounted(machines: Machines, name: str, source: Path, target: Path | str) -> Iterator[None]:
    machines.run(name, ["mount", "--bind", str(source), str(target)])
    try:
        yield
    finally:
        machines.run(name, ["umount", str(target)])


@contextlib.contextmanager
def another_version(cluster: Cluster) -> Iterator[None]:
    shim(cluster.machines, "h1", "mlx_lm-0.30.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: mlx-lm\nVersion: 0.30.1\n")
    yield
    unshim(cluster.machines, "h1")


@contextlib.contextmanager
def no_model(cluster: Cluster) -> Iterator[None]:
    empty = cluster.machines["h1"].home / "empty"
    empty.mkdir()
    with mounted(cluster.machines, "h1", empty, cluster.model):
        yield


@contextlib.contextmanager
def another_model(cluster: Cluster) -> Iterator[None]:
    copy = cluster.machines["h2"].home / "model"
    shutil.copytree(cluster.model, copy)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    with mounted(cluster.machines, "h2", copy, cluster.model):
        yield


@contextlib.contextmanager
def little_memory(cluster: Cluster) -> Iterator[None]:
    file = cluster.machines["h1"].home / "meminfo"
    file.write_text("MemTotal: 300000 kB\nMemAvailable: 250000 kB\n")
    with mounted(cluster.machines, "h1", file, "/proc/meminfo"):
        yield


@contextlib.contextmanager
def name_on_loopback(cluster: Cluster) -> Iterator[None]:
    file = cluster.machines["h2"].home / "hosts"
    before = file.read_text()
    file.write_text("127.0.1.1 h2\n" + "".join(line for line in before.splitlines(True) if not line.endswith(" h2\n")))
    yield
    file.write_text(before)


@contextlib.contextmanager
def clock_ahead(cluster: Cluster) -> Iterator[None]:
    shim(cluster.machines, "h2", "sitecustomize.py", "import time\nreal = time.time\ntime.time = lambda: real() + 90\n")
    yield
    unshim(cluster.machines, "h2")


@contextlib.contextmanager
def port_taken(cluster: Cluster) -> Iterator[None]:
    taker = cluster.machines.start(
        "h2", ["python", "-m", "http.server", str(PORT)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 240
    while str(PORT) not in cluster.machines.run("h2", ["ss", "-ltn"]).stdout:
        assert time.monotonic() < deadline
    yield
    cluster.machines.signal(taker, signal.SIGKILL)
    taker.wait(240)


@contextlib.contextmanager
def firewall(cluster: Cluster) -> Iterator[None]:
    cluster.machines.run(
        "h1",
        "nft add table inet strict; "
        "nft add chain inet strict input '{ type filter hook input priority 0; policy drop; }'; "
        "nft add rule inet strict input tcp dport 22 accept; "
        "nft add rule inet strict input ct state established,related accept",
    )
    yield
    cluster.machines.run("h1", "nft delete table inet strict")


@contextlib.contextmanager
def gateway_in_a_cables_subnet(cluster: Cluster) -> Iterator[None]:
    machines = cluster.machines
    base = machines.address.rpartition(".")[0]
    machines.run("h1", f"ip route add default via {base}.254")
    device = machines.link("h1", "h2", (f"{base}.253/30", f"{base}.253/32"))
    yield
    machines.unlink("h1", device)
    machines.run("h1", "ip route del default")


@contextlib.contextmanager
def two_cables_one_subnet(cluster: Cluster) -> Iterator[None]:
    machines = cluster.machines
    devices = [
        machines.link("h1", "h0", ("10.254.0.1/30", "10.254.0.2/32")),
        machines.link("h1", "h2", ("10.254.0.2/30", "10.254.0.1/32")),
    ]
    yield
    for device in devices:
        machines.unlink("h1", device)


@contextlib.contextmanager
def key_not_accepted(cluster: Cluster) -> Iterator[None]:
    file = cluster.machines["h2"].home / ".ssh" / "authorized_keys"
    before = file.read_text()
    file.write_text("")
    yield
    file.write_text(before)


@contextlib.contextmanager
def another_host_key(cluster: Cluster) -> Iterator[None]:
    file = cluster.machines["h0"].home / ".ssh" / "known_hosts"
    before = file.read_text()
    keys = {line.split(",")[0]: line.split()[-1] for line in before.splitlines()}
    file.write_text(before.replace(keys["h1"], keys["h2"]))
    yield
    file.write_text(before)


@contextlib.contextmanager
def no_tandem(cluster: Cluster) -> Iterator[None]:
    empty = cluster.machines["h1"].home / "nothing"
    empty.mkdir()
    with mounted(cluster.machines, "h1", empty, Path(sys.executable).parent):
        yield


@contextlib.contextmanager
def cable_cut(cluster: Cluster) -> Iterator[None]:
    cluster.machines.cut("h2")
    yield
    cluster.machines.heal("h2")


@contextlib.contextmanager
def closed_one_way(cluster: Cluster) -> Iterator[None]:
    machines = cluster.machines
    inside = ["ip", "netns", "exec", machines.switch, "nft"]
    sh(
        *inside,
        "add table bridge filter; add chain bridge filter forward { type filter hook forward priority 0; }; "
        f"add rule bridge filter forward ip saddr {machines['h1'].address} ip daddr {machines['h2'].address} "
        "tcp flags & (syn|ack) == syn drop",
    )
    yield
    sh(*inside, "delete table bridge filter")


@contextlib.contextmanager
def slow_cable(cluster: Cluster) -> Iterator[None]:
    cluster.machines.slow("h2", rate="60mbit")
    yield
    cluster.machines.heal("h2")


@contextlib.contextmanager
def rdma_off(cluster: Cluster) -> Iterator[None]:
    tools = cluster.machines["h1"].home / "tools"
    for name, text in (("rdma_ctl", "RDMA is enabled"), ("ibv_devices", "  ------\n  rdma_en2  00")):
        tools.mkdir(exist_ok=True)
        (tools / name).write_text(f"#!/bin/sh\necho '{text}'\n")
        (tools / name).chmod(0o755)
    before = cluster.machines.variables["h0"]["PATH"]
    for name in ("h0", "h2"):
        cluster.machines.set_variables(name, {"PATH": f"{tools}:{before}"})
    device = cluster.machines.link("h0", "h2", ("169.254.1.3/16", "169.254.3.1/16"), "en2")  # jaccl needs addresses
    content = cluster.hostfile.read_text()
    matrix = [[None if i == j else "rdma_en2" for j in range(3)] for i in range(3)]
    hosts = [{**one, "rdma": row} for one, row in zip(json.loads(content), matrix, strict=True)]
    cluster.hostfile.write_text(json.dumps({"backend": "jaccl", "hosts": hosts}))
    yield
    cluster.hostfile.write_text(content)
    cluster.machines.unlink("h0", device)
    for name in ("h0", "h2"):
        cluster.machines.set_variables(name, {"PATH": before})


Plant = Callable[[Cluster], contextlib.AbstractContextManager[None]]
Fault = tuple[Plant, str, str, str, str]
"""How to plant it; check and machine that must name it; words of what is found, and of the remedy."""
FAULTS: dict[str, list[Fault]] = {
    "what machines have": [
        (another_version, "versions", "h1", "mlx-lm is 0.30.1", "mlx-lm=="),
        (another_model, "model", "h2", "model.safetensors", "rsync -a"),
        (little_memory, "memory", "h1", "GiB", "--hosts h0="),
        (name_on_loopback, "hostname", "h2", "127.0.1.1", "/etc/hosts"),
        (clock_ahead, "clock", "h2", "90.0 s ahead of h0", "set-ntp"),
        (port_taken, "ports", "h2", f"port {PORT} is taken by python", "ss -ltnp"),
    ],
    "model missing": [(no_model, "model", "h1", "no config.json", "rsync -a")],
    "gateway": [(gateway_in_a_cables_subnet, "subnets", "h1", "holds the default gateway", "addr add 10.254.0.1/30")],
    "cables": [(two_cables_one_subnet, "subnets", "h1", "share a subnet", "ip addr add")],
    "ssh": [
        (key_not_accepted, "ssh", "h2", "refuses this user's key", "ssh-copy-id h2"),
        (another_host_key, "ssh", "h1", "host key is not the known one", "ssh-keygen -R h1"),
    ],
    "installation": [(no_tandem, "ssh", "h1", "no Python with Tandem was found there", "tandem hosts sync")],
    "cable cut": [(cable_cut, "ssh", "h2", "cannot be reached", "ping")],
    "closed one way": [(closed_one_way, "reachable", "h1 -> h2", "timed out", "ping")],
    "slow": [(slow_cable, "speed", "h0 -> h2", "MB/s", "ip route get")],
    "rdma": [(rdma_off, "rdma", "h1", "RDMA is not there", "rdma_ctl enable")],
}
CONSEQUENCES = {("speed", "speed"), ("subnets", "subnets")}
"""What else a fault shows in: a slow cable is slow both ways and for all, a subnet clash shows at both ends."""


def test_nothing_is_wrong_with_healthy_machines(cluster):
    code, said = cluster.doctor()
    assert code == 0, said
    assert said["ok"]
    assert [one for one in said["findings"] if one["verdict"] == "fail"] == []
    verdicts = {one["check"]: one["verdict"] for one in said["findings"]}
    of_macs = {"thunderbolt", "macos", "rdma", "accelerators", "fences", "power"}
    assert {name for name, verdict in verdicts.items() if verdict == "skip"} == {"ray", *of_macs}
    assert len(said["links"]) == 6
    assert all(link["bytes_per_s"] > 0 and link["latency_s"] > 0 for link in said["links"])
    assert set(said["all_sum"]) == {"h0", "h1", "h2"}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_found_and_nothing_else(cluster, faults):
    with contextlib.ExitStack() as stack:
        for plant, *_ in faults:
            stack.enter_context(plant(cluster))
        code, said = cluster.doctor()
    assert code == 1
    failed = [one for one in said["findings"] if one["verdict"] == "fail"]
    for _, check, where, detail, remedy in faults:
        verdict = "warn" if check == "hostname" else "fail"  # Tandem goes by addresses
        assert any(
            (one["check"], one["where"], one["verdict"]) == (check, where, verdict)
            and detail in one["detail"]
            and remedy in one["remedy"]
            for one in said["findings"]
        ), (check, said["findings"])
    planted = {(check, where) for _, check, where, *_ in faults}
    for one in failed:
        assert (one["check"], one["where"]) in planted or any((check, one["check"]) in CONSEQUENCES for check, _ in planted), one


def test_a_firewall_is_found_and_its_remedy_opens_it(cluster):
    with firewall(cluster):
        code, said = cluster.doctor()
        assert code == 1
        failed = {one["check"]: one for one in said["findings"] if one["verdict"] == "fail"}
        assert set(failed) == {"firewall", "reachable"}
        assert failed["firewall"]["where"] == "h1"
        assert "chain inet strict input drops" in failed["firewall"]["detail"]
        cluster.machines.run("h0", failed["firewall"]["remedy"].replace("sudo ", ""))
        code, said = cluster.doctor()
    assert code == 0, said


def test_bench_comm_measures_what_joins_machines(cluster, tmp_path):
    hosts, found = tmp_path / "two.json", tmp_path / "found.json"
    words = [
        "python",
        "-m",
        "tandem",
        "bench",
        "comm",
        "--hostfile",
        str(hosts),
        "--sizes",
        "4K",
        "--num-iters",
        "3",
        "--output-json",
        str(found),
    ]
    entries = json.loads(cluster.hostfile.read_text())
    hosts.write_text(json.dumps(entries[1:]))  # not the machine that asks
    assert "=== h1 - h2 (ring)" in cluster.machines.run("h0", words).stdout
    [pair] = json.loads(found.read_text())["pairs"]
    assert [row["operation"] for row in pair["rows"]] == ["all_sum", "between", "tcp", "ring"]
    hosts.write_text(json.dumps([entries[1], {"ssh": "nowhere", "ips": ["10.99.0.1"]}]))
    done = cluster.machines.run("h0", words, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("tandem: nowhere: ")
    assert len(done.stderr.splitlines()) == 1


def test_nothing_is_left_running(cluster):
    deadline = time.monotonic() + 240
    while any(cluster.machines.processes(name, "tandem.diagnostics") for name in cluster.machines.names):
        assert time.monotonic() < deadline
        time.sleep(0.1)
