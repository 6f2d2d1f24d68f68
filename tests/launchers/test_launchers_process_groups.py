"""Environment and files of each backend over several machines, up to the call of MLX."""

from __future__ import annotations

import json

import pytest

from tandem.env import child_environment
from tandem.errors import LayoutError
from tandem.launchers import node_agent
from tandem.launchers.process_groups import any_process_group, jaccl_process_group, nccl_process_group, ring_process_group
from tandem.protocol.hosts import StartRank

MESH = [[None, "a", "b"], ["c", None, "d"], ["e", "f", None]]
NAMES = ["m0", "m1", "m2"]


def test_ring_ranks_get_the_same_file_and_their_number() -> None:
    process_group = ring_process_group([["10.0.0.1:5000", "10.0.1.1:5001"], ["10.0.0.2:5000", "10.0.1.2:5001"]])
    assert process_group.backend == "ring" and [process_group.variables(i) for i in range(2)] == [
        {"MLX_RANK": "0"},
        {"MLX_RANK": "1"},
    ]
    content = json.loads(process_group.files(1)["MLX_HOSTFILE"])
    assert process_group.files(0) == process_group.files(1) and content[1] == ["10.0.0.2:5000", "10.0.1.2:5001"]


def test_jaccl_ranks_get_devices_and_the_coordinator() -> None:
    process_group = jaccl_process_group("jaccl", NAMES, MESH, "10.0.0.1:5000")
    assert process_group.variables(2) == {"MLX_RANK": "2", "MLX_JACCL_COORDINATOR": "10.0.0.1:5000"}
    assert json.loads(process_group.files(0)["MLX_IBV_DEVICES"]) == MESH


def test_a_jaccl_ring_needs_neighbours_alone() -> None:
    square = [[None, "a", None, "b"], ["c", None, "d", None], [None, "e", None, "f"], ["g", None, "h", None]]
    process_group = jaccl_process_group("jaccl-ring", ["m0", "m1", "m2", "m3"], square, "10.0.0.1:5000")
    assert process_group.backend == "jaccl-ring" and process_group.variables(0)["MLX_JACCL_RING"] == "1"
    with pytest.raises(LayoutError, match="lists no RDMA device of m0 for m2; complete `rdma` of m0, or use ring"):
        jaccl_process_group("jaccl", ["m0", "m1", "m2", "m3"], square, "10.0.0.1:5000")


def test_devices_that_are_missing_are_named() -> None:
    with pytest.raises(LayoutError, match="lists 0 RDMA devices for m1"):
        jaccl_process_group("jaccl", NAMES, [MESH[0], [], MESH[2]], "10.0.0.1:5000")
    with pytest.raises(LayoutError, match="`rdma` of m1 lists en9 for itself; put null there"):
        jaccl_process_group("jaccl", NAMES[:2], [[None, "a"], ["b", "en9"]], "10.0.0.1:5000")
    with pytest.raises(LayoutError, match="at most 8 ranks"):
        jaccl_process_group("jaccl", [f"m{i}" for i in range(9)], [[]] * 9, "10.0.0.1:5000")


def test_several_cables_for_a_pair_are_as_many_at_both_ends() -> None:
    """As MLX's reader has them: a list for a pair; unequal ends would wait for one another without end."""
    rows = [[None, ["en2", "en3"]], [["en4", "en5"], None]]
    assert json.loads(jaccl_process_group("jaccl", NAMES[:2], rows, "10.0.0.1:5000").files(1)["MLX_IBV_DEVICES"]) == rows
    with pytest.raises(LayoutError, match="`rdma` of m0 lists 2 devices for m1, and that of m1 1 for m0; list one for"):
        jaccl_process_group("jaccl", NAMES[:2], [rows[0], ["en4", None]], "10.0.0.1:5000")


def test_nccl_ranks_meet_at_the_first() -> None:
    process_group = nccl_process_group(2, "10.0.0.1:5000")
    assert process_group.variables(1) == {"MLX_RANK": "1", "MLX_WORLD_SIZE": "2", "NCCL_HOST_IP": "10.0.0.1", "NCCL_PORT": "5000"}
    assert process_group.files(1) == {}


def test_any_offers_all_that_is_there() -> None:
    ring = ring_process_group([["10.0.0.1:1"], ["10.0.0.2:1"]])
    rdma = jaccl_process_group("jaccl", NAMES[:2], [[None, "a"], ["b", None]], "10.0.0.1:2")
    assert set(any_process_group(ring, None).files(0)) == {"MLX_HOSTFILE"}
    both = any_process_group(ring, rdma)
    assert both.backend == "any" and set(both.files(1)) == {"MLX_HOSTFILE", "MLX_IBV_DEVICES"}
    assert both.variables(1) == {"MLX_RANK": "1", "MLX_JACCL_COORDINATOR": "10.0.0.1:2"}


def test_ranks_inherit_no_group_from_the_shell_that_started_their_host(monkeypatch):
    """jaccl reads JACCL_* before MLX_*, so that these would win over what the head says."""
    for name in ("JACCL_RANK", "JACCL_IBV_DEVICES", "JACCL_COORDINATOR", "JACCL_RING", "MLX_RANK", "NCCL_PORT"):
        monkeypatch.setenv(name, "7")
    order = StartRank(1, 0, b"{}", {"A": "b"}, {}, {}, 1)
    environment = child_environment(node_agent._variables(order))
    assert {name: value for name, value in environment.items() if value == "7"} == {}
    assert environment["A"] == "b"
