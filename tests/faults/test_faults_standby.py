"""`--standby-ranks 1`: ranks that are replaced are the processes that waited beside them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from pids import gone
from tandem import LLM
from tandem.errors import ConfigError, LayoutError

FLAGS = ("--prefill-chunk", "8", "--prefix-cache", "0", "--max-restarts", "100")
STANDBY = ("tandem.executors.worker", "standby")


def waiting(served: Any) -> set[int]:
    """Process ids of standby ranks; not those that have become ranks."""
    return {one.pid for one in served.processes(*STANDBY)} - set(served.ranks())


@pytest.mark.slow
def test_they_are_the_next_ranks(running: Callable[..., AbstractContextManager[Any]], model: Path) -> None:
    with running(str(model), "-tp", "2", *FLAGS, "--standby-ranks", "1") as served:
        served.learn()
        served.wait(lambda: len(waiting(served)) == 2, "spares")
        first, standbys = set(served.ranks()), waiting(served)
        calls = served.load()
        os.kill(min(first), signal.SIGKILL)
        served.check(calls)
        served.wait(lambda: served.settled() and set(served.ranks()) == standbys, "they are the ranks")
        served.wait(lambda: len(waiting(served)) == 2, "others wait")
        # One that has ended, or stands still, is no rank, and costs nothing but the time that it would have saved.
        ended, stopped = sorted(waiting(served))
        os.kill(ended, signal.SIGKILL)
        os.kill(stopped, signal.SIGSTOP)
        served.wait(lambda: gone(ended), "it has ended")
        calls = served.load()
        os.kill(min(standbys), signal.SIGKILL)
        served.check(calls)
        served.wait(lambda: served.settled() and not set(served.ranks()) & {ended, stopped, *standbys}, "new ranks")


def test_what_cannot_be_is_refused(model: Path) -> None:
    with pytest.raises(LayoutError, match="--standby-ranks is for ranks in processes of their own"):
        LLM(str(model), standby_ranks=1)
    with pytest.raises(ConfigError, match="standby_ranks"):
        LLM(str(model), pipeline_parallel_size=2, standby_ranks=2)
