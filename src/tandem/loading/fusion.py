"""Fused projections: several products of one input as one (q, k and v; gate and up; those of experts too) (mlx).

Projections are found by tracing a lazy forward pass, not by name. Fused are those of one module that get the same
arrays, once each, and have weights of equal form. This works for every family, for a rank's part of the heads, and for
packed weights. LoRA adapters are added to the whole product.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from tandem.loading.lora import LoRA
from tandem.loading.shard_modules import Around, at, put

log = logging.getLogger(__name__)

_OUTPUT_AXIS: dict[type[nn.Module], int] = {nn.Linear: 0, nn.QuantizedLinear: 0, SwitchLinear: 1, QuantizedSwitchLinear: 1}
"""Axis of the outputs in each parameter, by type of module."""
_PARAMETERS = frozenset(("weight", "scales", "biases", "bias"))
_SETTINGS = ("group_size", "bits", "mode")
_JOINED_BYTES = 256 * 2**20
"""Largest fused product in bytes. For larger weights reading outweighs a kernel's launch, and fusing needs both copies
in memory at once."""


class FusedPart(nn.Module):
    """Replacement for one of several fused projections; returns its part of the shared product."""

    def __init__(self, product: Product, number: int) -> None:
        super().__init__()
        if number == 0:
            self.joined = product.joined  # a parameter of the first part only, so that its bytes count once
        self.product, self.number = product, number

    def __call__(self, x: mx.array, *args: object, **kwargs: object) -> mx.array:
        """Return the projection's output [..., O]. The arguments are those of the replaced module."""
        product = self.product
        # Host time matters: a step makes a hundred such calls or more.
        if (
            x is not product.x
            or (args or kwargs or product.more)
            and not product.alike(args, kwargs)
            or self.number not in product.outputs
        ):
            product.compute(x, args, kwargs)
        found = product.outputs.pop(self.number)
        if not product.outputs:
            product.forget()
        return found


