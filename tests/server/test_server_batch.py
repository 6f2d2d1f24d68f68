"""`tandem batch` against a live server whose engine answers from a script."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from tandem.cli.main import main


def request(name, **body):
    body = {"model": "tiny", "messages": [{"role": "user", "content": name}], "max_tokens": 5, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def write(path, *requests):
    path.write_text("".join(json.dumps(one) + "\n" for one in requests))


def batch(server, files, *more):
    return main(["batch", *map(str, files), "--base-url", server.url, *more])


def answers(path):
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one["response"] for one in found}


def test_every_request_is_answered_and_refusals_say_why(server, engine, files, capsys):
    responses = {"custom_id": "r", "url": "/v1/responses", "body": {"input": "hi", "max_output_tokens": 4}}
    write(files[0], *(request(str(number)) for number in range(20)), request("bad", nonsense=1), responses)
    assert batch(server, files, "--concurrency", "4") == 0
    found = answers(files[1])
    assert set(found) == {*map(str, range(20)), "bad", "r"}
    assert found["bad"]["status_code"] == 400
    assert found["bad"]["body"]["error"]["param"] == "nonsense"
    assert found["3"]["body"]["usage"]["completion_tokens"] == 5
    assert found["3"]["request_id"] == found["3"]["body"]["id"]
    assert found["r"]["body"]["object"] == "response"
    assert "22 of 22 answered (0 before, 1 refused now)" in capsys.readouterr().out


def test_it_goes_on_where_it_was_torn_off(server, engine, files, capsys):
    write(files[0], *(request(str(number)) for number in range(6)))
    assert batch(server, files) == 0
    lines = files[1].read_bytes().splitlines(keepends=True)
    files[1].write_bytes(b"".join(lines[:2]) + lines[2][:30])
    engine.submitted.clear()
    assert batch(server, files) == 0
    assert len(engine.submitted) == 4
    assert set(answers(files[1])) == set(map(str, range(6)))
    assert files[1].read_bytes().startswith(b"".join(lines[:2]))
    assert "(2 before" in capsys.readouterr().out


def test_what_the_server_cannot_answer_now_is_asked_again_and_never_written(server, engine, files, capsys):
    write(files[0], request("a"))
    engine.refusal = (503, "not now", "engine_unavailable", 1.0)
    assert batch(server, files, "--retries", "1") == 1
    assert len(engine.submitted) == 2
    assert files[1].read_bytes() == b""
    assert "1 without an answer, for instance: a: HTTP 503" in capsys.readouterr().out
    engine.refusal = None
    assert batch(server, files) == 0
    assert set(answers(files[1])) == {"a"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no requests"),
        ("{", "line 1"),
        ("[]", "JSON object"),
        ('{"custom_id": 5}', "'custom_id'"),
        (json.dumps({**request("a"), "method": "GET"}), "'method'"),
        (json.dumps({**request("a"), "url": "http://elsewhere/"}), "'url'"),
        (json.dumps(request("a", stream=True)), "'stream'"),
        (json.dumps(request("a")) + "\n" + json.dumps(request("a")), "line 2: custom_id 'a' is there twice"),
    ],
)
def test_mistakes_are_found_before_anything_is_sent(server, engine, files, capsys, text, words):
    files[0].write_text(text)
    assert batch(server, files) == 2
    assert words in capsys.readouterr().err
    assert not engine.submitted


def test_another_files_answers_are_left_alone(server, files, capsys):
    write(files[0], request("a"))
    write(files[1], {"custom_id": "other"})
    assert batch(server, files) == 2
    assert "answers to other requests ('other')" in capsys.readouterr().err
    assert batch(server, (files[0], files[0])) == 2
    assert "file of the requests" in capsys.readouterr().err
    assert main(["batch", str(files[0]) + "x", str(files[1]), "--base-url", server.url]) == 2


def test_answers_that_cannot_be_written_are_not_asked_for(server, engine, files, capsys):
    write(files[0], request("a"))
    away = files[1].parent / "away" / "out.jsonl"
    assert batch(server, (files[0], away)) == 2
    assert f"{away} cannot be written: No such file or directory; name a file" in capsys.readouterr().err
    assert not engine.submitted


def test_a_wrong_key_is_no_answer(serve, files, capsys, monkeypatch):
    server = serve(api_key=("secret",))
    write(files[0], request("a"))
    monkeypatch.setenv("TANDEM_API_KEY", "wrong")
    assert batch(server, files) == 1
    assert "TANDEM_API_KEY" in capsys.readouterr().out
    monkeypatch.setenv("TANDEM_API_KEY", "secret")
    assert batch(server, files) == 0
    assert answers(files[1])["a"]["status_code"] == 200


def test_a_server_that_breaks_off_is_no_answer(files, capsys):
    write(files[0], request("a"))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve_badly():
            with listener.accept()[0] as connection:
                sent = b""
                while not sent.endswith(b"}"):  # closing before the body is read would reset the connection
                    sent += connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")

        thread = threading.Thread(target=serve_badly)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert main(["batch", *map(str, files), "--base-url", url, "--retries", "0"]) == 1
        thread.join(240)
    assert "1 without an answer, for instance: a: IncompleteRead" in capsys.readouterr().out
