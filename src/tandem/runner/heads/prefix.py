"""A draft head's part of cached prefixes, in memory and on disk (mlx)."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from tandem.kv.store import Layers, unsupported
from tandem.loading.pipeline_model import unevaluated
from tandem.loading.prefix import Prefix, each_array, kinds_of, trimmable
from tandem.loading.stage import CacheMember
from tandem.protocol.kv_blocks import BLOCK_SIZE, DISK_BLOCK_SIZE
from tandem.runner.heads.mtp import MTPHead
from tandem.runner.heads.separate import Eagle3Head


class HeadPrefix(NamedTuple):
    """First positions of a sequence in a draft head."""

    kv: Prefix
    """KV of all tokens but the first, which the head does not read."""
    ends: mx.array
    """Hidden states [1, blocks, W] of the model at the last position of each KV block, from which the head goes on."""

    def stored(self) -> Prefix:
        """Return whole disk blocks: KV of each token at its place, zeros for the first one, and the states as one more cache."""
        length = min(self.kv.length + 1, self.ends.shape[1] * BLOCK_SIZE) // DISK_BLOCK_SIZE * DISK_BLOCK_SIZE
        shift = [(0, 0), (0, 0), (1, 0), (0, 0)]
        states = each_array(lambda side: mx.pad(side, shift)[..., :length, :], [state[:2] for state in self.kv.states])
        ends, width = self.ends[:, : length // BLOCK_SIZE], _width(self.ends.shape[2])
        ends = mx.pad(ends, [(0, 0), (0, 0), (0, 2 * width * BLOCK_SIZE - ends.shape[2])]).reshape(1, 1, length, 2 * width)
        states = [*states, (ends[..., :width], ends[..., width:])]
        return Prefix(length, [*self.kv.kinds, KVCache], [(*state, length) for state in states])

    @classmethod
    def revived(cls, stored: Prefix, width: int) -> HeadPrefix:
        """Return the prefix that `stored` gave. `width`: elements of a hidden state."""
        *states, ends = each_array(lambda side: side, [state[:2] for state in stored.states])
        cut = [(*each_array(lambda side: side[..., 1:, :], state), stored.length - 1) for state in states]
        rows = mx.concatenate(ends, axis=-1).reshape(1, stored.length // BLOCK_SIZE, -1)
        return cls(Prefix(stored.length - 1, stored.kinds[:-1], cut), rows[..., :width])


def _width(states: int) -> int:
    """Return the elements of each of two sides, at each position of a KV block, that hold a hidden state."""
    return -(-states // (2 * BLOCK_SIZE))


def disk_layers(head: MTPHead | Eagle3Head, dtype: mx.Dtype) -> Layers | None:
    """Return the layout of `HeadPrefix.stored` on disk; None if the head's caches cannot be written. `dtype`: compute type."""
    empty, used = head.make_caches(), head.make_caches()
    with unevaluated():
        head.join(mx.zeros((1, 1), mx.int32), head.states(mx.zeros((1, 1, head.width), dtype)), used)
    ends = CacheMember(0, KVCache(), [((1, 1, 1, _width(head.width)), dtype)] * 2)
    found = CacheMember.all_of(0, empty, used)
    if not empty or not trimmable(empty) or unsupported(found, dtype):
        return None
    return Layers([*kinds_of(empty), KVCache], [*found, ends], 1, 0, dtype, as_bytes=False)
