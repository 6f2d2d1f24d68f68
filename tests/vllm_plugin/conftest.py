"""Models for the tests with vLLM, and their order."""

from __future__ import annotations

import pytest
from vllm_models import demo as demo
from vllm_models import expected as expected
from vllm_models import tiny as tiny


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first: of the two that run at a time none is left alone at the end."""
    items.sort(key=lambda item: item.path.name != "test_seeds_vllm_metal.py")
