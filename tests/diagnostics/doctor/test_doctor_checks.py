"""Checks over made-up evidence: each fault is found, named with its machine, and comes with a remedy."""

from __future__ import annotations

import json

import pytest
from msgspec import structs

from mac_evidence import DEVICES, VERSIONS, bad, ifconfig, judged, mac, pair, with_b, with_output
from tandem.diagnostics.doctor.checks_apple import BRIDGE
from tandem.diagnostics.doctor.evidence import Clock, Host, Need, PlannedMemory
from tandem.diagnostics.doctor.examine import findings
from tandem.diagnostics.doctor.probe_messages import ModelFacts, Transferred
from tandem.diagnostics.doctor.probe_session import explain
from tandem.diagnostics.doctor.topology import free_subnets
from tandem.diagnostics.tasks import RankTimes
from tandem.system.privacy import LOCAL_NETWORK


def test_nothing_is_found_on_healthy_macs():
    evidence = pair()
    assert bad(evidence) == []
    assert {one.verdict for one in judged(evidence)} == {"ok"}


@pytest.mark.parametrize(
    ("outputs", "check", "words", "remedy"),
    [
        ({"rdma_ctl": "RDMA is disabled\n"}, "rdma", "disabled", "rdma_ctl enable"),
        ({"rdma_ctl": "RDMA is disabled\n"}, "rdma", "disabled", "System Settings, search for RDMA"),
        ({"ibv_devices": DEVICES}, "rdma", "no device", "cable"),
        (
            {"ibv_devices": DEVICES + "    rdma_en5            00\n"},
            "rdma",
            "no device rdma_en2 (for a)",
            "mlx.distributed_config",
        ),
        ({"ibv_devinfo": "hca_id: rdma_en2\n\t\tstate: PORT_DOWN (1)\n"}, "rdma", "PORT_DOWN", "cable between b and a"),
        ({"os_version": "26.1\n"}, "rdma", "needs 26.2", "softwareupdate"),
        (
            {"ifconfig": ifconfig("en0 inet 192.168.1.2 netmask 0xffffff00", "en2 ether 36:ab:c0:de:f0:04")},
            "rdma",
            "en2, the interface of rdma_en2 (for a), has no IPv4 address",
            'ssh b "sudo ifconfig en2 inet 169.254.2.1 netmask 255.255.0.0 alias"',
        ),
        ({"battery": "Now drawing from 'Battery Power'\n"}, "power", "battery", "plug b in"),
        ({"power": "Currently in use:\n lowpowermode         1\n"}, "power", "low power", "pmset -a lowpowermode 0"),
        ({"translated": "1\n"}, "versions", "run by Rosetta", "macos-aarch64"),
        ({"os_build": "25D1\n"}, "macos", "build 25D1", "softwareupdate"),
        ({"os_version": "26.2\n"}, "macos", "before 26.3", "softwareupdate"),
        (
            {"firewall": "Firewall is enabled. (State = 1)"},
            "firewall",
            "application firewall: on",
            "--unblockapp /opt/python/3.12",
        ),
        ({"firewall": "Firewall is enabled. (State = 1)"}, "firewall", "on", "again after each upgrade of that Python"),
        (
            {"routes": "default 10.254.0.1 UGScg en0\n"},
            "subnets",
            "holds the default gateway 10.254.0.1",
            "sudo ifconfig en2 inet 10.254.0.2 delete && sudo ifconfig en2 inet 10.254.0.5 netmask 255.255.255.252",
        ),
    ],
)
def test_what_a_mac_says(outputs, check, words, remedy):
    evidence = with_output(pair(), **outputs)
    found = [one for one in bad(evidence) if one.check == check]
    assert any(one.where == "b" and words in one.detail and remedy in one.remedy for one in found), found


def test_the_interface_of_an_rdma_device_must_not_be_in_a_bridge():
    text = mac(2).outputs["ifconfig"] + "bridge0: flags=8863<UP,RUNNING> mtu 1500\n\tmember: en2 flags=3<LEARNING>\n"
    [found] = bad(with_output(pair(), ifconfig=text))
    assert (found.check, found.where) == ("rdma", "b")
    assert found.remedy == 'ssh b "sudo ifconfig bridge0 down"'


def test_a_hosts_file_without_a_device_for_a_peer():
    evidence = pair()
    evidence.hosts[1] = Host("b", "10.254.0.2", (None,))
    assert {one.check for one in bad(evidence)} == {"rdma"}
    evidence.backend = "ring"
    assert bad(evidence) == []


