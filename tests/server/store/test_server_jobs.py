"""Idempotency keys and background requests over HTTP: once each, also over the death of the server."""

from __future__ import annotations

import contextlib
import re
import resource
import shutil
import signal
import sqlite3
import threading

import httpx
import pytest

from tandem.server.store.journal import JournalError

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ROUTE = "/v1/chat/completions"


@pytest.fixture
def place(tmp_path):
    return str(tmp_path / "journal")


def ask(server, key=None, route=ROUTE, prefer=None, api_key=None, **fields):
    headers = {"idempotency-key": key, "prefer": prefer, "x-api-key": api_key}
    body = {**(CHAT if route == ROUTE else {"prompt": "x"}), **fields}
    with httpx.Client(base_url=server.url, timeout=240, trust_env=False) as http:
        return http.post(route, json=body, headers={name: value for name, value in headers.items() if value})


def in_thread(*arguments, **options):
    results = []
    thread = threading.Thread(target=lambda: results.append(ask(*arguments, **options)))
    thread.start()
    return thread, results


def retrieve(server, name):
    return server.http.get(f"/v1/requests/{name}")


def status(server, name):
    return retrieve(server, name).json()["status"]


def errors(server):
    return float(re.findall(r"^tandem_journal_errors_total (\S+)$", server.http.get("/metrics").text, re.M)[0])


@pytest.mark.parametrize("route", [ROUTE, "/v1/completions"])
def test_a_retry_gets_the_stored_answer(serve, engine, place, route):
    server = serve(journal=place)
    first = ask(server, "k1", route)
    assert first.status_code == 200 and "idempotent-replayed" not in first.headers
    again = ask(server, "k1", route)
    assert again.content == first.content and again.headers["idempotent-replayed"] == "true"
    assert again.headers["x-request-id"] == first.headers["x-request-id"]
    assert len(engine.submitted) == 1
    assert ask(server, "k2", route).json()["id"] != first.json()["id"]
    assert ask(server, None, route).status_code == 200
    assert len(engine.submitted) == 3


def test_retries_while_it_runs_wait_for_the_one_answer(serve, engine, place, wait_until):
    server = serve(journal=place)
    engine.hold = True
    asking = [in_thread(server, "k") for _ in range(4)]
    wait_until(lambda: engine.submitted)
    engine.hold = False
    for thread, _ in asking:
        thread.join(240)
    assert len({results[0].content for _, results in asking}) == 1
    assert len(engine.submitted) == 1


def test_what_the_journal_runs_has_a_line_of_its_own_with_its_tokens(serve, place, caplog, wait_until):
    caplog.set_level("INFO", logger="tandem")
    ask(serve(journal=place), "k")
    lines = lambda: [record.fields for record in caplog.records if hasattr(record, "fields")]  # noqa: E731
    wait_until(lambda: len(lines()) == 2)
    job, client = lines()
    assert (job["path"], job["status"], job["model"], job["job"]) == (ROUTE, 200, "tiny", job["job"])
    assert job["completion_tokens"] > 0 and "prompt_tokens" not in client and client["status"] == 200


def test_another_request_under_the_same_key_is_refused(serve, place):
    server = serve(journal=place)
    ask(server, "k")
    reused = ask(server, "k", temperature=0.5)
    assert reused.status_code == 422
    assert reused.json()["error"]["code"] == "idempotency_key_reused"
    assert ask(server, "k", "/v1/completions").status_code == 422


def test_a_key_with_a_slash_can_be_asked_for_and_forgotten(serve, place):
    server = serve(journal=place)
    ask(server, "order/7?/cancel")
    for name in ("order/7%3F/cancel", "order%2F7%3F%2Fcancel"):
        assert retrieve(server, name).json()["idempotency_key"] == "order/7?/cancel"
    assert server.http.delete("/v1/requests/order/7%3F/cancel").json()["deleted"] is True


@pytest.mark.parametrize("key", ["x" * 256, '""', "t\tab"])
def test_bad_keys(serve, place, key):
    response = ask(serve(journal=place), key)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "Idempotency-Key"


