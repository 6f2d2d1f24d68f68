"""Models to plan for: from local files, or presets that need no files. No mlx.

`scripts/presets` generates `presets.json`: weights and cache elements per layer, counted on mlx-lm's own modules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import NamedTuple

import msgspec

from tandem.checkpoints.config import read_config
from tandem.checkpoints.files import ModelFiles, read_tensors
from tandem.errors import ConfigError
from tandem.json_types import JsonObject
from tandem.models.adapter_files import adapter_elements
from tandem.models.caches import LayerCache
from tandem.models.description import ModelDescription, describe, part_of_tensor, text_config
from tandem.models.families.axes import Axis, Base
from tandem.models.kv_types import kv_groups
from tandem.models.quantization import loaded_bytes, read_quantization
from tandem.planner.types import Experts

_PLAIN = 16
"""Bits of an unquantised weight."""
_AFFINE_SCALE = 32
"""Bits of scale and bias together per group, in MLX's affine format."""
_COUNT = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
ROUTED = re.compile(r"\.(?:experts|switch_mlp|switch_glu|input_linear|output_linear)\.")
"""Path components of routed experts, as stored and as stacked by mlx-lm."""


class Preset(msgspec.Struct, frozen=True):
    """One model, counted in numbers of weights and cache elements."""

    family: str
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    latent: bool
    """Whether the cache is a latent shared by all heads, which every rank of a tensor-parallel stage replicates."""
    native: tuple[int, int, int] | None
    """Bits, group size and bits of scale of routed experts that are published quantised; None if they are not."""
    context: int
    experts: tuple[int, int]
    """Routed experts per layer, and experts per token; 0 for a dense model."""
    widths: tuple[int, int, int]
    """Intermediate widths of the dense MLP, of one expert, and of the shared experts together."""
    layers: list[tuple[int, int, int, int]]
    """(number of layers, quantisable weights of each, other weights, weights of routed experts)."""
    embed: int
    head: int
    """Weights of the head; 0 if it reuses the embedding."""
    norm: int
    cache: list[tuple[int, int, int, int]]
    """(number of caches, elements per token, elements per sequence, float32 elements of the latter)."""
    axes: dict[str, tuple[Base, int, int]] = {}
    """The family's own kinds of split axes, as arguments of `Axis`: (base, units, elements per unit)."""
    index_heads: int = 0
    whole: int = 0
    """Cache elements per token, over all layers, that every rank of a stage replicates."""


class Packing(NamedTuple):
    """Storage format of quantised weights."""

    bits: int
    group_size: int
    scale_bits: int
    mode: str = "affine"

    @property
    def each(self) -> float:
        """Bits per weight, including its part of the scales."""
        return self.bits + self.scale_bits / self.group_size


QUANTS: Mapping[str, Packing | None] = {
    "native": None,
    "bf16": None,
    **{f"{bits}bit": Packing(bits, 64, _AFFINE_SCALE) for bits in (2, 3, 4, 5, 6, 8)},
    "mxfp4": Packing(4, 32, 8, "mxfp4"),
    "nvfp4": Packing(4, 16, 8, "nvfp4"),
    "mxfp8": Packing(8, 32, 8, "mxfp8"),
}
"""Values of `--quant`. native: 16 bits, except for experts that are published quantised."""


COPIES = "mlx-community/"


@dataclass(frozen=True)
class Planned:
    """A model in the form that the planner needs."""

    description: ModelDescription
    experts: Experts | None
    note: str = ""
    copy: str = ""
    """Conventional hub id of a copy with these weights, if they differ from the published ones; else empty."""
    lora_elements: float = 0.0
    """Average numbers in a layer's LoRA adapter of rank 1; 0 without the model's files."""


