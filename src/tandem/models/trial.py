"""A model of a type without a row is tried in a child process before anything of it is served. No mlx here."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile

from tandem.env import child_environment
from tandem.errors import UnsupportedModel
from tandem.models.description import ModelDescription
from tandem.models.families.table import FAMILIES
from tandem.processes.child import ChildProcess

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
    with TemporaryFile() as output:
        child = ChildProcess("tandem.loading.trial", b"", arguments=(str(path),), env=child_environment(),
                             name="trial of the architecture", output=output.fileno())
        try:
            ended = child.wait(TIMEOUT_S)
        finally:
            child.kill()
            child.wait(TIMEOUT_S)
        output.seek(0)
        said = output.read().decode(errors="replace").splitlines()
    if not ended:
        raise UnsupportedModel(f"{path}: an unlisted architecture; its trial did not end within {TIMEOUT_S:g} s",
                               param="model")
    line = said[-1] if said and (child.poll() or 0) >= 0 else child.describe_exit()
    if child.poll():
        raise UnsupportedModel(f"{path}: an unlisted architecture, and its trial failed: {line[:500]}", param="model")
    return line
