"""Which addresses machines use with one another, and subnets for cables. Pure."""

from __future__ import annotations

import ipaddress
import json

import pytest

from tandem.diagnostics.doctor.parsing import Interface
from tandem.diagnostics.doctor.topology import address_cables, choose_addresses, parse_cable, readdress
from tandem.errors import ConfigError, LayoutError


def interface(name: str, address: str, kind: str = "") -> Interface:
    network = ipaddress.IPv4Interface(address)
    return Interface(name, [network], kind, point_to_point=network.network.prefixlen >= 30)


LO = interface("lo", "127.0.0.1/8", "loopback")


def test_the_fastest_subnet_that_all_share():
    machines = {
        name: [LO, interface("en1", f"192.168.1.{number}/24", "wifi"), interface("en0", f"10.0.0.{number}/24", "ethernet")]
        for number, name in enumerate("abc", 1)
    }
    assert choose_addresses("abc", machines) == {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}
    machines["c"].pop()
    assert choose_addresses("abc", machines) == {"a": "192.168.1.1", "b": "192.168.1.2", "c": "192.168.1.3"}
    machines["c"].pop()
    with pytest.raises(LayoutError, match="no subnet that a, b, c all are in"):
        choose_addresses("abc", machines)


def test_containers_and_loopback_are_no_way():
    machines = {name: [LO, interface("docker0", "172.17.0.1/16")] for name in "ab"}
    with pytest.raises(LayoutError):
        choose_addresses("ab", machines)
    assert choose_addresses("a", machines) == {"a": "127.0.0.1"}


def test_a_virtual_bridge_in_a_shared_subnet_is_not_chosen():
    machines = {"a": [interface("virbr0", "10.0.0.9/24"), interface("e0", "10.0.0.1/24")], "b": [interface("e0", "10.0.0.2/24")]}
    assert choose_addresses("ab", machines) == {"a": "10.0.0.1", "b": "10.0.0.2"}


def test_cables_between_neighbours_win():
    """Each rank listens on its cable to the one before it, which is where that one looks for it."""
    ends = {"a": (1, 9), "b": (2, 5), "c": (6, 10)}
    machines = {
        name: [
            interface("e0", f"10.0.0.{number}/24"),
            interface("t0", f"10.254.0.{one}/30"),
            interface("t1", f"10.254.0.{other}/30"),
        ]
        for number, (name, (one, other)) in enumerate(ends.items(), 1)
    }
    assert choose_addresses("abc", machines) == {"a": "10.254.0.9", "b": "10.254.0.2", "c": "10.254.0.6"}
    machines["c"].pop()  # the ring is open
    assert choose_addresses("abc", machines)["a"] == "10.0.0.1"
    assert choose_addresses("ab", machines) == {"a": "10.254.0.1", "b": "10.254.0.2"}


def test_subnets_of_cables_clash_with_nothing():
    machines = {"a": [interface("e0", "10.254.0.1/29")], "u@b": [interface("e0", "10.254.0.2/29")], "c": []}
    cables = [parse_cable(text, list(machines)) for text in ("a:en2=u@b:en2", "u@b:en3=c:en2")]
    found = address_cables(cables, machines)
    assert found == {
        "a": [("en2", ipaddress.IPv4Interface("10.254.0.9/30"))],
        "u@b": [("en2", ipaddress.IPv4Interface("10.254.0.10/30")), ("en3", ipaddress.IPv4Interface("10.254.0.13/30"))],
        "c": [("en2", ipaddress.IPv4Interface("10.254.0.14/30"))],
    }
    with pytest.raises(ConfigError, match="a:en2 is named twice"):
        address_cables([cables[0], parse_cable("a:en2=c:en3", list(machines))], machines)


@pytest.mark.parametrize("text", ["", "a:en2", "a:en2=a:en3", "a:en2=x:en3", "a:=b:en2", "a:en2=b:en2=c:en2"])
def test_cables_that_make_no_sense(text):
    with pytest.raises(ConfigError, match="--cable"):
        parse_cable(text, ["a", "b", "c"])


COMMANDS = """\
Setup for mac-a
===============
sudo ifconfig bridge0 down
sudo ifconfig en2 inet 192.168.0.1 netmask 255.255.255.252
sudo route change 192.168.0.2 -interface en2

Setup for mac-b
===============
sudo ifconfig bridge0 down
sudo ifconfig en3 inet 192.168.0.2 netmask 255.255.255.252
sudo route change 192.168.0.1 -interface en3
"""


def test_subnets_of_mlx_are_replaced():
    """What mlx.distributed_config 0.32.4 prints for two Macs with one cable."""
    used = [ipaddress.IPv4Network("192.168.0.0/24")]
    ring = json.dumps(
        {"backend": "ring", "hosts": [{"ssh": "mac-a", "ips": ["192.168.0.1"]}, {"ssh": "mac-b", "ips": ["192.168.0.2"]}]}
    )
    commands, hostfile = readdress(COMMANDS, ring, used)
    assert commands == COMMANDS.replace("192.168.0.", "10.254.0.")
    assert [one["ips"] for one in json.loads(hostfile)["hosts"]] == [["10.254.0.1"], ["10.254.0.2"]]
    jaccl = ring.replace('"ring"', '"jaccl"')  # there the addresses are those of Ethernet
    assert readdress(COMMANDS, jaccl, used)[1] == jaccl
