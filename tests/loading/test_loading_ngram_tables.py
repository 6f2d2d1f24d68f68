"""N-gram tables (qwen4_exp): rows are read from the model's files, and neither loaded nor counted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tandem.checkpoints.files import read_tensors
from tandem.checkpoints.resolve import resolve
from tandem.checkpoints.safetensors import PendingTensor, read_header, write_safetensors
from tandem.cli.main import main
from tandem.errors import BrokenModel
from tandem.loading.stage import DTYPES, StageModel, _build, load_stage
from tandem.loading.weights import MappedRows, open_weights
from tandem.models.description import describe
from tandem.models.footprint import slice_bytes
from tandem.models.quantization import NGRAM_TABLE
from tandem.testing import tiny_model

TOKENS = mx.array([[3 + (7 * i * i + 5 * i) % 290 for i in range(9)]], mx.int32)
LAYERS = range(1)
"""The first layer has a table, the second none, the third another."""


def loaded(path: Path, **options: Any) -> StageModel:
    files = resolve(str(path))
    return load_stage(files, describe(files), LAYERS, **options)


def computed(stage: StageModel) -> mx.array:
    h = stage.forward(TOKENS, stage.make_caches())
    mx.eval(h)
    return h


def mapped(stage: StageModel) -> dict[str, MappedRows]:
    [leaf] = stage.modules[0].ple.ple_embedding.ngram_embedding.shards
    return {name: rows for name, rows in leaf.items() if isinstance(rows, MappedRows)}


def rewritten(path: Path, change: Any) -> None:
    """Write the weights anew: `change` gives name, type and array for each tensor, as bytes for types that numpy lacks."""
    raw, file = (path / "model.safetensors").read_bytes(), path / "model.safetensors"
    tensors = [
        one
        for name, info in read_header(file).items()
        for one in change(name, info.dtype, info.shape, np.frombuffer(raw, np.uint8, info.nbytes, info.offset))
    ]
    write_safetensors(file, [PendingTensor(name, kind, shape, lambda data=data: data) for name, kind, shape, data in tensors])


def as_fp8(path: Path, scale: float) -> None:
    """Store tables as the original does: fp8 under `shard_N`, with one scale."""

    def change(name: str, kind: str, shape: Any, data: np.ndarray) -> Any:
        if ".ngram_embedding.shards." not in name:
            return [(name, kind, shape, data)]
        numbers = mx.array(data).view(mx.bfloat16).reshape(shape)
        made = [(name.replace("shards.", "shard_"), "F8_E4M3", shape, np.array(mx.to_fp8(numbers)))]
        if ".shards.0." in name:
            made.append((name.replace("shards.0.weight", "weight_scale"), "F32", (), np.array(scale, np.float32)))
        return made

    rewritten(path, change)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("form", ["plain", "4 bits", "fp8"])
def test_rows_are_those_of_the_whole_table(form: str, dtype: str, tmp_path: Path) -> None:
    """In all bits, with tensors in several files; fp8 as mlx-vlm expands it."""
    path = tiny_model(tmp_path, "qwen4_exp", quantized=form == "4 bits", shards=1 if form == "fp8" else 3)
    if form == "fp8":
        as_fp8(path, 0.37)
    files = resolve(str(path))
    description = describe(files)
    stage = load_stage(files, description, LAYERS, dtype=dtype, dequantize=form == "4 bits")
    weights = open_weights(files, _build(files, description), description)
    found = mapped(stage)
    assert len(found) == (3 if form == "4 bits" else 1)
    for name, rows in found.items():
        base = "language_model.model.layers.0.ple.ple_embedding.ngram_embedding.shards"
        whole = mx.concatenate([weights[f"{base}.{i}.{name}"] for i in range(4)])
        whole = whole.astype(DTYPES[dtype]) if mx.issubdtype(whole.dtype, mx.floating) else whole
        places = mx.array([0, len(whole) - 1, *range(len(whole) - 2, 1, -7), 5, 5], mx.int32)
        assert rows[places].dtype == whole.dtype
        assert mx.array_equal(rows[places], whole[places]).item()


@pytest.mark.parametrize("quantized", [False, True])
def test_tables_are_neither_loaded_nor_counted(quantized: bool, tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "qwen4_exp", quantized=quantized)
    files = resolve(str(path))
    description, tensors = describe(files), read_tensors(files)
    tables = {name: info for name, info in tensors.items() if ".ngram_embedding." in name}
    assert len(tables) == 2 * 4 * (3 if quantized else 1)
    assert description.mapped_bytes == sum(info.nbytes for info in tables.values())
    everything = sum(info.nbytes for info in tensors.values())
    rest = sum(description.layer_bytes) + description.embed_bytes + description.head_bytes
    assert rest + description.mapped_bytes == everything and description.mapped_bytes > everything // 20
    progress: list[tuple[int, int]] = []
    for layers in (range(1), range(1, 4)):
        stage = load_stage(files, description, layers, dtype="bfloat16", progress=lambda *one: progress.append(one))
        assert stage.nbytes == slice_bytes(description, layers, "bfloat16", False, 1.0, gpu=False)
        assert progress[-1] == (stage.nbytes, stage.nbytes)
        assert not {info.shape for info in tables.values()} & {array.shape for array in stage.arrays()}


def test_lookups_read_the_file(tmp_path: Path) -> None:
    """A table that is all zeros in the file changes what a loaded stage computes."""
    path = tiny_model(tmp_path, "qwen4_exp")
    stage = loaded(path)
    before = computed(stage)
    assert mx.array_equal(computed(stage), before).item()
    file = path / "model.safetensors"
    tables = {name: info for name, info in read_header(file).items() if NGRAM_TABLE.match(name)}
    with file.open("r+b") as opened:
        for info in tables.values():
            opened.seek(info.offset)
            opened.write(bytes(info.nbytes))
    assert not mx.array_equal(computed(stage), before).item()


def test_a_file_that_is_replaced_is_read_as_it_was(tmp_path: Path) -> None:
    """A new file under the same name is another one, as after a download."""
    path = tiny_model(tmp_path / "model", "qwen4_exp")
    stage = loaded(path)
    before = computed(stage)
    os.replace(tiny_model(tmp_path / "other", "qwen4_exp", seed=1) / "model.safetensors", path / "model.safetensors")
    assert mx.array_equal(computed(stage), before).item()
    assert not mx.array_equal(computed(loaded(path)), before).item()


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    """Even after the model was described, so that no lookup reads behind the end of a file."""
    path = tiny_model(tmp_path, "qwen4_exp")
    files = resolve(str(path))
    description = describe(files)
    file = path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 5)
    for load in (lambda: loaded(path), lambda: load_stage(files, description, LAYERS)):
        with pytest.raises(BrokenModel, match=r"model\.safetensors: (truncated|cannot be read: .*incomplete)") as caught:
            load()
        assert "\n" not in caught.value.message


@pytest.mark.parametrize("wrong", ["missing", "rows", "kinds", "scale"])
def test_tables_that_do_not_fit_are_refused(wrong: str, tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "qwen4_exp")

    def change(name: str, kind: str, shape: Any, data: np.ndarray) -> Any:
        if not name.endswith("layers.0.ple.ple_embedding.ngram_embedding.shards.2.weight"):
            return [(name, kind, shape, data)]
        row = data.size // shape[0]
        return {
            "missing": [],
            "rows": [(name, kind, (shape[0] - 1, shape[1]), data[:-row])],
            "kinds": [(name, "F16", shape, data)],
            "scale": [(name, kind, shape, data)],
        }[wrong]

    if wrong == "scale":  # a scale for each tensor, which is no format of these tables
        as_fp8(path, 1.0)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))

        def change(name: str, kind: str, shape: Any, data: np.ndarray) -> Any:
            if name.endswith("ngram_embedding.weight_scale"):
                return [(name.replace("weight_scale", f"shard_{i}.weight_scale"), kind, (1,), data) for i in range(4)]
            return [(name, kind, shape, data)]

    rewritten(path, change)
    words = {"missing": "shards.2.weight is missing", "rows": "shape", "kinds": "do not fit together", "scale": "weight_scale"}
    with pytest.raises(BrokenModel, match=words[wrong]):
        loaded(path)


def test_the_plan_says_what_is_mapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = ("--hosts", "a=4GB:cpu", "--context", "128")
    assert main(["plan", str(tiny_model(tmp_path / "qwen", "qwen4_exp")), *hosts]) == 0
    assert "of n-gram tables are read from the model's files" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", str(tiny_model(tmp_path / "llama")), *hosts]) == 0
    assert "n-gram" not in capsys.readouterr().out
