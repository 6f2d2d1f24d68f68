"""`tandem serve` as a person starts it."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil


@contextmanager
def served(model: str, *options: str, start_s: float = 240) -> Iterator[str]:
    """The address of a server on a free port, which must be ready within `start_s` seconds; it is ended after."""
    command = [sys.executable, "-m", "tandem", "serve", model, *options, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                               env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    try:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], start_s)
        line = process.stdout.readline() if readable else ""
        ready = re.search(r"Tandem is ready: (\S+)", line)
        assert ready, f"not ready: {line!r}"
        yield ready[1]
    finally:
        process.terminate()
        process.communicate(timeout=240)


def assert_idle(family: Sequence[psutil.Process]) -> None:
    """These processes have nothing to do: soon there are 2 s in which they use 0.2 s of a processor, all together."""
    for _ in range(20):
        before = {one.pid: sum(one.cpu_times()[:2]) for one in family}
        time.sleep(2.0)
        spent = {one.pid: sum(one.cpu_times()[:2]) - before[one.pid] for one in family}
        if sum(spent.values()) < 0.2:
            return
    raise AssertionError(f"seconds of a processor in 2 s of idleness: {spent}")
