"""Processes that take this machine for a Mac (fake_mac/README.md)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

FAKE_MAC = Path(__file__).parent / "fake_mac"
TOOLS = FAKE_MAC / "bin"


def mac_environment(directory: Path, **variables: str) -> dict[str, str]:
    """The environment of such a process. `directory` is kept for what its tools are told, and what they shall say."""
    directory.mkdir(parents=True, exist_ok=True)
    return {
        **os.environ,
        "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(FAKE_MAC / "site"), os.environ.get("PYTHONPATH")))),
        "FAKE_MAC": str(directory),
        "OPENBLAS_NUM_THREADS": "1",
        **variables,
    }


def answers(directory: Path, texts: Mapping[str, str]) -> None:
    """Let tools say something else."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (directory / name).write_text(text)


def recorded(name: str) -> str:
    """What a tool says by itself."""
    return (FAKE_MAC / "answers" / name).read_text()
