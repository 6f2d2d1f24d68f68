"""How often the api asks the supervisor which engines there are, and which answers it takes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tandem.protocol.supervisor_messages import Done, ListReplicas, LoadModel, ReplicaInfo, ReplicaList, SupervisorRequest
from tandem.server.engines import supervisor
from tandem.server.engines.supervisor import SupervisorLink
from tandem.supervision.control_socket import ControlServer


@pytest.mark.parametrize(
    ("state", "never"),
    [("running", "INTERVAL_S"), ("restarting", "INTERVAL_S"), ("draining", "INTERVAL_S"), ("failed", "BEGIN_S")],
)
def test_replicas_that_come_or_go_are_asked_after_often_failed_ones_seldom(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: str, never: str
) -> None:
    """One of the two pauses never ends, so that a second answer shows that it was the other one."""
    monkeypatch.setattr(supervisor, never, 1e6)
    control = ControlServer(tmp_path / "s", lambda _: ReplicaList([ReplicaInfo(0, "ipc://none", state, 1, 0)]))
    answers = 0

    async def count(latest: ReplicaList) -> None:
        nonlocal answers
        answers += latest.replicas[0].state == state

    async def two_answers() -> None:
        link = SupervisorLink(tmp_path / "s")
        await link.start(count)
        try:
            async with asyncio.timeout(30):
                while answers < 2:
                    await asyncio.to_thread(control.serve, 0.02)
        finally:
            await link.close()

    try:
        asyncio.run(two_answers())
    finally:
        control.close()


def test_a_list_that_was_asked_for_before_a_command_is_not_handed_on(tmp_path: Path) -> None:
    """It may tell of the model as it was before."""
    numbers: list[int] = []

    def answer(request: SupervisorRequest) -> Done | ReplicaList:
        if not isinstance(request, ListReplicas):
            return Done()
        numbers.append(request.number)
        return ReplicaList([], number=request.number if len(numbers) > 1 else 0)

    control = ControlServer(tmp_path / "s", answer)
    lists: list[int] = []

    async def take(latest: ReplicaList) -> None:
        lists.append(latest.number)

    async def until_listed() -> None:
        link = SupervisorLink(tmp_path / "s")
        await link.start(take)
        link.tell(LoadModel("a"))
        try:
            async with asyncio.timeout(30):
                while not lists:
                    await asyncio.to_thread(control.serve, 0.02)
        finally:
            await link.close()

    try:
        asyncio.run(until_listed())
    finally:
        control.close()
    assert lists[0] == numbers[1] > numbers[0]
