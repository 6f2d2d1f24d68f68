"""When an api that dies is started again."""

from __future__ import annotations

import dataclasses
import os
import socket
import time

import msgspec
import pytest

from tandem.config.loading import build
from tandem.errors import ConfigError, UsageError
from tandem.protocol.events import History
from tandem.protocol.payloads import ApiPayload
from tandem.supervision import children as module
from tandem.supervision.api import ApiProcess


class Child:
    """A process that ends when it is told to."""

    pid, stopped = 1, False

    def __init__(self, _: str = "", payload: bytes = b"", *, arguments: tuple[str, ...], **__: object) -> None:
        self.code: int | None = None
        self.payload = payload
        self.words, self.wait_s = int(arguments[1]), float(arguments[3])

    def poll(self) -> int | None:
        return self.code

    def describe_exit(self) -> str:
        return f"exited with code {self.code}"

    def wait(self, timeout_s: float) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when they are told to."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module, "ChildProcess", Child)
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


@pytest.mark.parametrize(("code", "answers", "deaths"), [(-9, 0, 5), (-9, 1, 5), (-9, 3, 50), (0, 3, 50)])
def test_only_an_api_that_never_serves_is_given_up(clock, code, answers, deaths):
    with socket.socket() as listener:
        api = ApiProcess(build({"model": "m"}), listener)
        for _ in range(deaths):
            assert api.look() is None
            for _ in range(answers):
                assert api.heard(1)
                clock(0.6)
            api.child.code = code
            assert api.look() is None
            assert api.child is None, "replaced"
            clock(1.0)
        assert api.look() is None
        api.child.code = code
        assert api.look() == (3 if answers < 3 else None)


def test_what_an_api_finds_amiss_is_waited_for_once_one_has_served(clock, monkeypatch):
    def start(*_: object, arguments: tuple[str, ...], **more: object) -> Child:
        os.write(int(arguments[1]), b"cannot read keys")
        return Child(arguments=arguments)

    with socket.socket() as listener:
        history = History()
        api = ApiProcess(build({"model": "m"}), listener, history)
        assert api.look() is None and api.child.wait_s == 0, "the first one ends at once"
        assert api.heard(1)
        monkeypatch.setattr(module, "ChildProcess", start)
        waits = []
        for _ in range(20):
            api.child.code = 2
            assert api.look() is None and api.child is None
            assert api.look() is None
            waits.append(api.child.wait_s)
        assert waits[0] == 1.0 and waits == sorted(waits) and waits[-1] == 30.0
        assert [one.kind for one in history.after()] == ["api_waits"]
        assert api.heard(1)
        api.child.code = 2
        assert api.look() is None
        assert "cannot read keys" in history.after()[-1].text


def test_what_the_first_api_finds_amiss_ends_the_server(clock):
    with socket.socket() as listener:
        api = ApiProcess(build({"model": "m"}), listener)
        api.look()
        api.child.code = 2
        assert api.look() == 2


def test_keys_stay_as_they_were_where_their_file_is_not_in_order(clock, tmp_path):
    file, history = tmp_path / "keys", History()

    def keys(text: str | None) -> list[str]:
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)
        if api.child is not None:
            api.child.code = -9
            assert api.look() is None
        clock(5.0)
        assert api.look() is None
        api.heard(1)
        return list(msgspec.json.decode(api.child.payload, type=ApiPayload).keys)

    with socket.socket() as listener:
        file.write_text("sk-one")
        api = ApiProcess(build({"model": "m", "api_key_file": str(file)}), listener, history)
        assert keys("sk-one") == ["sk-one"]
        assert keys("sk-one\nsk-two request_per_minute=5") == ["sk-one"] == keys(None)
        assert keys("sk-two") == ["sk-two"]
        assert [one.kind for one in history.after()].count("api_keys_kept") == 2
        with pytest.raises(ConfigError, match="cannot read"):
            ApiProcess(build({"model": "m", "api_key_file": str(tmp_path)}), listener).start()


@pytest.mark.parametrize("journal", [None, "j"])
def test_a_successor_takes_over_once_it_is_ready_and_one_that_cannot_start_changes_nothing(clock, monkeypatch, tmp_path, journal):
    """Only one process can have a journal: with one, the successor waits for the other's end."""
    retired: list[Child] = []
    monkeypatch.setattr(Child, "retire", lambda self: retired.append(self), raising=False)
    monkeypatch.setattr(Child, "wait", lambda self, timeout_s: self.code is not None)
    before = build({"model": "m", "journal": journal and str(tmp_path)})
    after = dataclasses.replace(before, process=dataclasses.replace(before.process, drain_timeout=7.0))
    with socket.socket() as listener:
        history = History()
        api = ApiProcess(before, listener, history)
        with pytest.raises(UsageError, match="just being started"):
            api.replace(after)
        api.look()
        assert api.heard(1)
        old = api.child
        if journal is None:
            api.replace(after)
            api.look()
            api.child.code = 2
            api.look()
            assert (api.child, api.settings, api.replacing, retired) == (old, before, False, [])
            assert [event.kind for event in history.after()] == ["rolling_failed"]
        api.replace(after)
        api.look()
        assert (retired, api.child) == (([], api.child) if journal is None else ([old], None))
        if journal is not None:
            old.code = 0
            api.look()
        new = api.child
        assert new is not old and msgspec.json.decode(new.payload, type=ApiPayload).succeeds
        assert api.heard(1)
        api.take_over()
        assert (retired, api.settings, api.replacing) == ([old], after, False)
        assert api.children == ([new] if journal else [new, old])
        old.code = 0
        api.look()
        assert api.children == [new]
