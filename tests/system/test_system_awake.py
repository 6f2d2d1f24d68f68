"""A Mac stays awake as long as the process that asks for it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

from macs import mac_environment
from pids import gone
from tandem.system.awake import keep_awake

HOLD = """
import sys
from tandem.system.awake import keep_awake
print(keep_awake(), keep_awake(), flush=True)
sys.stdin.read()
"""


def eventually(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + 240
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_caffeinate_holds_off_idle_sleep_and_ends_with_a_process_that_is_killed(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], env=mac_environment(tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        first, second = (int(one) for one in process.stdout.readline().split())
        assert first == second  # one is enough
        told = tmp_path / "caffeinate.log"
        assert eventually(lambda: told.exists() and told.read_text().endswith("\n"))
        assert told.read_text() == f"{first} -i -s -w {process.pid}\n"
        process.kill()
    assert eventually(lambda: gone(first))


def test_a_mac_without_caffeinate_is_warned_of_and_served(monkeypatch, caplog):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("tandem.system.awake.find_tool", lambda name: None)
    assert keep_awake() is None
    assert "may sleep while it serves" in caplog.text


def test_elsewhere_nothing_is_started():
    assert keep_awake() is None
