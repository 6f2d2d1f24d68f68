"""A port that somebody takes before MLX does costs another attempt, not the start."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem import LLM, SamplingParams
from tandem.executors.failure_cause import rank_failure
from tandem.launchers import process_groups
from tandem.testing import tiny_model


def test_a_lost_port_counts_as_a_loss() -> None:
    failure = rank_failure(1, "RuntimeError", "[ring] Couldn't bind socket (error: 98)")
    assert failure.cause == "link" and "somebody took a port" in failure.message


@pytest.mark.slow
def test_a_start_that_has_lost_its_port_takes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sound, asked = process_groups.free_ports, []

    def lost(count: int, address: str = "127.0.0.1", wanted: Sequence[int] = ()) -> list[int]:
        asked.append(count)
        return [thief.getsockname()[1], *sound(count - 1)] if len(asked) == 1 else sound(count)

    monkeypatch.setattr(process_groups, "free_ports", lost)
    options = {"tensor_parallel_size": 2}
    with (
        socket.create_server(("127.0.0.1", 0)) as thief,
        caplog.at_level(logging.WARNING),
        LLM(str(tiny_model(tmp_path)), **options) as llm,
    ):
        assert llm.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True))[0].finish_reason == "length"
    assert len(asked) == 2 and "somebody took a port of the group" in caplog.text