def test_each_of_several_cables_of_a_pair_is_looked_at():
    evidence = pair()
    evidence.hosts[1] = Host("b", "10.254.0.2", (("rdma_en2", "rdma_en3"), None))
    [found] = bad(evidence)
    assert (found.check, found.where, found.detail) == ("rdma", "b", "has no device rdma_en3 (for a), only rdma_en2")


def test_an_address_on_wifi():
    evidence = pair(backend="ring")
    evidence.hosts[1] = Host("b", "192.168.1.2")
    [found] = bad(evidence)
    assert (found.check, found.verdict, found.where) == ("thunderbolt", "warn", "b")
    assert found.remedy.startswith("tandem hosts write cable-hosts.json")
    evidence.hosts.append(Host("agent:c"))  # MLX's tool asks no agent for its cables
    assert {found.remedy for found in bad(evidence) if found.check == "thunderbolt"} == {BRIDGE}


def test_stages_that_would_go_beside_the_cable():
    """MLX's own set-up for RDMA writes the addresses of Ethernet into the hosts file."""
    text = ifconfig(
        "en0 inet 192.168.1.2 netmask 0xffffff00",
        "en2 inet 10.254.0.2 netmask 0xfffffffc",
        "en7 inet 192.168.7.2 netmask 0xffffff00",
    )
    evidence = with_output(pair(), ifconfig=text)
    evidence.hosts[1] = Host("b", "192.168.7.2", ("rdma_en2", None))
    [found] = bad(evidence)
    assert (found.check, found.verdict, found.where) == ("thunderbolt", "warn", "b")
    assert "not over the cable, where it has 10.254.0.2" in found.detail


@pytest.mark.parametrize("value", ["1", "0"])
def test_fast_fences_are_told_wherever_they_are_turned_on(value):
    fast = {"MLX_METAL_FAST_SYNCH": value}
    found = bad(pair(variables=fast)) + bad(with_b(pair(), variables=fast))
    assert [(one.check, one.verdict, one.where) for one in found] == (
        [("fences", "warn", ""), ("fences", "warn", "b")] if value == "1" else []
    )


@pytest.mark.parametrize(
    ("chip", "release", "tag", "words", "remedy"),
    [
        ("Apple M5 Max", "26.1", "macosx_26_0_arm64", "macOS is 26.1, not 26.2", "softwareupdate"),
        (
            "Apple M5",
            "26.4",
            "macosx_15_0_arm64",
            "its wheel of MLX is for macOS 15",
            "--force-reinstall --no-deps mlx-metal==0.32.4",
        ),
        ("Apple M5", "26.2", "macosx_26_0_arm64", None, None),
        ("Apple M5", "26.4", "", None, None),  # built from source: not told
        ("Apple M4 Max", "26.1", "macosx_15_0_arm64", None, None),
    ],
)
def test_neural_accelerators_of_an_m5_that_mlx_leaves_unused(chip, release, tag, words, remedy):
    evidence = with_b(with_output(pair(backend="ring"), os_version=f"{release}\n"), chip=chip, mlx_tag=tag)
    found = [(one.check, one.verdict, one.where) for one in bad(evidence)]
    assert found == ([("accelerators", "warn", "b")] if words else [])
    assert all(words in one.detail and f"accelerators of {chip}" in one.detail and remedy in one.remedy for one in bad(evidence))


def test_a_local_network_that_macos_withholds_is_told_as_that():
    evidence = pair()
    evidence.links["b", "a"] = Transferred(f"No route to host: {LOCAL_NETWORK}")
    found = next(one for one in bad(evidence) if one.check == "reachable")
    assert (found.where, found.remedy) == (
        "b -> a",
        "ssh b \"open 'x-apple.systempreferences:com.apple.preference.security?Privacy_LocalNetwork'\"",
    )


@pytest.mark.parametrize("used", [False, True], ids=["for RDMA alone", "connected to"])
def test_link_local_addresses_of_several_cables_clash_only_if_connections_go_there(used):
    """macOS gives each cable one, and the doctor's own remedy for RDMA does."""
    text = ifconfig(
        "en0 inet 192.168.1.2 netmask 0xffffff00",
        "en2 inet 169.254.2.1 netmask 0xffff0000",
        "en3 inet 169.254.2.3 netmask 0xffff0000",
    )
    evidence = with_output(pair(), ifconfig=text)
    evidence.hosts[1] = Host("b", "169.254.2.1" if used else "192.168.1.2", ("rdma_en2", None))
    found = [one for one in bad(evidence) if one.check in ("rdma", "subnets")]
    assert [(one.check, one.where) for one in found] == ([("subnets", "b")] if used else [])


