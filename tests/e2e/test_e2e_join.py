"""Ranks that people or `mlx.launch` start: `tandem rank`, in any order."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hosts import eventually, serving
from netns import Machines

pytestmark = pytest.mark.slow


def join(machines: Machines, name: str, *words: str, before: Sequence[str] = ()) -> tuple[subprocess.Popen[str], Path]:
    """`tandem rank` on a machine, for the head on h0, and its log."""
    log = machines[name].home / f"rank-{time.monotonic_ns()}.log"
    command = [*before, "tandem", "rank", "--join", machines["h0"].address, "--token-file", "token", *words]
    with log.open("w") as file:
        return machines.start(name, command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL), log


def give_token(machines: Machines) -> None:
    token = machines["h0"].home / "token"
    eventually(lambda: token.exists() and token.read_text().endswith("\n"))
    assert token.stat().st_mode & 0o777 == 0o600
    for name in machines.names[1:]:
        shutil.copy(token, machines[name].home / "token")


def manual(machines: Machines, tiny: Path, *words: str) -> list[str]:
    return [str(tiny), "--launcher", "manual", "--token-file", str(machines["h0"].home / "token"), *words]


def test_machines_join_by_hand_in_reverse_order_and_before_the_head(machines: Machines, tiny: Path, expected: str) -> None:
    """The head makes the token, so the first head ends before anybody could join it."""
    arguments = manual(machines, tiny, "-tp", "2")
    with serving(machines, *arguments, ready=False) as server:
        server.wait_for("waiting for 2 rank")
        give_token(machines)
    ranks = [join(machines, "h2", "--rank", "1"), join(machines, "h1", "--rank", "0")]
    with serving(machines, *arguments) as server:
        assert server.complete() == expected
    for process, log in ranks:
        assert process.wait(240) == 0, log.read_text()


def test_a_standby_machine_takes_the_place_of_one_that_leaves(machines: Machines, tiny: Path, expected: str) -> None:
    with serving(machines, *manual(machines, tiny, "-pp", "2"), ready=False) as server:
        give_token(machines)
        ranks = [join(machines, name) for name in ("h1", "h2", "h0")]
        server.wait_ready()
        eventually(lambda: server.log.count("has joined") == 3)
        busy = [name for name in machines.names if machines.processes(name, "tandem.executors.worker")]
        leaver = ranks[("h1", "h2", "h0").index(busy[0])][0]
        machines.signal(leaver, 15)
        assert leaver.wait(240) != 0
        server.wait_for("has been ended there")
        assert server.complete() == expected


def test_ranks_under_mlx_launch(machines: Machines, tiny: Path, expected: str) -> None:
    with serving(machines, *manual(machines, tiny, "-tp", "2"), ready=False) as server:
        give_token(machines)
        launched, log = join(machines, "h1", before=["mlx.launch", "-n", "2", "--backend", "ring", "--"])
        server.wait_ready()
        assert server.complete() == expected
        assert "for rank 0" in server.log and "for rank 1" in server.log
    assert launched.wait(240) == 0, log.read_text()


def refused(machines: Machines, name: str, *words: str) -> str:
    process, log = join(machines, name, *words)
    assert process.wait(240) == 2, log.read_text()
    return log.read_text()


def test_who_may_not_join_is_told_why_and_disturbs_nobody(machines: Machines, tiny: Path, expected: str) -> None:
    with serving(machines, *manual(machines, tiny, "-pp", "2"), ready=False) as server:
        give_token(machines)
        for name in ("h1", "h2"):
            join(machines, name)
        server.wait_ready()
        assert "rank 0 is taken" in refused(machines, "h2", "--rank", "0")
        (machines["h2"].home / "token").unlink()
        machines.run("h2", ["python", "-c", "from tandem.launchers.manual import make_token; make_token('token')"])
        assert "refused: the token is not that of this head" in refused(machines, "h2", "--join-timeout", "4")
        assert server.log.count("refused a peer at the join socket") == 1
        assert server.complete() == expected