@cache
def presets() -> Mapping[str, Preset]:
    """Return all presets by hub id."""
    text = resources.files("tandem.planner").joinpath("presets.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, Preset])


def find(name: str) -> tuple[str, Preset] | None:
    """Return a preset's hub id and the preset, by the id or its last part, ignoring case; None if there is none."""
    wanted = name.lower()
    for known, preset in presets().items():
        if wanted in (known.lower(), known.lower().partition("/")[2]):
            return known, preset
    return None


def copied(name: str) -> tuple[str, str | None]:
    """Return model and format of a copy's conventional id, mlx-community/NAME-FORMAT; `name` and None for other names."""
    model, _, quant = name.removeprefix(COPIES).rpartition("-")
    return (model, quant) if name.startswith(COPIES) and quant in QUANTS and find(model) else (name, None)


def planned(name: str, preset: Preset, quant: str) -> Planned:
    """Return the model with weights in format `quant`. Raise ConfigError for an unknown format."""
    if quant not in QUANTS:
        raise ConfigError(f"--quant {quant}: is not one of {', '.join(QUANTS)}", param="quant")
    packing = QUANTS[quant]
    expert = packing
    if packing is None and quant == "native" and preset.native:
        expert = Packing(*preset.native, "mxfp4" if preset.native[2] == 8 else "affine")
    layers: list[int] = []
    routed: list[int] = []
    for count, linear, other, experts in preset.layers:
        own = _bytes(experts, expert)
        layers += [_bytes(linear, packing) + _bytes(other, None) + own] * count
        routed += [own] * count
    used = preset.experts[1]
    repacked = packing is not None or (quant == "bf16" and preset.native)
    copy = f"{COPIES}{name.rpartition('/')[2]}-{quant}" if repacked else ""
    return Planned(
        _description(preset, layers, packing, expert),
        Experts(count=preset.experts[0], used=used, layer_bytes=tuple(routed)) if used and any(routed) else None,
        f"{name} is planned for from its published config.json, with weights of {_words(quant, packing, expert)}; "
        "no weights were read."
        + (
            f" {copy} is what a copy stored so is usually called on the hub; if it is not "
            "there, name another one, or a directory."
            if copy
            else ""
        ),
        copy,
    )


def _description(preset: Preset, layers: list[int], packing: Packing | None, expert: Packing | None
                 ) -> ModelDescription:  # fmt: skip
    count = len(layers)
    caches = [
        LayerCache("latent" if preset.latent else "positions", tokens, state, float32)
        for n, tokens, state, float32 in preset.cache
        for _ in range(n)
    ]
    groups = kv_groups({"model_type": preset.family}, caches, preset.head_dim)
    shown = packing or expert
    settings: JsonObject | None = None
    if shown is not None:
        settings = {"group_size": shown.group_size, "bits": shown.bits, "mode": shown.mode}
    return ModelDescription(
        family=preset.family,
        num_layers=count,
        hidden_size=preset.hidden,
        vocab_size=preset.vocab,
        num_heads=preset.heads,
        num_kv_heads=preset.kv_heads,
        head_dim=preset.head_dim,
        max_context=preset.context,
        dtype="bfloat16",
        quantization=settings,
        tied_head=not preset.head,
        layer_bytes=tuple(layers),
        embed_bytes=_bytes(preset.embed, packing),
        head_bytes=_bytes(preset.head, packing) + _bytes(preset.norm, None),
        eos_token_ids=(),
        mlp_width=preset.widths[0],
        expert_width=preset.widths[1],
        shared_width=preset.widths[2],
        num_experts=preset.experts[0],
        axes={kind: Axis(*axis) for kind, axis in preset.axes.items()},
        token_elements=sum(n * tokens for n, tokens, _, _ in preset.cache) / count,
        state_elements=sum(n * state for n, _, state, _ in preset.cache) / count,
        float32_elements=sum(n * float32 for n, _, _, float32 in preset.cache) / count,
        replicated_cache=preset.latent,
        index_heads=preset.index_heads,
        whole_elements=preset.whole / count,
        kv_groups=tuple((group, cache.position) for group, cache in zip(groups, caches, strict=True)),
    )


def _bytes(weights: int, packing: Packing | None) -> int:
    return int(weights * (packing.each if packing else _PLAIN) / 8)


def _words(quant: str, packing: Packing | None, expert: Packing | None) -> str:
    if packing is not None:
        return f"{packing.bits} bits ({quant}, {packing.each:.2f} with scales)"
    return f"16 bits and experts of {expert.bits}" if expert is not None else "16 bits"


# ---- models with local files


def planned_files(files: ModelFiles) -> Planned:
    """Describe a model from its local headers. Raise `BrokenModel`, `UnsupportedModel`."""
    description = describe(files)
    layers = range(description.num_layers)
    elements = adapter_elements(read_tensors(files), description, layers, 1) / len(layers)
    return Planned(description, read_experts(files, description), lora_elements=elements)


def read_experts(files: ModelFiles, description: ModelDescription) -> Experts | None:
    """Return a model's routed experts; None for a dense model. Raise `BrokenModel`."""
    config = text_config(read_config(files.path))
    count, used = _first(config, _COUNT), _first(config, _USED)
    if not count or not used or used > count:
        return None
    layers = [0] * description.num_layers
    tensors = read_tensors(files)
    for name, nbytes in loaded_bytes(tensors, read_quantization(config, files.name).foreign).items():
        part = part_of_tensor(name, len(layers))
        if isinstance(part, int) and ROUTED.search(name):
            layers[part] += nbytes
    return Experts(count=count, used=used, layer_bytes=tuple(layers)) if any(layers) else None


def _first(config: Mapping[str, object], names: tuple[str, ...]) -> int:
    return next((value for n in names if isinstance(value := config.get(n), int)), 0)
