"""How the machines of a stage can divide its layers: what the sharding rules allow, for the planner. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.errors import LayoutError
from tandem.models.description import ModelDescription
from tandem.models.shard import Shard, held_kv_heads, plan_shards

_LOPSIDED = 1e9


class Divider:
    """Asks `plan_shards`, and remembers the answers."""

    def __init__(self, description: ModelDescription, *, dequantize: bool) -> None:
        self._description, self._dequantize = description, dequantize
        self._heads: dict[tuple[float, ...], tuple[int, ...] | None] = {}
        self._whole: set[int] = set()
        self._refusals: dict[int, str | None] = {}
        least = self.heads((1.0, _LOPSIDED))
        step = least[0] if least else 0
        self.step = step if step and description.num_kv_heads % step == 0 else 0
        """Kv heads between places where attention can be cut; 0 where it cannot, or not evenly."""

    def heads(self, shares: Sequence[float]) -> tuple[int, ...] | None:
        """Kv heads of each machine with these shares; None where the layers cannot be divided so."""
        key = tuple(shares)
        if key not in self._heads:
            try:
                self._heads[key] = tuple(held_kv_heads(self._description, s) for s in self._plan(len(key), key))
            except LayoutError:
                self._heads[key] = None
        return self._heads[key]

    def refusal(self, size: int) -> str | None:
        """Why `size` machines cannot share a layer, or None if they can."""
        if size not in self._refusals:
            try:
                self._plan(size)
                self._refusals[size] = None if self.step else "attention cannot be cut evenly between its kv heads"
            except LayoutError as error:
                self._refusals[size] = error.message
        return self._refusals[size]

    def whole_experts(self, size: int) -> bool:
        """Experts are too narrow to be divided among `size` machines, which therefore share them out whole.

        Where their width can be cut that is faster: all machines then read the same number of bytes.
        """
        return self.refusal(size) is None and size in self._whole

    def _plan(self, size: int, weights: Sequence[float] | None = None) -> tuple[Shard, ...]:
        try:
            return plan_shards(self._description, size, weights=weights, dequantize=self._dequantize)
        except LayoutError:
            if not self._description.num_experts or size == 1:
                raise
            try:
                found = plan_shards(self._description, size, weights=weights, dequantize=self._dequantize,
                                    expert_parallel=True)
            except LayoutError:
                found = ()
            if not found:
                raise
            self._whole.add(size)
            return found
