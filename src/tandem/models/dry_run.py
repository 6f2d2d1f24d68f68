"""Checks of a model type before it is served: its package, and without a row in `FAMILIES` a dry run in a child process.
No mlx here."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

from tandem.errors import UnsupportedModel
from tandem.models.description import ModelDescription
from tandem.models.families.table import FAMILIES
from tandem.models.sources import require_source
from tandem.processes.sandbox import SandboxTask, TaskDone, run_once

log = logging.getLogger(__name__)

TIMEOUT_S = 300.0
"""Time limit of a dry run in seconds; usually a few suffice."""


def require_dry_run(path: Path, description: ModelDescription) -> None:
    """Return if the type is listed and its package is installed, or if a tiny random model of its config matches mlx-lm
    bit for bit when split into stages.

    Raise UnsupportedModel with the remedy or the difference otherwise.
    """
    require_source(description.family)
    if description.family not in FAMILIES:
        log.warning(
            "%s: unlisted architecture, parity checked: %s; `tandem parity` checks more", description.family, _tried(path)
        )


@cache
def _tried(path: Path) -> str:
    reply = run_once(SandboxTask("tandem.loading.dry_run", "tried", {"path": str(path)}, wall_s=TIMEOUT_S))
    if isinstance(reply, TaskDone):
        return reply.decoded(str)
    raise UnsupportedModel(f"{path}: an unlisted architecture, and its trial failed: {reply.why}")
