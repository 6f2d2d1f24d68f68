"""A rank's way to its peers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import pytest

from tandem.config.settings import ModelSettings, ParallelSettings, Settings
from tandem.engine.build_layout import plan_layout
from tandem.executors import worker
from tandem.protocol.control import Connect
from tandem.protocol.payloads import WorkerPayload
from tandem.testing import tiny_model
from tandem.transport.security import ClusterKeys


class Joined(Exception):
    """MLX would wait for the other ranks now."""


@pytest.mark.parametrize(
    "parallel",
    [ParallelSettings(tensor_parallel_size=2, backend="ring"), ParallelSettings(pipeline_parallel_size=2, channel="mlx")],
)
def test_while_mlx_waits_for_other_ranks_a_rank_still_goes_with_its_parent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parallel: ParallelSettings
) -> None:
    """It keeps the interpreter lock meanwhile, so that no thread of the rank could end it."""
    guarded: list[bool] = []

    @contextmanager
    def guard() -> Iterator[None]:
        guarded.append(True)
        try:
            yield
        finally:
            guarded.clear()

    def init(**_: object) -> None:
        assert guarded
        raise Joined

    monkeypatch.setattr(worker, "guarded_lifeline", guard)
    monkeypatch.setattr(mx.distributed, "init", init)
    settings = Settings(model=ModelSettings(model=str(tiny_model(tmp_path / "tiny"))), parallel=parallel)
    payload = WorkerPayload(
        spec=plan_layout(settings).ranks[0], keys=ClusterKeys.generate(), bus_endpoint="", channel_host="", generation="1"
    )
    mailbox = cast(Any, SimpleNamespace(put=lambda _: None))
    rank = worker.Worker(payload, cast(Any, None))
    with pytest.raises(Joined):
        rank._build(cast(Connect, None), None, mailbox, lambda *_: None)
    assert guarded == []
