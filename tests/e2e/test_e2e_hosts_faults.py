"""Machines, links and heads that fail while they serve: what goes on, what ends, and that nothing is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from hosts import Served, eventually, hostfile, left_over, serving
from netns import Machines

pytestmark = pytest.mark.slow
LONG = 400
STANDBY = "tandem.executors.worker standby"


def running(machines: Machines, name: str, module: str) -> list[int]:
    """Process ids of `python -m module` on a machine."""
    return [pid for pid, line in machines.processes(name, module).items() if not line.startswith("ssh ")]


def kill(machines: Machines, name: str, module: str) -> None:
    for pid in running(machines, name, module):
        os.kill(pid, signal.SIGKILL)


def answer_in_background(server: Served) -> tuple[threading.Thread, list[str]]:
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append(server.complete(LONG)))
    thread.start()
    time.sleep(0.5)
    return thread, texts


def test_answers_survive_a_rank_a_rank_host_and_a_cable(machines: Machines, tiny: Path) -> None:
    """One server with a standby rank on each machine, three faults, the same greedy answer after each."""
    with serving(machines, str(tiny), "--hostfile", hostfile(machines, ["h1", "h2"]), "--standby-ranks", "1") as server:
        undisturbed = server.complete(LONG)
        eventually(lambda: running(machines, "h2", STANDBY))
        for module in ("tandem.executors.worker", "tandem.launchers rank-host"):
            before, standby = running(machines, "h2", module), running(machines, "h2", STANDBY)
            thread, texts = answer_in_background(server)
            for pid in set(before) - set(standby):
                os.kill(pid, signal.SIGKILL)
            thread.join(240)
            assert texts == [undisturbed], server.log
            now = set(running(machines, "h2", module))
            assert now.isdisjoint(set(before) - set(standby))
            assert module != "tandem.executors.worker" or now >= set(standby), "the standby process is the rank"
        thread, texts = answer_in_background(server)
        machines.cut("h2")
        try:
            server.wait_for("h2.* is lost|no ping|not answer")
            # Its ranks end by themselves, cut off as they are.
            eventually(lambda: not running(machines, "h2", "tandem.executors"))
        finally:
            machines.heal("h2")
        thread.join(240)
        assert texts == [undisturbed], server.log


def test_a_head_that_is_killed_leaves_nothing_on_any_machine_not_even_one_that_is_cut_off(machines: Machines, tiny: Path) -> None:
    with serving(machines, str(tiny), "--hostfile", hostfile(machines, ["h1", "h2"])):
        machines.cut("h2")
        try:
            kill(machines, "h0", "tandem")
            eventually(lambda: not left_over(machines), what=lambda: left_over(machines))
        finally:
            machines.heal("h2")


def test_a_cable_that_is_cut_during_the_load_ends_the_start_with_its_reason(machines: Machines, tiny: Path) -> None:
    path = hostfile(machines, ["h1", "h2"])
    with serving(machines, str(tiny), "--hostfile", path, "--rejoin-timeout", "2", ready=False) as server:
        server.wait_for(r"\[h2\] .*stage 2/2")
        machines.cut("h2")
        try:
            assert server.process.wait(240) == 3, server.log
            assert "on h2 is lost with the Tandem there, which has not answered for 8 s (heartbeat_timeout)" in server.log
            eventually(lambda: not left_over(machines), what=lambda: left_over(machines))
        finally:
            machines.heal("h2")
