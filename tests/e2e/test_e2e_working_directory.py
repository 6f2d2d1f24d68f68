"""Files beside the model and in working directories are imported by nobody: on no machine, by no launcher."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostile import imported, plant
from hosts import hostfile
from netns import Machines
from tandem.launchers.manual import make_token

pytestmark = pytest.mark.slow


@pytest.fixture
def mark(tiny: Path, tmp_path: Path) -> Iterator[Path]:
    """The model's directory is hostile; a test fails when anything in it was imported."""
    mark = tmp_path / "mark"
    plant(tiny, mark)
    yield mark
    assert not imported(mark), imported(mark)


@pytest.fixture(scope="module")
def machines(make_machines) -> Machines:
    return make_machines(2)


def generate(machines: Machines, tiny: Path, *words: str) -> None:
    """A text from two ranks, asked for within the model's directory on h0."""
    line = f"cd {tiny} && tandem generate . -pp 2 --prompt 'a b' --max-tokens 3 {' '.join(words)}"
    assert machines.run("h0", line, timeout=240).stdout.strip()


def plant_homes(machines: Machines, mark: Path) -> None:
    """Homes are where ssh, agents and `tandem rank` start programs."""
    for name in machines.names:
        plant(machines[name].home, mark)


def test_over_ssh(machines: Machines, tiny: Path, mark: Path) -> None:
    plant_homes(machines, mark)
    generate(machines, tiny, "--hostfile", hostfile(machines, ["h0", "h1"]))


def test_the_doctor_over_ssh(machines: Machines, tiny: Path, mark: Path) -> None:
    plant_homes(machines, mark)
    done = machines.run(
        "h0", f"cd {tiny} && tandem doctor --json --hostfile {hostfile(machines, ['h0', 'h1'])}", timeout=240, check=False
    )
    assert done.returncode == 0 and "sums that 2 machines make together are right" in done.stdout, done.stdout + done.stderr


def test_machines_that_join_by_hand(machines: Machines, tiny: Path, mark: Path) -> None:
    plant_homes(machines, mark)
    token = machines["h0"].home / "token"
    make_token(str(token))
    shutil.copy(token, machines["h1"].home)
    join = ["tandem", "rank", "--join", machines["h0"].address, "--token-file", "token", "--join-timeout", "100"]
    ranks = [machines.start(name, join, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for name in ("h0", "h1")]
    generate(machines, tiny, "--launcher", "manual", "--token-file", str(token))
    assert [rank.wait(240) for rank in ranks] == [0, 0]


def test_over_an_agent(machines: Machines, tiny: Path, mark: Path) -> None:
    plant_homes(machines, mark)
    agent = machines.start("h1", ["tandem", "agent"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert agent.stdout is not None
        agent.stdout.readline()
        code = "".join(agent.stdout.readline().split()[1:3]).rstrip(":")
        machines.run("h0", ["tandem", "hosts", "pair", "h1", "--code", code])
        generate(machines, tiny, "--hostfile", hostfile(machines, ["h0", {"ssh": "agent:h1"}]))
    finally:
        machines.signal(agent, 15)
        agent.wait(240)


def test_on_ray(tiny: Path, mark: Path, tmp_path: Path) -> None:
    """Ray itself has its workers import from the directory that a driver works in."""
    pytest.importorskip("ray")
    tandem = str(Path(sys.executable).with_name("tandem"))
    words = [
        tandem,
        "generate",
        ".",
        "-pp",
        "2",
        "--prompt",
        "a b",
        "--max-tokens",
        "3",
        "--launcher",
        "ray",
        "--ray-address",
        "new",
    ]
    done = subprocess.run(
        words, cwd=tiny, capture_output=True, text=True, timeout=240, env={**os.environ, "TANDEM_RUNTIME_DIR": "run"}
    )  # a relative path counts from here
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
