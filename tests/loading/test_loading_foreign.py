"""Weights as other programs quantise them: loaded as mlx-lm loads the same weights in its own format, bit for bit."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import dequantize_model, load_model, quantize_model, save_model

from tandem.checkpoints.resolve import resolve
from tandem.checkpoints.safetensors import PendingTensor, write_safetensors
from tandem.errors import BrokenModel, UnsupportedModel
from tandem.loading.foreign import expanded_fp8
from tandem.loading.stage import load_stage
from tandem.models.description import describe
from tandem.models.footprint import slice_bytes
from tandem.models.partition import split_layers
from tandem.models.shard import plan_shards
from tandem.testing import tiny_model
from thread_ranks import ThreadGroup, ThreadRank

WIDTHS = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 32}
AWQ_NUMBERS = [0, 2, 4, 6, 1, 3, 5, 7]
"""Which of eight neighbours stand in a word of AWQ, from the lowest bits up."""


TOKENS = [3 + (7 * i * i + 5 * i) % 290 for i in range(27)]


def logits(path: Path, *, stages: int = 1, dequantize: bool = False, size: int = 1) -> list[np.ndarray]:
    """Of all tokens, in float32, as each of `size` ranks of a stage has them."""
    files = resolve(str(path))
    description = describe(files)
    shards = plan_shards(description, size, dequantize=dequantize)
    ranges = split_layers(description.num_layers, stages)

    def work(tp: Any) -> np.ndarray:
        hidden = mx.array([TOKENS])
        for layers in ranges:
            part = load_stage(files, description, layers, dtype="float32", dequantize=dequantize,
                              shard=shards[tp.rank], tensor_parallel=tp)  # fmt: skip
            hidden = part.forward(hidden, part.make_caches())
        return np.array(part.head(hidden))

    return ThreadGroup(size).run(work)


def logits_of_mlx_lm(path: Path, *, dequantize: bool = False) -> np.ndarray:
    model, _ = load_model(path)
    model.set_dtype(mx.float32)
    if dequantize:
        dequantize_model(model)
    return np.array(model(mx.array([TOKENS])))


class Twin:
    """A tiny model twice: as another program quantises it, and the same numbers in MLX's format."""

    def __init__(self, directory: Path, family: str, **widths: int) -> None:
        self.rng = np.random.default_rng(0)
        self.source = tiny_model(directory / "plain", family, layers=3, config={**WIDTHS, **widths})
        arrays = mx.load(str(self.source / "model.safetensors"))
        # Exact in bfloat16 and in float16.
        self.plain = {
            name: np.array(mx.where(mx.abs(array) < 1e-3, 0, array).astype(mx.float32)) for name, array in arrays.items()
        }
        self.foreign: dict[str, tuple[str, np.ndarray]] = {}
        self.own: dict[str, tuple[str, np.ndarray]] = {}
        self.directory = directory

    dtype = "BF16"
    """Of what is not quantised, and of scales."""

    def matrices(self) -> dict[str, np.ndarray]:
        """Projections of the layers by path, experts one by one as they are stored before mlx-lm joins them."""
        found = {}
        for name, array in self.plain.items():
            base = name.removesuffix(".weight")
            if "_proj" not in name or array.ndim < 2:
                self.foreign[name] = self.own[name] = (self.dtype, array)
            elif array.ndim == 3:
                for i, expert in enumerate(array):
                    found[base.replace("switch_mlp", f"experts.{i}")] = expert
            else:
                found[base] = array
        return found

    def packed(self, base: str, values: np.ndarray, scales: np.ndarray, zeros: np.ndarray | int, bits: int) -> None:
        """The weights as MLX holds them, of numbers [out, in], scales and zero points [out, groups]."""
        self.own[f"{base}.weight"] = ("U32", words(values, bits))
        self.own[f"{base}.scales"] = (self.dtype, scales)
        self.own[f"{base}.biases"] = (self.dtype, (-zeros * scales).astype(np.float32))

    def write(self, quantization_config: dict[str, Any], own: dict[str, Any] | None) -> tuple[Path, Path]:
        """Paths of both."""
        for kind in ("weight", "scales", "biases"):
            names = [name for name in self.own if ".experts.0." in name and name.endswith(kind)]
            for first in names:
                count = sum(1 for i in range(99) if first.replace(".experts.0.", f".experts.{i}.") in self.own)
                parts = [self.own.pop(first.replace(".experts.0.", f".experts.{i}.")) for i in range(count)]
                stacked = np.stack([array for _, array in parts])
                self.own[first.replace("experts.0", "switch_mlp")] = (parts[0][0], stacked)
        made = []
        for label, tensors, entry in (
            ("foreign", self.foreign, {"quantization_config": quantization_config}),
            ("own", self.own, {"quantization": own} if own else {}),
        ):
            path = self.directory / label
            shutil.copytree(self.source, path)
            write_safetensors(
                path / "model.safetensors",
                [
                    PendingTensor(name, dtype, array.shape, lambda dtype=dtype, array=array: stored(array, dtype))
                    for name, (dtype, array) in tensors.items()
                ],
            )
            config = json.loads((path / "config.json").read_text()) | entry
            (path / "config.json").write_text(json.dumps(config))
            made.append(path)
        return made[0], made[1]


