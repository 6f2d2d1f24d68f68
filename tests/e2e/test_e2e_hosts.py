"""`tandem serve --hostfile` over machines of their own: layouts, logs, and that nothing is left on any machine."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hosts import hostfile, serving
from netns import Machines

pytestmark = pytest.mark.slow


@pytest.mark.demo
def test_the_demo_model_in_a_pipeline_over_two_machines_and_ctrl_c(machines: Machines) -> None:
    path = hostfile(machines, ["h1", "h2"])
    with serving(machines, "demo", "--hostfile", path) as server:
        assert "[h1] " in server.log and "[h2] " in server.log and "[Rank 1] stage 2/2" in server.log
        assert ", in 2 parts on " in server.log
        assert all(machines.processes(name, "tandem.executors.worker") for name in ("h1", "h2"))
        assert "Paris" in server.complete(tokens=8, prompt="The capital of France is", ignore_eos=False)
        assert server.stop(signal.SIGINT) == 0


def test_two_stages_over_three_machines_with_weights_from_the_head(
    machines: Machines, tiny: Path, expected: str, tmp_path: Path
) -> None:
    path = hostfile(machines, ["h1", "h2", "h0"])
    for name in machines.names:
        machines.set_variables(name, {"TANDEM_CACHE": str(tmp_path / name)})
    with serving(machines, str(tiny), "--hostfile", path, "--parallel", "2,1", "--weights-from", "head") as server:
        assert server.complete() == expected
        assert all(any((tmp_path / name).rglob("*.safetensors")) for name in machines.names)


def fails(machines: Machines, tiny: Path, *arguments: str, code: int = 2) -> str:
    """The last line of a server that cannot start."""
    with serving(machines, str(tiny), *arguments, ready=False) as server:
        assert server.process.wait(240) == code, server.log
        return [line for line in server.log.splitlines() if "tandem: " in line][-1]


def test_a_name_that_nobody_knows(machines: Machines, tiny: Path) -> None:
    path = hostfile(machines, ["h1", {"ssh": "nowhere.invalid"}])
    assert "host nowhere.invalid: nowhere.invalid is not known here" in fails(machines, tiny, "--hostfile", path)


def test_a_machine_that_refuses_the_key_is_named(machines: Machines, tiny: Path) -> None:
    path, keys = hostfile(machines, ["h1", "h2"]), machines["h2"].home / ".ssh" / "authorized_keys"
    before = keys.read_text()
    keys.write_text("")
    try:
        assert "host h2: ssh refuses this user's key; ssh-copy-id h2" in fails(machines, tiny, "--hostfile", path)
    finally:
        keys.write_text(before)


def test_a_machine_whose_host_key_is_not_known_is_named(machines: Machines, tiny: Path) -> None:
    path, known = hostfile(machines, ["h1", "h2"]), machines["h0"].home / ".ssh" / "known_hosts"
    before = known.read_text()
    known.write_text("".join(line + "\n" for line in before.splitlines() if not line.startswith("h2")))
    try:
        assert "host h2: its host key is not the known one" in fails(machines, tiny, "--hostfile", path)
    finally:
        known.write_text(before)


def test_a_machine_without_tandem_is_named(machines: Machines, tiny: Path) -> None:
    path = hostfile(machines, ["h1", {"ssh": "h2", "python": "/nowhere/python"}])
    assert "host h2: no Python with Tandem was found there" in fails(machines, tiny, "--hostfile", path)
