"""Choosing Ray nodes for ranks: room, order, spreading, and the words for what is missing."""

from __future__ import annotations

import pytest

from tandem.errors import UsageError
from tandem.launchers.ray.nodes import RayNode, check_addresses, choose, shortage


def node(address: str, *, taken: dict[str, float] | None = None, trouble: str = "", **total: float) -> RayNode:
    free = {name: amount - (taken or {}).get(name, 0.0) for name, amount in total.items()}
    return RayNode(f"id-{address}", address, "", total, free, trouble)


def addresses(chosen: list[RayNode] | None) -> list[str] | None:
    return None if chosen is None else [one.address for one in chosen]


class TestUnits:
    def test_a_node_without_the_resource_carries_nothing(self) -> None:
        assert node("10.0.0.1", CPU=8).units({"CPU": 8}) == 0

    def test_a_gpu_counts_on_apple_silicon_alone(self) -> None:
        apple = RayNode("a", "10.0.0.1", "", {"GPU": 1, "accelerator_type:M4-Max": 1}, {"GPU": 1})
        nvidia = RayNode("n", "10.0.0.2", "", {"GPU": 8, "accelerator_type:H200": 1}, {"GPU": 8})
        assert (apple.units(apple.free), nvidia.units(nvidia.free)) == (1, 0)
        assert "Apple silicon only" in nvidia.describe()

    def test_one_device_under_two_names_is_one(self) -> None:
        both = node("10.0.0.1", mlx=1, GPU=1)
        assert both.bundle == {"mlx": 1.0, "GPU": 1.0} and both.units(both.total) == 1
        assert node("10.0.0.1", mlx=2, GPU=1).units({"mlx": 2, "GPU": 1}) == 1

    def test_a_device_that_is_taken_under_its_other_name_is_taken(self) -> None:
        both = node("10.0.0.1", mlx=1, GPU=1, taken={"GPU": 1})
        assert both.units(both.free) == 0


class TestChoice:
    def test_ranks_follow_the_addresses_from_the_engine_on(self) -> None:
        nodes = [node("10.0.0.10", mlx=1), node("10.0.0.9", mlx=1), node("10.0.0.11", mlx=1)]
        assert addresses(choose(nodes, 3, "10.0.0.11")) == ["10.0.0.11", "10.0.0.9", "10.0.0.10"]

    def test_a_replica_stays_together_and_the_next_goes_elsewhere(self) -> None:
        one, two = node("10.0.0.1", mlx=2), node("10.0.0.2", mlx=2)
        assert addresses(choose([one, two], 2, "10.0.0.1")) == ["10.0.0.1", "10.0.0.1"]
        used = node("10.0.0.1", mlx=2, taken={"mlx": 1})
        assert addresses(choose([used, two], 1, "10.0.0.1")) == ["10.0.0.2"]

    def test_lost_nodes_are_left_out_and_suspects_come_last(self) -> None:
        lost, suspect, good = (node(f"10.0.0.{i}", mlx=1, trouble="is lost" if i == 1 else "") for i in (1, 2, 3))
        assert addresses(choose([lost, suspect, good], 1, "10.0.0.1", avoid=["id-10.0.0.2"])) == ["10.0.0.3"]
        assert addresses(choose([lost, suspect, good], 2, "10.0.0.1", avoid=["id-10.0.0.2"])) == ["10.0.0.2", "10.0.0.3"]

    def test_too_little_room_is_no_choice(self) -> None:
        assert choose([node("10.0.0.1", mlx=1), node("10.0.0.2", CPU=2)], 2, "10.0.0.1") is None


def test_a_shortage_says_what_the_cluster_has_and_what_to_do() -> None:
    nodes = [node("10.0.0.1", mlx=1, taken={"mlx": 1}), node("10.0.0.2", CPU=4), node("10.0.0.3", mlx=1, trouble="is lost")]
    text = shortage(nodes, 2, "10.0.0.1:6379")
    for part in (
        "2 rank(s)",
        "has 1, 0 of them free",
        "10.0.0.1: mlx 1, room for 0 of 1",
        "10.0.0.2: no `mlx`",
        "10.0.0.3: is lost",
        "ray start --address=10.0.0.1:6379",
    ):
        assert part in text
    assert "\n" not in text
    assert "end what else uses them" in shortage(nodes[:2], 1, "10.0.0.1:6379")


@pytest.mark.parametrize(
    ("here", "others", "named"),
    [
        ("10.0.0.1", ["127.0.0.1"], "127.0.0.1"),
        ("127.0.0.1", ["10.0.0.2"], "the loopback address 127.0.0.1"),
        ("10.0.0.1", ["10.0.0.1", "127.0.0.1"], "127.0.0.1"),
    ],
)
def test_loopback_and_real_addresses_do_not_mix(here: str, others: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        check_addresses([node(one, mlx=1) for one in others], here)


def test_addresses_of_one_kind_are_fine() -> None:
    check_addresses([node("127.0.0.2", mlx=1), node("127.0.0.3", mlx=1)], "127.0.0.2")
    check_addresses([node("10.0.0.1", mlx=1), node("10.0.0.2", mlx=1)], "10.0.0.1")
