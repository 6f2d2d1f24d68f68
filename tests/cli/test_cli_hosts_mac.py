"""`tandem hosts write --over thunderbolt` from one of two Macs, whose tools are stand-ins (fake_mac/README.md).

MLX's own tool runs as it is; ssh is a stand-in that takes no connection to this machine, as a Mac without Remote Login.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from macs import answers, mac_environment, recorded
from tandem.planner.hosts import read_hosts

SSH = """#!/bin/sh
# ssh OPTIONS HOST COMMAND: runs the command on another Mac, `mac-b` or `mac-c`, as that takes it.
while [ "${1#mac-}" = "$1" ]; do
    case "$1" in 127.0.0.1|localhost) echo "connect to host $1 port 22: Connection refused" >&2; exit 255;; esac
    shift
    [ "$#" -gt 0 ] || exit 255
done
mac=${1#mac-}
shift
FAKE_MAC="$MACS/$mac" exec sh -c "$*"
"""


@pytest.fixture
def mac(tmp_path: Path) -> dict[str, str]:
    """The first Mac, one cable from the second."""
    ports = recorded("networksetup") + "\nHardware Port: Thunderbolt 2\nDevice: en3\nEthernet Address: 36:ab:c0:0:0:8\n"
    profile = recorded("system_profiler-thunderbolt")
    swapped = profile.replace("00A1", "@").replace("00B1", "00A1").replace("@", "00B1").replace("00A2", "00B2")
    answers(tmp_path / "a", {"networksetup": ports})
    answers(tmp_path / "b", {"networksetup": ports, "system_profiler-thunderbolt": swapped})
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "ssh").write_text(SSH)
    (tools / "ssh").chmod(0o755)
    environment = mac_environment(tmp_path / "a", MACS=str(tmp_path), HOME=str(tmp_path))
    return {**environment, "PATH": f"{tools}{os.pathsep}{environment['PATH']}"}


def write(mac: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tandem", "hosts", "write", "-", *words, "--over", "thunderbolt", "--backend", "ring"],
        env=mac,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_the_mac_where_one_sits_needs_no_remote_login(mac: dict[str, str], name: str) -> None:
    done = write(mac, name, "mac-b")
    assert done.returncode == 0, done.stderr
    written = json.loads(done.stdout)
    assert [host["ssh"] for host in written["hosts"]] == [name, "mac-b"]
    assert all(host["ips"][0].startswith("10.254.") for host in written["hosts"])
    assert "ifconfig en2 inet 10.254." in done.stderr


def test_cables_that_are_not_there_are_said_with_what_to_check(mac: dict[str, str], tmp_path: Path) -> None:
    profile = json.loads(recorded("system_profiler-thunderbolt"))
    del profile["SPThunderboltDataType"][0]["_items"]
    answers(tmp_path / "a", {"system_profiler-thunderbolt": json.dumps(profile)})
    answers(tmp_path / "b", {"system_profiler-thunderbolt": json.dumps(profile)})
    done = write(mac, "127.0.0.1", "mac-b")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "check cables and Remote Login on the other Macs" in done.stderr


def interfaces(*networks: str) -> str:
    """What ifconfig says: Ethernet, or Wi-Fi, at en0 and cables behind it."""
    text = "lo0: flags=8049<UP,LOOPBACK> mtu 16384\n\tinet 127.0.0.1 netmask 0xff000000\n"
    for name, address in zip(("en0", "en2", "en3"), networks, strict=False):
        mask = "0xfffffffc" if address.startswith("10.254") else "0xffffff00"
        text += f"{name}: flags=8863<UP,BROADCAST> mtu 1500\n\tinet {address} netmask {mask}\n" if address else ""
    return text


def three(tmp_path: Path, shared: bool) -> None:
    ends = {"a": ("10.254.0.1", "10.254.0.9"), "b": ("10.254.0.2", "10.254.0.5"), "c": ("10.254.0.6", "10.254.0.10")}
    for number, (name, cables) in enumerate(ends.items(), 1):
        answers(tmp_path / name, {"ifconfig": interfaces(f"192.168.1.{number}" if shared else "", *cables)})


def mesh(mac: dict[str, str], *hosts: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tandem", "hosts", "write", "-", *hosts],
        env=mac,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_three_macs_in_a_mesh_meet_where_all_reach_all(mac: dict[str, str], tmp_path: Path) -> None:
    """A cable of the first reaches one of the others, never both."""
    three(tmp_path, shared=True)
    done = mesh(mac, "127.0.0.1", "mac-b", "mac-c")
    assert done.returncode == 0, done.stderr
    hosts = json.loads(done.stdout)["hosts"]
    assert [host["ips"] for host in hosts] == [["10.254.0.9"], ["10.254.0.2"], ["10.254.0.6"]]
    assert [host["address"] for host in hosts] == ["192.168.1.1", "192.168.1.2", "192.168.1.3"]
    two = json.loads(mesh(mac, "127.0.0.1", "mac-b").stdout)["hosts"]
    assert [sorted(host) for host in two] == [["chip", "ips", "memory", "ssh"]] * 2
    (tmp_path / "hosts.json").write_text(json.dumps(two))
    machines = read_hosts([], str(tmp_path / "hosts.json")).machines  # as `tandem plan` reads them, without asking
    assert [(one.name, one.chip) for one in machines] == [("127.0.0.1", "m4-max"), ("mac-b", "m4-max")]


def test_three_macs_with_cables_alone_are_refused(mac: dict[str, str], tmp_path: Path) -> None:
    three(tmp_path, shared=False)
    done = mesh(mac, "127.0.0.1", "mac-b", "mac-c")
    assert done.returncode == 2
    assert "share no network beside their cables" in done.stderr and "Ethernet or Wi-Fi" in done.stderr
