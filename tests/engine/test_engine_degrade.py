"""What is remembered of full memories and of machines that fail, without any rank."""

from __future__ import annotations

import pytest

from tandem.engine import degrade
from tandem.engine.degrade import ExcludedMachines, MemoryBackoff
from tandem.errors import RankFailure


def failure(cause: str, rank: int | None = 1) -> RankFailure:
    return RankFailure("rank 1 failed", rank=rank, cause=cause)


def test_limits_are_halved_twice_and_doubled_again_later_each_time() -> None:
    memory = MemoryBackoff()
    assert not memory.restore(1e9), "nothing was halved"
    assert [memory.halve(now) for now in (0.0, 10.0, 20.0)] == [True, True, False]
    assert memory.pause_s == 2 * degrade.WIDEN_S, "it was full again"
    assert not memory.restore(10.0 + 2 * degrade.WIDEN_S - 1)
    assert memory.restore(10.0 + 2 * degrade.WIDEN_S) and memory.halvings == 1
    assert not memory.restore(10.0 + 4 * degrade.WIDEN_S - 1) and memory.restore(10.0 + 4 * degrade.WIDEN_S)
    for _ in range(20):
        memory.halve(1e6)
        memory.restore(1e9)
    assert memory.pause_s == degrade.LATEST_WIDEN_S


@pytest.mark.parametrize(
    ("failures", "usable"),
    [
        ([failure("start")], [0, 1, 2]),
        ([failure("start")] * 2, [0, 2]),
        ([failure("start"), failure("start", 2), failure("start")], [0, 1, 2]),
        ([failure("died")] * 3, [0, 1, 2]),
        ([failure("start", None)] * 2, [0, 1, 2]),
        ([failure("gpu")], [0, 2]),
    ],
    ids=["one start", "two in a row", "not in a row", "deaths", "no rank", "gpu"],
)
def test_which_machines_are_done_without(failures: list[RankFailure], usable: list[int]) -> None:
    machines = ExcludedMachines()
    for one in failures:
        machines.note(one, None, 0.0)
    assert machines.usable([0, 1, 2]) == usable
    assert machines.barred == (usable == [0, 2] and failures[0].cause == "start")


def test_ranks_of_a_smaller_layout_accuse_their_own_places_and_only_of_gpus() -> None:
    machines = ExcludedMachines()
    machines.note(failure("start"), (0, 2), 0.0)
    machines.note(failure("start"), (0, 2), 0.0)
    machines.note(failure("gpu"), (0, 2), 0.0)
    assert machines.usable([0, 1, 2]) == [0, 1] and not machines.barred


def test_a_gpu_is_trusted_again_once_its_machine_has_been_away() -> None:
    machines = ExcludedMachines()
    machines.note(failure("gpu"), None, 0.0)
    assert not machines.all_back([0, 1, 2], 3)
    assert not machines.all_back([0, 2], 3)
    assert machines.all_back([0, 1, 2], 3)


def test_the_full_layout_is_tried_again_at_growing_intervals_until_it_starts() -> None:
    machines, now = ExcludedMachines(), 100.0
    assert machines.due(now) and not machines.due(now + degrade.SEEK_S / 2), "looked for once a second"
    for pause in (degrade.AGAIN_S, 2 * degrade.AGAIN_S, 4 * degrade.AGAIN_S):
        machines.full_layout_failed(failure("start"), now)
        assert not machines.due(now + pause - 0.1) and machines.due(now + pause)
        now += pause
    assert machines.usable([0, 1, 2]) == [0, 1, 2], "that alone bars no machine"
    machines.started(full=False)
    assert machines.pause_s == 8 * degrade.AGAIN_S
    machines.note(failure("gpu"), None, now)
    machines.started(full=True)
    assert machines.pause_s == degrade.AGAIN_S and machines.usable([1]) == [1]
