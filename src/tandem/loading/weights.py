"""Lazy weights of a model: division into parts, and loading into modules tensor by tensor (mlx)."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from tandem.checkpoints.config import read_config
from tandem.checkpoints.files import ModelFiles, read_tensors, weight_files
from tandem.checkpoints.safetensors import TensorInfo, encode_header, read_header
from tandem.errors import BrokenModel, OutOfMemory
from tandem.json_types import JsonObject
from tandem.loading.foreign import converted, sanitized
from tandem.loading.shard_modules import Cutter, Slice, take, whole_groups
from tandem.models.description import ModelDescription, part_of_tensor, stored_bare
from tandem.models.families.table import family_of
from tandem.models.mtp import head_tensors
from tandem.models.quantization import NGRAM_TABLE, read_quantization
from tandem.system.files import file_trouble
from tandem.system.metal import fault_of

Weights = dict[str, mx.array]

_MODES = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}
"""Formats with byte scales, by bits and group size."""
_NGRAMS = "ple.ple_embedding.ngram_embedding."
"""Start of the names of an n-gram table's weights in a layer."""
_COMPUTED = "rotary_emb.inv_freq"  # old checkpoints store this buffer; every family computes it


def open_weights(
    files: ModelFiles, model: nn.Module, description: ModelDescription, names: Mapping[str, str] | None = None
) -> Weights:
    """Return all weights of the model as lazy arrays under mlx-lm's names; only headers are read.

    `names`: stored names of the only tensors to return, and the names under which `sanitize` sees them.
    Weights that are not on this machine still have shapes and types, which mlx-lm's `sanitize` inspects. Evaluating
    them raises RuntimeError. Raise `BrokenModel` for weights that do not fit config.json.
    """
    weights: Weights = {}
    for path in weight_files(files.path) if files.headers is None else files.weights:
        weights.update(load_file(path))
    if files.headers is not None:
        everything = read_tensors(files)
        weights.update(_absent({name: info for name, info in everything.items() if name not in weights}))
    if names is not None:
        weights = {names[name]: array for name, array in weights.items() if name in names}
    elif head_tensors(description.family, description.num_layers, weights):  # mlx-lm's `sanitize` leaves out some alone
        weights = {name: array for name, array in weights.items() if part_of_tensor(name, description.num_layers) is not None}
    layers = family_of(description.family).layers
    if stored_bare(weights, layers):
        root = layers.partition(".")[0]
        weights = {f"{root}.{name}": array for name, array in weights.items()}
    foreign = read_quantization(read_config(files.path), files.name).foreign
    if foreign is not None:
        weights = converted(weights, foreign)
    if hasattr(model, "sanitize"):
        try:
            weights = sanitized(weights, model.sanitize) if foreign is not None else model.sanitize(weights)
        except (KeyError, ValueError, AttributeError, TypeError) as error:
            raise BrokenModel(f"{files.path}: weights do not fit config.json: {one_line(error)}") from error
    return {name: array for name, array in weights.items() if not name.endswith(_COMPUTED)}


MLX_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, OverflowError, MemoryError, SystemError)
"""Python errors that MLX's C++ exceptions become; MLX has no exception types of its own."""


def load_file(path: Path) -> Weights:
    """Return the lazy arrays of a file by name. Raise BrokenModel."""
    try:
        loaded = mx.load(str(path))
    except MLX_ERRORS as error:
        raise BrokenModel(f"{path}: cannot be read: {_why(path, error)}", param=path.name) from error
    assert isinstance(loaded, dict)
    return loaded


def _why(path: Path, error: Exception) -> str:
    """Return the system's reason why a file cannot be opened, since MLX does not report it; else MLX's error."""
    try:
        path.open("rb").close()
    except OSError as trouble:
        return file_trouble(trouble)
    return one_line(error)


def _absent(tensors: dict[str, TensorInfo]) -> Weights:
    """Return lazy arrays without data, by truncating a file to its header after MLX has opened it."""
    header = encode_header({name: replace(info, offset=0) for name, info in tensors.items()})
    with tempfile.NamedTemporaryFile(prefix="tandem-", suffix=".safetensors") as file:
        file.write(header)
        file.flush()
        os.truncate(file.name, len(header) + max((info.nbytes for info in tensors.values()), default=0))
        weights = load_file(Path(file.name))
        os.truncate(file.name, len(header))
    return weights


