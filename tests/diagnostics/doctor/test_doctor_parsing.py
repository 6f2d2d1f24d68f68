"""Reading what macOS and Linux print. The macOS texts have the shape that Apple's tools print; no Mac is needed."""

from __future__ import annotations

import json

import pytest

from tandem.diagnostics.doctor.parsing import (
    available_bytes,
    firewalls,
    gateways,
    interfaces,
    port_owner,
    rdma_devices,
    rdma_enabled,
    rdma_port_states,
)
from tandem.diagnostics.doctor.probe_messages import Facts

IFCONFIG = """\
lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384
\toptions=1203<RXCSUM,TXCSUM,TXSTATUS,SW_TIMESTAMP>
\tinet 127.0.0.1 netmask 0xff000000
\tinet6 ::1 prefixlen 128
gif0: flags=8010<POINTOPOINT,MULTICAST> mtu 1280
en0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\toptions=6460<TSO4,TSO6,CHANNEL_IO,PARTIAL_CSUM,ZEROINVERT_CSUM>
\tether 5c:e9:1e:aa:bb:cc
\tinet6 fe80::4b:c0ff:fe8e:1%en0 prefixlen 64 secured scopeid 0xb
\tinet 192.168.1.23 netmask 0xffffff00 broadcast 192.168.1.255
\tmedia: autoselect
\tstatus: active
en1: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tether 5c:e9:1e:aa:bb:cd
\tmedia: autoselect
\tstatus: inactive
en3: flags=8963<UP,BROADCAST,SMART,RUNNING,PROMISC,SIMPLEX,MULTICAST> mtu 1500
\tether 36:ab:c0:de:f0:04
\tinet 10.254.0.1 netmask 0xfffffffc broadcast 10.254.0.3
\tstatus: active
bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tether 36:ab:c0:de:f0:00
\tConfiguration:
\t\tid 0:0:0:0:0:0 priority 0 hellotime 0 fwddelay 0
\tmember: en2 flags=3<LEARNING,DISCOVER>
\t        ifmaxaddr 0 port 8 priority 0 path cost 0
\tmember: en3 flags=3<LEARNING,DISCOVER>
\t        ifmaxaddr 0 port 9 priority 0 path cost 0
"""
PORTS = """\

Hardware Port: Wi-Fi
Device: en0
Ethernet Address: 5c:e9:1e:aa:bb:cc

Hardware Port: Thunderbolt 2
Device: en3
Ethernet Address: 36:ab:c0:de:f0:04

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 36:ab:c0:de:f0:00

Hardware Port: Thunderbolt Ethernet Slot 1
Device: en7
Ethernet Address: 00:11:22:33:44:55
"""
ROUTES = """\
Routing tables

Internet:
Destination        Gateway            Flags               Netif Expire
default            192.168.1.1        UGScg                 en0
default            link#22            UCSIg             bridge0      !
127                127.0.0.1          UCS                   lo0
192.168.1          link#11            UCS                   en0      !
"""
IBV_DEVINFO = """\
hca_id:\trdma_en2
\ttransport:\t\t\tThunderbolt (0)
\tphys_port_cnt:\t\t\t1
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_DOWN (1)
hca_id:\trdma_en3
\ttransport:\t\t\tThunderbolt (0)
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_ACTIVE (4)
"""
VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                              100000.
Pages active:                            900000.
Pages inactive:                           50000.
Pages speculative:                         1000.
Pages throttled:                              0.
Pages wired down:                        200000.
Pages purgeable:                             10.
"""
LSOF = """\
COMMAND     PID USER   FD   TYPE             DEVICE SIZE/OFF NODE NAME
ControlCe   612  ann   10u  IPv4 0xabcdef0123456789      0t0  TCP *:5000 (LISTEN)
python3.1  4711  ann    7u  IPv6 0xabcdef0123456780      0t0  TCP [::1]:8000 (LISTEN)
"""


def facts(system: str, root: bool = True, **outputs: str) -> Facts:
    return Facts(
        hostname="a",
        hostname_addresses=[],
        system=system,
        executable="python",
        root=root,
        chip="",
        memory_bytes=1,
        available_bytes=7,
        mlx_bytes=None,
        versions={},
        outputs=outputs,
        busy_ports=[],
    )


def test_interfaces_of_a_mac():
    found = {one.name: one for one in interfaces(facts("Darwin", ifconfig=IFCONFIG, hardware_ports=PORTS))}
    assert set(found) == {"lo0", "en0", "en3", "bridge0"}  # neither those that are down nor without a cable
    assert {name: one.kind for name, one in found.items()} == {
        "lo0": "loopback",
        "en0": "wifi",
        "en3": "thunderbolt",
        "bridge0": "thunderbolt",
    }
    assert [str(one) for one in found["en0"].networks] == ["192.168.1.23/24"]
    assert [str(one) for one in found["en3"].networks] == ["10.254.0.1/30"]
    assert found["en3"].point_to_point
    assert not found["en0"].point_to_point
    assert found["bridge0"].members == ["en2", "en3"]


def test_an_ethernet_adapter_in_a_thunderbolt_slot_is_ethernet():
    text = IFCONFIG.replace("en3:", "en7:")
    found = {one.name: one.kind for one in interfaces(facts("Darwin", ifconfig=text, hardware_ports=PORTS))}
    assert found["en7"] == "ethernet"


def test_gateways_of_a_mac():
    [gateway] = gateways(facts("Darwin", routes=ROUTES))
    assert (str(gateway.address), gateway.interface) == ("192.168.1.1", "en0")


def test_interfaces_and_gateways_of_linux():
    addresses = [
        {
            "ifname": "lo",
            "flags": ["LOOPBACK", "UP"],
            "addr_info": [
                {"family": "inet", "local": "127.0.0.1", "prefixlen": 8},
                {"family": "inet6", "local": "::1", "prefixlen": 128},
            ],
        },
        {"ifname": "eth0", "flags": ["UP"], "addr_info": [{"family": "inet", "local": "10.0.0.2", "prefixlen": 24}]},
        {"ifname": "eth1", "flags": [], "addr_info": []},
    ]
    routes = [{"dst": "default", "gateway": "10.0.0.1", "dev": "eth0"}, {"dst": "10.0.0.0/24", "dev": "eth0"}]
    one = facts("Linux", addresses=json.dumps(addresses), routes=json.dumps(routes))
    assert [(i.name, i.kind, [str(n) for n in i.networks]) for i in interfaces(one)] == [
        ("lo", "loopback", ["127.0.0.1/8"]),
        ("eth0", "", ["10.0.0.2/24"]),
    ]
    assert [(str(g.address), g.interface) for g in gateways(one)] == [("10.0.0.1", "eth0")]


def test_what_is_not_there_is_not_guessed():
    for system in ("Darwin", "Linux"):
        assert interfaces(facts(system)) == []
        assert gateways(facts(system)) == []
        assert firewalls(facts(system)) == []
        assert port_owner(facts(system), 80) is None
        assert available_bytes(facts(system)) == 7
    assert interfaces(facts("Linux", addresses="ip: command failed")) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [("RDMA is enabled\n", True), ("RDMA is disabled\n", False), ("enabled\n", True), ("usage: rdma_ctl", None), (None, None)],
)
def test_rdma_ctl(text, expected):
    assert rdma_enabled(text) is expected


def test_rdma_devices():
    text = (
        "    device          \t   node GUID\n    ------          \t----------------\n    rdma_en2        \t"
        "36abc0def0040000\n    rdma_en3        \t36abc0def0050000\n"
    )
    assert rdma_devices(text) == ["rdma_en2", "rdma_en3"]
    assert rdma_devices("    device          \t   node GUID\n    ------          \t----------------\n") == []
    assert rdma_devices(None) == []
    assert rdma_port_states(IBV_DEVINFO) == {"rdma_en2": "PORT_DOWN", "rdma_en3": "PORT_ACTIVE"}


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("Firewall is disabled. (State = 0)", False),
        ("Firewall is enabled. (State = 1)", True),
        ("Firewall is enabled. (State = 2)", True),
        ("not permitted", None),
    ],
)
def test_the_application_firewall(text, blocks):
    [found] = firewalls(facts("Darwin", firewall=text))
    assert found.blocks is blocks


def nft(policy: str, *rules: dict) -> str:
    chain = {"family": "inet", "table": "filter", "name": "input", "hook": "input", "policy": policy}
    forward = {"family": "inet", "table": "filter", "name": "forward", "hook": "forward", "policy": "drop"}
    return json.dumps(
        {
            "nftables": [
                {"metainfo": {}},
                {"chain": chain},
                {"chain": forward},
                *({"rule": {"family": "inet", "table": "filter", "chain": "input", "expr": [rule]}} for rule in rules),
            ]
        }
    )


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        (nft("accept"), False),
        (nft("drop"), True),
        (nft("accept", {"drop": None}), True),
        (nft("accept", {"accept": None}), False),
        (nft("accept", {"reject": {"type": "tcp reset"}}), True),
    ],
)
def test_nftables(text, blocks):
    [found] = firewalls(facts("Linux", nft=text))
    assert found.blocks is blocks
    assert not blocks or found.chain == "inet filter input"


def test_iptables():
    closed = "*filter\n:INPUT DROP [0:0]\nCOMMIT\n"
    rule = "*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -p tcp -m tcp --dport 5000 -j DROP\nCOMMIT\n"
    free = "*filter\n:INPUT ACCEPT [0:0]\n:FORWARD DROP [0:0]\n-A FORWARD -j DROP\nCOMMIT\n"
    assert [firewalls(facts("Linux", iptables=text))[0].blocks for text in (closed, rule, free)] == [True, True, False]


def test_rules_that_only_root_may_see_are_not_called_free():
    assert firewalls(facts("Linux", root=False, nft="Operation not permitted (you must be root)"))[0].blocks is None
    assert firewalls(facts("Linux", root=False, iptables="Permission denied"))[0].blocks is None


def test_who_has_a_port():
    mac = facts("Darwin", listeners=LSOF)
    assert port_owner(mac, 8000) == "python3.1 (process 4711)"
    assert port_owner(mac, 80) is None
    linux = facts("Linux", listeners='LISTEN 0 128 0.0.0.0:8000 0.0.0.0:* users:(("nginx",pid=12,fd=3))\n')
    assert port_owner(linux, 8000) == "nginx (process 12)"
    assert port_owner(linux, 800) is None


def test_free_memory_of_a_mac():
    assert available_bytes(facts("Darwin", memory_pages=VM_STAT)) == 16384 * (100000 + 50000 + 1000 + 10)
