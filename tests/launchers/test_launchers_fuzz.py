"""Hostfiles, token files, what mlx.launch leaves in the environment, and node agents that send nonsense."""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.config.api_keys import ClientLimits, read_key_file
from tandem.errors import ConfigError
from tandem.launchers.host_facts import host_facts, launched_process_group
from tandem.launchers.hostfile import HOST_FIELDS, TOP_FIELDS, read_hostfile
from tandem.launchers.manual import read_token
from tandem.launchers.membership import Membership
from tandem.planner.hosts import read_hosts
from tandem.protocol.hosts import HostMessage, Join, Leave, MlxProcessGroup, Ports, RankStarted
from tandem.protocol.keys import ClusterKeys

FUZZ = settings(max_examples=120, derandomize=True, deadline=None, database=None)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=6),
        st.sampled_from(["10.0.0.1", "mac1", "64GB", "9" * 400 + "GB", "ring", "A=b", "=", "\ud800", "-x", 10**400]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(HOST_FIELDS), inner, max_size=3),
    max_leaves=6,
)
ENTRY = st.dictionaries(st.sampled_from([*HOST_FIELDS, "shs"]), VALUES, max_size=4)
TOP = st.dictionaries(st.sampled_from([*TOP_FIELDS, "x"]), VALUES | st.lists(ENTRY, max_size=3), max_size=3)
READERS = (read_hostfile, lambda path: read_hosts([], path), read_token, lambda path: read_key_file(path, ClientLimits()))


def refused(path, read):
    """Reads, or refuses in one line."""
    try:
        read(str(path))
    except ConfigError as error:
        assert error.message and "\n" not in error.message


@FUZZ
@given(st.lists(ENTRY, max_size=3) | TOP)
def test_hostfiles_with_values_of_any_kind(content):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "hosts.json"
        path.write_text(json.dumps(content))
        for read in READERS[:2]:
            refused(path, read)


@FUZZ
@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,0123456789eE.-nul abc\n=', max_size=40).map(str.encode))
def test_files_of_any_bytes(content):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "file"
        path.write_bytes(content)
        path.chmod(0o600)
        for read in READERS:
            refused(path, read)


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"hosts":' * 20_000, b"9" * 10_000, b'[{"ssh": "a", "memory": ' + b"9" * 4000 + b"}]", b"\xff\xfe"],
)
@pytest.mark.parametrize("read", READERS)
def test_files_that_go_too_far(tmp_path, content, read):
    (tmp_path / "file").write_bytes(content)
    (tmp_path / "file").chmod(0o600)
    refused(tmp_path / "file", read)
    refused("\0", read)
    refused(tmp_path, read)


@pytest.mark.parametrize("rank", ["0", "-1", "x", "9" * 5000])
@pytest.mark.parametrize("content", ["", "[]", "{}", "[[1]]", '[["a"]]', "[" * 100_000, '[[":"]]', '[["10.0.0.1:5"]]', "\xff"])
def test_what_mlx_launch_leaves(tmp_path, monkeypatch, rank, content):
    (tmp_path / "hosts").write_bytes(content.encode("latin-1"))
    for name in ("MLX_HOSTFILE", "MLX_IBV_DEVICES"):
        monkeypatch.setenv(name, str(tmp_path / "hosts"))
    monkeypatch.setenv("MLX_RANK", rank)
    try:
        process_group = launched_process_group()
    except ConfigError as error:
        assert "mlx.launch" in error.message and "\n" not in error.message
    else:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(process_group), type=MlxProcessGroup) == process_group


def test_the_membership_survives_rank_hosts_that_send_nonsense():
    keys, draw = ClusterKeys.generate(), random.Random(0)
    membership = Membership(keys, "127.0.0.1", 0, 20.0, tickets=False)
    good = Join(facts=host_facts("127.0.0.1"), host_id="h", attempt=1, head="127.0.0.1", slot=0)
    whole = msgspec.msgpack.encode(good)
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as member:
            member.linger = 0
            keys.secure_connect(member)
            member.connect(f"tcp://127.0.0.1:{membership.port}")
            messages: list[HostMessage] = [Ports(1, [2]), RankStarted(1, 2), Leave()]
            for _ in range(100):
                cut = draw.randrange(len(whole))
                for frames in (
                    [b""],
                    [whole[:cut]],
                    [whole[:cut], whole[cut:]],
                    [b"\x91" * 30_000],
                    [draw.randbytes(20) + b"\xc1"],
                    [msgspec.msgpack.encode(draw.choice(messages))],
                ):
                    member.send_multipart(frames)
            for name, value in (("slot", -1), ("mlx", {"rank": -100})):
                member.send(msgspec.msgpack.encode({**msgspec.to_builtins(good), name: value}))
            member.send(whole)
            deadline = time.monotonic() + 240
            while (found := membership.fill(1)) == [None]:
                assert time.monotonic() < deadline
                membership.wait(0.1)
            assert found[0] is not None and found[0].join == good
    finally:
        membership.close()
