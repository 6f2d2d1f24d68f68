"""GGUF files written with the gguf package, converted, and compared with what was written."""

from __future__ import annotations

import json

import gguf
import mlx.core as mx
import numpy as np
import pytest

from tandem.checkpoints.gguf.config import _llama3
from tandem.checkpoints.resolve import resolve
from tandem.errors import BrokenModel, UnsupportedModel
from tandem.loading.stage import load_stage
from tandem.models.description import describe
from tandem.testing import tiny_model
from tandem.text.tokenizer import load_tokenizer

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
PLAIN = {"F16": np.float16, "F32": np.float32}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))


def gguf_name(name):
    base, _, last = name.rpartition(".")
    if base in TOP:
        return f"{TOP[base]}.{last}"
    _, _, layer, rest = base.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{last}"


def permute(array, heads):
    """llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute."""
    half = array.shape[0] // heads // 2
    return array.reshape(heads, 2, half, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def write_gguf(path, model, kind, arch="llama", extra=(), metadata=()):
    """`model` (a tiny MLX directory in float32) as a GGUF file with its matrices as `kind`."""
    config = json.loads((model / "config.json").read_text())
    weights = {k: np.array(v) for k, v in mx.load(str(model / "model.safetensors")).items()}
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    write_vocabulary(writer, model)
    for add in metadata:
        add(writer)
    for name, array in weights.items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            array = permute(array, config[heads])
        put(writer, gguf_name(name), array, "F32" if array.ndim == 1 else kind)
    for name, array, as_kind in extra:
        put(writer, name, array, as_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def put(writer, name, array, kind):
    if kind in PLAIN:
        writer.add_tensor(name, np.ascontiguousarray(array.astype(PLAIN[kind])))
    else:
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(array), number), raw_dtype=number)


