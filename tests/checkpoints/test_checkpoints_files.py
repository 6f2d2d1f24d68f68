"""Finding models, describing them, and what is said of broken ones."""

from __future__ import annotations

import json
import subprocess
import sys

import mlx.core as mx
import pytest

from tandem.checkpoints.files import ModelFiles
from tandem.checkpoints.resolve import resolve
from tandem.errors import BrokenModel, LayoutError, ModelNotFound, UnsupportedModel, UsageError
from tandem.loading.stage import load_stage
from tandem.models.description import describe
from tandem.models.footprint import slice_bytes
from tandem.testing import tiny_model


def edit(path, **changes):
    config = json.loads((path / "config.json").read_text())
    config |= changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def load(path, **kwargs):
    files = resolve(str(path))
    description = describe(files)
    return load_stage(files, description, kwargs.pop("layers", range(description.num_layers)), **kwargs)


def test_describes_a_quantised_model(tmp_path):
    path = tiny_model(tmp_path / "m", "qwen3", quantized=True)
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    files = resolve(str(path))
    assert files == ModelFiles(path.resolve(), "m")
    d = describe(files)
    assert (d.family, d.num_layers, d.hidden_size, d.vocab_size) == ("qwen3", 4, 64, 512)
    assert (d.num_heads, d.num_kv_heads, d.head_dim, d.max_context) == (4, 2, 16, 512)
    assert (d.dtype, d.tied_head, d.eos_token_ids) == ("bfloat16", False, (0, 2))
    assert d.quantization == {"group_size": 32, "bits": 4}
    assert len(set(d.layer_bytes)) == 1
    assert d.embed_bytes == 512 * 64 // 2 + 2 * 512 * 2 * 2


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        ("", UsageError, "no model"),
        ("/no/such/place", ModelNotFound, "no such directory"),
        ("no such", ModelNotFound, "not a hub id"),
        ("{tmp}", ModelNotFound, "no config.json"),
        ("{tmp}/x.bin", ModelNotFound, "not a .gguf"),
        ("demo", ModelNotFound, "tandem model get demo"),
    ],
)
def test_what_cannot_be_found(model, error, words, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "x.bin").write_bytes(b"x")
    with pytest.raises(error, match=words):
        resolve(model.format(tmp=tmp_path))


def test_revision_is_for_hub_models(tmp_path):
    with pytest.raises(UsageError, match="--revision"):
        resolve(str(tiny_model(tmp_path)), revision="main")


def test_truncated_weights(tmp_path):
    path = tiny_model(tmp_path, shards=2)
    file = path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BrokenModel, match=r"model-00002-of-00002\.safetensors: truncated"):
        describe(resolve(str(path)))
    file.write_bytes(b"{}")
    with pytest.raises(BrokenModel, match="truncated or damaged"):
        describe(resolve(str(path)))


@pytest.mark.parametrize("with_index", [True, False])
def test_missing_shard(with_index, tmp_path):
    path = tiny_model(tmp_path, shards=3)
    (path / "model-00003-of-00003.safetensors").unlink()
    if not with_index:
        (path / "model.safetensors.index.json").unlink()
    with pytest.raises(BrokenModel, match="model-00003-of-00003.safetensors: is missing"):
        describe(resolve(str(path)))


def test_shards_without_an_index_are_read(tmp_path):
    path = tiny_model(tmp_path, shards=3)
    (path / "model.safetensors.index.json").unlink()
    assert load(path).is_last


def test_no_weights_at_all(tmp_path):
    path = tiny_model(tmp_path)
    (path / "model.safetensors").unlink()
    with pytest.raises(BrokenModel, match=r"has no model\*\.safetensors"):
        describe(resolve(str(path)))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model_type": "lama"}, UnsupportedModel, r"'lama' is not supported \(nearest is llama\); docs/models-list"),
        (
            {"model_type": "internvl", "text_config": {"model_type": "qwen2"}},
            UnsupportedModel,
            "internvl is computed with a text model of type qwen3, not 'qwen2'",
        ),
        ({"model_type": None}, UnsupportedModel, "model_type None"),
        ({"quantization_config": {"quant_method": "hqq", "bits": 4}}, UnsupportedModel, "'hqq' is not supported"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, UnsupportedModel, "'bitsandbytes'"),
        ({"quantization": {"bits": "x"}}, UnsupportedModel, "are not MLX's"),
        ({"quantization": {"bits": 4, "group_size": 0}}, UnsupportedModel, "are not MLX's"),
        ({"quantization": {"bits": 4, "group_size": 64, "model.x": {"group_size": "x"}}}, UnsupportedModel, "are not MLX's"),
        ({"hidden_size": None}, BrokenModel, "hidden_size must be a positive whole number, is None"),
        ({"num_hidden_layers": -1}, BrokenModel, "num_hidden_layers"),
        ({"num_hidden_layers": 9}, BrokenModel, "no weights of layer 4 of 9"),
    ],
)
def test_configs_that_are_refused(changes, error, words, tmp_path):
    path = tiny_model(tmp_path)
    edit(path, **changes)
    with pytest.raises(error, match=words):
        describe(resolve(str(path)))


