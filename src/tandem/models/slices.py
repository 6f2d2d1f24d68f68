"""Files and byte ranges that hold a rank's part of a model. Reads nothing, no mlx.

The unit of storage is one layer, the embedding, the head, the rest (final norm), the draft head (MTP), or the vision tower
with its projector. Parts fetched for one layout therefore serve the next one too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from tandem.checkpoints.safetensors import TensorInfo, encode_header
from tandem.models.description import ModelDescription, of_vision, part_of_tensor
from tandem.models.mtp import head_tensors

Part = int | Literal["embed", "head", "rest", "mtp", "vision"]
Headers = Mapping[str, Mapping[str, TensorInfo]]
"""Tensors by name, by name of their file."""


@dataclass(frozen=True)
class Span:
    """Bytes of a weight file, and their place in the part's own file."""

    file: str
    start: int
    length: int
    target: int
    """Offset in the part's own file, in bytes."""


@dataclass(frozen=True)
class PartPlan:
    """One part of the model, as a safetensors file of its own."""

    name: str
    """File name."""
    header: bytes
    """Safetensors header, at the start of the file; the spans follow without gaps, in the order of `target`."""
    spans: tuple[Span, ...]
    size: int
    """Bytes of the file."""


def owned_parts(layers: range, description: ModelDescription, *, mtp: bool = False) -> list[Part]:
    """Return the parts that a stage with `layers` loads, in the order of need. `mtp`: with the draft head, on the last."""
    first, last = layers.start == 0, layers.stop == description.num_layers
    tied = description.tied_head
    parts: list[Part] = ["embed"] if first or (last and (tied or mtp)) else []
    parts += layers
    if last:
        parts += ["rest"] if tied else ["rest", "head"]
    if first and description.vision_bytes:
        parts.append("vision")
    return [*parts, "mtp"] if mtp else parts


def _parts(headers: Headers, description: ModelDescription) -> dict[str, Part | None]:
    """Return the part of each stored tensor; None for one that is not loaded."""
    parts: dict[str, Part | None] = {
        name: part_of_tensor(name, description.num_layers) for tensors in headers.values() for name in tensors
    }
    parts |= dict.fromkeys(filter(of_vision, parts), "vision")
    return {**parts, **dict.fromkeys(head_tensors(description.family, description.num_layers, parts), "mtp")}


def owned_files(headers: Headers, layers: range, description: ModelDescription, *, mtp: bool = False) -> list[str]:
    """Return the weight files with a tensor of the stage with `layers`, sorted by name."""
    wanted, parts = set(owned_parts(layers, description, mtp=mtp)), _parts(headers, description)
    return sorted(file for file, tensors in headers.items() if any(parts[name] in wanted for name in tensors))


def plan_parts(headers: Headers, layers: range, description: ModelDescription, *, mtp: bool = False) -> list[PartPlan]:
    """Plan the parts of the stage with `layers`, with each byte of each tensor once; parts without tensors are omitted."""
    where = {name: (file, info) for file in sorted(headers) for name, info in headers[file].items()}
    members: dict[Part, list[str]] = {part: [] for part in owned_parts(layers, description, mtp=mtp)}
    for name, part in _parts(headers, description).items():
        if part is not None and part in members:
            members[part].append(name)
    return [_plan(part, {name: where[name] for name in names}) for part, names in members.items() if names]


def _plan(part: Part, tensors: Mapping[str, tuple[str, TensorInfo]]) -> PartPlan:
    # In the order of the source, so that adjacent tensors are read together.
    order = sorted(tensors, key=lambda name: (tensors[name][0], tensors[name][1].offset, name))
    placed: dict[str, TensorInfo] = {}
    size = 0
    for name in order:
        placed[name] = replace(tensors[name][1], offset=size)
        size += placed[name].nbytes
    header = encode_header(placed)
    spans: list[Span] = []
    for name in order:
        file, info = tensors[name]
        last = spans[-1] if spans else None
        if last is not None and (last.file, last.start + last.length) == (file, info.offset):
            spans[-1] = replace(last, length=last.length + info.nbytes)
        elif info.nbytes:
            spans.append(Span(file, info.offset, info.nbytes, len(header) + placed[name].offset))
    name = f"layer-{part:05d}" if isinstance(part, int) else part
    return PartPlan(f"{name}.safetensors", header, tuple(spans), len(header) + size)


def chunks(spans: Iterable[Span], limit: int) -> list[Span]:
    """Split spans into spans of at most `limit` bytes that cover the same bytes, in order."""
    return [
        Span(span.file, span.start + at, min(limit, span.length - at), span.target + at)
        for span in spans
        for at in range(0, span.length, limit)
    ]
