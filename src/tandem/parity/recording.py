"""A stage that writes down the logits of every position, so that the ranks' own code can be compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tandem.loading.stage import Apart, StageModel


class RecordingStage(StageModel):
    """A loaded stage, with its weights shared. On the last stage each forward pass is followed by the head for all of
    its positions, not just for those that are sampled from.

    Where ranks share the head all of them must record, since computing it takes them all; one keeps the result.
    """

    def __init__(self, stage: StageModel, keep: Callable[[mx.array], None] | None) -> None:
        """`keep` gets the logits [B, L, V] of each pass, in order; None on the ranks that only take part."""
        vars(self).update(vars(stage))
        self._keep = keep

    def forward(self, h: mx.array, caches: Sequence[Any]) -> mx.array:
        """As `StageModel.forward`."""
        h = super().forward(h, caches)
        if self.is_last and not isinstance(caches, Apart):  # rows apart have come through here one by one
            logits = self.head(h)
            mx.eval(logits)
            if self._keep is not None:
                self._keep(logits)
        return h


def recording(stage: StageModel, path: Path, *, keeps: bool) -> RecordingStage:
    """Record `stage`: where it `keeps`, logits go to `path` as rows of float32, and its type's name to `path`.dtype."""
    if not keeps:
        return RecordingStage(stage, None)
    dtype_file(path).write_text(str(stage.dtype).removeprefix("mlx.core."))
    path.write_bytes(b"")

    def keep(logits: mx.array) -> None:
        with path.open("ab") as file:
            file.write(np.array(logits.astype(mx.float32)).tobytes())

    return RecordingStage(stage, keep)


def dtype_file(path: Path) -> Path:
    """Where the type of computation stands for logits in `path`."""
    return path.with_suffix(".dtype")
