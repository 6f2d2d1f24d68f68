"""Head and node agents over loopback: joining, ranks and their ends, ports, process groups, and strangers."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from pids import gone
from served import wait_until
from tandem.config.settings import ParallelSettings
from tandem.errors import LayoutError, RankFailure, UsageError
from tandem.launchers.host_facts import host_facts
from tandem.launchers.hosts import HostsLauncher
from tandem.launchers.node_agent import NodeAgent
from tandem.protocol.hosts import HostFacts, HostPing, MlxProcessGroup
from tandem.protocol.payloads import HostPayload
from tandem.transport.security import ClusterKeys

RANK = """
import os, sys, time
from tandem.processes.child import receive_payload, watch_lifeline
line = receive_payload().decode()
watch_lifeline()
where, how = line.split("|")
hostfile = os.environ.get("MLX_HOSTFILE")
with open(where + ".part", "w") as file:
    file.write(os.environ.get("WORD", "") + "|" + (open(hostfile).read() if hostfile else ""))
os.rename(where + ".part", where)
if how == "end":
    sys.exit(7)
time.sleep(60)
"""
HEARTBEAT_S = 2.5


class Waiting(HostsLauncher):
    """Its node agents are threads of the test."""

    def __init__(self, **options: object) -> None:
        super().__init__(ParallelSettings(heartbeat_timeout=HEARTBEAT_S), bind="127.0.0.1", tickets=False, **options)  # type: ignore[arg-type]

    def bring(self, missing: list[int], *, first: bool) -> None:
        for slot in missing:
            if (refusal := self.membership.refusal(slot)) is not None:
                raise UsageError(refusal)

    def describe_missing(self, missing: list[int]) -> str:
        return f"{missing} did not come"


class Cluster:
    """A head and its node agents."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.head = Waiting()
        self.threads: list[threading.Thread] = []
        self.hosts: list[NodeAgent] = []
        self.codes: dict[int, int | str] = {}

    def add(self, slot: int | None = None, mlx: MlxProcessGroup | None = None, **changes: object) -> int:
        options: dict[str, object] = {
            "keys": self.head.keys,
            "endpoints": [f"127.0.0.1:{self.head.membership.port}"],
            "slot": slot,
            "worker": "a_rank",
            "join_timeout": 60.0,
            **changes,
        }
        host, number = NodeAgent(HostPayload(**options), mlx), len(self.hosts)  # type: ignore[arg-type]
        self.hosts.append(host)

        def run() -> None:
            try:
                self.codes[number] = host.run()
            except UsageError as error:
                self.codes[number] = error.message

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()
        return number

    def recruit(self, count: int, seconds: float = 240, slots: list[int] | None = None) -> list[str]:
        return [place.host for place in self.head.recruit(count, time.monotonic() + seconds, slots=slots)]

    def code(self, number: int) -> int | str:
        self.threads[number].join(240)
        assert not self.threads[number].is_alive()
        return self.codes[number]

    def close(self) -> None:
        self.head.close()
        for host in self.hosts:
            host.end()
        for thread in self.threads:
            thread.join(240)
            assert not thread.is_alive()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    (tmp_path / "a_rank.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    one = Cluster(tmp_path)
    yield one
    one.close()


def content(path: Path) -> str:
    wait_until(path.exists)
    return path.read_text()


def test_ranks_start_where_hosts_have_joined_and_their_ends_are_told(cluster: Cluster) -> None:
    for slot in (1, 0):
        cluster.add(slot)
    cluster.recruit(2)
    long = cluster.head.start(0, 2, f"{cluster.directory}/0|stay".encode(), {"WORD": "hello"})
    short = cluster.head.start(1, 2, f"{cluster.directory}/1|end".encode(), {})
    assert content(cluster.directory / "0") == "hello|"
    assert short.wait(240) and short.poll() == 7
    assert "exited with code 7" in short.describe_exit()
    wait_until(lambda: long.pid)
    assert long.poll() is None and not long.wait(0.01)
    long.kill()
    assert long.wait(240) and long.poll() == -9 and "SIGKILL" in long.describe_exit()
    assert gone(long.pid)
    # The same hosts serve the next rank group.
    cluster.recruit(2)
    assert cluster.head.start(1, 2, f"{cluster.directory}/2|end".encode(), {}).wait(240)


def test_released_hosts_end_with_code_0_and_their_ranks_with_them(cluster: Cluster) -> None:
    cluster.add(0)
    cluster.recruit(1)
    rank = cluster.head.start(0, 1, f"{cluster.directory}/0|stay".encode(), {})
    wait_until(lambda: rank.pid)
    cluster.head.close()
    assert cluster.code(0) == 0
    wait_until(lambda: gone(rank.pid))


def test_hosts_without_a_number_fill_the_gaps_and_standbys_step_in(cluster: Cluster) -> None:
    cluster.add(1)
    cluster.add(None)
    cluster.recruit(2)
    cluster.add(None)
    rank = cluster.head.start(1, 2, f"{cluster.directory}/0|stay".encode(), {})
    cluster.hosts[0].end()
    assert rank.wait(240) and "has been ended there" in rank.describe_exit()
    cluster.recruit(2)
    assert cluster.head.start(1, 2, f"{cluster.directory}/1|end".encode(), {}).wait(240)


def test_a_head_that_falls_silent_loses_its_ranks_and_gets_them_back(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.add(0, rejoin=True)
    cluster.recruit(1)
    rank = cluster.head.start(0, 1, f"{cluster.directory}/0|stay".encode(), {})
    wait_until(lambda: rank.pid)
    with monkeypatch.context() as silent:
        post = cluster.head.membership._end.post
        silent.setattr(
            cluster.head.membership._end,
            "post",
            lambda identity, message: None if isinstance(message, HostPing) else post(identity, message),
        )
        wait_until(lambda: gone(rank.pid))
    assert rank.wait(240)
    cluster.recruit(1)
    assert cluster.head.start(0, 1, f"{cluster.directory}/1|end".encode(), {}).wait(240)


def test_a_host_that_falls_silent_is_lost_with_its_rank(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.add(0)
    cluster.recruit(1)
    rank = cluster.head.start(0, 1, f"{cluster.directory}/0|stay".encode(), {})
    wait_until(lambda: rank.pid)
    monkeypatch.setattr(cluster.hosts[0], "_obey", lambda link, message: None)
    assert rank.wait(240) and "has not answered for" in rank.describe_exit()
    assert cluster.code(0) == 1  # told that it was given up
    with pytest.raises(RankFailure, match="did not come"):
        cluster.recruit(1, seconds=0.3)


def test_a_head_that_is_not_there_is_named_with_what_was_tried(cluster: Cluster) -> None:
    cluster.add(0, endpoints=["127.0.0.1:1"], join_timeout=1.0)
    message = str(cluster.code(0))
    assert "could not join the head within 1 s: tried 127.0.0.1:1 (Connection refused)" in message


def test_a_host_without_the_address_that_is_given_for_it_says_so(cluster: Cluster) -> None:
    cluster.add(0, address="192.0.2.77")
    assert "has no address 192.0.2.77" in str(cluster.code(0))


def test_too_few_hosts_is_an_error_at_the_deadline(cluster: Cluster) -> None:
    with pytest.raises(UsageError, match=r"\[0, 1\] did not come"):
        cluster.recruit(2, seconds=0.3)


def test_a_host_with_other_versions_is_refused_by_name(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    import tandem.launchers.host_facts as facts

    real = facts.versions()
    monkeypatch.setattr(facts, "versions", lambda: {**real, "mlx": "0.1.0"})
    cluster.add(0)
    with pytest.raises(UsageError, match=rf"has mlx 0.1.0 \(here {real['mlx']}\); install the same"):
        cluster.recruit(1)
    assert "refuses this machine" in str(cluster.code(0))


def test_a_place_that_is_taken_and_one_that_is_too_many_are_refused(cluster: Cluster) -> None:
    cluster.add(0)
    cluster.recruit(1)
    assert "rank 0 is taken" in str(cluster.code(cluster.add(0)))
    assert "the layout has 1 ranks" in str(cluster.code(cluster.add(3)))


def test_a_port_that_is_taken_is_a_mistake_to_mend(cluster: Cluster) -> None:
    with pytest.raises(UsageError, match="Address already in use; choose another --join-port"):
        Waiting(port=cluster.head.membership.port)


def test_a_ring_over_hosts_has_fresh_ports_and_its_file_is_on_the_host(cluster: Cluster) -> None:
    for slot in (0, 1):
        cluster.add(slot)
    cluster.recruit(2)
    process_group = cluster.head.process_group("auto", [0, 1])
    assert process_group.backend == "ring"
    cluster.head.start(0, 2, f"{cluster.directory}/0|stay".encode(), process_group.variables(0))
    hosts = json.loads(content(cluster.directory / "0").removeprefix("|"))
    assert [host.split(":")[0] for [host] in hosts] == ["127.0.0.1"] * 2 and hosts[0] != hosts[1]


def test_the_first_rank_group_takes_the_ports_of_mlx_launch_and_later_ones_do_not(cluster: Cluster) -> None:
    from tandem.launchers.process_groups import free_ports

    given = [[f"127.0.0.1:{port}"] for port in free_ports(2)]
    for rank in (1, 0):
        cluster.add(rank, MlxProcessGroup(rank=rank, hostfile=given))
    cluster.recruit(2)
    assert json.loads(cluster.head.process_group("auto", [0, 1]).files(0)["MLX_HOSTFILE"]) == given
    cluster.recruit(2)
    assert json.loads(cluster.head.process_group("auto", [0, 1]).files(0)["MLX_HOSTFILE"]) != given


def test_rdma_devices_and_coordinator_of_mlx_launch_are_used(cluster: Cluster) -> None:
    devices = [[None, "rdma_en2"], ["rdma_en3", None]]
    for rank in (0, 1):
        cluster.add(rank, MlxProcessGroup(rank=rank, devices=devices, coordinator="127.0.0.1:34999"))  # type: ignore[arg-type]
    cluster.recruit(2)
    process_group = cluster.head.process_group("auto", [0, 1])
    assert process_group.backend == "jaccl" and json.loads(process_group.files(1)["MLX_IBV_DEVICES"]) == devices
    assert process_group.variables(1)["MLX_JACCL_COORDINATOR"] == "127.0.0.1:34999"


def test_mpi_without_mpirun_is_refused(cluster: Cluster) -> None:
    cluster.add(0)
    cluster.add(1)
    cluster.recruit(2)
    with pytest.raises(LayoutError, match="--backend mpi: every rank must be started by mpirun"):
        cluster.head.process_group("mpi", [0, 1])


def test_a_head_that_macos_hides_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """ssh reaches it, Python does not: "no route to host" towards a machine on the same cable."""

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(socket, "create_connection", refused)
    monkeypatch.setattr("tandem.launchers.node_agent.JOIN_S", 0.2)
    for platform, words in (("linux", r"\(No route to host\)"), ("darwin", "No route to host: macOS withholds")):
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setattr("tandem.system.privacy.output_of", lambda _: "\tinet 127.0.0.1 netmask 0xff000000\n")
        host = NodeAgent(HostPayload(keys=ClusterKeys.generate(), endpoints=["127.0.0.1:9"], join_timeout=0.1))
        with pytest.raises(UsageError, match=f"could not join the head.*127.0.0.1:9 .*{words}"):
            host.run()


@pytest.mark.parametrize(("machines", "shares"), [(("a", "b"), 1), (("a", "a"), 2)])
def test_machines_are_told_apart_by_what_they_are_and_not_by_their_names(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, machines: tuple[str, str], shares: int
) -> None:
    """Two Macs may both be called `Mac`, and one may be renamed between two starts. What its GPU may use is cut."""
    left = list(machines)

    def facts(address: str) -> HostFacts:
        machine = left.pop(0)
        return structs.replace(
            host_facts(address),
            name=f"Mac{len(left)}" if shares == 2 else "Mac",
            machine=machine,
            memory_bytes=64 << 30,
            usable_bytes=48 << 30,
            gpus=[],
        )

    monkeypatch.setattr("tandem.launchers.node_agent.host_facts", facts)
    for slot in range(2):
        cluster.add(slot)
        cluster.recruit(2, slots=[slot])
    places = cluster.head.recruit(2, time.monotonic() + 240)
    assert [place.memory_bytes for place in places] == [(48 << 30) // shares] * 2
    assert len({place.machine for place in places}) == 3 - shares
