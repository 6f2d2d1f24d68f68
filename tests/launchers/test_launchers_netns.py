"""The machines that other tests stand on: they reach one another, and each is alone where it should be."""

from __future__ import annotations

import signal
import socket
import subprocess
import time

import pytest

import tandem
from netns import Machines, children, has_netem

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def machines(make_machines) -> Machines:
    return make_machines(3)


def ping(machines: Machines, source: str, target: str, seconds: int = 200) -> subprocess.CompletedProcess[str]:
    return machines.run(
        source, ["ssh", "-o", f"ConnectTimeout={seconds}", "-o", "BatchMode=yes", target, "hostname"], check=False
    )


def test_every_machine_reaches_every_other_over_ssh(machines):
    for source in machines.names:
        for target in machines.names:
            assert ping(machines, source, target).stdout.strip() == target


def test_tandem_over_ssh_is_this_checkout(machines):
    done = machines.run("h0", ["ssh", "h1", "python -c 'import tandem; print(tandem.__file__)'"])
    assert done.stdout.strip() == tandem.__file__


def test_the_test_process_can_talk_to_a_machine(machines):
    with socket.create_connection((machines["h2"].address, 22), timeout=240) as connection:
        assert connection.recv(64).startswith(b"SSH-2.0")


def test_processes_belong_to_one_machine_and_can_be_signalled(machines):
    sleeper = machines.start("h1", ["sleep", "1000"])
    while "sleep" not in "".join(machines.processes("h1").values()):
        time.sleep(0.01)
    [pid] = machines.processes("h1", "sleep 1000")
    assert children(sleeper.pid) == [pid]
    assert machines.processes("h0", "sleep 1000") == {}
    machines.signal(sleeper, signal.SIGTERM)
    assert sleeper.wait(240) != 0
    assert machines.processes("h1", "sleep 1000") == {}


def test_a_cut_cable_loses_packets_until_it_is_healed(machines):
    machines.cut("h1")
    try:
        done = ping(machines, "h0", "h1", 2)
        assert done.returncode == 255
        assert "timed out" in done.stderr or "No route" in done.stderr
        assert ping(machines, "h0", "h2").stdout.strip() == "h2"
    finally:
        machines.heal("h1")
    assert ping(machines, "h0", "h1").stdout.strip() == "h1"


def copy_s(machines: Machines) -> float:
    began = time.monotonic()
    machines.run("h0", "head -c 2000000 /dev/zero | ssh h1 'cat > /dev/null'")
    return time.monotonic() - began


def test_a_slow_cable_is_slow_until_it_is_healed(machines):
    machines.slow("h1", rate="8mbit")
    try:
        assert copy_s(machines) > 1.5  # 16 Mbit; the bucket holds half of one
    finally:
        machines.heal("h1")
    if has_netem():
        machines.slow("h1", delay="100ms")
        try:
            assert copy_s(machines) > 0.4
        finally:
            machines.heal("h1")


def test_a_link_of_their_own(machines):
    device = machines.link("h0", "h2", ("192.168.77.1/30", "192.168.77.2/30"))
    try:
        done = machines.run(
            "h0", ["ssh", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "192.168.77.2", "hostname"]
        )
        assert done.stdout.strip() == "h2"
    finally:
        machines.unlink("h0", device)


def test_a_machine_without_power_has_no_processes(make_machines):
    machines = make_machines(1)
    sleeper = machines.start("h0", ["sleep", "1000"])
    while not children(sleeper.pid):
        time.sleep(0.01)
    machines.power_off("h0")
    assert sleeper.wait(240) != 0