def test_a_client_that_leaves_can_come_back_for_it(serve, engine, place, wait_until):
    server = serve(journal=place)
    engine.hold = True
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    head = f"POST {ROUTE} HTTP/1.1\r\nhost: x\r\nidempotency-key: k\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    connection = server.raw(head + body)
    wait_until(lambda: engine.submitted)
    connection.close()
    engine.hold = False
    wait_until(lambda: status(server, "k") == "completed")
    assert not engine.aborted and len(engine.submitted) == 1
    assert retrieve(server, "k").json()["response"]["choices"][0]["message"]["content"] == engine.text()


def test_failures_that_a_client_hears_of_are_not_kept(serve, engine, place):
    server = serve(journal=place)
    engine.refusal = (429, "full", "overloaded", 7.0)
    refused = ask(server, "k")
    assert refused.status_code == 429 and refused.headers["retry-after"] == "7"
    assert retrieve(server, "k").status_code == 404
    engine.refusal = None
    assert ask(server, "k").status_code == 200
    assert ask(server, "bad", max_tokens=-2).status_code == 400
    assert ask(server, "bad").status_code == 200


def test_streams_and_broken_bodies_are_not_journalled(serve, engine, place):
    server = serve(journal=place)
    assert ask(server, "k", stream=True).text.rstrip().endswith("[DONE]")
    assert ask(server, "k", stream=True, prefer="respond-async").status_code == 200
    assert len(engine.submitted) == 2
    assert retrieve(server, "k").status_code == 404
    for body, code in ((b"{", "invalid_json"), (b"[]", "invalid_json"), (b'{"stream": "\xff"}', "invalid_utf8")):
        broken = server.http.post(ROUTE, content=body, headers={"idempotency-key": "k"})
        assert broken.status_code == 400 and broken.json()["error"]["code"] == code


def test_in_the_background(serve, engine, place, wait_until):
    server = serve(journal=place)
    engine.hold = True
    accepted = ask(server, prefer="respond-async, wait=5")
    assert accepted.status_code == 202
    assert accepted.headers["preference-applied"] == "respond-async"
    name = accepted.json()["id"]
    assert accepted.headers["location"] == f"/v1/requests/{name}"
    wait_until(lambda: engine.submitted)
    running = retrieve(server, name).json()
    assert running["status"] == "in_progress" and running["response"] is None
    engine.hold = False
    wait_until(lambda: status(server, name) == "completed")
    done = retrieve(server, name).json()
    assert done["status_code"] == 200 and done["response"]["usage"]["completion_tokens"] > 0
    assert retrieve(server, "req-unknown").status_code == 404


def test_background_requests_outlast_overload_and_tell_failures(serve, engine, place, wait_until):
    server = serve(journal=place)
    engine.refusal = (429, "full", "overloaded", 0.1)
    name = ask(server, "k", prefer="respond-async").json()["id"]
    wait_until(lambda: engine.submitted)
    assert status(server, name) == ask(server, "k", prefer="respond-async").json()["status"] == "in_progress"
    engine.refusal = (500, "it kills ranks", "rank_failure", None)
    wait_until(lambda: status(server, name) == "failed")
    assert ask(server, "k", prefer="respond-async").json() == {"id": name, "object": "request", "status": "failed"}
    failed = retrieve(server, name).json()
    assert failed["status_code"] == 500 and failed["response"]["error"]["code"] == "rank_failure"


def test_what_was_accepted_in_the_background_is_kept_though_another_client_waits(serve, engine, place, wait_until):
    server = serve(journal=place, request_timeout=3.0)
    engine.hold = True
    thread, waited = in_thread(server, "k")
    wait_until(lambda: engine.submitted)
    assert ask(server, "k", prefer="respond-async", temperature=0.5).status_code == 422
    accepted = ask(server, "k", prefer="respond-async")
    assert accepted.status_code == 202
    thread.join(240)
    assert waited[0].status_code == 504
    wait_until(lambda: status(server, accepted.json()["id"]) == "failed")
    assert retrieve(server, "k").json()["status_code"] == 504


