"""Layouts that somebody asks for: their notation, and whether they make sense for a model. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tandem.errors import LayoutError
from tandem.models.description import ModelDescription
from tandem.models.partition import split_layers
from tandem.planner.hardware import Machine
from tandem.planner.layouts import Arrangement, why_not_tensor_parallel
from tandem.planner.shares import Divider
from tandem.planner.types import ManualLayout

_KEYS = ("tp", "pp", "dp", "layers", "split", "machines")


def parse_layout(text: str) -> ManualLayout:
    """Read `single`, `tp=2`, `pp=2 layers=20,16`, `tp=2,1` (sizes per stage), `dp=2 tp=2`, `machines=b,a` ...

    Words are separated by spaces. `tp` is one size or one per stage; `split` is the share of each machine of a
    stage, as for --tensor-split.
    Raises `LayoutError` naming the word.
    """
    found: dict[str, str] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if word == "single":
            continue
        if not equals or key not in _KEYS or key in found:
            raise LayoutError(
                f"--layout {text!r}: {word!r} is not understood; words are single, {', '.join(k + '=' for k in _KEYS)}",
                param="layout",
            )
        found[key] = value
    sizes = _numbers(text, "tp", found["tp"]) if "tp" in found else (1,)
    depth = _one(text, "pp", found["pp"]) if "pp" in found else len(sizes)
    if len(sizes) == 1:
        sizes *= depth
    if len(sizes) != depth:
        raise LayoutError(
            f"--layout {text!r}: tp has {len(sizes)} sizes for pp={depth} stages; give one, or one per stage",
            param="layout",
        )
    return ManualLayout(
        stages=sizes,
        replicas=_one(text, "dp", found["dp"]) if "dp" in found else 1,
        layers=_numbers(text, "layers", found["layers"]) if "layers" in found else None,
        split=_numbers(text, "split", found["split"]) if "split" in found else None,
        machines=tuple(found["machines"].split(",")) if "machines" in found else None,
    )


def arrangement_of(
    manual: ManualLayout, model: ModelDescription, divider: Divider, machines: Sequence[Machine]
) -> Arrangement:
    """The machines of each stage of each replica. Raises `LayoutError` for what the model or the hosts rule out."""
    size = sum(manual.stages)
    order = _order(manual, machines)
    if min(manual.stages) < 1 or manual.replicas < 1:
        raise LayoutError("--layout: sizes must be at least 1", param="layout")
    if size * manual.replicas > len(order):
        raise LayoutError(
            f"--layout needs {size * manual.replicas} machines, there are {len(order)}; add hosts or use a smaller "
            "layout",
            param="layout",
        )
    for ranks in manual.stages:
        if ranks > 1 and (why := why_not_tensor_parallel(divider, ranks)):
            raise LayoutError(f"--layout: {why}", param="layout")
    split_layers(model.num_layers, len(manual.stages), explicit=manual.layers, uncut=model.uncut)
    _check_split(manual, divider)
    starts = [sum(manual.stages[:i]) for i in range(len(manual.stages))]
    return tuple(
        tuple(order[r * size + a : r * size + a + n] for a, n in zip(starts, manual.stages, strict=True))
        for r in range(manual.replicas)
    )


def _order(manual: ManualLayout, machines: Sequence[Machine]) -> tuple[int, ...]:
    if manual.machines is None:
        return tuple(range(len(machines)))
    names = [m.name for m in machines]
    for name in manual.machines:
        if name not in names or manual.machines.count(name) > 1:
            raise LayoutError(
                f"--layout machines={','.join(manual.machines)}: {name} is not one of {', '.join(names)}, or is there "
                "twice",
                param="layout",
            )
    return tuple(names.index(n) for n in manual.machines)


def _check_split(manual: ManualLayout, divider: Divider) -> None:
    if manual.split is None:
        return
    shown = ",".join(map(str, manual.split))
    if any(size != len(manual.split) for size in manual.stages):
        raise LayoutError(
            f"--layout split={shown}: give one share for each machine of a stage; stages have "
            f"{','.join(map(str, manual.stages))}",
            param="layout",
        )
    if len(manual.split) > 1 and divider.heads([x / sum(manual.split) for x in manual.split]) is None:
        raise LayoutError(f"--layout split={shown}: the layers cannot be divided so unevenly", param="layout")


def _numbers(text: str, key: str, value: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*", value):
        raise LayoutError(f"--layout {text!r}: {key}={value} must be whole numbers, such as {key}=2,1", param="layout")
    return tuple(int(n) for n in value.split(","))


def _one(text: str, key: str, value: str) -> int:
    numbers = _numbers(text, key, value)
    if len(numbers) != 1:
        raise LayoutError(f"--layout {text!r}: {key}={value} must be one number", param="layout")
    return numbers[0]
