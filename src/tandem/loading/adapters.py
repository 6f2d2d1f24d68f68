"""LoRA adapters in a stage's modules: several beside one copy of the base, chosen row by row (mlx)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from tandem.errors import BrokenModel, UnsupportedModel
from tandem.loading.fusion import FusedPart
from tandem.loading.lora import LoRA, LoRALinear, Rows
from tandem.loading.shard_modules import OverRanks, Slice, at, layer_cutter, put, take
from tandem.loading.weights import load_file
from tandem.models.adapter_files import read_adapter
from tandem.models.description import ModelDescription
from tandem.models.shard import Shard


class _Target(NamedTuple):
    """Linear layer that adapters may name, as it was loaded: cut, and not yet fused or wrapped."""

    holder: nn.Module
    """Module or list that holds it."""
    name: str
    inputs: int
    outputs: int
    part: Slice | None
    """Part of the weight on this rank; None for all of it."""


class Adapters:
    """LoRA adapters of one stage or rank, by index."""

    def __init__(self, root: str, description: ModelDescription, shard: Shard | None, dtype: mx.Dtype, most: int) -> None:
        """Hold at most `most` adapters, with indices from 1. `root` is the path of the layer list in the model; A and B are
        cast to `dtype`."""
        self._root, self._description, self._shard, self._dtype = root, description, shard, dtype
        self._targets: dict[int, dict[str, _Target]] = {}
        self._rows = Rows()
        self.most = most
        self.chosen: list[int] = []
        """Adapter of each row of the next forward pass."""

    def note(self, number: int, layer: nn.Module) -> None:
        """Record the linear layers of decoder layer `number`, which is loaded and cut."""
        root = f"{self._root}.{number}"
        cutter = layer_cutter(root, layer, self._shard, self._description) if self._shard is not None else None
        self._targets[number] = {}
        for path, module in layer.named_modules():
            if isinstance(module, nn.Linear | nn.QuantizedLinear):
                parent, _, name = path.rpartition(".")
                part = cutter.slice_of(f"{path}.weight") if cutter is not None else None
                self._targets[number][f"{root}.{path}"] = _Target(at(layer, parent), name, *_dimensions(module), part)

    def load(self, number: int, directory: str) -> None:
        """Load the adapter in `directory` as index `number`, in place of one that has it, or raise and change nothing.

        Raise `BrokenModel` for weights of the wrong shape or that are not finite, `UnsupportedModel` for a module that is
        not a linear layer.
        """
        adapter = read_adapter(directory, self._description)
        weights = load_file(adapter.path)
        found: dict[str, tuple[_Target, mx.array, mx.array]] = {}
        for path, names in adapter.modules.items():
            targets = self._targets.get(int(path[len(self._root) + 1 :].partition(".")[0]))
            if targets is None:
                continue  # of another stage
            if (target := targets.get(path)) is None:
                raise UnsupportedModel(
                    f"{adapter.path}: {path} is not in the model or no linear layer, so it cannot be adapted; is this an "
                    "adapter for another model? Else fuse it into the model instead",
                    param="adapter_path",
                )
            a, b = (weights[name].T if adapter.transposed else weights[name] for name in names)
            a, b = self._cut(f"{adapter.path}: {path}", target, a, b)
            found[path] = target, a.astype(self._dtype), (adapter.scale * b).astype(self._dtype)
        for path, (_, a, b) in found.items():
            if not (mx.isfinite(a).all() & mx.isfinite(b).all()).item():
                raise BrokenModel(
                    f"{adapter.path}: the weights of {path} are not all finite numbers; train or save the adapter again",
                    param="adapter_path",
                )
        self.unload(number)
        products: dict[LoRA, dict[int, tuple[mx.array, mx.array]]] = {}
        for target, a, b in found.values():
            holder, name, module = _place(target)
            if isinstance(module, FusedPart):
                product, part = module.product, module.number
                product.lora = lora = product.lora or LoRA(self._rows, self.most + 1, product.widths)
            else:
                if not isinstance(module, LoRALinear):
                    module = LoRALinear(module, LoRA(self._rows, self.most + 1, [target.outputs]))
                    put(holder, name, module)
                lora, part = module.lora, 0
            products.setdefault(lora, {})[part] = a, b
        for lora, parts in products.items():
            lora.put(number, parts)

    def unload(self, number: int) -> None:
        """Drop the adapter `number`, if it is loaded."""
        for target in (target for targets in self._targets.values() for target in targets.values()):
            holder, name, module = _place(target)
            if isinstance(module, LoRALinear) and not module.lora.drop(number):
                put(holder, name, module.module)
            elif isinstance(module, FusedPart) and (lora := module.product.lora) and not lora.drop(number):
                module.product.lora = None

    def choose(self, rows: list[int]) -> None:
        """Set the adapter of each row of the next forward pass, 0 for none."""
        self.chosen = rows
        self._rows.each = mx.array(rows, mx.int32)
        self._rows.index = self._rows.each if len(set(rows)) > 1 else next(iter(rows), 0)

    def _cut(self, what: str, target: _Target, a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
        """Return A [inputs, rank] and B [rank, outputs], cut like the module's weight."""
        if target.part is not None:
            axis, total = target.part.axis, target.part.part.total
            size = a.shape[0] if axis == -1 else b.shape[1]
            if size == total or not (target.part.exact or size % total):
                if axis == -1:  # inputs are split
                    a = take(a, replace(target.part, axis=-2), what)
                else:
                    b = take(b, replace(target.part, axis=-1), what)
        if (a.shape[0], b.shape[1]) != (target.inputs, target.outputs):
            raise BrokenModel(
                f"{what} is for {a.shape[0]} inputs and {b.shape[1]} outputs, and the model's has {target.inputs} and "
                f"{target.outputs}{' on this rank' if self._shard else ''}; is this an adapter for another model?",
                param="adapter_path",
            )
        return a, b


def _place(target: _Target) -> tuple[nn.Module, str, nn.Module]:
    """Return the module of a target as it is now, within what sums over ranks, with its holder and name there."""
    holder, name, module = target.holder, target.name, at(target.holder, target.name)
    while isinstance(module, OverRanks):
        holder, name, module = module, "module", module.module
    return holder, name, module


def _dimensions(module: nn.Module) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a linear layer."""
    outputs, inputs = module.weight.shape
    return (inputs * 32 // module.bits if isinstance(module, nn.QuantizedLinear) else inputs), outputs
