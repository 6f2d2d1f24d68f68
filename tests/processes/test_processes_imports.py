"""What processes of a server load, and what they do without: it costs each of them time and memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("numpy", "transformers", "gguf", "mlx", "mlx_lm", "ray")


@pytest.mark.parametrize(
    "modules",
    [
        "tandem.cli.serve",
        "tandem.cli.processes, tandem.server.api_process",
        "tandem.cli.processes, tandem.engine.engine_process",
        "tandem.executors.worker",
    ],
    ids=["supervisor", "api", "engine", "rank"],
)
def test_a_process_starts_without_what_it_may_not_need(modules: str) -> None:
    code = f"import sys, {modules}; print(*(set(sys.modules) & set({HEAVY})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.split() == []
