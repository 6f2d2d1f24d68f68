"""Which weight files a model directory has, and what their headers say."""

from __future__ import annotations

import re
from pathlib import Path

from tandem.checkpoints.config import read_json
from tandem.checkpoints.files import ModelFiles
from tandem.checkpoints.safetensors import TensorInfo, read_header
from tandem.errors import BrokenModel

_SHARD = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.safetensors$")


def weight_files(path: Path) -> tuple[Path, ...]:
    """The weight files of a model directory, all present. Raises `BrokenModel` naming one that is missing."""
    names = weight_names(path)
    if not names:
        names = sorted(p.name for p in path.glob("model*.safetensors"))
        names = sorted({*names, *(s for n in names for s in _siblings(n))})
    if not names:
        raise BrokenModel(f"{path}: has no model*.safetensors", param="model")
    for name in names:
        if not (path / name).is_file():
            raise BrokenModel(f"{path / name}: is missing; download or copy the model again", param=name)
    return tuple(path / name for name in names)


def weight_names(path: Path) -> list[str]:
    """Names of the weight files in the index of a model directory; empty where there is no index.

    Raises `BrokenModel` for an index that names none, or one outside the directory.
    """
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return []
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BrokenModel(f"{index}: has no weight_map", param=index.name)
    names = sorted({str(name) for name in weight_map.values()})
    if bad := [name for name in names if Path(name).name != name]:
        raise BrokenModel(f"{index}: names {bad[0]}, which is not a file of this directory", param=index.name)
    return names


def _siblings(name: str) -> list[str]:
    match = _SHARD.match(name)
    if not match:
        return []
    count = int(match[3])
    return [f"{match[1]}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def read_headers(files: ModelFiles) -> dict[str, dict[str, TensorInfo]]:
    """All tensors of the model by name of the weight file; checks the files that are here. Raises `BrokenModel`."""
    if files.headers is None:
        return {file.name: read_header(file) for file in weight_files(files.path)}
    for file in files.weights:
        read_header(file)
    return {file.name: read_header(file, header_only=True) for file in sorted(files.headers.glob("*.safetensors"))}