def write_vocabulary(writer, model):
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {t["content"] for t in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocab)
    writer.add_token_types([3 if t in special else 1 for t in vocab])
    writer.add_token_merges([" ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_chat_template(json.loads((model / "tokenizer_config.json").read_text())["chat_template"])


def logits(files, **kwargs):
    description = describe(files)
    stage = load_stage(files, description, range(description.num_layers), dtype="float32", **kwargs)
    return stage.head(stage.forward(mx.array([[5, 80, 200, 31, 7]]), stage.make_caches()))


@pytest.mark.parametrize(("family", "arch"), [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")])
def test_plain_file_gives_the_same_model(family, arch, tmp_path):
    model = tiny_model(tmp_path / "m", family, dtype="float32")
    path = write_gguf(tmp_path / "tiny.gguf", model, "F32", arch)
    files = resolve(str(path))
    assert files.name == "tiny"
    assert mx.array_equal(logits(files), logits(resolve(str(model)))).item()
    ours, theirs = load_tokenizer(files), load_tokenizer(resolve(str(model)))
    text = "the hen 12<|im_end|> über\n"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.eos_token_ids == theirs.eos_token_ids == (2,)
    messages = [{"role": "user", "content": "hello"}]
    assert ours.render_chat(messages) == theirs.render_chat(messages)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16"])
def test_weights_are_those_that_gguf_reads(kind, tmp_path):
    model = tiny_model(tmp_path / "m", "mistral", dtype="float32")
    path = write_gguf(tmp_path / "tiny.gguf", model, kind)
    files = resolve(str(path))
    loaded = mx.load(str(files.path / "model.safetensors"))
    bits = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}.get(kind)
    for tensor in gguf.GGUFReader(str(path)).tensors:
        if "attn_q" in tensor.name or "attn_k" in tensor.name:
            continue  # in another order; covered by the comparison of logits below
        name = {v: k for k, v in ((n, gguf_name(n)) for n in mx.load(str(model / "model.safetensors")))}[tensor.name]
        want = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        got = loaded[name]
        if got.dtype == mx.uint32:
            base = name.removesuffix(".weight")
            scales, biases = (loaded[f"{base}.{n}"].astype(mx.float32) for n in ("scales", "biases"))
            got = mx.dequantize(got, scales, biases, 32, bits)
        np.testing.assert_allclose(np.array(got.astype(mx.float32)), want.reshape(got.shape), rtol=1e-6, atol=1e-6)
    packed, expanded = logits(files), logits(files, dequantize=True)
    scale = mx.max(mx.abs(expanded)).item()
    assert mx.max(mx.abs(packed - expanded)).item() < 1e-4 * scale
    reference = logits(resolve(str(model)))
    error = mx.sqrt(mx.mean((expanded - reference) ** 2) / mx.mean(reference**2)).item()
    assert error < {"Q4_0": 0.6, "Q4_1": 0.6, "Q8_0": 0.05, "F16": 0.005}[kind]


def test_query_rows_come_back_in_order(tmp_path):
    model = tiny_model(tmp_path / "m", "llama", dtype="float32")
    files = resolve(str(write_gguf(tmp_path / "tiny.gguf", model, "Q8_0")))
    name = "model.layers.1.self_attn.q_proj"
    loaded, original = mx.load(str(files.path / "model.safetensors")), mx.load(str(model / "model.safetensors"))
    parts = [loaded[f"{name}.{n}"] for n in ("weight", "scales", "biases")]
    got, want = mx.dequantize(*parts, 32, 8), original[f"{name}.weight"]
    assert mx.max(mx.abs(got - want)).item() < 0.01


def test_mixed_types_and_one_conversion(tmp_path):
    model = tiny_model(tmp_path / "m", "llama", dtype="float32")
    path = write_gguf(tmp_path / "tiny.gguf", model, "Q4_0")
    first = resolve(str(path))
    stamp = (first.path / "model.safetensors").stat().st_mtime_ns
    assert resolve(str(path)) == first
    assert (first.path / "model.safetensors").stat().st_mtime_ns == stamp
    assert not [p for p in first.path.parent.iterdir() if p.name.startswith(".")]


def test_unsupported_tensor_type_is_named(tmp_path):
    model = tiny_model(tmp_path / "m", "llama", dtype="float32")
    path = write_gguf(tmp_path / "tiny.gguf", model, "Q5_0")
    with pytest.raises(UnsupportedModel, match=r"tensor type Q5_0 \(.*\) is not supported; supported are F32, F16"):
        resolve(str(path))
    assert not list((tmp_path / "cache" / "gguf").iterdir())


def test_unsupported_architecture_and_tokenizer(tmp_path):
    model = tiny_model(tmp_path / "m", "llama", dtype="float32")
    with pytest.raises(UnsupportedModel, match="architecture bert is not supported"):
        resolve(str(write_gguf(tmp_path / "a.gguf", model, "F16", "bert")))
    add = [lambda writer: writer.add_tokenizer_pre("mystery")]
    with pytest.raises(UnsupportedModel, match="pre-tokeniser 'mystery' is not supported"):
        resolve(str(write_gguf(tmp_path / "b.gguf", model, "F16", metadata=add)))


def test_llama3_rotary_factors(tmp_path):
    model = tiny_model(tmp_path / "m", "llama", dtype="float32")
    factors = _llama3(8.0, 10000.0, 16).astype(np.float32)
    path = write_gguf(tmp_path / "tiny.gguf", model, "F32", extra=[("rope_freqs.weight", factors, "F32")])
    scaling = json.loads((resolve(str(path)).path / "config.json").read_text())["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", 8.0)
    other = write_gguf(tmp_path / "o.gguf", model, "F32", extra=[("rope_freqs.weight", factors * 2, "F32")])
    with pytest.raises(UnsupportedModel, match="not Llama 3's"):
        resolve(str(other))


def test_damaged_files(tmp_path):
    model = tiny_model(tmp_path / "m", "llama", dtype="float32")
    data = write_gguf(tmp_path / "tiny.gguf", model, "F16").read_bytes()
    path = tmp_path / "broken.gguf"
    for content, words in [
        (data[:-1], "truncated: tensor .* ends after the file"),
        (data[:2000], "truncated or damaged GGUF header"),
        (b"GGUF", "truncated or damaged GGUF header"),
        (b"nothing of the kind", "not a GGUF file"),
        (b"", "cannot be read"),
    ]:
        path.write_bytes(content)
        with pytest.raises(BrokenModel, match=words):
            resolve(str(path))
    path.write_bytes(b"GGUF" + (9).to_bytes(4, "little") + bytes(16))
    with pytest.raises(UnsupportedModel, match="GGUF version 9"):
        resolve(str(path))
