"""A model of a type without a row is tried in a child process before anything of it is served. No mlx here."""

from __future__ import annotations

import logging
import subprocess
from functools import cache
from pathlib import Path

from tandem.env import child_environment
from tandem.errors import UnsupportedModel
from tandem.models.description import ModelDescription
from tandem.models.families.table import FAMILIES
from tandem.processes.interpreter import module_command

log = logging.getLogger(__name__)

TIMEOUT_S = 300.0
"""Far more than the seconds that it takes."""


def require_trial(path: Path, description: ModelDescription) -> None:
    """Return if the type has a row, or if a tiny random model of its config computes over stages what mlx-lm computes.

    Raises UnsupportedModel with the line that differed.
    """
    if description.family not in FAMILIES:
        log.warning("%s: unlisted architecture, parity checked: %s; `tandem parity` checks more",
                    description.family, _tried(path))


@cache
def _tried(path: Path) -> str:
    command = module_command("tandem.loading.trial", str(path))
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
                              env=child_environment())
        line = (done.stdout.strip() or done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    except subprocess.TimeoutExpired:
        raise UnsupportedModel(f"{path}: an unlisted architecture; its trial did not end within {TIMEOUT_S:g} s",
                               param="model") from None
    if done.returncode:
        raise UnsupportedModel(f"{path}: an unlisted architecture, and its trial failed: {line[:500]}", param="model")
    return line