def test_of_interfaces_that_cannot_be_read_nothing_is_said():
    assert [one for one in bad(with_output(pair(), ifconfig="")) if one.check == "rdma"] == []


def test_two_cables_with_one_subnet():
    text = (
        mac(2).outputs["ifconfig"]
        + ifconfig("en3 inet 10.254.0.2 netmask 0xfffffffc").partition("en3")[1]
        + (": flags=8863<UP> mtu 1500\n\tinet 10.254.0.3 netmask 0xfffffffc\n")
    )
    [found] = bad(with_output(pair(), ifconfig=text))
    assert (found.check, found.where) == ("subnets", "b")
    assert "en2 (10.254.0.2/30) and en3 (10.254.0.3/30) share a subnet" in found.detail


def test_cable_and_wifi_to_the_same_router_are_no_clash():
    text = ifconfig(
        "en0 inet 192.168.1.2 netmask 0xffffff00",
        "en1 inet 192.168.1.3 netmask 0xffffff00",
        "en2 inet 10.254.0.2 netmask 0xfffffffc",
    )
    routes = "default 192.168.1.254 UGScg en0\ndefault 192.168.1.254 UGScIg en1\n"
    assert bad(with_output(pair(), ifconfig=text, routes=routes)) == []


def test_one_address_on_two_machines():
    text = ifconfig("en0 inet 192.168.1.2 netmask 0xffffff00", "en2 inet 10.254.0.1 netmask 0xfffffffc")
    assert any("10.254.0.1 of en2 is a's too" in one.detail for one in bad(with_output(pair(), ifconfig=text)))


@pytest.mark.parametrize(
    ("package", "version", "remedy"),
    [
        ("mlx", "0.31.0", "ssh b \"/opt/venv/bin/python3.12 -m pip install 'mlx==0.32.4'\""),
        ("mlx-lm", None, "'mlx-lm==0.32.2'"),
        ("tandem", "0.0.9", "tandem hosts sync --hostfile FILE"),
        ("python", "3.11.9", "3.12"),
    ],
)
def test_versions(package, version, remedy):
    [found] = bad(with_b(pair(), versions={**VERSIONS, package: version}))
    assert (found.check, found.where) == ("versions", "b")
    assert remedy in found.remedy


def test_commits_of_one_version_are_told_apart():
    [found] = bad(with_b(pair(), build="77ab"))
    assert (found.check, found.verdict, found.where) == ("versions", "warn", "b")
    assert "another commit" in found.detail and found.remedy == "tandem hosts sync --hostfile FILE"
    assert bad(with_b(pair(), build="")) == []  # a probe of an earlier version


def test_repairs_on_the_machine_of_an_agent_are_commands_for_its_own_terminal():
    evidence = with_b(pair(), build="77ab", model=ModelFacts(None), outputs={**mac(2).outputs, "power": " lowpowermode  1\n"})
    evidence.facts["agent:b"] = evidence.facts.pop("b")
    evidence.links = {("a", "agent:b"): Transferred(None, 2e-5, 3e9)}
    evidence.hosts[1] = Host("agent:b", "10.254.0.2", ("rdma_en2", None))
    evidence.clocks = evidence.collected = {}
    evidence.planned = None
    remedies = {one.check: one.remedy for one in bad(evidence)}
    assert "agents are used; ssh is not needed" in [one.detail for one in findings(evidence) if one.check == "ssh"]
    evidence.unreachable["agent:b"] = ("no answer", "on b: tandem agent")
    assert [one.where for one in bad(evidence) if one.check == "ssh"] == ["agent:b"]
    assert not [text for text in remedies.values() if "ssh" in text or "agent:" in text]
    assert remedies["power"] == "on b: sudo pmset -a lowpowermode 0"
    assert "on b: /opt/venv/bin/python3.12 -m pip install" in remedies["versions"]
    assert remedies["model"] == "copy /models/m to the same path on b, or serve with --weights-from head"