def split_by_part(
    weights: Weights, layers: str, model: nn.Module, description: ModelDescription, path: str
) -> dict[str | int, Weights]:
    """Divide weights into parts: a layer's number, or the path of a module outside the layers; names become relative.

    `layers` is the path of the layer list in `model`. Arrays are removed from `weights`, so that each is freed with its
    part. Raise `BrokenModel` for a weight that belongs to no part.
    """
    parts: dict[str | int, Weights] = {i: {} for i in range(description.num_layers)}
    for name, module in model.named_modules():
        inside = f"{name}.".startswith(f"{layers}.")
        if name and not inside and not tree_flatten(module.children()) and tree_flatten(module.parameters()):
            parts[name] = {}
    for name in list(weights):
        if name.startswith(layers + "."):
            number, _, rest = name[len(layers) + 1 :].partition(".")
            if number.isdecimal() and int(number) < description.num_layers:
                parts[int(number)][rest] = weights.pop(name)
                continue
        base, _, rest = name.rpartition(".")
        if base not in parts:
            raise BrokenModel(f"{path}: weight {name} does not belong to the model that config.json describes")
        parts[base][rest] = weights.pop(name)
    return parts


@dataclass(kw_only=True)
class PartLoader:
    """Loads the weights of one part at a time into a module, cast and evaluated."""

    quantization: JsonObject | None
    """MLX's settings, or None."""
    dequantize: bool
    """Whether packed weights are expanded."""
    dtype: mx.Dtype
    """Type for floating-point weights, except those for whose name `cast` returns False."""
    cast: Callable[[str], bool] | None = None
    loaded: Callable[[int], None] = lambda _: None
    """Called with the stored bytes of each tensor."""

    def load(self, root: str, module: nn.Module, weights: Weights, cutter: Cutter | None = None) -> nn.Module:
        """Fill `module`, whose path in the model is `root`, and return it (or its quantised replacement).

        With `cutter`, module and weights are cut to a rank's part. Empties `weights`. Peak memory beyond the result is
        about one tensor. Raise `BrokenModel` unless weights and parameters match exactly.
        """
        holder = nn.Module()  # nn.quantize replaces children, so a leaf module needs a parent
        holder.part = module
        packed = self._packed(root, holder, weights) if self.quantization else {}
        if packed and not self.dequantize:
            nn.quantize(holder, class_predicate=lambda path, _: packed.get(path, False))
        expand = {path.removeprefix("part").lstrip("."): s for path, s in packed.items()} if self.dequantize else {}
        names = {name.removeprefix("part.") for name, _ in tree_flatten(holder.parameters())}
        names.update(_join(base, one) for base, settings in expand.items() for one in _companions(settings))
        if missing := sorted(names - weights.keys()):
            raise BrokenModel(f"weight {root}.{missing[0]} is missing ({len(missing)} of {len(names)})")
        if surplus := sorted(weights.keys() - names):
            raise BrokenModel(f"weight {root}.{surplus[0]} does not fit config.json ({len(surplus)} such)")
        if cutter is not None:
            _check_shapes(root, holder, weights)
            cutter.narrow(holder)
        done = list(self._arrays(root, weights, expand, cutter))
        try:
            holder.load_weights(done, strict=True)
        except ValueError as error:
            raise BrokenModel(f"{root}: {one_line(error)}") from error
        holder.eval()
        return holder.part

    def _packed(self, root: str, holder: nn.Module, weights: Weights) -> dict[str, JsonObject]:
        """Return quantisation settings by path below `holder`, as mlx_lm.utils.load_model derives them."""
        settings = self.quantization or {}
        prefixed = {f"part.{name}": array for name, array in weights.items()}
        found: dict[str, JsonObject] = {}
        for path, module in holder.named_modules():
            if not path or not hasattr(module, "to_quantized"):
                continue
            named = settings.get((root + path.removeprefix("part")).lstrip("."))
            if named is False or (named is None and f"{path}.scales" not in prefixed):
                continue
            if isinstance(named, dict):
                found[path] = {"mode": "affine", **named}
            elif named is True:
                found[path] = {key: settings[key] for key in ("group_size", "bits", "mode") if key in settings}
            else:
                found[path] = _found_quantization(path, module, prefixed)
                if f"{path}.global_scale" in prefixed:
                    found[path]["global_scale"] = True
        return found

    def _arrays(
        self, root: str, weights: Weights, expand: dict[str, JsonObject], cutter: Cutter | None
    ) -> Iterable[tuple[str, mx.array]]:
        while weights:
            name = next(iter(weights))
            base, _, last = name.rpartition(".")
            if base in expand and last in ("weight", "scales", "biases", "global_scale"):
                settings = expand.pop(base)
                group = {s: weights.pop(_join(base, s)) for s in ("weight", *_companions(settings))}
                nbytes = sum(array.nbytes for array in group.values())
                name = _join(base, "weight")
                _read(f"{root}.{name}", *group.values())
                array = self._expand_cut(f"{root}.{name}", group, settings, cutter.slice_of(name) if cutter else None)
                del group
            else:
                array = weights.pop(name)
                nbytes = array.nbytes
                _read(f"{root}.{name}", array)
                array = self._cast(f"{root}.{name}", cutter.take(name, array) if cutter else array)
            mx.eval(array)
            self.loaded(nbytes)
            yield f"part.{name}", array

    def _cast(self, name: str, array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating) or (self.cast is not None and not self.cast(name)):
            return array
        return array.astype(self.dtype)

    def _expand_cut(self, name: str, group: Weights, settings: JsonObject, found: Slice | None) -> mx.array:
        """Expand a packed matrix, or the slice `found` of it: input columns by whole groups first, then cut exactly."""
        if found is None:
            return self._expand(group, settings)
        inner = None
        if found.axis == -1:
            found, inner = whole_groups(found, settings["group_size"])
        cut = {key: array if key == "global_scale" else take(array, found, name) for key, array in group.items()}
        array = self._expand(cut, settings)
        return array if inner is None else take(array, inner, name)

    def _expand(self, group: Weights, settings: JsonObject) -> mx.array:
        # Scales are cast before use, as in the quantised product.
        scales, global_scale = self._cast("scales", group["scales"]), group.get("global_scale")
        biases = self._cast("biases", group["biases"]) if "biases" in group else None
        form = settings["group_size"], settings["bits"], settings["mode"]
        array = mx.dequantize(group["weight"], scales, biases, *form, global_scale)
        return self._cast("weight", array)


