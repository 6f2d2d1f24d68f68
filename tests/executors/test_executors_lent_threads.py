"""Threads that have worked for MLX wait for more, and never end while the interpreter does."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tandem import LLM, SamplingParams
from tandem.executors.lent_threads import LentThread
from tandem.testing import tiny_model

EXITS = Path(__file__).parents[2] / "benchmarks" / "exits.py"


def test_threads_are_used_again_one_by_one() -> None:
    seen: list[int] = []
    for _ in range(3):
        work = LentThread(lambda: seen.append(threading.get_ident()))
        work.join(240)
        assert not work.is_alive()
    assert len(seen) == 3 and len(set(seen)) == 1


def test_work_at_the_same_time_has_threads_of_its_own() -> None:
    meet = threading.Barrier(3, timeout=240)
    works = [LentThread(lambda: meet.wait() and None) for _ in range(2)]
    assert works[0].is_alive() and works[1].is_alive()
    meet.wait()
    for work in works:
        work.join(240)
        assert not work.is_alive()


def test_a_thread_that_has_raised_is_not_lent_again(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise OSError("the mailbox is closed")

    with caplog.at_level(logging.ERROR):
        work = LentThread(fail)
        work.join(240)
    assert not work.is_alive()
    test_threads_are_used_again_one_by_one()


def test_a_model_that_is_closed_ends_no_thread_that_has_computed(tmp_path: Path) -> None:
    model, before = str(tiny_model(tmp_path)), set(threading.enumerate())
    for _ in range(2):
        with LLM(model) as llm:
            llm.generate([[5, 6]], SamplingParams(max_tokens=2))
            computing = [one for one in threading.enumerate() if one.name == "mlx"]
        assert all(one.is_alive() for one in computing)
    assert {one.name for one in set(threading.enumerate()) - before} & {"results", "engine"} == set()


IMPORTED = """
import asyncio, sys, threading
from tandem import AsyncLLM

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx.nn":
            print(threading.current_thread().name)

async def main():
    sys.meta_path.insert(0, Finder())
    async with AsyncLLM(sys.argv[1]):
        pass

asyncio.run(main())
"""


def test_no_thread_of_asyncio_imports_mlx(tmp_path: Path) -> None:
    """They end with the loop, a moment before the interpreter."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", IMPORTED, str(tiny_model(tmp_path))], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout == "mlx\n"


@pytest.mark.slow
def test_tandem_generate_ends_with_0_on_a_busy_machine(tmp_path: Path) -> None:
    words = [sys.executable, str(EXITS), str(tiny_model(tmp_path)), "--times", "2", "--burners", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 x exit code 0" in done.stdout
