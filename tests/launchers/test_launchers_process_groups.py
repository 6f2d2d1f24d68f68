"""Environment and files of each backend over several machines, up to the call of MLX."""

from __future__ import annotations

import json

import pytest

from tandem.errors import LayoutError
from tandem.launchers.process_groups import any_process_group, jaccl_process_group, nccl_process_group, ring_process_group

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
    with pytest.raises(LayoutError, match="at most 8 ranks"):
        jaccl_process_group("jaccl", [f"m{i}" for i in range(9)], [[]] * 9, "10.0.0.1:5000")


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
