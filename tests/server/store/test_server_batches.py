"""/v1/files and /v1/batches with the official client, against a live server whose engine answers from a script."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sqlite3
import stat
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import openai
import pytest

from tandem.errors import ConfigError, RequestError
from tandem.server.store import batches
from tandem.server.store.files import Files
from tandem.server.store.journal import KEPT_OPEN, LINE, Entry, Journal

CHAT = "/v1/chat/completions"
BODIES = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    "/v1/completions": {"model": "tiny", "prompt": "hi", "max_tokens": 5},
    "/v1/embeddings": {"model": "tiny", "input": "hi"},
    "/v1/responses": {"model": "tiny", "input": "hi", "max_output_tokens": 5},
}


@pytest.fixture
def place(tmp_path):
    return tmp_path / "journal"


@pytest.fixture
def keeps(serve, place):
    return lambda **server: serve(journal=str(place), **server)


def line(name, endpoint=CHAT, **body):
    return json.dumps({"custom_id": name, "method": "POST", "url": endpoint, "body": {**BODIES[endpoint], **body}})


def upload(client, *lines, name="in.jsonl", **more):
    return client.files.create(file=(name, "\n".join(lines).encode()), purpose="batch", **more)


def begin(client, *lines, endpoint=CHAT, **more):
    file = upload(client, *lines)
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


def over(client, batch, wait_until):
    ends = ("completed", "failed", "expired", "cancelled")
    wait_until(lambda: client.batches.retrieve(batch.id).status in ends, 240.0)
    return client.batches.retrieve(batch.id)


def results(client, file_id):
    if file_id is None:
        return {}
    found = [json.loads(one) for one in client.files.content(file_id).text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found), "answered twice"
    return {one["custom_id"]: one for one in found}


def error_of(response, status=400):
    assert response.status_code == status, response.text
    return response.json()["error"]


@pytest.mark.parametrize("endpoint", BODIES)
def test_a_batch_from_upload_to_results(keeps, engine, wait_until, endpoint, place):
    server = keeps()
    client = server.openai()
    lines = [line(str(number), endpoint) for number in range(40)]
    file = upload(client, *lines, line("bad", endpoint, nonsense=1), "", name="../../etc/été.jsonl")
    assert (file.filename, file.purpose, file.object) == ("../../etc/été.jsonl", "batch", "file")
    assert file.bytes == len(client.files.content(file.id).content)
    begun = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"order": "4711"})
    assert begun.status in ("validating", "in_progress") and begun.metadata == {"order": "4711"}
    client.files.delete(file.id)
    done = over(client, begun, wait_until)
    assert (done.status, done.errors) == ("completed", None)
    assert done.request_counts.to_dict() == {"total": 41, "completed": 40, "failed": 1}
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at < done.expires_at
    answers = results(client, done.output_file_id)
    assert set(answers) == set(map(str, range(40)))
    response = answers["7"]["response"]
    assert response["status_code"] == 200 and answers["7"]["error"] is None
    assert response["request_id"] == response["body"].get("id", "")
    [bad] = results(client, done.error_file_id).values()
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("bad", 400)
    assert bad["response"]["body"]["error"]["param"] == "nonsense"
    assert client.files.retrieve(done.output_file_id).purpose == "batch_output"
    kept = [path for path in place.rglob("*") if path.is_file()]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in kept if path.parent.name == "files"), kept
    assert stat.S_IMODE((place / "files").stat().st_mode) == 0o700
    wait_until(lambda: not server.app.state.jobs.lines_bytes)
    assert not server.app.state.jobs.journal.batches_with_lines()


def test_lists_come_in_pages(keeps, engine, wait_until):
    client = keeps().openai()
    begun = [begin(client, line("a")) for _ in range(5)]
    for one in begun:
        over(client, one, wait_until)
    assert [one.id for one in client.batches.list(limit=2)] == [one.id for one in begun[::-1]]
    assert len(client.batches.list(limit=2).data) == 2
    assert len(list(client.files.list(purpose="batch", limit=3))) == 5
    assert len(list(client.files.list())) == 10
    oldest = next(iter(client.files.list(order="asc", limit=1)))
    assert oldest.id == begun[0].input_file_id
    with pytest.raises(openai.NotFoundError):
        client.batches.list(after="batch_none")
    with pytest.raises(openai.BadRequestError, match="limit"):
        client.batches.list(limit=101)


def test_two_batches_go_on_together_and_one_is_cancelled(keeps, engine, wait_until):
    server = keeps()
    client = server.openai()
    engine.delay, engine.hold = 0.01, True
    first = begin(client, *(line(str(number)) for number in range(300)))
    second = begin(client, *(line(str(number)) for number in range(10)))
    engine.hold = False
    wait_until(lambda: client.batches.retrieve(first.id).request_counts.completed > 0, 240.0)
    assert over(client, second, wait_until).request_counts.completed == 10
    assert client.batches.retrieve(first.id).status == "in_progress", "the short one did not wait for the long one"
    engine.hold = True
    assert client.batches.cancel(first.id).status == "cancelling"
    engine.hold = False
    done = over(client, first, wait_until)
    assert done.status == "cancelled" and done.cancelling_at and done.cancelled_at
    answers, errors = results(client, done.output_file_id), results(client, done.error_file_id)
    assert len(answers) == done.request_counts.completed > 0
    assert answers.keys() | errors.keys() == set(map(str, range(300))) and not answers.keys() & errors.keys()
    assert {one["error"]["code"] for one in errors.values()} == {"batch_cancelled"}
    with pytest.raises(openai.BadRequestError, match="'cancelled' cannot be cancelled"):
        client.batches.cancel(first.id)


def test_what_waits_is_cancelled_and_what_is_late_expires(keeps, engine, wait_until, monkeypatch):
    monkeypatch.setattr("tandem.server.store.jobs.LINES_AT_ONCE", 1)
    monkeypatch.setattr("tandem.server.store.batch_routes.HOUR_S", 0.04)
    client = keeps().openai()
    engine.hold = True
    late = begin(client, line("a"), line("b"))
    waits = begin(client, line("a"))
    assert client.batches.cancel(waits.id).status == "cancelling"
    done = over(client, late, wait_until)
    assert done.status == "expired" and done.expired_at and done.request_counts.failed == 2
    assert {one["error"]["code"] for one in results(client, done.error_file_id).values()} == {"batch_expired"}
    done = over(client, waits, wait_until)
    assert done.status == "cancelled" and done.request_counts.total == 1
    [one] = results(client, done.error_file_id).values()
    assert one["error"]["code"] == "batch_cancelled"


def half_done(server, engine, wait_until, lines):
    """A batch of which some lines are answered, and the others wait for the engine."""
    engine.outputs = 8 * len(engine.reply)
    client = server.openai()
    begun = begin(client, *(line(str(number), temperature=1.0) for number in range(lines)))
    wait_until(lambda: client.batches.retrieve(begun.id).request_counts.completed > 5, 240.0)
    return begun


def opened(place):
    return contextlib.closing(Journal(place))


@pytest.mark.parametrize("killed", [False, True])
def test_the_next_server_goes_on_where_the_last_was(keeps, serve, engine, wait_until, place, tmp_path, killed, caplog):
    server = keeps()
    begun = half_done(server, engine, wait_until, 200)
    if killed:
        wait_until(lambda: engine.outputs == 0)
        shutil.copytree(place, tmp_path / "after")  # what a kill -9 leaves
        place = tmp_path / "after"
    server.stop()
    with opened(place) as journal:
        [(name, owner, _)] = journal.batches_with_lines()
        kept = {entry.id: (entry.status, body) for entry, body in journal.answered_lines(name, owner, 0) if body}
    assert name == begun.id and 5 < len(kept) < 200 and {status for status, _ in kept.values()} == {200}
    asked = len(engine.submitted)
    left = [place / "files" / name for name in ("upload-x.tmp", "batch_x.output.tmp", "file-x.data")]
    for path in left:
        path.write_bytes(b"left behind")
    engine.outputs = None
    client = serve(journal=str(place)).openai()
    done = over(client, begun, wait_until)
    assert done.status == "completed" and done.request_counts.completed == 200
    answers = results(client, done.output_file_id)
    assert set(answers) == set(map(str, range(200)))
    by_id = {one["id"]: one["response"] for one in answers.values()}
    for name, (status, body) in kept.items():
        assert (by_id[name]["status_code"], by_id[name]["body"]) == (status, json.loads(body))
    assert len(engine.submitted) - asked == 200 - len(kept)
    assert not [path for path in left if path.exists()]
    seeds = {request.params.seed for request in engine.submitted.values()}
    assert len(seeds) == 200, "a line that is asked again draws the same text"
    assert "damaged" not in caplog.text, "lines that the end of a server leaves open are not looked for in vain"


def test_what_a_batch_left_stops_no_start_when_the_disk_takes_nothing(keeps, engine, wait_until, place, monkeypatch):
    server = keeps()
    client = server.openai()
    over(client, begin(client, line("a")), wait_until)
    wait_until(lambda: not server.app.state.jobs.lines_bytes)
    server.stop()
    with opened(place) as journal, journal.transaction():
        journal.add_lines([(Entry(0, "left", "g", "batch_over", b"", CHAT, KEPT_OPEN, LINE), b"{}")])
    full, drop = [True], Journal.drop_lines

    def drop_lines(self, batch_id, owner):
        if full[0]:
            raise sqlite3.OperationalError("disk I/O error")
        return drop(self, batch_id, owner)

    monkeypatch.setattr(Journal, "drop_lines", drop_lines)
    monkeypatch.setattr(batches, "DISK_POLL_S", 0.05)
    server = keeps().wait_ready()
    assert server.chat().status_code == 200 and server.app.state.jobs.lines_bytes["batch_over"] > 0
    full[0] = False
    wait_until(lambda: not server.app.state.jobs.lines_bytes)
    assert not server.app.state.jobs.journal.batches_with_lines()


def test_an_upload_that_cannot_be_noted_leaves_nothing(keeps, engine, place, monkeypatch):
    server = keeps()
    client = server.openai()

    def put(self, record):
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(Journal, "put", put)
    with pytest.raises(openai.InternalServerError):
        upload(client, line("a"))
    assert not list((place / "files").iterdir())


@pytest.mark.parametrize("stopped", [False, True])
def test_what_the_disk_changes_in_results_is_computed_again(keeps, engine, wait_until, place, stopped, caplog):
    server = keeps()
    begun = half_done(server, engine, wait_until, 80)

    def damage(database):
        database.execute("""UPDATE answers SET body = CAST(replace(body, 'content', 'CONTENT') AS BLOB) WHERE number IN
            (SELECT number FROM answers LIMIT 2)""")

    if stopped:
        server.stop()
        with opened(place) as journal:
            damage(journal._database)
        server = keeps()
    else:
        damage(server.app.state.jobs.journal._database)
    engine.outputs = None
    client = server.openai()
    done = over(client, begun, wait_until)
    assert (done.status, done.request_counts.completed) == ("completed", 80)
    answers = results(client, done.output_file_id)
    assert set(answers) == set(map(str, range(80)))
    assert len({one["response"]["body"]["choices"][0]["message"]["content"] for one in answers.values()}) == 1
    assert "2 lines of" in caplog.text


def test_lines_that_the_disk_has_lost_are_told(keeps, engine, wait_until, place):
    """Whose they are stands in no other place by then."""
    server = keeps()
    client = server.openai()
    begun = half_done(server, engine, wait_until, 200)
    client.files.delete(client.batches.retrieve(begun.id).input_file_id)
    server.stop()
    with opened(place) as journal:
        journal._database.execute("UPDATE requests SET outline = 'x' WHERE number = (SELECT min(number) FROM requests)")
        journal._database.execute("DELETE FROM requests WHERE number = (SELECT max(number) FROM requests)")
    engine.outputs = None
    client = keeps().openai()
    done = over(client, begun, wait_until)
    assert (done.status, done.request_counts.completed) == ("completed", 198)
    assert len(results(client, done.output_file_id)) == 198
    assert (done.errors.data[0].code, done.errors.data[0].message.split()[0]) == ("lines_lost", "2")


def test_overload_and_an_absent_engine_are_waited_for(keeps, engine, wait_until):
    client = keeps().openai()
    engine.refusal = (429, "full", "overloaded", 0.1)
    begun = begin(client, line("a"))
    wait_until(lambda: engine.submitted)
    assert client.batches.retrieve(begun.id).status == "in_progress"
    engine.refusal = None
    assert over(client, begun, wait_until).request_counts.completed == 1


def test_a_client_over_its_limit_holds_up_no_other_clients_batches(keeps, engine, wait_until, monkeypatch, tmp_path):
    monkeypatch.setattr("tandem.server.store.jobs.LINES_AT_ONCE", 1)
    monkeypatch.setattr(batches, "LINES_AT_ONCE", 1)
    monkeypatch.setattr("tandem.server.store.calls.LONGEST_PAUSE_S", 0.05)
    keys = tmp_path / "keys"
    keys.write_text("sk-limited requests_per_minute=1\nsk-free\n")
    keys.chmod(0o600)
    server = keeps(api_key_file=str(keys))
    limited, free = (server.openai(api_key=key) for key in ("sk-limited", "sk-free"))
    stalled = [begin(limited, *(line(str(number)) for number in range(3))) for _ in range(2)]
    wait_until(lambda: limited.batches.retrieve(stalled[0].id).errors)
    done = over(free, begin(free, *(line(str(number)) for number in range(5))), wait_until)
    assert (done.status, done.request_counts.completed, done.errors) == ("completed", 5, None)
    told = limited.batches.retrieve(stalled[0].id)
    assert told.status == "in_progress" and told.request_counts.completed == 1
    assert "The batch waits: Rate limit reached: the limit is 1 requests a minute" in told.errors.data[0].message
    limited.batches.cancel(stalled[0].id)
    ended = over(limited, stalled[0], wait_until)
    assert (ended.status, ended.errors, ended.request_counts.failed) == ("cancelled", None, 2)
    first, refused = results(limited, ended.output_file_id), results(limited, ended.error_file_id)
    assert [*first] == ["0"] and refused.keys() == {"1", "2"}


def test_lines_that_were_refused_are_asked_for_again_once_each(keeps, engine, wait_until, monkeypatch):
    monkeypatch.setattr(batches, "LINES_AT_ONCE", 3)
    monkeypatch.setattr("tandem.server.store.journal.ROWS_AT_ONCE", 4)
    monkeypatch.setattr("tandem.server.store.calls.LONGEST_PAUSE_S", 0.01)
    client = keeps().openai()
    begun = begin(client, *(line(str(number)) for number in range(60)))
    for _ in range(4):
        engine.refusal = (429, "full", "overloaded", 1.0)
        wait_until(lambda: client.batches.retrieve(begun.id).errors)
        engine.refusal = None
        wait_until(lambda: not client.batches.retrieve(begun.id).errors)
    done = over(client, begun, wait_until)
    assert (done.status, done.request_counts.completed) == ("completed", 60)
    assert set(results(client, done.output_file_id)) == set(map(str, range(60)))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["{"], "line 1: not valid JSON"),
        (["[]"], "line 1: a request is a JSON object"),
        ([line("a"), "", line("a")], "line 3: custom_id 'a' is there twice"),
        ([line("a", "/v1/completions")], "'url' is not the batch's endpoint /v1/chat/completions"),
        ([line("a", stream=True)], "'stream' has no place in a batch"),
        ([line("a", background=True)], "'background' has no place in a batch"),
        ([json.dumps({"custom_id": "a", "url": CHAT})], "'body' must be a JSON object"),
        ([json.dumps({"custom_id": 5, "url": CHAT, "body": {}})], "'custom_id'"),
        (["[" * 100_000], "line 1"),
        (['{"custom_id": "\\ud800", "url": "/v1/x", "body": {}}'], "line 1"),
        ([" "], "no requests"),
        (["\x00\x01"], "line 1"),
    ],
)
def test_a_file_at_fault_fails_the_batch_and_says_why(journalled, wait_until, lines, words):
    client = journalled.openai()
    done = over(client, begin(client, *lines), wait_until)
    assert (done.status, done.output_file_id) == ("failed", None)
    assert words in done.errors.data[0].message
    assert journalled.engine.submitted == {}


def test_limits_of_lines(keeps, engine, wait_until, monkeypatch):
    monkeypatch.setattr("tandem.server.store.batches.MOST_LINES", 3)
    monkeypatch.setattr(batches, "MOST_OPEN", 1)
    client = keeps(max_body_mb=0.001).openai()
    done = over(client, begin(client, *(line(str(number)) for number in range(9))), wait_until)
    assert "line 4: a file may hold 3 requests" in done.errors.data[0].message
    done = over(client, begin(client, line("x" * 500, user="y" * 2000)), wait_until)
    assert "--max-body-mb" in done.errors.data[0].message
    done = over(client, begin(client, line("a"), "", " ", "", "", ""), wait_until)
    assert "line 5: a file may hold 3 requests, and as many blank lines" in done.errors.data[0].message
    engine.hold = True
    begin(client, line("a"))
    with pytest.raises(openai.BadRequestError, match="At most 1 batches"):
        begin(client, line("a"))


def client_files(place, max_bytes=1e9, records=()):
    jobs = SimpleNamespace(journal=SimpleNamespace(records=lambda kind: list(records)), lines_bytes=Counter())
    return Files(jobs, place, max_bytes=max_bytes, sync=False)


def test_batches_and_files_that_come_together_are_counted_one_by_one(keeps, engine, place, monkeypatch):
    monkeypatch.setattr(batches, "MOST_OPEN", 3)
    client = keeps().openai()
    engine.hold = True
    body = {"input_file_id": upload(client, line("a")).id, "endpoint": CHAT, "completion_window": "24h"}
    with ThreadPoolExecutor(12) as threads:
        made = list(
            threads.map(lambda _: httpx.post(f"{client.base_url}batches", json=body, trust_env=False, timeout=240), range(12))
        )
    assert sorted(one.status_code for one in made) == [200] * 3 + [400] * 9
    files = client_files(place / "two", max_bytes=100)
    files._coming = {"first": 60}
    files.check_room("a", 40)
    with pytest.raises(RequestError, match="--files-max-gb"):
        files.check_room("a", 60)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
        ({"input_file_id": 5}, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
        ({"frob": 1}, "frob"),
    ],
)
def test_fields_of_a_batch_at_fault(journalled, fields, param):
    file = upload(journalled.openai(), line("a"))
    body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **fields}
    assert error_of(journalled.http.post("/v1/batches", json=body))["param"] == param


def form(server, data=None, files=None, **more):
    return server.http.post("/v1/files", data=data, files=files, **more)


FILE = {"file": ("a.jsonl", b"{}")}


@pytest.mark.parametrize(
    ("data", "files", "param"),
    [
        ({}, FILE, "purpose"),
        ({"purpose": "vision"}, FILE, "purpose"),
        ({"purpose": "batch"}, {"x": ("a", b"y" * 9)}, "x"),
        ({"purpose": "batch"}, {"file": ("a", b"")}, "file"),
        ({"purpose": "x" * 2000}, FILE, "purpose"),
        ({"purpose": "batch", "frob": "1"}, FILE, "frob"),
        ({"purpose": "batch", "expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, FILE, "expires_after[anchor]"),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "5"},
            FILE,
            "expires_after[seconds]",
        ),
        ({"purpose": "batch", "expires_after[seconds]": "9" * 500}, FILE, "expires_after[anchor]"),
    ],
)
def test_forms_at_fault(journalled, data, files, param):
    before = set(journalled.place.rglob("*"))
    assert error_of(form(journalled, data, files))["param"] == param
    assert set(journalled.place.rglob("*")) == before


def multipart(*parts, end=b"--b--\r\n"):
    return b"".join(b"--b\r\n" + part + b"\r\n" for part in parts) + end


PURPOSE = b'content-disposition: form-data; name="purpose"\r\n\r\nbatch'
DATA = b'content-disposition: form-data; name="file"; filename="a"\r\n\r\n{}'


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (multipart(PURPOSE, DATA, end=b""), "multipart/form-data; boundary=b"),
        (multipart(PURPOSE, DATA, DATA), "multipart/form-data; boundary=b"),
        (multipart(*[PURPOSE] * 40, DATA), "multipart/form-data; boundary=b"),
        (multipart(b"x: " + b"y" * 100_000 + b"\r\n\r\n"), "multipart/form-data; boundary=b"),
        (b"nonsense", "multipart/form-data; boundary=b"),
        (b"{}", "multipart/form-data"),
        (b"{}", "multipart/form-data; boundary=" + "b" * 5000),
        (b"{}", "application/json"),
        (b"", "application/json"),
    ],
)
def test_malformed_forms(journalled, content, kind, caplog):
    before = set(journalled.place.rglob("*"))
    response = journalled.http.post("/v1/files", content=content, headers={"content-type": kind})
    assert error_of(response)["code"] == "invalid_form"
    assert set(journalled.place.rglob("*")) == before
    assert upload(journalled.openai(), line("a")).bytes > 0
    assert not [one for one in caplog.records if one.name.startswith("python_multipart")], "clients write no log"


def test_odd_names_are_kept_as_they_are_and_lead_nowhere(keeps, place):
    server = keeps()
    for name in ("/etc/passwd", "..\\..\\x", "a\r\nset-cookie: b", "\u2028" * 900, "<script>", "."):
        response = form(server, {"purpose": "batch"}, {"file": (name, b"{}")})
        assert response.status_code == 200, response.text
        content = server.http.get(f"/v1/files/{response.json()['id']}/content")
        assert (content.content, content.headers["content-type"]) == (b"{}", "application/octet-stream")
        assert (content.headers["content-disposition"], content.headers["x-content-type-options"]) == ("attachment", "nosniff")
    assert {path.parent for path in place.rglob("*")} == {place, place / "files"}
    for name in ("..%2f..%2fjournal.db", "file-..%2f", "file-%00", "x" * 5000, "file-' OR 1=1"):
        assert server.http.get(f"/v1/files/{name}/content").status_code == 404
        assert server.http.get(f"/v1/batches/{name}").status_code == 404


@pytest.mark.parametrize(
    ("asked", "status", "content"),
    [
        ("bytes=1-3", 206, b"bcd"),
        ("bytes=-2", 206, b"ef"),
        ("bytes=4-", 206, b"ef"),
        ("bytes=2-99", 206, b"cdef"),
        ("bytes=6-", 416, None),
        ("bytes=abc", 400, None),
        ("lines=0-1", 400, None),
        ("bytes=3-1", 400, None),
        ("bytes=0-1,9-", 416, None),
        ("BYTES=0-1,", 206, b"ab"),
        ("bytes=" + "9" * 5000 + "-", 400, None),
    ],
)
def test_parts_of_a_file(journalled, asked, status, content):
    name = form(journalled, {"purpose": "batch"}, {"file": ("a", b"abcdef")}).json()["id"]
    answer = journalled.http.get(f"/v1/files/{name}/content", headers={"range": asked})
    assert answer.status_code == status
    if content is None:
        assert answer.json()["error"]["param"] == "Range"
        assert answer.headers.get("content-range") == ("bytes */6" if status == 416 else None)
    else:
        assert answer.content == content


def test_sizes_and_room_are_bounded(keeps, place, monkeypatch):
    server = keeps(max_file_mb=0.01, files_max_gb=0.00002)
    assert error_of(form(server, {"purpose": "batch"}, {"file": ("a", b"x" * 20_000)}), 413)["param"] == "file"
    chunks = (multipart(PURPOSE, DATA + b"x" * 20_000)[start : start + 1000] for start in range(0, 22_000, 1000))
    streamed = server.http.post("/v1/files", content=chunks, headers={"content-type": "multipart/form-data; boundary=b"})
    assert streamed.status_code == 413
    for whole in (multipart(PURPOSE, DATA), b""):
        endless = (whole if not number else b"\r\n" * 500 for number in range(1000))
        answer = server.http.post("/v1/files", content=endless, headers={"content-type": "multipart/form-data; boundary=b"})
        assert answer.status_code == 413, answer.text + "what is no part of the form counts too"
    for _ in range(2):
        assert form(server, {"purpose": "batch"}, {"file": ("a", b"x" * 9000)}).status_code == 200
    full = error_of(form(server, {"purpose": "batch"}, {"file": ("a", b"x" * 9000)}))
    assert (full["code"], "--files-max-gb" in full["message"]) == ("files_limit_exceeded", True)
    monkeypatch.setattr("tandem.server.store.files.MOST_FILES", 2)
    assert error_of(form(server, {"purpose": "batch"}, {"file": ("a", b"x")}))["code"] == "too_many_files"
    batch = {"input_file_id": server.openai().files.list().data[0].id, "endpoint": CHAT, "completion_window": "24h"}
    assert error_of(server.http.post("/v1/batches", json=batch))["code"] == "too_many_files", "it makes files too"
    assert len(list((place / "files").iterdir())) == 2


def test_each_key_has_its_own(keeps, wait_until):
    server = keeps(api_key=("a", "b"))
    mine, other = server.openai(api_key="a"), server.openai(api_key="b")
    begun = begin(mine, line("a"))
    done = over(mine, begun, wait_until)
    for theirs, name in (
        (other.batches.retrieve, begun.id),
        (other.batches.cancel, begun.id),
        (other.files.retrieve, done.output_file_id),
        (other.files.content, done.output_file_id),
        (other.files.delete, done.input_file_id),
    ):
        with pytest.raises(openai.NotFoundError):
            theirs(name)
    with pytest.raises(openai.BadRequestError, match="there is no file"):
        other.batches.create(input_file_id=done.input_file_id, endpoint=CHAT, completion_window="24h")
    assert list(other.files.list()) == list(other.batches.list()) == []
    assert len(list(mine.files.list())) == 2
    assert form(server, {"purpose": "batch"}, FILE).status_code == 401


def test_pages_of_others_cannot_send_files(keeps):
    server = keeps()
    refused = form(server, {"purpose": "batch"}, FILE, headers={"origin": "https://evil.example"})
    assert refused.status_code == 403
    elsewhere = httpx.post(f"{server.url}{CHAT}", files=FILE, trust_env=False)
    assert elsewhere.status_code == 415


def test_the_remedy_without_a_journal(shared):
    for response in (
        form(shared, {"purpose": "batch"}, FILE),
        shared.http.get("/v1/batches"),
        shared.http.post("/v1/batches", json={}),
        shared.http.get("/v1/files/x"),
    ):
        assert "--journal DIR" in error_of(response)["message"]


def test_files_expire(keeps, place, monkeypatch, wait_until):
    server = keeps()
    client = server.openai()
    file = upload(client, line("a"), expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at - file.created_at == 3600
    lasting = upload(client, line("a"))
    assert lasting.expires_at - lasting.created_at == 30 * 86400
    now = file.created_at + 3700
    monkeypatch.setattr("tandem.server.store.files.time.time", lambda: now)
    wait_until(lambda: [one.id for one in client.files.list()] == [lasting.id])
    wait_until(lambda: len(list((place / "files").iterdir())) == 1)


def test_files_that_are_taken_away_are_told_and_disturb_no_batch_that_runs(keeps, engine, wait_until, place):
    server = keeps()
    client = server.openai()
    begun = begin(client, *(line(str(number)) for number in range(5)))
    over(client, begun, wait_until)
    engine.hold = True
    before = len(engine.submitted)
    waits = begin(client, *(line(str(number)) for number in range(600)))
    wait_until(lambda: len(engine.submitted) > before)
    shutil.move(place / "files", place / "away")
    engine.hold = False
    content = server.http.get(f"/v1/files/{begun.input_file_id}/content")
    assert error_of(content, 503)["code"] == "disk_error"
    assert error_of(form(server, {"purpose": "batch"}, FILE), 503)["code"] == "disk_error"
    lost = client.batches.create(input_file_id=begun.input_file_id, endpoint=CHAT, completion_window="24h")
    wait_until(lambda: client.batches.retrieve(waits.id).errors and client.batches.retrieve(lost.id).errors, 240.0)
    assert (client.batches.retrieve(waits.id).status, client.batches.retrieve(lost.id).status) == ("finalizing", "validating"), (
        "a disk may come back"
    )
    (place / "files").mkdir(mode=0o700)
    done = over(client, waits, wait_until)
    assert (done.status, done.errors) == ("completed", None) and len(results(client, done.output_file_id)) == 600
    done = over(client, lost, wait_until)
    assert (done.status, done.errors.data[0].code) == ("failed", "files_lost")
    assert over(client, begin(client, line("a")), wait_until).status == "completed"


def test_a_file_that_cannot_be_deleted_is_still_there(keeps, monkeypatch):
    server = keeps()
    file = upload(server.openai(), line("a"))
    with monkeypatch.context() as patch:
        patch.setattr("tandem.server.store.files.Path.unlink", refuse)
        assert error_of(server.http.delete(f"/v1/files/{file.id}"), 503)["code"] == "disk_error"
    assert server.http.get(f"/v1/files/{file.id}").status_code == 200
    assert server.http.delete(f"/v1/files/{file.id}").json()["deleted"]


def refuse(*_, **__):
    raise OSError(30, "Read-only file system")


def test_a_full_disk_is_told_and_waited_for(keeps, engine, wait_until, monkeypatch, place):
    full = OSError(28, "No space left on device")
    trouble = [True]
    real = os.replace

    def replace(source, target):
        if trouble[0]:
            raise full
        real(source, target)

    server = keeps()
    client = server.openai()
    monkeypatch.setattr("os.replace", replace)
    refused = form(server, {"purpose": "batch"}, FILE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "disk_full")
    trouble[0] = False
    file = upload(client, line("a"), line("a"))
    batch = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    journal = server.app.state.jobs.journal

    def on_full_disk(name, when=lambda *_: True):
        call = getattr(journal, name)

        def fails(*arguments):
            if when(*arguments):
                raise sqlite3.OperationalError("full")
            return call(*arguments)

        monkeypatch.setattr(journal, name, fails)

    on_full_disk("put")
    assert error_of(server.http.post("/v1/batches", json=batch), 503)["code"] == "journal_unavailable"
    assert not list(client.batches.list()), "nothing is left of a batch that was not accepted"
    monkeypatch.undo()
    failing = [True]
    on_full_disk("put", lambda record: record.status == "failed" and failing and failing.pop())
    failed = over(client, client.batches.create(**batch), wait_until)
    assert (failed.status, failed.errors.data[0].line, failing) == ("failed", 2, [])
    monkeypatch.undo()
    engine.hold = True
    begun = begin(client, *(line(str(number)) for number in range(5)))
    wait_until(lambda: engine.submitted)
    on_full_disk("answer")
    engine.hold = False
    wait_until(lambda: client.batches.retrieve(begun.id).errors, 240.0)
    waiting = client.batches.retrieve(begun.id)
    assert (waiting.status, waiting.errors.data[0].code) == ("in_progress", "journal_unavailable")
    assert "The batch waits: The journal cannot be used" in waiting.errors.data[0].message
    asked = len(engine.submitted)
    monkeypatch.undo()
    done = over(client, begun, wait_until)
    assert (done.status, done.errors, done.request_counts.completed) == ("completed", None, 5)
    assert set(results(client, done.output_file_id)) == set(map(str, range(5)))
    assert len(engine.submitted) == asked, "what was answered is not asked again"


def test_a_directory_that_cannot_be_used_is_said_at_the_start(tmp_path):
    (tmp_path / "files").write_text("in the way")
    with pytest.raises(ConfigError, match="--journal: cannot use"):
        client_files(tmp_path / "files")


def test_a_file_object_may_be_streamed_in(keeps):
    client = keeps().openai()
    big = io.BytesIO(b"\n".join([line(str(number)).encode() for number in range(20_000)]))
    file = client.files.create(file=big, purpose="batch")
    assert file.bytes == len(big.getvalue())
    assert client.files.content(file.id).content == big.getvalue()
