"""`tandem serve --hostfile` over machines of their own: layouts, logs, and that nothing is left on any machine."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hosts import hostfile, serving
from netns import Machines
from tandem import LLM, SamplingParams
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def machines(make_machines) -> Machines:
    return make_machines(3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("hosts") / "tiny", "llama")


@pytest.fixture(scope="module")
def expected(tiny: Path) -> str:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with LLM(str(tiny)) as llm:
        return llm.generate([[5, 9, 70, 3, 42]], params)[0].text


@pytest.mark.demo
def test_the_demo_model_in_a_pipeline_over_two_machines_and_ctrl_c(machines: Machines) -> None:
    path = hostfile(machines, ["h1", "h2"])
    with serving(machines, "demo", "--hostfile", path) as server:
        assert "[h1] " in server.log and "[h2] " in server.log and "[Rank 1] stage 2/2" in server.log
        assert "2 rank(s), 2 stage(s)" in server.log
        assert machines.processes("h1", "tandem.executors.worker") and machines.processes("h2", "tandem.executors.worker")
        assert "Paris" in server.complete(tokens=8, prompt="The capital of France is", ignore_eos=False)
        assert server.stop(signal.SIGINT) == 0


def test_tensor_parallel_over_two_machines(machines: Machines, tiny: Path, expected: str) -> None:
    path = hostfile(machines, ["h1", "h2"], backend="ring", envs=["TANDEM_TEST_WORD=1"])
    with serving(machines, str(tiny), "--hostfile", path, "--tensor-parallel-size", "2") as server:
        assert server.complete() == expected
