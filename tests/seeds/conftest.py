"""Ray's machines, for documents that have vLLM under Ray; they are used where vLLM is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm_helpers import expected_tokens
from vllm_models import expected as expected
from vllm_models import tiny as tiny
from vllm_ray import PROMPT, Cluster, block

from netns import Machines


@pytest.fixture(scope="module")
def wanted(tiny: Path) -> list[int]:
    return expected_tokens(tiny, [PROMPT], 16)["served"][0]


@pytest.fixture
def one_machine(make_machines: Callable[[int], Machines], tiny: Path) -> Cluster:
    return Cluster(make_machines(1), tiny)


@pytest.fixture(scope="module")
def two_machines(tiny: Path) -> Iterator[Cluster]:
    with Machines(2) as machines:
        cluster = Cluster(machines, tiny)
        cluster.run("h0", block("Ray, two machines, pipeline parallelism", 0))
        cluster.run("h1", block("Ray, two machines, pipeline parallelism", 1))
        yield cluster