def test_a_wrong_address_of_the_hosts_file_is_told_before_what_may_withhold_it():
    evidence = pair(backend="ring")
    evidence.hosts[1] = Host("b", "10.254.0.9")
    evidence.links["a", "b"] = Transferred(f"No route to host: {LOCAL_NETWORK}")
    found = next(one for one in bad(evidence) if one.check == "reachable")
    assert found.detail == "10.254.0.9 of the hosts file is not an address of b, which has 192.168.1.2, 10.254.0.2"
    assert "`ips`" in found.remedy


def test_a_version_that_this_machine_lacks_is_that_of_the_others():
    evidence = with_b(pair(), versions={**VERSIONS, "mlx": "0.31.0"})
    evidence.facts["a"].versions["mlx"] = None
    [lacking] = bad(evidence)
    assert (lacking.where, lacking.detail) == ("a", "mlx is not installed")
    assert "'mlx==0.31.0'" in lacking.remedy
    evidence.facts["c"] = mac(3)
    evidence.facts["d"] = mac(4)
    evidence.hosts += [Host("c"), Host("d")]
    assert "mlx is 0.31.0, on c 0.32.4" in [found.detail for found in bad(evidence) if found.check == "versions"]
    for facts in evidence.facts.values():
        facts.versions["mlx"] = None
    assert {found.remedy.split(" -m ")[1].strip('"') for found in bad(evidence) if found.check == "versions"} == {
        "pip install 'mlx'"
    }


def test_builds_are_compared_with_a_macs_where_this_machine_is_none():
    evidence = with_output(pair(), os_build="25D1\n")
    evidence.here = "this machine"
    evidence.facts["this machine"] = structs.replace(mac(3), system="Linux")
    evidence.hosts.append(Host("this machine", ranks=0))
    [found] = [one for one in bad(evidence) if one.check == "macos"]
    assert (found.where, found.detail) == ("b", "build 25D1, on a 25D125")


def test_patch_releases_of_python_are_alike():
    assert bad(with_b(pair(), versions={**VERSIONS, "python": "3.12.9"})) == []


def test_a_copy_of_the_model_that_differs_or_is_not_there():
    other = ModelFacts("/models/m", digests={"config.json": "1", "model.safetensors": "3"})
    [found] = bad(with_b(pair(), model=other))
    assert (found.check, found.where, found.detail) == ("model", "b", "its copy differs: model.safetensors")
    [found] = bad(with_b(pair(), model=ModelFacts(None, "m is not on this machine")))
    assert "rsync -a /models/m/ b:/models/m/" in found.remedy
    assert bad(with_b(pair(weights_from_head=True), model=ModelFacts(None, "m is not on this machine"))) == []
    one = with_b(pair(model="org/m"), model=ModelFacts(None, "not here"))
    assert bad(one) == []  # it is fetched when serving starts, as `a` shows that there is such a model
    one.facts["a"] = structs.replace(one.facts["a"], model=ModelFacts(None, "not here"))
    assert [(found.verdict, found.remedy) for found in bad(one)] == [
        ("warn", "tandem model get org/m"),
        ("warn", 'ssh b "tandem model get org/m"'),
    ]


def test_memory():
    small = PlannedMemory(
        "pp=2", {"a": Need(1 << 30, 40 << 30), "b": Need(50 << 30, 40 << 30)}, "tandem plan m", ("use 4-bit weights",)
    )
    [found] = bad(pair(planned=small))
    assert (found.check, found.verdict, found.where, found.remedy) == (
        "memory",
        "fail",
        "b",
        "tandem plan m   (use 4-bit weights)",
    )
    [found] = bad(with_output(pair(), memory_pages="(page size of 16384 bytes)\nPages free:     100.\n"))
    assert (found.check, found.verdict, found.where) == ("memory", "warn", "b")


def test_single_machines():
    [found] = bad(with_b(pair(ray=[]), hostname_addresses=["127.0.0.1"]))
    assert (found.check, found.verdict, found.where) == ("hostname", "fail", "b")
    [found] = bad(with_b(pair(), hostname_addresses=["127.0.0.1"]))
    assert (found.check, found.verdict, found.where) == ("hostname", "warn", "b")
    assert "sudo scutil --set HostName mac2" in found.remedy
    assert "10.254.0.2 mac2" in found.remedy
    [found] = bad(with_b(pair(), busy_ports=[32323]))
    assert (found.check, found.remedy.split("   ")[0]) == ("ports", 'ssh b "lsof -nP -iTCP:32323"')
    one = pair(own_port=8000)
    one.facts["a"] = structs.replace(one.facts["a"], busy_ports=[8000])
    assert [(line.verdict, line.detail) for line in judged(one) if line.check == "ports"] == [
        ("ok", "Tandem serves at port 8000; others are free")
    ]
    one.facts["b"] = structs.replace(one.facts["b"], busy_ports=[8000])
    assert [found.where for found in bad(one)] == ["b"]


