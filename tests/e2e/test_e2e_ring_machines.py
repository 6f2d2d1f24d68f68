"""The ring project's quick start over two machines: a `.env` as its page has it, and `tandem up --profile ring`."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest

import tandem
from hosts import eventually, left_over
from netns import Machines
from ring_project import DOTENV

pytestmark = pytest.mark.slow
UP = ["tandem", "up", "--profile", "ring"]


def test_a_dotenv_with_a_worker_spreads_the_model(
    make_machines: Callable[[int], Machines], tiny: Path, expected: str, tmp_path: Path
) -> None:
    machines = make_machines(2)
    here, worker = machines["h0"].address, machines["h1"].address
    python, _ = machines.without_tandem("h1")
    machines.set_variables("h0", {"TANDEM_REMOTE_PYTHON": str(python)})

    def write(**changes: str) -> None:
        text = DOTENV.format(model=tiny, port=8100, socket=machines["h0"].home / "ring.sock", host=here)
        values = dict(line.split("=", 1) for line in text.splitlines())
        values |= {"WORKER_HOSTS": worker, "WORKER_SSH": f"root@{worker}", **changes}
        (machines["h0"].home / ".env").write_text("".join(f"{name}={value}\n" for name, value in values.items()))

    def context() -> int:
        return int(httpx.get(f"http://{here}:8100/model/info", timeout=240).json()["max_context_length"])

    def refused(words: str, **changes: str) -> None:
        write(**changes)
        done = machines.run("h0", UP, check=False)
        assert done.returncode == 2 and words in done.stderr.splitlines()[-1], done.stderr
        assert not left_over(machines)

    refused(f"host nobody@{worker}: ssh refuses this user's key; ssh-copy-id", WORKER_SSH=f"nobody@{worker}")
    two = {"NUM_DEVICES": "3", "WORKER_HOSTS": f"{worker},10.255.0.1"}
    machines.cut("h1")
    refused(f"host root@{worker}: it cannot be reached; ping -c 3")
    machines.heal("h1")
    refused(f"WORKER_HOSTS: {here} is this machine's own address", WORKER_HOSTS=here)

    write()
    started = machines.run("h0", UP)
    assert f"default is ready: http://{here}:8100" in started.stdout
    versions = f"tandem {tandem.__version__} mlx {version('mlx')} mlx-lm {version('mlx-lm')}"
    assert f"root@{worker}: {versions} in {python}\n" in started.stdout
    try:
        [status] = json.loads(machines.run("h0", ["tandem", "status", "--json", "--interval", "0"]).stdout)
        ranks = status["replicas"][0]["ranks"]
        assert [(rank["host"], rank["stage"]) for rank in ranks] == [("h0", 0), ("h1", 0)]
        body = {"prompt": [5, 9, 70, 3, 42], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"http://{here}:8100/v1/completions", json=body, timeout=240).json()
        assert answer["choices"][0]["text"] == expected and context() == 512

        write(MAX_SEQUENCE_LENGTH="256")
        again = machines.run("h0", ["tandem", "restart"])
        assert "in " + str(python) + ", as here: nothing to do" in again.stdout and context() == 256
        write(MAX_SEQUENCE_LENGTH="128")
        other = machines.run("h0", UP, check=False)
        assert other.returncode == 2 and "default runs already" in other.stderr and context() == 256
        write(**two, WORKER_SSH=f"root@{worker},h1")
        twice = machines.run("h0", [*UP, "--replace"], check=False)
        assert twice.returncode == 2 and f"host h1: is the same machine as root@{worker}" in twice.stderr
        assert context() == 256
        write(MAX_SEQUENCE_LENGTH="128")
        machines.run("h0", [*UP, "--replace"])
        assert context() == 128
    finally:
        machines.run("h0", ["tandem", "down", "--now"])
    eventually(lambda: not left_over(machines), what=lambda: left_over(machines))
