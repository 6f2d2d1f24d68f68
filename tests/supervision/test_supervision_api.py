"""When an api that dies is started again."""

from __future__ import annotations

import socket
import time

import pytest

from tandem.config.loading import build
from tandem.supervision import api as module
from tandem.supervision.api import ApiProcess


class Child:
    """A process that ends when it is told to."""

    pid, stopped = 1, False

    def __init__(self, *_: object, **__: object) -> None:
        self.code: int | None = None

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