class Product:
    """Several projections as one module. Outputs are computed on the first request, and each is handed out once, so
    that none is retained."""

    def __init__(self, joined: nn.Module, widths: Sequence[int]) -> None:
        """Store the fused module; `widths` are the outputs of each projection, in their order in `joined`."""
        self.joined, self.widths = joined, widths
        self.lora: LoRA | None = None
        self._call = _turned(joined) or joined
        self._columns = [(..., slice(sum(widths[:i]), sum(widths[: i + 1]))) for i in range(len(widths))]
        self._width, self._ends = sum(widths), [sum(widths[:i]) for i in range(1, len(widths))]
        self.x: mx.array | None = None
        """Input that `outputs` were computed from, together with `more`."""
        self.more: tuple[object, ...] = ()
        self.outputs: dict[int, mx.array] = {}
        """Outputs not handed out yet, by the projection's number."""

    def compute(self, x: mx.array, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Compute all outputs for these arguments."""
        whole = self._call(x, *args, **kwargs)
        parts: Any = self.lora(x, whole) if self.lora is not None else None
        # mx.split is faster, but its parts report a size that ignores the gaps between their rows. With two rows or more,
        # MLX's rotary kernel on a GPU would allocate too little memory.
        if parts is None:
            parts = mx.split(whole, self._ends, axis=-1) if whole.size == self._width else [whole[own] for own in self._columns]
        self.x, self.more, self.outputs = x, (*args, *kwargs.values()), dict(enumerate(parts))

    def alike(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
        """Return True if the arguments after the first are those that `outputs` were computed from."""
        given = (*args, *kwargs.values())
        return len(given) == len(self.more) and all(a is b for a, b in zip(given, self.more, strict=True))

    def forget(self) -> None:
        """Drop references to the last inputs."""
        self.x, self.more = None, ()


def _turned(module: nn.Module) -> Callable[[mx.array], mx.array] | None:
    """Return a function that applies a plain linear layer with its weight transposed once; None for other modules."""
    if type(module) is not nn.Linear:
        return None
    turned = module.weight.T
    mx.eval(turned)  # shares memory with the weight
    if "bias" in module:
        return lambda x: mx.addmm(module["bias"], x, turned)
    return lambda x: x @ turned


def fuse_projections(
    layers: Mapping[int, nn.Module], call: Callable[[], object], is_whole: Callable[[int, str], bool] = lambda number, path: False
) -> int:
    """Fuse projections in loaded layers; return by how many the products of a step decrease.

    `call` builds a lazy forward pass through the layers. Memory beyond the weights is at most one fused product.
    `is_whole` takes a layer's number and a path, and returns True for a module replicated on all ranks. Such a module
    (a router) must compute the same bits on every rank. It is never fused with a module whose width differs by rank.
    """
    fewer = 0
    for number, groups in _alike(layers, call, is_whole).items():
        for paths in groups:
            _join(layers[number], paths)
            mx.synchronize()  # MLX frees the parts on another thread
            mx.clear_cache()  # the next product would not fit into the freed buffers
            fewer += len(paths) - 1
    if fewer:
        log.info("Fused projections of the same input: %d products fewer in a step", fewer)
    return fewer


def _join(layer: nn.Module, paths: Sequence[str]) -> None:
    parts = [at(layer, path) for path in paths]
    axis = _OUTPUT_AXIS[type(parts[0])]
    joined = copy.copy(parts[0])
    joined.update({name: mx.concatenate([part[name] for part in parts], axis=axis) for name in parts[0].parameters()})
    mx.eval(joined.parameters())
    product = Product(joined, [part["weight"].shape[axis] for part in parts])
    for number, path in enumerate(paths):
        put(layer, path, FusedPart(product, number))


@dataclass
class _Calls:
    """Recorded calls of one projection."""

    given: list[tuple[object, ...]] = field(default_factory=list)
    read: bool = False
    """True if code accessed an attribute of the projection, so that it cannot be replaced."""


class _Overheard(Around):
    """Wrapper of a projection that records its inputs."""

    def __init__(self, module: nn.Module, calls: _Calls) -> None:
        super().__init__(module)
        self._calls = calls

    def __call__(self, *args: object, **kwargs: object) -> mx.array:
        self._calls.given.append((*args, *kwargs.values()))
        found: mx.array = self.module(*args, **kwargs)
        return found

    def __getattr__(self, name: str) -> object:
        if "module" in self and name not in self:
            self._calls.read = True
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: object) -> None:
        if "module" in self and name in self["module"]:
            self._calls.read = True
            setattr(self["module"], name, value)
        else:
            super().__setattr__(name, value)


def _alike(
    layers: Mapping[int, nn.Module], call: Callable[[], object], is_whole: Callable[[int, str], bool]
) -> dict[int, list[list[str]]]:
    """Return the paths of projections that can be fused, by layer; one list per product."""
    modules = {
        (number, path): module
        for number, layer in layers.items()
        for path, module in layer.named_modules()
        if type(module) in _OUTPUT_AXIS and module.parameters().keys() <= _PARAMETERS
    }
    calls = {place: _Calls() for place in modules}
    try:
        for (number, path), module in modules.items():
            put(layers[number], path, _Overheard(module, calls[number, path]))
        call()
    finally:
        for (number, path), module in modules.items():
            put(layers[number], path, module)
    groups: dict[tuple[int, str, bool, tuple[int, ...], tuple[object, ...]], list[str]] = defaultdict(list)
    for (number, path), one in calls.items():
        if len(one.given) == 1 and not one.read:
            place = (number, path.rpartition(".")[0], is_whole(number, path))
            groups[*place, tuple(map(id, one.given[0])), _form(modules[number, path])].append(path)
    found: dict[int, list[list[str]]] = {}
    for (number, *_), paths in groups.items():
        size = sum(array.nbytes for path in paths for array in modules[number, path].parameters().values())
        if len(paths) > 1 and size <= _JOINED_BYTES:
            found.setdefault(number, []).append(paths)
    return found


def _form(module: nn.Module) -> tuple[object, ...]:
    """Return a key; modules can be fused only if their keys are equal."""
    axis = _OUTPUT_AXIS[type(module)]
    parameters = sorted(
        (name, array.dtype, (*array.shape[:axis], *array.shape[axis + 1 :])) for name, array in tree_flatten(module.parameters())
    )
    return type(module), tuple(parameters), *(getattr(module, name, None) for name in _SETTINGS)