class MappedRows:
    """Rows of an n-gram table, in place of an embedding's array: a lookup reads them from the model's files."""

    def __init__(self, parts: list[np.ndarray], starts: Sequence[int], types: Sequence[mx.Dtype], scale: mx.array | None) -> None:
        """Store the table's parts, as bytes [rows, bytes of a row], and the number of each part's first row.

        `types`: of the numbers in the files, and of those returned. `scale`: factor of fp8, else None.
        """
        self._parts, self._starts, self._types, self._scale = parts, starts, types, scale

    def __getitem__(self, indices: mx.array) -> mx.array:
        """Return rows [n, width]. Waits for nothing: mlx-vlm's lookup makes `indices` of numbers that it has waited for."""
        rows = np.array(indices)
        places = np.searchsorted(self._starts, rows, side="right") - 1
        found = np.empty((len(rows), self._parts[0].shape[1]), np.uint8)
        for i in np.unique(places):
            found[places == i] = self._parts[i][rows[places == i] - self._starts[i]]
        read = mx.array(found)
        read = read.view(self._types[0]) if self._scale is None else mx.from_fp8(read, dtype=mx.bfloat16) * self._scale
        return read.astype(self._types[1])


class TableLoader(PartLoader):
    """Loads n-gram tables: checks names and shapes of their tensors, and leaves their rows in the model's files."""

    def map_tables(self, files: ModelFiles, pipeline_model: Any, owned: Mapping[Any, Weights]) -> None:
        """Map the tables of a `PipelineModel`'s own layers, and remove their tensors from `owned`. Raise `BrokenModel`."""
        for i in [i for i in pipeline_model.own if "ple" in pipeline_model.layers[i]]:
            table, size = pipeline_model.layers[i].ple.ple_embedding.ngram_embedding, len(_NGRAMS)
            taken = {name[size:]: owned[i].pop(name) for name in [*owned[i]] if name.startswith(_NGRAMS)}
            self.load(f"{pipeline_model.path}.{i}.{_NGRAMS[:-1]}", table, taken)
            stored = dict(_stored_table(files, i))
            try:
                for name, array in table.shards[0].parameters().items():
                    [(kind, width)] = {(shard[name].dtype, shard[name].shape[1]) for shard in table.shards}
                    parts = [stored[f"{number}.{name}"][0] for number in range(len(table.shards))]
                    scale = stored["weight_scale"][1] if parts[0].shape[1] < width * kind.size else None
                    table.shards[0][name] = MappedRows(parts, table.shard_offsets, (kind, self._cast(name, array).dtype), scale)
            except (KeyError, ValueError) as error:
                raise BrokenModel(f"{files.path}: parts of layer {i}'s n-gram table do not fit together: {error}") from error
            table.shards, table.shard_offsets = table.shards[:1], (0, table.shard_offsets[-1])

    def _arrays(self, root: str, weights: Weights, *_: object) -> Iterable[tuple[str, mx.array]]:
        return [(f"part.{name}", array) for name, array in weights.items()]


