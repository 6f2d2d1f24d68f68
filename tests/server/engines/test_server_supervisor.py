"""How often the api asks the supervisor which engines there are."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tandem.protocol.supervisor import ReplicaInfo, ReplicaList
from tandem.server.engines import supervisor
from tandem.server.engines.supervisor import SupervisorLink
from tandem.supervision.control_socket import ControlServer


@pytest.mark.parametrize(("state", "never"), [("running", "INTERVAL_S"), ("restarting", "INTERVAL_S"),
                                              ("draining", "INTERVAL_S"), ("failed", "BEGIN_S")])
def test_replicas_that_come_or_go_are_asked_after_often_failed_ones_seldom(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: str, never: str) -> None:
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
