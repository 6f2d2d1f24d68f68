"""/v1/events: what happened to the server, with reasons, as each client may see it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tandem.protocol.events import History
from tandem.protocol.supervisor_messages import Done, ListReplicas, NoteEvent, ReplicaList
from tandem.server.context import key_group
from tandem.server.engines.supervisor import SupervisorLink
from tandem.supervision.control_socket import ControlServer


def history() -> History:
    made = History()
    made.note(
        "rank_lost",
        "rank 1 was killed (SIGKILL); all ranks are replaced",
        level="error",
        rank=1,
        remedy="Nothing to do if it stays at this once.",
    )
    made.note("ranks_replaced", "2 rank(s) serve again after 1.5 s; 3 request(s) go on")
    made.note("request_refused", "a request is not tried again", level="error", request_id="chatcmpl-7", group=key_group("first"))
    return made


def wait_for(client, count, **headers):
    """The api asks the engine how it is once in a while."""
    while len(found := client.get("/v1/events", headers=headers).json()["data"]) < count:
        pass
    return found


def test_events_have_time_kind_reason_and_remedy(serve, engine) -> None:
    server = serve()
    engine.set_status(events=history().after())
    lost, back, refused = wait_for(server.http, 3)
    assert (lost["kind"], lost["level"], lost["rank"], lost["replica"]) == ("rank_lost", "error", 1, 0)
    assert "SIGKILL" in lost["text"] and lost["remedy"].startswith("Nothing to do") and lost["time"] > 1.7e9
    assert back["remedy"] is None and refused["request_id"] == "chatcmpl-7", "without keys nothing is hidden"
    assert [one["number"] for one in (lost, back, refused)] == [1, 2, 3]
    assert "group" not in lost and "origin" not in lost
    answer = server.http.get("/v1/events?after=1&limit=1").json()
    assert [one["number"] for one in answer["data"]] == [3] and answer["last"] == 3
    assert "events" not in server.http.get("/v1/status").json()["engine"]


def test_the_id_of_a_request_is_for_its_own_key(serve, engine) -> None:
    server = serve(api_key=("first", "second"))
    engine.set_status(events=history().after())
    assert server.http.get("/v1/events").status_code == 401
    [*_, mine] = wait_for(server.http, 3, authorization="Bearer first")
    [*_, theirs] = wait_for(server.http, 3, authorization="Bearer second")
    assert mine["request_id"] == "chatcmpl-7" and theirs["request_id"] is None
    assert {**mine, "request_id": None} == theirs


@pytest.mark.parametrize(
    ("query", "named"),
    [("limit=0", "limit"), ("limit=100000", "limit"), ("after=-1", "after"), ("after=x", "after"), ("since=3", "since")],
)
def test_a_wrong_query_is_named(shared, query: str, named: str) -> None:
    answer = shared.http.get(f"/v1/events?{query}")
    assert answer.status_code == 400 and named in answer.json()["error"]["message"]


def test_the_supervisor_keeps_them_for_the_next_api(tmp_path: Path) -> None:
    kept, asked = history(), []

    def answer(request):
        if isinstance(request, NoteEvent):
            kept.take([request.event])
            return Done()
        assert isinstance(request, ListReplicas)
        asked.append(request.events_after)
        return ReplicaList([], events=kept.after(request.events_after))

    control = ControlServer(tmp_path / "s", answer)

    async def one_api() -> list[str]:
        link = SupervisorLink(tmp_path / "s")

        async def listed(_: ReplicaList) -> None:
            return None

        await link.start(listed)
        own = History()
        try:
            async with asyncio.timeout(60):
                while len(link.events) < 3:
                    await asyncio.to_thread(control.serve, 0.02)
                before = len(link.events)
                link.tell(NoteEvent(own.note("request_refused", "by this api")))
                while len(link.events) == before:
                    await asyncio.to_thread(control.serve, 0.02)
        finally:
            await link.close()
        assert asked[0] == 0 and asked[-1] >= 3, "what it has is not sent again"
        return [one.text for one in link.events]

    try:
        first, second = asyncio.run(one_api()), asyncio.run(one_api())
    finally:
        control.close()
    assert len(first) == 4 and first[-1] == "by this api" and second[:4] == first and len(second) == 5
