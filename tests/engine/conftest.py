"""A model for tests to which it does not matter which."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.testing import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))