@pytest.mark.parametrize(
    ("ahead", "within", "verdict"), [(0.4, 0.1, None), (2.0, 0.1, "warn"), (-90.0, 0.1, "fail"), (1.0, 0.8, None)]
)
def test_clocks(ahead, within, verdict):
    found = bad(pair(clocks={"b": Clock(ahead, within)}))
    assert [one.verdict for one in found] == ([verdict] if verdict else [])


def test_links():
    evidence = pair()
    evidence.links["a", "b"] = Transferred("timed out")
    assert [(one.check, one.where) for one in bad(evidence)] == [("reachable", "a -> b")]
    with_output(evidence, firewall="Firewall is enabled. (State = 1)")
    firewall = next(one for one in bad(evidence) if one.check == "firewall")
    assert (firewall.verdict, firewall.where) == ("fail", "b")
    assert "nothing arrives from a" in firewall.detail
    evidence = pair()
    evidence.links["a", "b"] = Transferred(None, 1e-4, 1e6)
    assert [(one.check, one.verdict, one.where) for one in bad(evidence)] == [("speed", "fail", "a -> b")]


def test_sums():
    evidence = pair(collected={"a": RankTimes(error="no sum within 60 s"), "b": RankTimes()})
    assert [(one.check, one.where) for one in bad(evidence)] == [("all_sum", "a")]
    evidence = pair(collected={})
    assert [one.verdict for one in judged(evidence) if one.check == "all_sum"] == ["skip"]


@pytest.mark.parametrize(
    ("code", "said", "remedy"),
    [
        (255, "ann@b: Permission denied (publickey,password).", "ssh-copy-id b   (with another user name there: USER@b"),
        (255, "Host key verification failed.", "ssh b hostname"),
        (255, "ssh: connect to host b port 22: Connection timed out", "ping"),
        (255, "ssh: connect to host b port 22: Connection refused", "Remote Login"),
        (255, "ssh: Could not resolve hostname b: nodename nor servname provided, or not known", "/etc/hosts"),
        (
            1,
            "/usr/bin/python: Error while finding module specification for 'tandem.diagnostics.doctor.probe' "
            "(ModuleNotFoundError: No module named 'tandem')",
            "tandem hosts sync --hostfile FILE",
        ),
        (127, "zsh:1: command not found: python3", "--remote-python"),
    ],
)
def test_why_ssh_failed(code, said, remedy):
    found = explain("b", code, ["Warning: Permanently added 'b' to the list of known hosts.", said])
    assert remedy in found.remedy
    assert "Traceback" not in found.message


def test_why_an_agent_failed():
    said = "tandem: agent b: the agent does not answer: is it running there, and still paired with this machine?"
    assert explain("agent:b", 255, [said]).remedy.startswith("on b: tandem agent   (")
    assert explain("agent:b", 255, ["tandem: agent b is not paired with this machine"]).remedy == "tandem hosts pair b"


def test_subnets_for_cables_clash_with_nothing():
    import ipaddress
    import itertools

    used = [ipaddress.IPv4Network(one) for one in ("10.254.0.0/24", "192.168.0.0/16")]
    found = list(itertools.islice(free_subnets(used), 100))
    assert len(set(found)) == 100
    assert not any(one.overlaps(other) for one in found for other in used)
    assert next(free_subnets([ipaddress.IPv4Network("10.0.0.0/8")])).subnet_of(ipaddress.IPv4Network("172.30.0.0/16"))


def test_linux_rules_are_mended_where_they_are():
    rules = json.dumps(
        {"nftables": [{"chain": {"family": "inet", "table": "fw", "name": "in", "hook": "input", "policy": "drop"}}]}
    )
    evidence = with_b(pair(backend="ring"), system="Linux", root=True, outputs={"nft": rules})
    evidence.links["a", "b"] = Transferred("timed out")
    found = next(one for one in bad(evidence) if one.check == "firewall")
    assert found.remedy == 'ssh b "sudo nft insert rule inet fw in ip saddr { 10.254.0.1 } accept"'
