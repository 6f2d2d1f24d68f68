"""Models for the tests with vLLM."""

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first: of the two that run at a time none is left alone at the end."""
    items.sort(key=lambda item: item.path.name != "test_vllm_plugin_ray.py")
