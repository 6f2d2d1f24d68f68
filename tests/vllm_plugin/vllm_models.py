"""Fixtures for the tests with vLLM: models, and the tokens that they give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from vllm_helpers import PROMPTS, expected_tokens

OUTPUT = 16

_TINY = "import sys; from tandem.testing import tiny_model; tiny_model(sys.argv[1], config=eval(sys.argv[2]))"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, made by another process: vLLM forks this one, which must not have MLX in it."""
    path = tmp_path_factory.mktemp("tiny") / "tiny"
    subprocess.run([sys.executable, "-c", _TINY, str(path), "{'architectures': ['LlamaForCausalLM']}"], check=True)
    return path


@pytest.fixture(scope="session")
def demo() -> Path:
    """The demo model."""
    from tandem.checkpoints.demo import fetch_demo

    return fetch_demo()


@pytest.fixture(scope="session")
def expected(tiny: Path) -> list[list[int]]:
    """What every layout must produce for PROMPTS with the tiny model."""
    found = expected_tokens(tiny, PROMPTS, OUTPUT)
    assert found["served"] == found["mlx_lm"]
    return found["served"]