def _stored_table(files: ModelFiles, layer: int) -> Iterable[tuple[str, tuple[np.ndarray, mx.array]]]:
    """Yield the tensors of a layer's n-gram table by name: as bytes [rows, bytes of a row] by memory map, and as lazy arrays.

    Raise `BrokenModel` for a file that is not as long as its header says.
    """
    for path in files.weights or weight_files(files.path):
        header, arrays, data = read_header(path), load_file(path), np.memmap(path, mode="r")
        data.base.madvise(mmap.MADV_RANDOM)  # type: ignore[union-attr]  # rows of a lookup are far apart
        for name, info in header.items():
            if (match := NGRAM_TABLE.match(name)) and int(match[1]) == layer:
                yield match[2], (data[info.offset : info.offset + info.nbytes].reshape(*info.shape[:1], -1), arrays[name])


def _read(name: str, *arrays: mx.array) -> None:
    """Read arrays on the CPU before a GPU uses them: Metal aborts commands that wait for seconds, as for a slow disk."""
    try:
        mx.eval(*arrays)
    except RuntimeError as error:  # not on this machine, or the file was deleted meanwhile
        if fault_of(str(error)) == "memory":
            raise OutOfMemory(
                f"weight {name}: the GPU's memory is full ({one_line(error)}); give this machine fewer "
                "layers (--layer-split), or use a smaller or quantised model"
            ) from error
        raise BrokenModel(f"weight {name}: cannot be read: {one_line(error)}") from error


def _check_shapes(root: str, holder: nn.Module, weights: Weights) -> None:
    """Raise BrokenModel unless weights have the model's shapes; after cutting, a wrong matrix could have the right
    shape."""
    shapes = {name.removeprefix("part."): array.shape for name, array in tree_flatten(holder.parameters())}
    for name, array in weights.items():
        base = name.rpartition(".")[0]
        scales = weights.get(_join(base, "scales"))
        if scales is not None and _join(base, "scales") not in shapes:  # about to be expanded
            got, want = scales.shape[:-1], shapes[_join(base, "weight")][:-1]
        else:
            got, want = array.shape, shapes[name]
        if got != want:
            raise BrokenModel(f"weight {root}.{name} has shape {got}, expected {want}")


def _companions(settings: JsonObject) -> tuple[str, ...]:
    names = ("scales", "biases") if settings.get("mode", "affine") == "affine" else ("scales",)
    return (*names, "global_scale") if settings.get("global_scale") else names


def _found_quantization(path: str, module: nn.Module, weights: Weights) -> JsonObject:
    """Return bits, group size and mode of a weight, derived from its shapes if the config has no entry.

    Same as mlx_lm.utils.infer_quant_config, whose import needs transformers. Raise BrokenModel.
    """
    scales, columns = weights[f"{path}.scales"], module.weight.shape[-1]
    size, bits = columns // scales.shape[-1], weights[f"{path}.weight"].shape[-1] * 32 // columns
    mode = "affine" if scales.dtype != mx.uint8 else _MODES.get((bits, size))
    if mode is None:
        raise BrokenModel(f"{path}: no quantisation has {bits} bits and groups of {size}")
    return {"group_size": size, "bits": bits, "mode": mode}


def _join(base: str, name: str) -> str:
    return f"{base}.{name}" if base else name


def one_line(error: BaseException) -> str:
    """Return the first 300 characters of an error's text on one line, or its type if it has none."""
    return " ".join(str(error).split())[:300] or type(error).__name__
