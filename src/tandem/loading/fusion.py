"""Projections of one input as one product: q, k and v; gate and up; those of experts too (mlx).

Which of a layer's modules these are is not read off their names but off a call that computes nothing: projections of
one module that are given the same arrays, once each, and whose weights are alike. So it holds for every family, for a
rank's part of the heads, and for packed weights. A projection with an adapter stays by itself.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from tandem.loading.shard_modules import Around, at, put

log = logging.getLogger(__name__)

_OUTPUT_AXIS: dict[type[nn.Module], int] = {nn.Linear: 0, nn.QuantizedLinear: 0, SwitchLinear: 1, QuantizedSwitchLinear: 1}
"""Type of module -> axis of the outputs in each of its parameters."""
_PARAMETERS = frozenset(("weight", "scales", "biases", "bias"))
_SETTINGS = ("group_size", "bits", "mode")
_JOINED_BYTES = 256 * 2**20
"""Most bytes of a joined product. Larger weights stay apart: their reading outweighs the start of a kernel, and while
weights are joined both forms are in memory."""


class FusedPart(nn.Module):
    """In the place of one of several projections that are computed together."""

    def __init__(self, product: Product, number: int) -> None:
        super().__init__()
        if number == 0:
            self.joined = product.joined  # among this one's parameters, so that they count once
        self._product, self._number = product, number

    def __call__(self, x: mx.array, *args: object, **kwargs: object) -> mx.array:
        """Return the projection's output [..., O]. The arguments are those of the replaced module."""
        product = self._product
        # Host time counts here: a step makes a hundred such calls and more.
        if (
            x is not product.x
            or (args or kwargs or product.more)
            and not product.alike(args, kwargs)
            or self._number not in product.outputs
        ):
            product.compute(x, args, kwargs)
        found = product.outputs.pop(self._number)
        if not product.outputs:
            product.forget()
        return found


class Product:
    """Several projections as one module, whose outputs are computed once for all that ask for them: each is given out
    once, so that nothing is kept when all have been."""

    def __init__(self, joined: nn.Module, widths: Sequence[int]) -> None:
        """`widths`: outputs of each projection, in their order in `joined`."""
        self.joined = joined
        self._call = _turned(joined) or joined
        self._columns = [(..., slice(sum(widths[:i]), sum(widths[: i + 1]))) for i in range(len(widths))]
        self._width, self._ends = sum(widths), [sum(widths[:i]) for i in range(1, len(widths))]
        self.x: mx.array | None = None
        """Input of which `outputs` were computed, together with `more`."""
        self.more: tuple[object, ...] = ()
        self.outputs: dict[int, mx.array] = {}
        """By the number of the projection, those that were not given out yet."""

    def compute(self, x: mx.array, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """All outputs for these arguments."""
        whole = self._call(x, *args, **kwargs)
        # mx.split is quicker, but its parts count their elements alone as the size of their memory. Where they have
        # gaps, which is from two rows on, MLX's rotary kernel on a GPU would allocate too little by that.
        parts = mx.split(whole, self._ends, axis=-1) if whole.size == self._width else [whole[own] for own in self._columns]
        self.x, self.more, self.outputs = x, (*args, *kwargs.values()), dict(enumerate(parts))

    def alike(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
        """True when the arguments after the first are those of `outputs`."""
        given = (*args, *kwargs.values())
        return len(given) == len(self.more) and all(a is b for a, b in zip(given, self.more, strict=True))

    def forget(self) -> None:
        """Drop references to the last inputs."""
        self.x, self.more = None, ()


def _turned(module: nn.Module) -> Callable[[mx.array], mx.array] | None:
    """Return the call of a plain layer with its weight turned once; None for another module."""
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
    """Join what can be in loaded layers; returns how many products there are fewer.

    `call` builds a forward pass through the layers without computing it. Besides the weights there is at most one
    joined product of one layer in memory at a time. `is_whole` says of a layer's number and a path whether all ranks
    have the same there: such a projection (a router is one) must give the same bits on all of them, so it is not
    joined with one of which each rank has another width.
    """
    fewer = 0
    for number, groups in _alike(layers, call, is_whole).items():
        for paths in groups:
            _join(layers[number], paths)
            mx.synchronize()  # MLX frees the parts on a thread of its own
            mx.clear_cache()  # into their places the next product would not fit
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
    """True when code read or changed more of it than its output."""


class _Overheard(Around):
    """Projection that records its inputs."""

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
    """Paths of projections that can be joined, by layer; each list is of one product."""
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
    """Key that modules must share to be joined."""
    axis = _OUTPUT_AXIS[type(module)]
    parameters = sorted(
        (name, array.dtype, (*array.shape[:axis], *array.shape[axis + 1 :])) for name, array in tree_flatten(module.parameters())
    )
    return type(module), tuple(parameters), *(getattr(module, name, None) for name in _SETTINGS)
