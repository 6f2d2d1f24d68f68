"""LoRA adapters as files: mlx-lm's `adapters.safetensors` and PEFT's `adapter_model.safetensors`. No mlx."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem.checkpoints.config import read_json, section
from tandem.checkpoints.files import fingerprint
from tandem.checkpoints.safetensors import TensorInfo, read_header
from tandem.errors import BrokenModel, ModelNotFound, UnsupportedModel, UsageError
from tandem.json_types import JsonObject
from tandem.models.description import ModelDescription, part_of_tensor
from tandem.models.families.table import family_of
from tandem.protocol.adapters import AdapterSpec
from tandem.system.files import file_trouble

_PEFT = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_MLX = re.compile(r"(?P<module>.+)\.lora_(?P<side>[ab])")


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: adds scale * (input @ A @ B) to the outputs of linear layers."""

    path: Path
    """File with the weights."""
    scale: float
    modules: Mapping[str, tuple[str, str]]
    """Names of A and B in the file, by path of the adapted module in the model."""
    transposed: bool
    """Whether the file stores A as [rank, inputs] and B as [outputs, rank] (PEFT), not [inputs, rank] and [rank,
    outputs]."""
    rank: int
    """Largest rank of its modules."""


def read_adapter(directory: str, description: ModelDescription) -> Adapter:
    """Read an adapter's config and header and check them against the model.

    Raise `ModelNotFound`, `BrokenModel` for files that are inconsistent or do not match the model, and
    `UnsupportedModel` for anything but plain LoRA on linear layers.
    """
    path = Path(directory)
    if not (path / "adapter_config.json").is_file():
        raise ModelNotFound(
            f"LoRA adapter {directory}: has no adapter_config.json, so it is not the directory of a "
            "LoRA adapter (one on a hub must be downloaded first)",
            param="adapter_path",
        )
    config = read_json(path / "adapter_config.json")
    peft = "peft_type" in config
    weights = path / ("adapter_model.safetensors" if peft else "adapters.safetensors")
    if not weights.is_file():
        raise ModelNotFound(f"LoRA adapter {directory}: has no {weights.name}", param="adapter_path")
    scale = _peft_scale(config, directory) if peft else _mlx_scale(config, directory)
    tensors = read_header(weights)
    modules = _modules(tensors, _PEFT if peft else _MLX, directory)
    _check_modules(modules, tensors, description, directory, transposed=peft)
    return Adapter(weights, scale, modules, peft, max(tensors[a].shape[0 if peft else 1] for a, _ in modules.values()))


def adapter_spec(index: int, name: str, directory: str) -> AdapterSpec:
    """Return the adapter in `directory` as number `index` of the ranks. Raises UsageError if a file of it cannot be read."""
    path = Path(os.path.expanduser(directory)).absolute()
    try:
        return AdapterSpec(index, name, str(path), fingerprint(path, model=False) if name else "")
    except OSError as error:
        raise UsageError(f"LoRA adapter {directory}: {error.filename}: {file_trouble(error)}", param="lora_modules") from error


def adapter_elements(tensors: Mapping[str, TensorInfo], description: ModelDescription, layers: range, rank: int) -> int:
    """Return the numbers in A and B of an adapter of all linear layers of `layers`, by the headers of the model's files."""
    count, bits = 0, int((description.quantization or {}).get("bits", 32))
    for name, info in tensors.items():
        matrix = name.endswith(".weight") and len(info.shape) == 2 and ".experts." not in name
        if matrix and part_of_tensor(name, description.num_layers) in layers:
            count += rank * (info.shape[0] + info.shape[1] * (32 // bits if info.dtype == "U32" else 1))
    return count


def _mlx_scale(config: JsonObject, directory: str) -> float:
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise _unsupported(directory, f"fine_tune_type {kind!r}")
    return _number(section(config, "lora_parameters").get("scale"), "lora_parameters.scale", directory)


def _peft_scale(config: JsonObject, directory: str) -> float:
    if config["peft_type"] != "LORA":
        raise _unsupported(directory, f"peft_type {config['peft_type']!r}")
    unsupported = "use_dora fan_in_fan_out rank_pattern alpha_pattern modules_to_save lora_bias layer_replication"
    for name in [*unsupported.split(), "trainable_token_indices"]:
        if config.get(name):
            raise _unsupported(directory, f"{name} {config[name]!r}")
    if config.get("bias", "none") != "none":
        raise _unsupported(directory, f"bias {config['bias']!r}")
    rank, alpha = (_number(config.get(name), name, directory) for name in ("r", "lora_alpha"))
    if rank <= 0:
        raise _broken(directory, f"r must be above 0, is {rank:g}")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _number(value: object, name: str, directory: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise _broken(directory, f"{name} in adapter_config.json must be a number, is {value!r}")
    return float(value)


def _modules(tensors: Mapping[str, TensorInfo], pattern: re.Pattern[str], directory: str) -> dict[str, tuple[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for name in tensors:
        match = pattern.fullmatch(name)
        if match is None:
            raise _unsupported(directory, f"tensor {name[:200]}")
        found.setdefault(match["module"], {})[match["side"].lower()] = name
    for module, sides in found.items():
        if len(sides) != 2:
            raise _broken(directory, f"{module[:200]} has lora_{min(sides)} alone")
    if not found:
        raise _broken(directory, "has no LoRA weights")
    return {module: (sides["a"], sides["b"]) for module, sides in found.items()}


def _check_modules(
    modules: Mapping[str, tuple[str, str]],
    tensors: Mapping[str, TensorInfo],
    description: ModelDescription,
    directory: str,
    *,
    transposed: bool,
) -> None:
    layers = family_of(description.family).layers
    inside = re.compile(rf"{re.escape(layers)}\.(\d+)\..+")
    for module, names in modules.items():
        match = inside.fullmatch(module)
        if match is None:
            raise _unsupported(directory, f"module {module[:200]}, which is in no decoder layer")
        if int(match[1]) >= description.num_layers:
            raise _broken(
                directory, f"{module[:200]}: the model has {description.num_layers} layers; is this an adapter for another model?"
            )
        a, b = (tensors[name].shape for name in names)
        if len(a) != 2 or len(b) != 2:
            raise _unsupported(directory, f"{module[:200]} with weights of shapes {a} and {b} (experts)")
        if (a[0] if transposed else a[1]) != (b[1] if transposed else b[0]):
            raise _broken(directory, f"{module[:200]}: shapes {a} and {b} have no common rank")


def _broken(directory: str, what: str) -> BrokenModel:
    return BrokenModel(f"LoRA adapter {directory}: {what}", param="adapter_path")


def _unsupported(directory: str, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"LoRA adapter {directory}: {what} is not supported, only plain LoRA on linear layers "
        "within decoder layers; fuse the adapter into the model instead (mlx_lm.fuse, or PEFT's "
        "merge_and_unload)",
        param="adapter_path",
    )
