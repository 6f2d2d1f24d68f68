"""Sums between ranks that are none, of which nobody is told: no token of theirs reaches a client."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

PLANTED = Path(__file__).parents[1] / "diagnostics" / "selftest" / "planted"
LONG = {"prompt": [7, 8, 9], "max_tokens": 200, "temperature": 0, "stream": True}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layout", [("-tp", "2"), ("--parallel", "2,1")], ids=" ".join)
def test_no_token_of_torn_sums_reaches_a_client(
    running: Callable[..., AbstractContextManager[Any]],
    model: Path,
    layout: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torn = tmp_path / "torn"
    for name, value in (("PYTHONPATH", str(PLANTED)), ("PLANTED", "torn sums"), ("TORN", str(torn))):
        monkeypatch.setenv(name, value)
    with running(str(model), *layout, "--max-restarts", "100") as server:
        calm = server.call(LONG).join().result
        call = server.call(LONG)
        server.wait(lambda: call.chunks > 20, "tokens")
        torn.touch()
        server.wait(lambda: "does not count" in server.log.read_text(), "it is noticed")
        torn.unlink()
        assert call.join().result == calm
