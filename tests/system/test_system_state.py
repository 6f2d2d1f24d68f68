"""A process that stands still is seen on both systems."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from tandem.system import state


@pytest.fixture
def sleeper():
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def becomes(pid: int, letter: str) -> bool:
    deadline = time.monotonic() + 240
    while state.process_state(pid) != letter:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_stopped_process_is_seen(sleeper):
    assert becomes(sleeper.pid, "S")
    sleeper.send_signal(signal.SIGSTOP)
    assert becomes(sleeper.pid, "T")
    sleeper.send_signal(signal.SIGCONT)
    assert becomes(sleeper.pid, "S")


def test_a_process_that_is_gone_has_no_state(sleeper, monkeypatch):
    sleeper.kill()
    sleeper.wait()
    assert state.process_state(sleeper.pid) == ""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert state.process_state(sleeper.pid) == ""


class Libproc:
    """Fills in the struct's second word, as <sys/proc_info.h> has it: flags, status."""

    def __init__(self, status: int, size: int = 136) -> None:
        self.status, self.size = status, size

    def proc_pidinfo(self, pid, flavor, argument, info, size):
        assert (flavor, size) == (3, 136)
        info[0], info[1] = 0x4000, self.status
        return self.size


@pytest.mark.parametrize(("status", "size", "letter"), [(4, 136, "T"), (3, 136, "S"), (2, 136, "R"), (5, 136, "Z"), (4, 0, "")])
def test_macos_tells_it_in_a_struct(monkeypatch, status, size, letter):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(state, "_libproc", lambda: Libproc(status, size))
    assert state.process_state(1) == letter
