"""Responses that are stored, and conversations that go on from them, with the official client."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import openai
import pytest

from tandem.config.settings import ModelSettings
from tandem.server.responses import answering, background
from tandem.server.store.journal import Entry, Journal

PLAIN = "{% for m in messages %}[{{ m.role }} {{ m.content }}]{% endfor %}"


@pytest.fixture
def place(tmp_path):
    return str(tmp_path / "journal")


@pytest.fixture
def keeps(serve, engine, tmp_path, place):
    """A server with a journal whose template, by default, shows the conversation as it is."""
    path = tmp_path / "plain.jinja"
    engine.reply = engine.tokenizer.encode("Blue.")
    engine.set_status(max_context=100_000)
    model = ModelSettings(model="org/tiny", served_name=("tiny",), chat_template=str(path))

    def start(template=PLAIN, **server):
        path.write_text(template)
        return serve(model=model, journal=place, **server)

    return start


def ask(client, text, previous=None, **fields):
    fields = {"model": "tiny", "store": True, **fields}
    return client.responses.create(input=text, previous_response_id=previous, **fields)


def prompt(engine):
    return engine.tokenizer.decode(engine.last.prompt)


def code_of(response, status=400):
    assert response.status_code == status, response.text
    return response.json()["error"]["code"]


def test_a_conversation_goes_on_from_what_is_kept(keeps, engine):
    server = keeps()
    client = server.openai()
    first = ask(client, "One?", instructions="Be brief.")
    assert (first.to_dict()["store"], first.previous_response_id) == (True, None)
    assert client.responses.retrieve(first.id) == first
    second = ask(client, [{"role": "user", "content": "Two?"}], first.id)
    assert prompt(engine) == "[user One?][assistant Blue.][user Two?]", "instructions are not carried over"
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(second.id) == second
    client.responses.delete(first.id)
    third = ask(client, "Three?", second.id, instructions="Be long.")
    assert prompt(engine) == ("[system Be long.][user One?][assistant Blue.][user Two?][assistant Blue.][user Three?]")
    items = list(client.responses.input_items.list(third.id, order="asc"))
    assert [(item.type, item.role, item.content[0].text) for item in items] == [
        ("message", "user", "One?"),
        ("message", "assistant", "Blue."),
        ("message", "user", "Two?"),
        ("message", "assistant", "Blue."),
        ("message", "user", "Three?"),
    ]
    assert len({item.id for item in items}) == 5
    pages = client.responses.input_items.list(third.id, limit=2)
    assert [item.id for item in pages] == [item.id for item in items[::-1]], "pages follow one another"
    unstored = ask(client, "Four?", third.id, store=False)
    assert unstored.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_streams_are_stored_before_they_end(keeps, engine, monkeypatch):
    client = keeps().openai()
    seconds = itertools.count(1_800_000_000)
    monkeypatch.setattr(answering, "time", SimpleNamespace(time=lambda: next(seconds)))
    with client.responses.create(model="tiny", input="One?", store=True, stream=True) as stream:
        last = list(stream)[-1]
    assert last.type == "response.completed"
    assert client.responses.retrieve(last.response.id) == last.response
    [again] = client.responses.retrieve(last.response.id, stream=True)
    assert again.response == last.response
    ask(client, "Two?", last.response.id, stream=True).close()
    assert prompt(engine) == "[user One?][assistant Blue.][user Two?]"
    cut = ask(client, "Two?", last.response.id, max_output_tokens=1)
    assert cut.status == client.responses.retrieve(cut.id).status == "incomplete"
    ask(client, "Three?", cut.id)


def test_background_and_conversation_go_together(keeps, engine, wait_until):
    client = keeps().openai()
    first = ask(client, "One?", background=True)
    wait_until(lambda: client.responses.retrieve(first.id).status == "completed")
    second = ask(client, "Two?", first.id, background=True)
    wait_until(lambda: client.responses.retrieve(second.id).status == "completed")
    assert prompt(engine) == "[user One?][assistant Blue.][user Two?]"
    assert client.responses.retrieve(second.id).previous_response_id == first.id
    engine.hold = True
    running = ask(client, "Three?", second.id, background=True)
    with pytest.raises(openai.BadRequestError, match="only one that is completed or incomplete"):
        ask(client, "Four?", running.id)
    client.responses.cancel(running.id)
    with pytest.raises(openai.BadRequestError, match="'cancelled'"):
        ask(client, "Four?", running.id)


def test_tools_and_their_results_are_part_of_it(keeps, engine):
    server = keeps(
        "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for m in messages %}[{{ m.role }} "
        "{{ m.content }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}]{% endfor %}"
    )
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
    engine.reply = engine.tokenizer.encode(call)
    client = server.openai()
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
    first = ask(client, "Weather?", tools=[tool])
    [made] = first.output
    ask(client, [{"type": "function_call_output", "call_id": made.call_id, "output": "sunny"}], first.id)
    assert prompt(engine).startswith("[user Weather?][assistant ")
    assert prompt(engine).endswith("[tool sunny]")
    assert '"city": "Paris"' in prompt(engine)


def test_it_survives_another_start_and_is_nobody_elses(keeps, engine):
    server = keeps(api_key=("a", "b"))
    first = ask(server.openai(api_key="a"), "One?")
    server.stop()
    server = keeps(api_key=("a", "b"))
    other = server.openai(api_key="b")
    for theirs in (other.responses.retrieve, other.responses.delete, other.responses.cancel, other.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            theirs(first.id)
    with pytest.raises(openai.BadRequestError, match="not found") as refused:
        ask(other, "Two?", first.id)
    assert refused.value.code == "previous_response_not_found"
    mine = server.openai(api_key="a")
    assert mine.responses.retrieve(first.id) == first
    ask(mine, "Two?", first.id)
    assert prompt(engine) == "[user One?][assistant Blue.][user Two?]"


def test_responses_are_stored_by_default_where_there_is_a_journal(keeps, engine):
    server = keeps(journal_max_gb=60_000 / 2**30)
    client = server.openai()
    first = client.responses.create(model="tiny", input="One?")
    assert first.to_dict()["store"] is True
    client.responses.create(model="tiny", input="Two?", previous_response_id=first.id)
    assert prompt(engine) == "[user One?][assistant Blue.][user Two?]"
    large = client.responses.create(model="tiny", input="x" * 32_000)
    assert (large.status, large.to_dict()["store"]) == ("completed", False), "more than half of the journal"
    assert client.responses.retrieve(first.id) == first


def test_items_are_referred_to_by_their_ids(keeps, engine, wait_until):
    server = keeps("{# </think> #}{% for m in messages %}[{{ m.role }} {{ m.reasoning_content }}|{{ m.content }}]{% endfor %}")
    client = server.openai()
    engine.reply = engine.tokenizer.encode("<think>Hm.</think>Blue.")
    first = ask(client, "One?", store=None)
    [asked] = client.responses.input_items.list(first.id)
    later = ask(client, "Two?", background=True)
    wait_until(lambda: client.responses.retrieve(later.id).status == "completed")
    thought, answer = client.responses.retrieve(later.id).output
    items = [asked, *first.output, thought, answer]
    assert len({item.id for item in items}) == 5
    named = [{"type": "item_reference", "id": asked.id}, *({"id": item.id} for item in items[1:])]
    third = ask(client, [*named, {"role": "user", "content": "Three?"}])
    assert prompt(engine) == "[user |One?][assistant Hm.\nHm.|Blue.\nBlue.][user |Three?]"
    for response in (first, later):
        client.responses.delete(response.id)
    ask(client, [{"type": "item_reference", "id": third.output[1].id}, {"role": "user", "content": "Four?"}], third.id)
    assert prompt(engine).endswith("[user |Three?][assistant Hm.|Blue.\nBlue.][user |Four?]"), "it holds them all"


def test_items_that_are_not_there(keeps):
    server = keeps(api_key=("a", "b"), max_body_mb=0.01)
    item = ask(server.openai(api_key="a"), "x" * 4000).output[0]
    [asked] = server.openai(api_key="a").responses.input_items.list(f"resp_{item.id[4:36]}")
    for key, name in (("b", item.id), ("a", item.id[:-1] + "9"), ("a", "rs_"), ("a", "x" * 10_000), ("a", "msg_%")):
        with pytest.raises(openai.NotFoundError, match="not found. Items are not persisted when 'store' is false") as refused:
            ask(server.openai(api_key=key), [{"role": "user", "content": "a"}, {"type": "item_reference", "id": name}])
        assert (refused.value.param, refused.value.code) == ("input[1]", "item_not_found")
    with pytest.raises(openai.BadRequestError, match="--max-body-mb"):
        ask(server.openai(api_key="a"), [{"type": "item_reference", "id": asked.id}] * 3)
    with pytest.raises(openai.BadRequestError, match="a item_reference item needs 'id'"):
        ask(server.openai(api_key="a"), [{"type": "item_reference"}])


def test_the_remedy_without_a_journal(shared, serve):
    for fields in ({"store": True}, {"previous_response_id": "resp_x"}):
        response = shared.http.post("/v1/responses", json={"input": "hi", **fields})
        assert code_of(response) == "unsupported_parameter"
        assert response.json()["error"]["param"] in fields
        assert "--journal DIR" in response.json()["error"]["message"]
    response = shared.http.post("/v1/responses", json={"input": [{"type": "item_reference", "id": "msg_x"}]})
    assert code_of(response) == "unsupported_parameter" and "--journal DIR" in response.json()["error"]["message"]
    soft = serve(unknown_fields="ignore")
    response = soft.http.post("/v1/responses", json={"input": "hi", "store": True})
    assert (response.json()["store"], response.headers["x-tandem-ignored-fields"]) == (False, "store")
    for fields in ({"store": False}, {"store": None}, {"previous_response_id": None}, {"previous_response_id": ""}):
        assert shared.http.post("/v1/responses", json={"input": "hi", **fields}).json()["store"] is False


@pytest.mark.parametrize(
    "name",
    [
        "resp_",
        "resp_none",
        "req-x",
        "../../etc/passwd",
        "resp_' OR 1=1 --",
        "x" * 100_000,
        "resp_\x00",
        "resp_%",
        5,
        ["resp_x"],
        {"id": "x"},
        True,
    ],
)
def test_odd_ids(journalled, name):
    response = journalled.http.post("/v1/responses", json={"input": "hi", "previous_response_id": name})
    assert code_of(response) in ("previous_response_not_found", "invalid_type")
    assert len(response.text) < 1000


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=x", "limit"), ("limit=101", "limit"), ("limit=" + "9" * 5000, "limit"), ("order=up", "order")],
)
def test_pages_at_fault(journalled, query, param):
    first = ask(journalled.openai(), "One?")
    response = journalled.http.get(f"/v1/responses/{first.id}/input_items?{query}")
    assert code_of(response) == "invalid_value"
    assert response.json()["error"]["param"] == param
    assert code_of(journalled.http.get(f"/v1/responses/{first.id}/input_items?after=x"), 404) == "not_found"


def test_a_full_disk_costs_the_storing_alone(keeps):
    server = keeps()
    first = ask(server.openai(), "One?")
    journal = server.app.state.jobs.journal
    pages = journal._database.execute("PRAGMA page_count").fetchone()[0]
    journal._database.execute(f"PRAGMA max_page_count = {pages}")
    long = ask(server.openai(), "word " * 5000, first.id)
    assert (long.status, long.to_dict()["store"]) == ("completed", False)
    with server.openai().responses.create(model="tiny", input="word " * 5000, store=True, stream=True) as stream:
        last = list(stream)[-1]
    assert (last.type, last.response.to_dict()["store"]) == ("response.completed", False)
    assert server.openai().responses.retrieve(first.id) == first


def test_a_conversation_that_outgrows_the_body_limit_is_refused(keeps):
    server = keeps(max_body_mb=0.01)
    first = ask(server.openai(), "x" * 6000)
    with pytest.raises(openai.BadRequestError, match="--max-body-mb"):
        ask(server.openai(), "x" * 6000, first.id)


def test_a_response_that_is_deleted_while_it_is_read_is_not_there(keeps, monkeypatch):
    client = keeps().openai()
    first = ask(client, "One?")
    kept = background.kept

    async def found_and_gone(http, name):
        stored = await kept(http, name)
        await stored.jobs.forget(stored.entry)
        return stored

    monkeypatch.setattr(background, "kept", found_and_gone)
    with pytest.raises(openai.NotFoundError, match="while it was read"):
        ask(client, "Two?", first.id)


def test_other_fields_are_named_once(keeps):
    server = keeps()
    first = ask(server.openai(), "One?")
    body = {"input": "Two?", "previous_response_id": first.id, "user": "u"}
    assert server.http.post("/v1/responses", json=body).headers["x-tandem-ignored-fields"] == "user"


def test_the_oldest_go_first_where_there_is_too_much(tmp_path):
    now = 1000.0
    journal = Journal(tmp_path / "journal", clock=lambda: now, max_bytes=600_000)
    body = json.dumps({"input": "x" * 10_000}).encode()
    with journal.transaction():
        for number in range(100):
            key = "kept" if number == 0 else ""
            journal.keep(Entry(0, f"req-{number}", "g", key, b"d", "/v1/responses", now, 0), body, b"answer")
    while journal.tidy(3600.0):
        pass
    with journal.transaction():
        left = [number for number in range(100) if journal.find("g", f"req-{number}", everybody=False)]
    assert left[0] == 0, "an Idempotency-Key holds"
    assert left[-1] == 99
    assert left[1:] == list(range(left[1], 100))
    assert 20 < len(left) < 60
    journal.close()
