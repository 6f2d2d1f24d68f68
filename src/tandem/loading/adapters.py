"""LoRA adapters in a model's modules: whole, or a rank's part of them (mlx)."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from tandem.errors import BrokenModel, UnsupportedModel
from tandem.loading.shard_modules import Slice, layer_cutter, take
from tandem.loading.weights import load_file
from tandem.models.adapter_files import Adapter
from tandem.models.description import ModelDescription
from tandem.models.shard import Shard


class Adapted(nn.Module):
    """A linear layer plus a LoRA adapter's output; bit for bit equal to mlx-lm's LoRALinear."""

    def __init__(self, linear: nn.Module, a: mx.array, b: mx.array, scale: float) -> None:
        super().__init__()
        self.linear = linear
        self.lora_a = a
        self.lora_b = b
        self._scale = scale

    def __call__(self, x: mx.array) -> mx.array:
        """Map inputs [..., I] to outputs [..., O]."""
        z = (x @ self.lora_a) @ self.lora_b
        outputs: mx.array = self.linear(x) + (self._scale * z).astype(x.dtype)
        return outputs


class AdapterLoader:
    """Applies an adapter's weights to the layers of one stage or rank."""

    def __init__(self, adapter: Adapter, layers: str, description: ModelDescription, shard: Shard | None) -> None:
        """Open the adapter's file; only headers are read. `layers` is the path of the layer list in the model. Raise
        `BrokenModel`."""
        self._adapter = adapter
        self._layers = layers
        self._description = description
        self._shard = shard
        self._weights: dict[str, mx.array] = load_file(adapter.path)

    def apply(self, number: int, layer: nn.Module) -> int:
        """Adapt decoder layer `number`, already loaded and cut; return the bytes of A and B added.

        Raise `BrokenModel` for weights of the wrong shape, `UnsupportedModel` for a module that is not a linear layer.
        """
        root = f"{self._layers}.{number}."
        modules = dict(layer.named_modules())
        adapted = []
        for path, names in self._adapter.modules.items():
            if not path.startswith(root):
                continue
            module = modules.get(path.removeprefix(root))
            if not isinstance(module, nn.Linear | nn.QuantizedLinear):
                what = "is no linear layer" if module is not None else "is not in the model"
                raise UnsupportedModel(
                    f"{self._adapter.path}: {path} {what}, so it cannot be adapted; fuse the adapter into the model instead",
                    param="adapter_path",
                )
            a, b = self._pair(path, path.removeprefix(root), names, layer)
            inputs, outputs = _dimensions(module)
            if (a.shape[0], b.shape[1]) != (inputs, outputs):
                raise self._misfit(path, a, b, inputs, outputs)
            mx.eval(a, b)
            adapted.append((path.removeprefix(root), Adapted(module, a, b, self._adapter.scale)))
        if adapted:
            layer.update_modules(tree_unflatten(adapted))
        return sum(one.lora_a.nbytes + one.lora_b.nbytes for _, one in adapted)

    def _pair(self, path: str, inner: str, names: tuple[str, str], layer: nn.Module) -> tuple[mx.array, mx.array]:
        """Return A [inputs, rank] and B [rank, outputs], cut like the module's weight."""
        a, b = (self._weights[name] for name in names)
        if self._adapter.transposed:
            a, b = a.T, b.T
        if self._shard is None:
            return a, b
        root = path.removesuffix(f".{inner}")
        part = layer_cutter(root, layer, self._shard, self._description).slice_of(f"{inner}.weight")
        if part is None:
            return a, b
        if part.axis == -1:  # inputs are split
            return self._cut(path, a, replace(part, axis=-2)), b
        return a, self._cut(path, b, replace(part, axis=-1))

    def _cut(self, path: str, array: mx.array, part: Slice) -> mx.array:
        size, total = array.shape[part.axis], part.part.total
        if size != total and (part.exact or size % total):
            raise BrokenModel(
                f"{self._adapter.path}: {path} has {size} of what the model has {total} of; is this an "
                "adapter for another model?",
                param="adapter_path",
            )
        return take(array, part, path)

    def _misfit(self, path: str, a: mx.array, b: mx.array, inputs: int, outputs: int) -> BrokenModel:
        return BrokenModel(
            f"{self._adapter.path}: {path} is for {a.shape[0]} inputs and {b.shape[1]} outputs, and the "
            f"model's has {inputs} and {outputs}; is this an adapter for another model?",
            param="adapter_path",
        )


def _dimensions(module: nn.Module) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a linear layer."""
    outputs, inputs = module.weight.shape
    return (inputs * 32 // module.bits if isinstance(module, nn.QuantizedLinear) else inputs), outputs
