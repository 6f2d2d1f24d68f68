"""Random numbers as a pure function of (seed, position), so that a sequence's text depends on nothing else.

Counter-based: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (SplitMix64), indexed instead of
iterated. The same seed and position give the same numbers in any batch, on any rank, and again after a replay.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's output function (a bijection of uint64), elementwise."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def seed_keys(seeds: list[int]) -> npt.NDArray[np.uint64]:
    """uint64 [n] keys of 64-bit seeds; mixed first, so that neighbouring seeds have unrelated sequences."""
    return mixed(np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64) + _GAMMA)


def uniform_pairs(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """float32 [n, 2] in [0, 1), 24 bits each: two independent numbers a row, for its token at `positions`."""
    bits = mixed(keys + (positions + np.uint64(1)) * _GAMMA)
    parts = np.stack([bits >> np.uint64(40), (bits >> np.uint64(8)) & np.uint64(0xFFFFFF)], axis=1)
    return parts.astype(np.float32) * np.float32(2.0**-24)