def test_forgetting(serve, engine, place, wait_until):
    server = serve(journal=place)
    ask(server, "done")
    engine.hold = True
    thread, results = in_thread(server, "running")
    wait_until(lambda: len(engine.submitted) == 2)
    for name in ("done", "running"):
        assert server.http.delete(f"/v1/requests/{name}").json()["deleted"] is True
        assert retrieve(server, name).status_code == 404
    thread.join(240)
    assert results[0].status_code == 409 and results[0].json()["error"]["code"] == "request_cancelled"
    wait_until(lambda: len(engine.aborted) == 1)


def test_a_new_server_keeps_answers_and_takes_up_the_rest(serve, engine, place, wait_until):
    server = serve(journal=place)
    kept = ask(server, "kept")
    engine.hold = True
    thread, results = in_thread(server, "open")
    name = ask(server, prefer="respond-async").json()["id"]
    wait_until(lambda: len(engine.submitted) == 3)
    server.server.handle_exit(signal.SIGTERM, None)
    thread.join(240)
    server.stop()
    assert results[0].status_code == 503 and results[0].json()["error"]["code"] == "shutting_down"
    engine.hold = False
    successor = serve(journal=place)
    assert ask(successor, "kept").content == kept.content
    again = ask(successor, "open")
    assert again.status_code == 200 and again.headers["idempotent-replayed"] == "true"
    wait_until(lambda: status(successor, name) == "completed")
    assert len(engine.submitted) == 5


def test_what_was_accepted_waits_for_the_engine(serve, engine, place, wait_until):
    server = serve(journal=place)
    engine.hold = True
    name = ask(server, "k", prefer="respond-async").json()["id"]
    server.stop()
    engine.stop()
    successor = serve(journal=place, ready=False)
    wait_until(lambda: status(successor, name) == "in_progress")
    engine.hold = False
    engine.start()
    wait_until(lambda: status(successor, name) == "completed")


def test_others_cannot_see_it(serve, engine, place):
    server = serve(journal=place, api_key=("one", "two"))
    first = ask(server, "k", api_key="one")
    name = first.headers["x-request-id"]
    for wanted in ("k", name):
        for key, code in (("one", 200), ("two", 404)):
            assert server.http.get(f"/v1/requests/{wanted}", headers={"x-api-key": key}).status_code == code
    assert ask(server, "k", api_key="two").json()["id"] != first.json()["id"]
    assert len(engine.submitted) == 2


