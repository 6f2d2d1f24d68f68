"""A model for tests to which it does not matter which, and steps whose cost does not decide whether drafts are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.testing import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def steps_that_cost_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may keep a few steps with drafts waiting, which do not pay then for hundreds of steps."""
    monkeypatch.setattr("tandem.speculation.proposers.StepCosts.ratio", lambda self, rows, width: 1.0)
