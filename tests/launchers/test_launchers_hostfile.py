"""MLX's hostfile as it stands; a mistake is named with entry, field, value and remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.errors import ConfigError
from tandem.launchers.hostfile import HostEntry, hosts_of, read_hostfile

WHOLE = {
    "backend": "jaccl",
    "envs": ["MLX_METAL_FAST_SYNCH=1", "A=b=c"],
    "hosts": [
        {"ssh": "mac1", "ips": ["10.0.0.1"], "rdma": [None, "rdma_en2"]},
        {
            "ssh": "me@mac2",
            "ips": ["10.0.0.2", "10.0.1.2"],
            "rdma": [["rdma_en2", "rdma_en3"], None],
            "memory": "64GB",
            "python": "/opt/py",
        },
    ],
}


def written(tmp_path: Path, content: object) -> str:
    path = tmp_path / "hosts.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_everything_that_mlx_writes_is_read(tmp_path: Path) -> None:
    read = read_hostfile(written(tmp_path, WHOLE))
    assert read.backend == "jaccl" and read.envs == (("MLX_METAL_FAST_SYNCH", "1"), ("A", "b=c"))
    assert read.hosts[0] == HostEntry(ssh="mac1", ips=("10.0.0.1",), rdma=(None, "rdma_en2"))
    assert read.hosts[1].rdma == (("rdma_en2", "rdma_en3"), None)
    assert read.hosts[1].memory_bytes == 64 * 2**30 and read.hosts[1].python == "/opt/py"


def test_the_bare_list_form_and_what_mlx_leaves_empty(tmp_path: Path) -> None:
    hosts = [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"], "rdma": []}, {"ssh": "b"}]
    for content in (hosts, {"backend": "", "envs": [], "hosts": hosts}):
        read = read_hostfile(written(tmp_path, content))
        assert [one.ssh for one in read.hosts] == ["127.0.0.1", "b"] and read.backend is None
    assert [one.is_here for one in read.hosts] == [True, False]


def test_entries_choose_hosts_in_order(tmp_path: Path) -> None:
    read = read_hostfile(written(tmp_path, [{"ssh": name} for name in "abc"]))
    assert [one.ssh for one in hosts_of(read, (2, 0))] == ["c", "a"]
    with pytest.raises(ConfigError, match=r"--host-entries 3: .* has 3 hosts"):
        hosts_of(read, (3,))


def host(**fields: object) -> list[dict[str, object]]:
    return [{"ssh": "a"}, {"ssh": "b", **fields}]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", r"line 1, column 2: is not valid JSON"),
        ("[]", '"hosts" must be a list with at least one host'),
        ("3", "must be a list of hosts"),
        ({"hosts": 3}, '"hosts" must be a list'),
        ({"host": []}, "'host' is not a field of a hostfile; did you mean 'hosts'"),
        ({"backend": "rign", "hosts": host()}, "backend is 'rign'; must be one of ring, jaccl"),
        ({"envs": "A=1", "hosts": host()}, r"envs is 'A=1'; must be a list"),
        ({"envs": ["A"], "hosts": host()}, r"envs\[0\] is 'A'; must be a text such as"),
        ({"envs": ["=1"], "hosts": host()}, r"envs\[0\] is '=1'"),
        ({"envs": [3], "hosts": host()}, r"envs\[0\] is 3"),
        (["a"], "host 0 is 'a'; must be an object"),
        ([{"ips": []}], "host 0: ssh is None; must be what `ssh` is given"),
        ([{"ssh": "-oProxyCommand=x"}], "host 0: ssh is '-oProxyCommand=x'"),
        ([{"ssh": "a b"}], "host 0: ssh is 'a b'"),
        ([{"ssh": "a\x1b[31m"}], r"host 0: ssh is 'a\\x1b\[31m'"),
        ([{"ssh": "a\0"}], r"host 0: ssh is 'a\\x00'"),
        ([{"ssh": "a\ud800"}], r"host 0: ssh is 'a\\ud800'"),
        (host(python="/a\0"), r"host 1 \(b\): python is '/a\\x00'"),
        ({"envs": ["A=\0"], "hosts": host()}, r"envs\[0\] is 'A=\\x00'"),
        (host(ip="10.0.0.1"), r"host 1 \(b\): 'ip' is not a field of a hostfile; did you mean 'ips'"),
        (host(ips="10.0.0.1"), r"host 1 \(b\): ips is '10.0.0.1'; must be a list"),
        (host(ips=["mac1"]), r"host 1 \(b\): ips has 'mac1'; must be IPv4 .* `ssh b ifconfig`"),
        (host(ips=["fe80::1"]), r"host 1 \(b\): ips has 'fe80::1'"),
        (host(ips=[3]), r"host 1 \(b\): ips has 3"),
        (host(address="mac1"), r"host 1 \(b\): address is 'mac1'; must be the IPv4 address at which all other hosts"),
        (host(address="0.0.0.0"), r"host 1 \(b\): address is '0.0.0.0'"),
        (host(address=["10.0.0.1"]), r"host 1 \(b\): address is \['10.0.0.1'\]"),
        (host(rdma="en2"), r"host 1 \(b\): rdma is 'en2'; must be a list"),
        (host(rdma=["rdma_en2"]), r"host 1 \(b\): rdma has 1 entries; must have one for each of the 2 hosts"),
        (host(rdma=["", None]), r"host 1 \(b\): rdma has ''; must be a device"),
        (host(rdma=[[], None]), r"host 1 \(b\): rdma has \[\]"),
        (host(python=""), r"host 1 \(b\): python is ''"),
        (host(memory="lots"), r"host 1 \(b\): memory: 'lots' is not a memory size"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(tmp_path: Path, content: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_hostfile(written(tmp_path, content))
    assert caught.value.message.startswith(f"--hostfile {tmp_path / 'hosts.json'}: ")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_hostfile(str(tmp_path / "none.json"))
