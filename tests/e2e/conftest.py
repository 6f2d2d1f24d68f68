"""Three machines, a tiny model, and what it says in one process: for tests over several hosts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from netns import Machines
from tandem import LLM, SamplingParams
from tandem.testing import tiny_model


@pytest.fixture(scope="module")
def machines(make_machines: Callable[[int], Machines]) -> Machines:
    return make_machines(3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("hosts") / "tiny", "llama")


@pytest.fixture(scope="module")
def expected(tiny: Path) -> str:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with LLM(str(tiny)) as llm:
        return llm.generate([[5, 9, 70, 3, 42]], params)[0].text
