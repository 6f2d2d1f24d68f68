"""The MLX process group of one pipeline stage, over whichever backend joins its ranks.

Where the backend finds its peers stands in the environment, which the launcher prepares (launchers/worlds.py). Nothing
here has a timeout: MLX offers none, so ranks are supervised from outside, by progress.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from tandem.errors import LayoutError


class StageGroup:
    """Collectives among the ranks of one stage. Used by one thread alone, in the same order on all ranks."""

    def __init__(self, backend: str, size: int) -> None:
        """Join the group. Blocks until all `size` ranks are there.

        `backend` is MLX's name: ring, jaccl, jaccl-ring, nccl, mpi, or any. Raises LayoutError when the group has
        another size.
        """
        # jaccl-ring is jaccl told by its environment to prefer a ring over a mesh.
        self._group = mx.distributed.init(backend=backend.removesuffix("-ring"), strict=True)
        if self._group.size() != size:
            raise LayoutError(f"the {backend} group has {self._group.size()} ranks, the layout {size}; start as many "
                              "ranks as the layout names")
        self.rank = self._group.rank()
        self.size = size

    def sum(self, x: mx.array) -> mx.array:
        """Elementwise sum over the ranks; the same bits on all of them."""
        return mx.distributed.all_sum(x, group=self._group)

    def gather_last(self, x: mx.array, sizes: Sequence[int]) -> mx.array:
        """Concatenate the last axes of all ranks, `sizes[r]` long on rank r, in rank order."""
        width = max(sizes)
        rows = x.reshape(-1, x.shape[-1])
        if rows.shape[-1] < width:
            rows = mx.pad(rows, [(0, 0), (0, width - rows.shape[-1])])
        parts = mx.distributed.all_gather(rows, group=self._group).reshape(self.size, -1, width)
        whole = mx.concatenate([parts[rank, :, :size] for rank, size in enumerate(sizes)], axis=-1)
        return whole.reshape(*x.shape[:-1], sum(sizes))
