"""Stages of tiny models, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.checkpoints.resolve import resolve
from tandem.loading.stage import StageModel, load_stage
from tandem.models.description import describe
from tandem.testing import tiny_model


def tiny_stage(
    directory: Path, family: str = "llama", *, part: range | None = None, loaded_as: str = "auto", **options: Any
) -> StageModel:
    """All layers of a model, or a part of them; `options` are those of `tiny_model`."""
    files = resolve(str(tiny_model(directory, family, **options)))
    description = describe(files)
    return load_stage(files, description, part or range(description.num_layers), dtype=loaded_as)