@contextlib.contextmanager
def no_room():
    """No file can grow beyond a few bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_without_room_for_the_journal_such_requests_are_refused(serve, engine, place):
    server = serve(journal=place)
    ask(server, "before")
    with no_room():
        refused = ask(server, "k")
        assert ask(server).status_code == 200, "those without a key are served"
        assert ask(server, "before").status_code == 200
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "journal_unavailable"
    assert int(refused.headers["retry-after"]) > 0
    assert errors(server) == 1
    assert ask(server, "k").status_code == 200


def test_an_answer_that_cannot_be_written_is_given_and_kept_in_memory(serve, engine, place, wait_until):
    server = serve(journal=place)
    engine.hold = True
    thread, results = in_thread(server, "k")
    wait_until(lambda: engine.submitted)
    with no_room():
        engine.hold = False
        thread.join(240)
    assert results[0].status_code == 200
    assert ask(server, "k").content == results[0].content
    assert status(server, "k") == "completed"
    assert len(engine.submitted) == 1 and errors(server) == 1


def test_too_many_open_requests_are_refused_and_a_known_key_is_not(serve, engine, place, monkeypatch, wait_until):
    monkeypatch.setattr("tandem.server.store.jobs.MOST_OPEN", 4)
    server = serve(journal=place)
    first = ask(server, "done")
    engine.hold = True
    for key in ("a", "b"):
        assert ask(server, key, prefer="respond-async").status_code == 202
    refused = ask(server, "c")
    assert refused.status_code == 429 and "2 journalled requests of yours" in refused.text
    assert ask(server, "done").content == first.content
    assert ask(server, "a", prefer="respond-async").status_code == 202
    engine.hold = False
    wait_until(lambda: status(server, "a") == status(server, "b") == "completed")
    assert ask(server, "c").status_code == 200


def statuses(server, key, times, **fields):
    return [ask(server, prefer="respond-async", api_key=key, **fields).status_code for _ in range(times)]


def test_one_client_never_has_all_places_of_the_journal(serve, engine, place, monkeypatch):
    monkeypatch.setattr("tandem.server.store.jobs.MOST_OPEN", 8)
    server = serve(journal=place, api_key=("one", "two", "three"))
    engine.hold = True
    assert statuses(server, "one", 5) == [202] * 4 + [429]
    assert statuses(server, "two", 3) == [202] * 2 + [429]
    assert statuses(server, "three", 2) == [202, 429]


def test_bodies_of_open_requests_have_room_of_their_own_and_each_client_a_share(serve, engine, place, wait_until):
    server = serve(journal=place, api_key=("one", "two"), journal_max_gb=2**14 / 2**30)
    engine.hold = True
    long = {"user": "x" * 3000}
    assert statuses(server, "one", 3, **long) == [202, 202, 429]
    assert statuses(server, "two", 2, **long) == [202, 429]
    refused = ask(server, "k", api_key="two", user="x" * 9000)
    assert refused.status_code == 413 and "half of --journal-max-gb" in refused.text
    server.stop()
    server = serve(journal=place, api_key=("one", "two"), journal_max_gb=2**14 / 2**30)
    assert statuses(server, "one", 1, **long) == [429], "those of the last process count"
    engine.hold = False
    wait_until(lambda: statuses(server, "one", 1, **long) == [202])


def test_a_request_is_counted_once_when_it_is_accepted(serve, engine, place, wait_until):
    server = serve(journal=place, requests_per_minute=4)
    engine.hold = True
    for key in ("a", "b"):
        assert ask(server, key, prefer="respond-async").headers["x-ratelimit-limit-requests"] == "4"
    assert ask(server, "a", prefer="respond-async").headers["x-ratelimit-remaining-requests"] == "2", "known"
    wait_until(lambda: len(engine.submitted) == 2)
    background = server.http.post("/v1/responses", json={"input": "hi", "background": True})
    assert background.headers["x-ratelimit-remaining-requests"] == "1"
    wait_until(lambda: len(engine.submitted) == 3)
    engine.hold = False
    assert ask(server, "c").headers["x-ratelimit-remaining-requests"] == "0"
    for prefer in (None, "respond-async"):
        refused = ask(server, "d", prefer=prefer)
        assert refused.status_code == 429 and "4 requests a minute" in refused.text
    assert retrieve(server, "d").status_code == 404
    assert ask(server, "c").status_code == 200, "kept"


def seeds(engine, before=()):
    """Of what the engine was given since then, by the number of the choice."""
    return {name.rpartition("-")[2]: one.params.seed for name, one in list(engine.submitted.items()) if name not in before}


@pytest.mark.parametrize("moment", ["accepted", "working", "answered unkept"])
def test_a_key_draws_one_text_whenever_everything_dies(serve, engine, place, wait_until, tmp_path, moment):
    """The seed is fixed when the request is accepted: what is begun again gives what the first client saw."""
    server = serve(journal=place)
    asked = {"n": 2, "temperature": 1.0, "prompt": ["a", "b"], "route": "/v1/completions"}
    engine.hold = True
    if moment == "accepted":
        engine.refusal = (429, "full", "overloaded", 5.0)
    thread, results = in_thread(server, "k", **asked, prefer="respond-async" if moment == "accepted" else None)
    wait_until(lambda: len(engine.submitted) == 4 or (moment == "accepted" and engine.submitted))
    with no_room() if moment == "answered unkept" else contextlib.nullcontext():
        engine.hold = moment != "answered unkept"
        if moment != "working":
            thread.join(240)
            assert results
    first, before = seeds(engine), set(engine.submitted)
    shutil.copytree(place, tmp_path / "after")  # what a kill -9 leaves
    engine.hold, engine.refusal = False, None
    successor = serve(journal=str(tmp_path / "after"))
    again = ask(successor, "k", **asked)
    assert again.status_code == 200 and again.headers["idempotent-replayed"] == "true"
    later = seeds(engine, before)
    assert first and None not in first.values() and len(set(later.values())) == 4, "each choice has its own"
    assert first.items() <= later.items()
    given = ask(successor, "given", seed=7, temperature=1.0)
    assert given.status_code == 200 and engine.last.params.seed == 7
    thread.join(240)


class Broken(Exception):
    pass


@pytest.mark.parametrize("fault", ["raises", "says nothing"])
@pytest.mark.parametrize("prefer", [None, "respond-async"])
def test_work_that_breaks_is_told_and_ends(serve, place, wait_until, fault, prefer):
    server = serve(journal=place)
    jobs = server.app.state.jobs
    routes = jobs.app

    async def broken(scope, receive, send):
        if fault == "raises":
            raise Broken

    jobs.app = broken
    told = ask(server, "k", prefer=prefer)
    if prefer is None:
        assert told.status_code == 500 and told.json()["error"]["code"] == "internal_error"
        jobs.app = routes
        assert ask(server, "k").status_code == 200, "the client has been told, so the key is free again"
    else:
        wait_until(lambda: status(server, "k") == "failed")
        assert retrieve(server, "k").json()["status_code"] == 500
    wait_until(lambda: "tandem_journal_open_requests 0.0" in server.http.get("/metrics").text)


def test_a_writer_that_breaks_is_told_too(serve, place, monkeypatch):
    server = serve(journal=place)
    journal = server.app.state.jobs.journal

    def broken(*_, **__):
        raise MemoryError

    monkeypatch.setattr(journal, "request", broken)
    assert ask(server, "k").status_code == 500
    monkeypatch.undo()
    monkeypatch.setattr(journal, "accept", broken)
    assert ask(server, "k").status_code == 500
    monkeypatch.undo()
    assert ask(server, "k").status_code == 200


def test_a_locked_journal_is_waited_for_in_the_background(serve, place, monkeypatch, wait_until):
    server = serve(journal=place)
    journal = server.app.state.jobs.journal
    tried = threading.Event()

    def locked(*_):
        tried.set()
        raise sqlite3.OperationalError("locked")

    monkeypatch.setattr(journal, "request", locked)
    monkeypatch.setattr("tandem.server.store.writer.told", lambda _: JournalError("locked", retry_after=0.1))
    name = ask(server, prefer="respond-async").json()["id"]
    assert tried.wait(240)
    assert status(server, name) == "in_progress"
    monkeypatch.undo()
    wait_until(lambda: status(server, name) == "completed")


def test_looking_does_not_read_what_was_asked(serve, engine, place, wait_until, monkeypatch):
    server = serve(journal=place)
    engine.hold = True
    ask(server, "k", prefer="respond-async", messages=[{"role": "user", "content": "x" * 50}])
    response = server.http.post("/v1/responses", json={"input": "x", "background": True}).json()["id"]
    wait_until(lambda: len(engine.submitted) == 2)
    reads = []
    journal = server.app.state.jobs.journal
    monkeypatch.setattr(journal, "request", reads.append)
    assert status(server, "k") == "in_progress"
    assert server.http.get(f"/v1/responses/{response}").json()["status"] == "in_progress"
    engine.hold = False
    wait_until(lambda: status(server, "k") == "completed")
    wait_until(lambda: server.http.get(f"/v1/responses/{response}").json()["status"] == "completed")
    assert reads == []


def test_a_slow_disk_holds_up_nobody_else(serve, engine, place, monkeypatch):
    server = serve(journal=place)
    journal = server.app.state.jobs.journal
    accept, stuck, go_on = journal.accept, threading.Event(), threading.Event()

    def slow(*arguments, **options):
        stuck.set()
        assert go_on.wait(240)
        return accept(*arguments, **options)

    monkeypatch.setattr(journal, "accept", slow)
    thread, results = in_thread(server, "k")
    assert stuck.wait(240)
    assert ask(server).status_code == 200, "while the journal's thread waits for its disk"
    assert ask(server, stream=True).text.rstrip().endswith("[DONE]")
    assert not results
    go_on.set()
    thread.join(240)
    assert results[0].status_code == 200


@pytest.mark.parametrize("policy", ["everysec", "no"])
def test_other_policies(serve, place, policy):
    server = serve(journal=place, journal_sync=policy)
    first = ask(server, "k")
    assert ask(server, "k").content == first.content


def test_without_a_journal(server):
    assert ask(server, "k", prefer="respond-async").status_code == 200
    missing = retrieve(server, "k")
    assert missing.status_code == 404 and "--journal" in missing.json()["error"]["message"]
