"""A model of a type without a row is tried in a child process before anything of it is served. No mlx here."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

from tandem.errors import UnsupportedModel
from tandem.models.description import ModelDescription
from tandem.models.families.table import FAMILIES
from tandem.processes.sandbox import SandboxTask, TaskDone, run_once

log = logging.getLogger(__name__)

TIMEOUT_S = 300.0
"""Far more than the seconds that it takes."""


def require_dry_run(path: Path, description: ModelDescription) -> None:
    """Return if the type has a row, or if a tiny random model of its config computes over stages what mlx-lm computes.

    Raises UnsupportedModel with the line that differed.
    """
    if description.family not in FAMILIES:
        log.warning(
            "%s: unlisted architecture, parity checked: %s; `tandem parity` checks more", description.family, _tried(path)
        )


@cache
def _tried(path: Path) -> str:
    reply = run_once(SandboxTask("tandem.loading.dry_run", "tried", {"path": str(path)}, wall_s=TIMEOUT_S))
    if isinstance(reply, TaskDone):
        return reply.decoded(str)
    raise UnsupportedModel(f"{path}: an unlisted architecture, and its trial failed: {reply.why}", param="model")
