"""Background responses: kept, followed, stopped, forgotten, and taken up again after the death of the server."""

from __future__ import annotations

import itertools
import json

import openai
import pytest

ASK = {"model": "tiny", "input": "hi", "background": True, "metadata": {"order": "4711"}}


@pytest.fixture
def place(tmp_path):
    return str(tmp_path / "journal")


def finished(client, response_id, wait_until):
    wait_until(lambda: client.responses.retrieve(response_id).status not in ("queued", "in_progress"))
    return client.responses.retrieve(response_id)


def beginning(client, count):
    """The first events of a response, whose client then leaves."""
    with client.responses.create(**ASK, stream=True) as stream:
        return list(itertools.islice(stream, count))


def test_it_is_answered_without_a_client_and_kept(serve, engine, place, wait_until):
    server = serve(journal=place)
    client = server.openai()
    engine.hold = True
    started = client.responses.create(**ASK)
    assert started.status in ("queued", "in_progress") and (started.background, started.output) == (True, [])
    wait_until(lambda: client.responses.retrieve(started.id).status == "in_progress")
    engine.hold = False
    done = finished(client, started.id, wait_until)
    assert (done.id, done.status, done.output_text) == (started.id, "completed", engine.text())
    assert done.metadata == {"order": "4711"} and done.usage.output_tokens > 0
    assert done.created_at == started.created_at and done.background
    assert server.http.get(f"/v1/requests/req-{started.id[5:]}").status_code == 404, "one place for each"
    again = serve(journal=str(place) + "2")
    with pytest.raises(openai.NotFoundError):
        again.openai().responses.retrieve(started.id)


def test_who_may_run_one_request_can_follow_it(serve, place):
    server = serve(journal=place, max_concurrent_requests=1)
    for _ in range(2):
        with server.openai().responses.create(**ASK, stream=True) as stream:
            assert list(stream)[-1].type == "response.completed"


def test_its_events_can_be_followed_from_anywhere(serve, engine, place, wait_until):
    server = serve(journal=place, heartbeat_s=0.05)
    client = server.openai()
    engine.delay = 0.02
    first = beginning(client, 6)
    assert [event.sequence_number for event in first] == list(range(6))
    assert first[0].type == "response.created"
    response_id = first[0].response.id
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=5))
    assert [event.sequence_number for event in rest] == list(range(6, 6 + len(rest)))
    assert rest[-1].type == "response.completed"
    text = "".join(event.delta for event in [*first, *rest] if event.type == "response.output_text.delta")
    assert text == engine.text() == rest[-1].response.output_text
    later = list(client.responses.retrieve(response_id, stream=True))
    assert later == [*first, *rest]
    assert client.responses.retrieve(response_id) == rest[-1].response
    assert len(engine.submitted) == 1 and not engine.aborted
    bad = server.http.get(f"/v1/responses/{response_id}?stream=true&starting_after=x")
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "starting_after"


def test_cancelling_and_deleting(serve, engine, place, wait_until):
    server = serve(journal=place)
    client = server.openai()
    engine.hold = True
    started = client.responses.create(**ASK)
    wait_until(lambda: engine.submitted)
    assert client.responses.cancel(started.id).status == "cancelled"
    wait_until(lambda: engine.aborted == set(engine.submitted))
    assert client.responses.cancel(started.id).status == client.responses.retrieve(started.id).status == "cancelled"
    [event] = client.responses.retrieve(started.id, stream=True)
    assert (event.type, event.response.status) == ("response.failed", "cancelled")
    other = client.responses.create(**ASK)
    wait_until(lambda: len(engine.submitted) == 2)
    client.responses.delete(other.id)
    wait_until(lambda: engine.aborted == set(engine.submitted))
    engine.hold = False
    for response_id in (other.id, "resp_none", "none"):
        with pytest.raises(openai.NotFoundError, match="not found"):
            client.responses.retrieve(response_id)
    done = finished(client, client.responses.create(**ASK).id, wait_until)
    assert client.responses.cancel(done.id) == done, "what is over stays as it is"
    assert server.http.delete(f"/v1/responses/{done.id}").json() == {"id": done.id, "object": "response", "deleted": True}


def test_it_waits_through_overload_and_keeps_what_cannot_be(serve, engine, place, wait_until):
    server = serve(journal=place)
    client = server.openai()
    engine.refusal = (429, "full", "overloaded", 1.0)
    waits = client.responses.create(**ASK)
    wait_until(lambda: engine.submitted)
    assert client.responses.retrieve(waits.id).status in ("queued", "in_progress")
    engine.refusal = None
    assert finished(client, waits.id, wait_until).status == "completed"
    long = finished(client, client.responses.create(**{**ASK, "input": "x " * 500}).id, wait_until)
    assert long.status == "failed" and long.error.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="max_output_tokens"):
        client.responses.create(**ASK, max_output_tokens=0)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.responses.create(**{**ASK, "model": "other"})


def test_the_next_server_goes_on_with_the_same_seed_and_ids(serve, engine, place, wait_until):
    server = serve(journal=place)
    engine.outputs = 4
    before = beginning(server.openai(), 8)
    [lost] = engine.submitted.values()
    server.stop()
    engine.outputs = None
    client = serve(journal=place).openai()
    response_id = before[0].response.id
    done = finished(client, response_id, wait_until)
    [again] = [one for one in engine.submitted.values() if one is not lost]
    assert again.params.seed == lost.params.seed is not None
    assert (done.status, done.output_text, done.created_at) == ("completed", engine.text(), before[0].response.created_at)
    after = list(client.responses.retrieve(response_id, stream=True))
    assert after[:8] == before
    assert done.output[0].id == before[2].item.id


def test_keys_and_the_remedy_without_a_journal(serve, place):
    server = serve(journal=place, api_key=("a", "b"))
    started = server.openai(api_key="a").responses.create(**ASK)
    with pytest.raises(openai.NotFoundError):
        server.openai(api_key="b").responses.retrieve(started.id)
    plain = serve(ready=False).wait_ready()
    response = plain.http.post("/v1/responses", content=json.dumps(ASK))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "background" and "--journal DIR" in response.json()["error"]["message"]
    assert plain.http.get("/v1/responses/resp_x").status_code == 404
