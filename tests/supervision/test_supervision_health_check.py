"""When the supervisor holds a child for stuck."""

from __future__ import annotations

import subprocess
import time

import pytest

from tandem.env import child_environment
from tandem.processes.child import ChildProcess
from tandem.supervision import children
from tandem.supervision.children import HealthCheck


class Child:
    stopped = False


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when they are told to."""
    now = [100.0]
    monkeypatch.setattr(children.time, "monotonic", lambda: now[0])

    def advance(seconds, watch=None):
        for _ in range(round(seconds * 10)):
            now[0] += 0.1
            if watch is not None and (said := watch.verdict()):
                return said
        return None

    advance.jump = lambda seconds: now.__setitem__(0, now[0] + seconds)
    return advance


def test_silence_counts_from_the_first_answer_on(clock):
    watch = HealthCheck(Child(), 5.0)
    assert clock(60, watch) is None, "it may be loading"
    watch.heard()
    assert clock(4.8, watch) is None
    watch.heard()
    assert "has not answered for 5 s" in clock(6, watch)


def test_a_stop_counts_unless_it_is_short(clock):
    child = Child()
    watch = HealthCheck(child, 5.0)
    child.stopped = True
    assert clock(0.8, watch) is None
    child.stopped = False
    assert clock(0.2, watch) is None
    child.stopped = True
    assert clock(0.8, watch) is None
    assert "stands still" in clock(1, watch)


def test_time_that_the_supervisor_lost_itself_counts_for_nobody(clock):
    child = Child()
    watch = HealthCheck(child, 5.0)
    watch.heard()
    child.stopped = True
    assert clock(0.3, watch) is None
    clock.jump(3600)
    assert watch.verdict() is None
    child.stopped = False
    assert clock(3, watch) is None
    assert "has not answered" in clock(3, watch)


def test_a_stopped_process_is_seen(tmp_path):
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(100)")
    child = ChildProcess("sleeps", b"", env=child_environment({"PYTHONPATH": str(tmp_path)}), name="child")
    try:
        assert not child.stopped
        subprocess.run(["kill", "-STOP", str(child.pid)], check=True)
        deadline = time.monotonic() + 240
        while not child.stopped:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        child.kill()
        assert child.wait(240)
    assert not child.stopped


def test_what_is_wrong_is_said_once_while_a_killed_process_ends(clock):
    watch = HealthCheck(Child(), 5.0)
    watch.heard()
    assert "has not answered" in clock(6, watch)
    assert clock(20, watch) is None, "a process with gigabytes to give back is still there for a while"
    assert "has not answered" in clock(20, watch)