def stored(array: np.ndarray, dtype: str) -> np.ndarray:
    """The array as its bytes are written."""
    if dtype == "BF16":
        return np.array(mx.array(array).astype(mx.bfloat16).view(mx.uint16))
    return np.ascontiguousarray(array.astype(np.float16) if dtype == "F16" else array)


def words(values: np.ndarray, bits: int) -> np.ndarray:
    """Numbers along the last axis in words of 32 bits, the first in the lowest."""
    if 32 % bits:  # the numbers go on from one word to the next
        each = (values[..., None].astype(np.uint8) >> np.arange(bits, dtype=np.uint8)) & 1
        stream = np.packbits(each.reshape(*values.shape[:-1], -1), axis=-1, bitorder="little")
        return np.ascontiguousarray(stream).view(np.uint32)
    count = 32 // bits
    parts = values.reshape(*values.shape[:-1], -1, count).astype(np.uint64)
    return (parts << (np.arange(count, dtype=np.uint64) * bits)).sum(-1).astype(np.uint32)


def numbers(twin: Twin, shape: tuple[int, ...], group: int, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random numbers, and scales and zero points a group, whose products are exact in every type."""
    values = twin.rng.integers(0, 1 << bits, shape)
    sizes = (shape[0], shape[1] // group)
    scales = 2.0 ** -twin.rng.integers(bits, bits + 3, sizes)
    return values, scales.astype(np.float32), twin.rng.integers(1, 1 << bits, sizes)


def make_fp8(twin: Twin, block: tuple[int, int] | None) -> tuple[Path, Path]:
    """In blocks, or with a scale for each row as compressed-tensors has it."""
    for base, array in twin.matrices().items():
        bytes_ = np.array(mx.to_fp8(mx.array(array)))
        rows, columns = array.shape
        shape = (-(-rows // block[0]), -(-columns // block[1])) if block else (rows, 1)
        scales = twin.rng.uniform(0.5, 1.0, shape).astype(np.float32)
        wide = np.repeat(np.repeat(scales, block[0], 0), block[1], 1)[:rows, :columns] if block else scales
        plain = mx.from_fp8(mx.array(bytes_), dtype=mx.bfloat16).astype(mx.float32) * mx.array(wide)
        twin.own[f"{base}.weight"] = ("BF16", np.array(plain))
        twin.foreign[f"{base}.weight"] = ("F8_E4M3", bytes_)
        twin.foreign[f"{base}.weight_scale{'_inv' if block else ''}"] = ("F32", scales)
    if block:
        return twin.write({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}, None)
    return twin.write({"quant_method": "compressed-tensors", "format": "float-quantized"}, None)


def make_packed(twin: Twin, bits: int, group: int | None, zero_points: bool) -> tuple[Path, Path]:
    """As Kimi K2 has it, and with zero points."""
    for base, array in twin.matrices().items():
        values, scales, zeros = numbers(twin, array.shape, group or array.shape[1], bits)
        twin.foreign[f"{base}.weight_packed"] = ("I32", words(values, bits).view(np.int32))
        twin.foreign[f"{base}.weight_scale"] = (twin.dtype, scales)
        twin.foreign[f"{base}.weight_shape"] = ("I64", np.array(array.shape, np.int64))
        if zero_points:
            twin.foreign[f"{base}.weight_zero_point"] = ("I32", words(zeros.T, bits).T.view(np.int32))
        scales = np.repeat(scales, array.shape[1] // 128, 1) if group is None else scales
        twin.packed(base, values, scales, zeros if zero_points else 1 << (bits - 1), bits)
    weights = {"num_bits": bits, "group_size": group, "type": "int", "symmetric": not zero_points}
    return twin.write({"quant_method": "compressed-tensors", "format": "pack-quantized",
                       "config_groups": {"group_0": {"weights": weights}}},
                      {"group_size": group or 128, "bits": bits})  # fmt: skip


def make_awq(twin: Twin, bits: int = 4) -> tuple[Path, Path]:
    twin.dtype = "F16"
    for base, array in twin.matrices().items():
        values, scales, zeros = numbers(twin, array.shape, 64, 4)

        def shuffled(matrix: np.ndarray) -> np.ndarray:
            eights = matrix.T.reshape(matrix.shape[1], -1, 8)
            return words(eights[..., AWQ_NUMBERS].reshape(matrix.shape[1], -1), 4).view(np.int32)

        twin.foreign[f"{base}.qweight"] = ("I32", shuffled(values))
        twin.foreign[f"{base}.qzeros"] = ("I32", shuffled(zeros))
        twin.foreign[f"{base}.scales"] = ("F16", scales.T)
        twin.packed(base, values, scales, zeros, 4)
    return twin.write({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True},
                      {"group_size": 64, "bits": 4})  # fmt: skip


def make_gptq(twin: Twin, bits: int, group: int) -> tuple[Path, Path]:
    twin.dtype = "F16"
    for base, array in twin.matrices().items():
        values, scales, zeros = numbers(twin, array.shape, group, bits)
        twin.foreign[f"{base}.qweight"] = ("I32", words(values, bits).T.view(np.int32))
        twin.foreign[f"{base}.qzeros"] = ("I32", words(zeros.T - 1, bits).view(np.int32))
        twin.foreign[f"{base}.scales"] = ("F16", scales.T)
        twin.foreign[f"{base}.g_idx"] = ("I32", (np.arange(array.shape[1]) // group).astype(np.int32))
        twin.packed(base, values, scales, zeros, bits)
    return twin.write({"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False},
                      {"group_size": group, "bits": bits})  # fmt: skip


FORMATS = {
    "fp8 in blocks": lambda twin: make_fp8(twin, (48, 40)),
    "fp8 by rows": lambda twin: make_fp8(twin, None),
    "4 bits of compressed-tensors": lambda twin: make_packed(twin, 4, 32, False),
    "4 bits, a scale for each row": lambda twin: make_packed(twin, 4, None, False),
    "8 bits with zero points": lambda twin: make_packed(twin, 8, 64, True),
    "AWQ": make_awq,
    "GPTQ": lambda twin: make_gptq(twin, 4, 32),
    "GPTQ of 3 bits": lambda twin: make_gptq(twin, 3, 32),
    "GPTQ of 2 bits": lambda twin: make_gptq(twin, 2, 32),
    "GPTQ of 8 bits": lambda twin: make_gptq(twin, 8, 64),
}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("form", FORMATS)
def test_stages_compute_what_mlx_lm_computes_with_the_same_weights_in_its_format(form, family, tmp_path):
    foreign, own = FORMATS[form](Twin(tmp_path, family))
    want = logits_of_mlx_lm(own)
    assert np.isfinite(want).all()
    for stages in (1, 2):
        np.testing.assert_array_equal(logits(foreign, stages=stages)[0], want)
    if describe(resolve(str(foreign))).quantization is not None:
        want = logits_of_mlx_lm(own, dequantize=True)
        np.testing.assert_array_equal(logits(foreign, stages=2, dequantize=True)[0], want)


@pytest.mark.parametrize("form", FORMATS)
def test_ranks_compute_with_their_part(form, tmp_path):
    foreign, own = FORMATS[form](Twin(tmp_path, "qwen3_moe" if form in ("fp8 in blocks", "AWQ") else "qwen3"))
    dequantize = form == "4 bits, a scale for each row"  # its groups of 128 are wider than a tiny head
    want = logits_of_mlx_lm(own, dequantize=dequantize)
    for got in logits(foreign, size=2, dequantize=dequantize):
        np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


BEYOND = {
    **dict.fromkeys(("AWQ", "fp8 in blocks", "fp8 by rows"), 4.0),
    **dict.fromkeys(("4 bits, a scale for each row", "8 bits with zero points", "GPTQ of 8 bits"), 1.0),
}
"""Largest tensors, as if in float32, that loading takes besides its result. AWQ has its bits in another order than MLX,
and fp8 becomes floats; else half a one."""


@pytest.mark.parametrize("form", FORMATS)
def test_a_rank_takes_the_memory_of_its_part_and_little_more(form, tmp_path):
    """The largest tensor is a layer's experts, joined."""
    twin = Twin(tmp_path, "qwen3_moe", hidden_size=256, intermediate_size=1024, moe_intermediate_size=256, head_dim=64)
    foreign, _ = FORMATS[form](twin)
    files = resolve(str(foreign))
    description = describe(files)
    expand = form == "4 bits, a scale for each row"
    shard = plan_shards(description, 2, dequantize=expand)[0]
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    stage = load_stage(
        files,
        description,
        range(3),
        dtype="float32",
        dequantize=expand,
        shard=shard,
        tensor_parallel=ThreadRank(ThreadGroup(2), 0),
    )
    beyond = mx.get_peak_memory() - before - stage.nbytes
    tensor = 4 * 256 * 256 * 4  # in float32
    assert beyond < tensor * BEYOND.get(form, 0.5), (beyond / tensor, stage.nbytes)


@pytest.mark.parametrize("form", FORMATS)
def test_estimates_are_the_bytes_that_are_loaded(form, tmp_path):
    foreign, _ = FORMATS[form](Twin(tmp_path, "qwen3_moe"))
    files = resolve(str(foreign))
    description = describe(files)
    stage = load_stage(files, description, range(1, 3), dtype="bfloat16")
    told = slice_bytes(description, range(1, 3), "bfloat16", False, 1.0, gpu=True)
    assert told == stage.nbytes


@pytest.mark.parametrize(
    ("group", "bits", "mode"),
    [
        (32, 2, "affine"),
        (64, 3, "affine"),
        (32, 5, "affine"),
        (64, 6, "affine"),
        (32, 8, "affine"),
        (128, 4, "affine"),
        (32, 4, "mxfp4"),
        (32, 8, "mxfp8"),
        (16, 4, "nvfp4"),
    ],
)
@pytest.mark.parametrize("mixed", [False, True], ids=["alike", "mixed"])
def test_formats_of_mlx_give_what_mlx_lm_gives(group, bits, mode, mixed, tmp_path):
    path = tiny_model(tmp_path / "plain", "qwen3_moe", layers=3, config=WIDTHS)
    model, config = load_model(path)

    def predicate(name: str, module: Any) -> Any:
        if not mixed:
            return True
        if ".layers.1." in name:
            return "q_proj" not in name
        return {"group_size": 64, "bits": 8, "mode": "affine"} if "down_proj" in name else True

    model, config = quantize_model(model, config, group, bits, mode=mode, quant_predicate=predicate)
    made = tmp_path / "made"
    save_model(made, model)
    (made / "config.json").write_text(json.dumps(config))
    want = logits_of_mlx_lm(made)
    for stages in (1, 2):
        np.testing.assert_array_equal(logits(made, stages=stages)[0], want)
    if group < 128:
        for got in logits(made, size=2):
            np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


def make_nvfp4(twin: Twin) -> tuple[Path, Path]:
    """As compressed-tensors has it: a second scale, of the whole matrix."""
    for base, array in twin.matrices().items():
        weight, scales = mx.quantize(mx.array(array), 16, 4, mode="nvfp4")
        twin.foreign[f"{base}.weight_packed"] = ("U8", np.array(weight.view(mx.uint8)))
        twin.foreign[f"{base}.weight_scale"] = ("F8_E4M3", np.array(scales))
        twin.foreign[f"{base}.weight_global_scale"] = ("F32", np.ones(1, np.float32))
    return twin.write({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, None)


def make_modelopt(twin: Twin) -> tuple[Path, Path]:
    for base, array in twin.matrices().items():
        weight, scales = mx.quantize(mx.array(array), 16, 4, mode="nvfp4")
        twin.foreign[f"{base}.weight"] = ("U8", np.array(weight.view(mx.uint8)))
        twin.foreign[f"{base}.weight_scale"] = ("F8_E4M3", np.array(scales))
        twin.foreign[f"{base}.weight_scale_2"] = ("F32", np.ones(1, np.float32))
    return twin.write({"quant_method": "modelopt", "quant_algo": "NVFP4"}, None)


def make_modelopt_apart(twin: Twin) -> tuple[Path, Path]:
    """Its settings in a file of their own."""
    foreign, own = make_modelopt(twin)
    config = json.loads((foreign / "config.json").read_text())
    settings = {"producer": {"name": "modelopt"}, "quantization": config.pop("quantization_config")}
    (foreign / "hf_quant_config.json").write_text(json.dumps({"quant_method": "modelopt", **settings}))
    (foreign / "config.json").write_text(json.dumps(config))
    return foreign, own


def make_bitsandbytes(twin: Twin) -> tuple[Path, Path]:
    for base, array in twin.matrices().items():
        twin.foreign[f"{base}.weight"] = ("U8", np.zeros((array.size // 2, 1), np.uint8))
        twin.foreign[f"{base}.weight.absmax"] = ("F32", np.ones(array.size // 64, np.float32))
    return twin.write({"quant_method": "bitsandbytes", "load_in_4bit": True}, None)


def make_desc_act(twin: Twin) -> tuple[Path, Path]:
    foreign, own = make_gptq(twin, 4, 32)
    config = json.loads((foreign / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (foreign / "config.json").write_text(json.dumps(config))
    return foreign, own


@pytest.mark.parametrize("make", [make_nvfp4, make_modelopt, make_modelopt_apart, make_bitsandbytes, make_desc_act])
def test_what_is_refused_is_not_loaded_by_mlx_lm_either(make, tmp_path):
    """docs/models.md says what to use instead. A format that mlx-lm has learnt to load must be loaded here too."""
    foreign, _ = make(Twin(tmp_path, "qwen3"))
    with pytest.raises(ValueError, match=r"g_idx|not in model|shape"):
        load_model(foreign)
    with pytest.raises(UnsupportedModel, match="is not supported; use a model in MLX format"):
        describe(resolve(str(foreign)))


def test_mlx_lm_reads_the_same_awq_weights(tmp_path):
    foreign, _ = make_awq(Twin(tmp_path, "qwen3"))
    np.testing.assert_array_equal(logits(foreign, stages=2)[0], logits_of_mlx_lm(foreign))


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("deepseek_v3", lambda twin: make_fp8(twin, (128, 128))),
        ("deepseek_v32", lambda twin: make_fp8(twin, (128, 128))),
        ("kimi_k2", lambda twin: make_packed(twin, 4, 32, False)),
    ],
    ids=["DeepSeek V3 in fp8", "DeepSeek V3.2 in fp8", "Kimi K2 in 4 bits"],
)
def test_mlx_lm_loads_the_same_model_from_the_published_format(family, form, tmp_path):
    foreign, _ = form(Twin(tmp_path, family))
    want = logits_of_mlx_lm(foreign)
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(logits(foreign, stages=2)[0], want)


def test_fp8_is_expanded_as_mlx_lms_models_do():
    from mlx_lm.models import minimax

    rng = np.random.default_rng(1)
    weight = mx.to_fp8(mx.array(rng.standard_normal((200, 300), dtype=np.float32)))
    scale = mx.array(rng.uniform(0, 2, (2, 3)).astype(np.float32))
    theirs = minimax.Model.sanitize(None, {"x.weight": weight, "x.weight_scale_inv": scale})["x.weight"]
    assert mx.array_equal(expanded_fp8(weight, scale, (128, 128)), theirs)


def test_scales_that_do_not_fit_are_refused(tmp_path):
    twin = Twin(tmp_path, "qwen3")
    for base, array in twin.matrices().items():
        twin.foreign[f"{base}.weight"] = ("F8_E4M3", np.array(mx.to_fp8(mx.array(array))))
        twin.foreign[f"{base}.weight_scale_inv"] = ("F32", np.ones((5, 7), np.float32))
    foreign, _ = twin.write({"quant_method": "fp8", "weight_block_size": [128, 128]}, None)
    files = resolve(str(foreign))
    with pytest.raises(BrokenModel, match=r"does not fit its scales: scales \(5, 7\) for weights"):
        load_stage(files, describe(files), range(3))


@pytest.mark.parametrize(
    ("settings", "words_"),
    [
        ({"quant_method": "bitsandbytes"}, "quantisation 'bitsandbytes'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, "GPTQ with desc_act"),
        ({"quant_method": "gptq", "bits": 5, "group_size": 128}, "quantisation with 5 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ version 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 48}, "quantisation in groups of 48"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "0 kinds of weights"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 of format 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": [1]}, "0 kinds of weights"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": {"weights": {"num_bits": [4], "group_size": {}}}},
            },
            "quantisation with .4. bits",
        ),
        ({"quant_method": ["fp8"]}, "quantisation"),
        ("words", "quantisation 'words'"),
    ],
)
def test_other_formats_are_refused_from_the_configuration_alone(settings, words_, tmp_path):
    path = tiny_model(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    with pytest.raises(UnsupportedModel, match=f"{words_}.* is not supported; use a model in MLX format"):
        describe(resolve(str(path)))
