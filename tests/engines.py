"""Engines without a server: their settings, what ranks that compute nothing say, and ranks that compute wrongly."""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from tandem.config.loading import build
from tandem.config.settings import Settings
from tandem.engine.build_layout import plan_layout
from tandem.engine.engine import Engine
from tandem.executors.cluster import ClusterExecutor
from tandem.launchers.local import LocalLauncher
from tandem.protocol.control import Ready, Stepped
from tandem.protocol.step import RankStep, StepPlan, StepResult


def settings_of(model: Path | str, **values: Any) -> Settings:
    """Settings for a model, by their names."""
    return build({"model": str(model), **values})


def ready(rank: int, **changes: Any) -> Ready:
    """A rank that has loaded, on a CPU with a GiB of memory."""
    return Ready(
        **{
            "rank": rank,
            "weight_bytes": 10**6,
            "kv_bytes_per_token": 256,
            "memory_bytes": 2**30,
            "peak_bytes": 0,
            "gpu": False,
            "host": "host",
            "pid": 1,
            "trimmable": True,
            **changes,
        }
    )


def stepped(plan: StepPlan, ranks: int, token: int = 5) -> list[Stepped]:
    """Reports of a step in which the first rank samples `token` for every row."""
    result = StepResult(plan.step_id, plan.micro_batch, [token] * len(plan.sampled()))
    return [Stepped(RankStep(rank, plan.step_id, 0.0, 0), result=None if rank else result) for rank in range(ranks)]


RANK = """
import os, signal, time
from pathlib import Path

import msgspec

from tandem.executors.worker import WorkerPayload, run_rank
from tandem.processes.child import receive_payload

payload = msgspec.json.decode(receive_payload(), type=WorkerPayload)
rank = payload.spec.rank
{before}


def wrap(stage):
    from tandem.loading.stage import StageModel

    class Planted(StageModel):
        def __init__(self):
            vars(self).update(vars(stage))

        def forward(self, h, caches):
{forward}

    return Planted()


run_rank(payload, wrap)
"""


def plant(directory: Path, monkeypatch: pytest.MonkeyPatch, forward: str, before: str = "") -> LocalLauncher:
    """A launcher of ranks whose stages compute by `forward`, in which `super().forward` is the real thing."""
    text = RANK.format(before=before, forward=indent(forward, " " * 12))
    (directory / "tandem_planted_rank.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")]))
    return LocalLauncher(1, "tandem_planted_rank")


def launched(settings: Settings, launcher: LocalLauncher) -> Engine:
    """An engine whose ranks that launcher starts."""
    layout = plan_layout(settings)
    return Engine(
        settings,
        layout,
        ClusterExecutor(list(layout.ranks), launcher, start_timeout_s=240.0, step_timeout_s=240.0, rejoin_timeout_s=240.0),
    )