def test_config_that_is_no_json(tmp_path):
    path = tiny_model(tmp_path)
    (path / "config.json").write_text("{")
    with pytest.raises(BrokenModel, match="not valid JSON"):
        describe(resolve(str(path)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 96}, "Expected shape"),
        ({"attention_bias": True}, "bias is missing"),
        ({"tie_word_embeddings": False}, "lm_head.weight is missing"),
        ({"num_hidden_layers": 3}, r"model\.layers\.3\..* does not belong"),
        ({"rms_norm_eps": None}, "config.json: does not describe a model: .*rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "nonsense"}}, "does not describe a model"),
    ],
)
def test_weights_must_cover_the_model_exactly(changes, words, tmp_path):
    path = tiny_model(tmp_path)
    edit(path, **changes)
    with pytest.raises(BrokenModel, match=words):
        load(path)


def test_missing_and_surplus_weights(tmp_path):
    path = tiny_model(tmp_path)
    weights = mx.load(str(path / "model.safetensors"))
    mx.eval(weights)
    gone = weights.pop("model.layers.2.mlp.up_proj.weight")
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    with pytest.raises(BrokenModel, match=r"model\.layers\.2\.mlp\.up_proj\.weight is missing"):
        load(path)
    assert load(path, layers=range(2)).layers == range(2)  # a stage needs its own weights alone
    weights |= {"model.layers.2.mlp.up_proj.weight": gone, "model.layers.2.mlp.other.weight": gone}
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    with pytest.raises(BrokenModel, match=r"model\.layers\.2\.mlp\.other\.weight does not fit"):
        load(path)


def test_ranges_and_dtypes_that_are_refused(tmp_path):
    path = tiny_model(tmp_path)
    for layers in (range(0, 5), range(2, 2), range(0, 4, 2)):
        with pytest.raises(LayoutError, match="not a range"):
            load(path, layers=layers)
    with pytest.raises(UsageError, match="--dtype int8"):
        load(path, dtype="int8")
    middle = load(path, layers=range(1, 3))
    with pytest.raises(LayoutError, match="no head"):
        middle.head(mx.zeros((1, 1, 64)))


def test_raw_experts_are_stacked_for_owned_layers(tmp_path):
    path = tiny_model(tmp_path, "qwen3_moe")
    stacked = load(path)
    weights = mx.load(str(path / "model.safetensors"))
    raw = {}
    for name, array in weights.items():
        if ".switch_mlp." not in name:
            raw[name] = array
            continue
        for e in range(array.shape[0]):
            raw[name.replace("switch_mlp", f"experts.{e}")] = array[e]
    mx.eval(raw)
    mx.save_safetensors(str(path / "model.safetensors"), raw)
    tokens = mx.array([[5, 9, 40]])
    logits = [m.head(m.forward(tokens, m.make_caches())) for m in (stacked, load(path))]
    assert mx.array_equal(*logits).item()


_PEAK = """
import resource, sys
import mlx.core as mx
from tandem.models.description import describe
from tandem.checkpoints.resolve import resolve
from tandem.loading.stage import load_stage
files = resolve(sys.argv[1])
description = describe(files)
mx.eval(mx.zeros((8, 8)) @ mx.zeros((8, 8)))
unit = 1 if sys.platform == "darwin" else 1024
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
stage = load_stage(files, description, range(4, 7), dtype=sys.argv[2], dequantize=sys.argv[3] == "1")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before, stage.nbytes, sum(description.layer_bytes))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("quantized", "dtype", "expand"), [(False, "bfloat16", 0), (False, "float32", 0), (True, "float32", 1)])
def test_peak_memory_is_the_slice_and_one_tensor(quantized, dtype, expand, tmp_path):
    big = {"hidden_size": 512, "intermediate_size": 2048}
    path = tiny_model(tmp_path, "mistral", layers=12, quantized=quantized, config=big)
    command = [sys.executable, "-c", _PEAK, str(path), dtype, str(expand)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    peak, owned, stored = map(int, done.stdout.split())
    tensor = 512 * 2048 * 4
    assert peak < owned + 4 * tensor + 8e6, (peak, owned, stored)


def test_the_last_stage_of_a_tied_model_has_the_embedding_too(tmp_path):
    d = describe(resolve(str(tiny_model(tmp_path / "m", config={"tie_word_embeddings": True}))))
    assert d.tied_head
    whole, *stages = (slice_bytes(d, layers, "auto", False, 1.0, gpu=True) for layers in (range(4), range(2), range(2, 4)))
    assert sum(stages) == whole + d.embed_bytes


def test_null_ties_nothing(tmp_path):
    """As mlx-lm reads it."""
    path = tiny_model(tmp_path / "m", "llama")
    config = json.loads((path / "config.json").read_text())
    for given, tied in ((None, False), (True, True), (False, False)):
        (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": given}))
        assert describe(resolve(str(path))).tied_head is tied
