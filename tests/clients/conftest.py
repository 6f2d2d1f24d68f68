"""One `tandem serve` for all clients, with a tiny random model whose context is long enough for their prompts."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tandem.testing import tiny_model

CONTEXT = 16384


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = tiny_model(tmp_path_factory.mktemp("model"), config={"max_position_embeddings": CONTEXT})
    command = [sys.executable, "-m", "tandem", "serve", str(model), "--max-context", str(CONTEXT), "--port", "0",
               "--default-max-tokens", "32"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                               env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    try:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], 120)
        line = process.stdout.readline() if readable else ""
        ready = re.search(r"Tandem is ready: (\S+)", line)
        assert ready, f"not ready: {line!r}"
        yield ready[1]
    finally:
        process.terminate()
        process.communicate(timeout=60)
