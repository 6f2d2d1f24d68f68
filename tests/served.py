"""`tandem serve` as a person starts it, for tests that only need its address."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def served(model: str, *options: str, start_s: float = 120) -> Iterator[str]:
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
        process.communicate(timeout=60)
