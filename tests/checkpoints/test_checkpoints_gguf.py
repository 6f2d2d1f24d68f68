"""GGUF files written with the gguf package, converted, and compared with what was written."""

from __future__ import annotations

import gc
import json
import tracemalloc

import gguf
import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer

from gguf_files import gguf_name, write_gguf
from tandem.checkpoints.gguf.config import _llama3
from tandem.checkpoints.gguf.tokenizer import write_tokenizer
from tandem.checkpoints.resolve import resolve
from tandem.errors import BrokenModel, UnsupportedModel
from tandem.loading.stage import load_stage
from tandem.models.description import describe
from tandem.models.families.tiny import tiny_config
from tandem.models.shard import plan_shards
from tandem.testing import tiny_model
from tandem.text.tokenizer import load_tokenizer
from thread_ranks import ThreadGroup, ThreadRank


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))


def logits(files, **kwargs):
    description = describe(files)
    stage = load_stage(files, description, range(description.num_layers), dtype="float32", **kwargs)
    return stage.head(stage.forward(mx.array([[5, 80, 200, 31, 7]]), stage.make_caches()))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False}  # fmt: skip
LONG = {"type": "longrope", "long_factor": [1.5] * 8, "short_factor": [1.0] * 8}
LATENT = [
    lambda w: w.add_q_lora_rank(32), lambda w: w.add_kv_lora_rank(32), lambda w: w.add_key_length(48),
    lambda w: w.add_value_length(16), lambda w: w.add_rope_dimension_count(16), lambda w: w.add_expert_count(4),
    lambda w: w.add_expert_used_count(2), lambda w: w.add_expert_shared_count(1),
    lambda w: w.add_expert_feed_forward_length(64), lambda w: w.add_leading_dense_block_count(1),
    lambda w: w.add_expert_weights_scale(1.5), lambda w: w.add_expert_weights_norm(True),
    lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), lambda w: w.add_rope_scaling_factor(40.0),
    lambda w: w.add_rope_scaling_orig_ctx_len(4096), lambda w: w.add_rope_scaling_yarn_log_mul(0.1),
]  # fmt: skip
GRANITE = tiny_config("granite")
EXPERTS = [lambda w: w.add_expert_count(4), lambda w: w.add_expert_used_count(2),
           lambda w: w.add_expert_feed_forward_length(64)]  # fmt: skip
DELTA = [
    lambda w: w.add_ssm_conv_kernel(4), lambda w: w.add_ssm_state_size(32), lambda w: w.add_ssm_group_count(2),
    lambda w: w.add_ssm_time_step_rank(4), lambda w: w.add_ssm_inner_size(128),
    lambda w: w.add_full_attention_interval(2), lambda w: w.add_rope_dimension_count(8),
]  # fmt: skip
NEXT = [*DELTA, *EXPERTS, lambda w: w.add_expert_shared_feed_forward_length(64)]
SHARES = {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
HALF = {"rope_theta": 5000.0, "partial_rotary_factor": 0.5, "type": "default"}
WINDOWS = {"sliding_attention": {"rope_theta": 5000.0, "rope_type": "default"},
           "full_attention": {"rope_theta": 1e6, "rope_type": "proportional",
                              "partial_rotary_factor": 0.25}}  # fmt: skip
GEMMA4 = [
    lambda w: w.add_key_length(32), lambda w: w.add_key_length_swa(16), lambda w: w.add_sliding_window(16),
    lambda w: w.add_sliding_window_pattern([True, False] * 2), lambda w: w.add_rope_freq_base(1e6),
    lambda w: w.add_rope_freq_base_swa(5000.0), lambda w: w.add_rope_dimension_count(32),
    lambda w: w.add_final_logit_softcapping(5.0),
    lambda w: w.add_tensor("rope_freqs.weight", np.array([1] * 4 + [1e30] * 12, np.float32)),
]  # fmt: skip
YARNED = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
          "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
          "llama_4_scaling_beta": 0.1}  # fmt: skip
MODELS = [
    # family, architecture, layers, its config, its metadata
    ("llama", "llama", 4, {}, []), ("qwen2", "qwen2", 4, {}, []), ("qwen3", "qwen3", 4, {}, []),
    ("qwen3_moe", "qwen3moe", 3, {"mlp_only_layers": []},
     [lambda w: w.add_expert_count(4), lambda w: w.add_expert_used_count(2),
      lambda w: w.add_expert_feed_forward_length(64)]),
    ("gemma2", "gemma2", 3, {}, [lambda w: w.add_final_logit_softcapping(5.0), lambda w: w.add_sliding_window(16)]),
    ("gemma3_text", "gemma3", 7, {"rope_local_base_freq": 10000.0, "sliding_window_pattern": 6},
     [lambda w: w.add_sliding_window(16)]),
    ("phi3", "phi3", 3, {}, []),
    ("phi3", "phi3", 3, {"rope_scaling": LONG, "original_max_position_embeddings": 4096},
     [lambda w: w.add_tensor("rope_factors_long.weight", np.full(8, 1.5, np.float32)),
      lambda w: w.add_tensor("rope_factors_short.weight", np.ones(8, np.float32))]),
    ("deepseek_v2", "deepseek2", 3, {}, LATENT),
    ("deepseek_v3", "deepseek2", 3, {}, [
        *LATENT, lambda w: w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID),
        lambda w: w.add_uint32("deepseek2.expert_group_count", 2),
        lambda w: w.add_uint32("deepseek2.expert_group_used_count", 1)]),
    ("gpt_oss", "gpt-oss", 4, {"rope_scaling": YARN, "sliding_window": 16},
     [lambda w: w.add_expert_count(4), lambda w: w.add_expert_used_count(2), lambda w: w.add_sliding_window(16),
      lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), lambda w: w.add_rope_scaling_factor(4.0),
      lambda w: w.add_rope_scaling_orig_ctx_len(128)]),
    ("gemma3_text", "gemma3", 4, {"rope_local_base_freq": 5000.0, "sliding_window_pattern": 3, "sliding_window": 3},
     [lambda w: w.add_sliding_window(3), lambda w: w.add_uint32("gemma3.attention.sliding_window_pattern", 3),
      lambda w: w.add_rope_freq_base_swa(5000.0)]),
    ("gemma3_text", "gemma3", 4, {"sliding_window_pattern": 2, "rope_local_base_freq": 10000.0, "sliding_window": 3},
     [lambda w: w.add_sliding_window(3), lambda w: w.add_sliding_window_pattern([True, False, True, False])]),
    ("qwen3_5", "qwen35", 4, {"rope_parameters": HALF}, DELTA),
    ("qwen3_5", "qwen35", 4, {"rope_parameters": HALF, **SHARES},
     [*DELTA, lambda w: w.add_ssm_time_step_rank(6), lambda w: w.add_ssm_inner_size(192)]),
    ("qwen3_5_moe", "qwen35moe", 4, {"rope_parameters": HALF}, NEXT),
    ("qwen3_next", "qwen3next", 4, {"norm_topk_prob": True}, NEXT),
    ("gemma4_text", "gemma4", 4, {"rope_parameters": WINDOWS, "sliding_window": 16},
     [*GEMMA4, *EXPERTS, lambda w: w.add_head_count_kv([2, 1, 2, 1])]),
    ("gemma4_text", "gemma4", 4,
     {"rope_parameters": WINDOWS, "sliding_window": 16, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16,
      "vocab_size_per_layer_input": 512, "enable_moe_block": False, "attention_k_eq_v": False,
      "use_double_wide_mlp": True, "num_global_key_value_heads": None,
      "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]},
     [*GEMMA4, lambda w: w.add_shared_kv_layers(2), lambda w: w.add_embedding_length_per_layer_input(16),
      lambda w: w.add_feed_forward_length([128, 128, 256, 256])]),
    ("mistral", "mistral3", 4, {}, []),
    ("ministral3", "mistral3", 4, {"rope_parameters": YARNED, "layer_types": ["full_attention"] * 4},
     [lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), lambda w: w.add_rope_scaling_factor(4.0),
      lambda w: w.add_rope_scaling_orig_ctx_len(16), lambda w: w.add_rope_scaling_yarn_log_mul(1.0),
      lambda w: w.add_attn_temperature_scale(0.1)]),
    ("glm4_moe", "glm4moe", 3, {"attention_bias": True},
     [*EXPERTS, lambda w: w.add_rope_dimension_count(8), lambda w: w.add_expert_weights_norm(True),
      lambda w: w.add_expert_weights_scale(1.5), lambda w: w.add_expert_shared_count(1),
      lambda w: w.add_leading_dense_block_count(1)]),
    ("lfm2", "lfm2", 4, {"conv_bias": False},
     [lambda w: w.add_shortconv_l_cache(3), lambda w: w.add_head_count_kv([0, 2, 0, 2]),
      lambda w: w.add_feed_forward_length(96)]),
    ("granite", "granite", 4, {},
     [lambda w: w.add_attention_scale(GRANITE["attention_multiplier"]),
      lambda w: w.add_embedding_scale(GRANITE["embedding_multiplier"]),
      lambda w: w.add_residual_scale(GRANITE["residual_multiplier"]),
      lambda w: w.add_logit_scale(GRANITE["logits_scaling"])]),
    ("smollm3", "smollm3", 4, {"no_rope_layer_interval": 4}, []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "arch", "layers", "config", "metadata"), MODELS, ids=[f"{model[1]} {i}" for i, model in enumerate(MODELS)]
)
def test_plain_file_gives_the_same_model(family, arch, layers, config, metadata, tmp_path):
    model = tiny_model(tmp_path / "m", family, dtype="float32", layers=layers, config=config)
    path = write_gguf(tmp_path / "tiny.gguf", model, "F32", arch, metadata=metadata)
    files = resolve(str(path))
    assert files.name == "tiny"
    # Gemma's norms are stored one larger, and decays of linear attention as powers, which costs them a bit.
    tolerance = 1e-5 if arch.startswith(("gemma", "qwen35", "qwen3next")) else 0
    want = np.array(logits(resolve(str(model))))
    np.testing.assert_allclose(np.array(logits(files)), want, atol=tolerance * np.abs(want).max(), rtol=0)
    ours, theirs = load_tokenizer(files), load_tokenizer(resolve(str(model)))
    text = "the hen 12<|im_end|> über\n"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.eos_token_ids == theirs.eos_token_ids == describe(files).eos_token_ids == (2,)
    messages = [{"role": "user", "content": "hello"}]
    assert ours.render_chat(messages) == theirs.render_chat(messages)


WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
PACKED = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5, "MXFP4": 4}


EXPANDED = ("F16", "BF16", "Q2_K", "Q3_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ3_S")


@pytest.mark.parametrize("kind", [*PACKED, *EXPANDED])
def test_weights_are_those_that_gguf_reads(kind, tmp_path):
    metadata = [lambda w: w.add_expert_count(4), lambda w: w.add_expert_used_count(2),
                lambda w: w.add_expert_feed_forward_length(256)]  # fmt: skip
    config = {**WIDE, "mlp_only_layers": []}
    model = tiny_model(tmp_path / "m", "qwen3_moe", layers=1, dtype="float32", config=config)
    path = write_gguf(tmp_path / "tiny.gguf", model, kind, "qwen3moe", metadata=metadata)
    files = resolve(str(path))
    loaded = mx.load(str(files.path / "model.safetensors"))
    names = {gguf_name(name, "qwen3moe"): name for name in mx.load(str(model / "model.safetensors"))}
    packed = 0
    for tensor in gguf.GGUFReader(str(path)).tensors:
        name = names[tensor.name]
        want = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        got = loaded[name]
        if got.dtype == mx.uint32:
            packed += 1
            base = name.removesuffix(".weight")
            mode = "mxfp4" if kind == "MXFP4" else "affine"
            rest = [loaded.get(f"{base}.{n}") for n in ("scales", "biases")]
            if mode == "affine":
                rest = [array.astype(mx.float32) for array in rest]
            got = mx.dequantize(got, *rest, 32, PACKED[kind], mode)
        # Whole numbers times a scale become 16 bits.
        tolerance = 2e-3 * np.abs(want).max() if kind not in ("F16", "BF16", "Q4_0", "Q8_0") else 1e-6
        np.testing.assert_allclose(np.array(got.astype(mx.float32)), want.reshape(got.shape), rtol=1e-6, atol=tolerance)
    assert (packed > 0) == (kind in PACKED)
    if kind not in PACKED:
        return
    ours, expanded = logits(files), logits(files, dequantize=True)
    assert mx.max(mx.abs(ours - expanded)).item() < 1e-4 * mx.max(mx.abs(expanded)).item()


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_a_quantised_model_is_near_the_plain_one(kind, tmp_path):
    model = tiny_model(tmp_path / "m", "mistral", dtype="float32")
    files = resolve(str(write_gguf(tmp_path / "tiny.gguf", model, kind)))
    expanded, reference = logits(files, dequantize=True), logits(resolve(str(model)))
    error = mx.sqrt(mx.mean((expanded - reference) ** 2) / mx.mean(reference**2)).item()
    assert error < {"Q4_0": 0.6, "Q8_0": 0.05}[kind]


@pytest.mark.parametrize(("family", "arch"), [("qwen3_5", "qwen35"), ("gemma4_text", "gemma4")])
def test_packed_rows_and_columns_are_put_in_order(family, arch, tmp_path):
    config, metadata = next((one[3], one[4]) for one in reversed(MODELS)
                            if one[1] == arch and "hidden_size_per_layer_input" not in one[3])  # fmt: skip
    model = tiny_model(tmp_path / "m", family, layers=4, dtype="float32", config=config)
    files = resolve(str(write_gguf(tmp_path / "tiny.gguf", model, "Q8_0", arch, metadata=metadata)))
    loaded, original = (mx.load(str(path / "model.safetensors")) for path in (files.path, model))
    packed = [name.removesuffix(".scales") for name in loaded if name.endswith(".scales")]
    assert len(packed) > 20
    for base in packed:
        got = mx.dequantize(*(loaded[f"{base}.{part}"] for part in ("weight", "scales", "biases")), 32, 8)
        assert mx.max(mx.abs(got - original[f"{base}.weight"])).item() < 0.01, base


def test_biases_of_queries_alone(tmp_path):
    """mlx-lm's Llama has biases in all four projections or in none."""
    model = tiny_model(tmp_path / "m", "llama", layers=2, dtype="float32", config={"attention_bias": True})
    weights = mx.load(str(model / "model.safetensors"))
    bare = [name for name in weights if name.endswith("o_proj.bias")]
    mx.save_safetensors(str(model / "model.safetensors"),
                        weights | {name: mx.zeros_like(weights[name]) for name in bare})  # fmt: skip
    want = np.array(logits(resolve(str(model))))
    mx.save_safetensors(str(model / "model.safetensors"), {k: v for k, v in weights.items() if k not in bare})
    files = resolve(str(write_gguf(tmp_path / "sha256-1f", model, "F32")))  # without a suffix, as Ollama keeps it
    np.testing.assert_array_equal(np.array(logits(files)), want)


def test_layers_for_several_tokens_are_left_out(tmp_path):
    model = tiny_model(tmp_path / "m", "qwen3", layers=2, dtype="float32")
    extra = [(f"blk.2.{name}.weight", np.ones((64, 64), np.float32), "F32") for name in ("attn_q", "nextn.eh_proj")]
    metadata = [lambda w: w.add_block_count(3), lambda w: w.add_nextn_predict_layers(1)]
    files = resolve(str(write_gguf(tmp_path / "tiny.gguf", model, "F32", "qwen3", extra=extra, metadata=metadata)))
    config = json.loads((files.path / "config.json").read_text())
    assert config["num_hidden_layers"] == 2
    assert mx.load(str(files.path / "model.safetensors")).keys() == mx.load(str(model / "model.safetensors")).keys()


def test_granite_without_positions_and_mistral_with_others_are_refused(tmp_path):
    model = tiny_model(tmp_path / "m", "llama", layers=1, dtype="float32")
    for arch, add, said in [
        ("granite", lambda w: w.add_rope_scaling_finetuned(False), "granite without rotary embedding is not"),
        ("mistral3", lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "rotary scaling yarn is not"),
        ("gemma3", lambda w: w.add_sliding_window_pattern([False, True, True]), "windows in layers that are not"),
        ("mistral3", lambda w: w.add_expert_count(4), "architecture mistral3 with experts is not supported"),
    ]:
        with pytest.raises(UnsupportedModel, match=said):
            resolve(str(write_gguf(tmp_path / "a.gguf", model, "F16", arch, metadata=[add])))


def test_deepseek_v2_with_attention_per_head_is_refused_with_its_file_named(tmp_path):
    model = tiny_model(tmp_path / "m", "deepseek_v2", layers=3, dtype="float32")
    extra = [("blk.0.attn_k_b.weight", np.ones((64, 64), np.float32), "F32")]
    path = write_gguf(tmp_path / "a.gguf", model, "F32", "deepseek2", extra=extra, metadata=LATENT)
    with pytest.raises(UnsupportedModel, match=r"a\.gguf: DeepSeek V2 with attn_k_b"):
        resolve(str(path))


WORDS = "It's a test: 12345 naïve क्षि x1y2 \t\n\n  end"


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("lfm2", ["It", "'s", " a", " test", ":", " ", "123", "45", " naïve", " क", "्ष", "ि", " x", "1", "y", "2"]),
        ("smaug-bpe", ["It", "'s", " a", " test", ":", " ", "123", "45"]),
        ("glm4", ["It", "'s", " a", " test", ":", " ", "123", "45"]),
        ("qwen35", ["It", "'s", " a", " test", ":", " ", "1", "2", "3", "4", "5", " naïve", " क्षि", " x", "1"]),
        ("tekken", ["It", "'s", " a", " test", ":", " ", "1", "2", "3", "4", "5", " naïve", " क्षि", " x", "1"]),
        ("refact", ["It", "'s", " a", " test", ":", " ", "1", "2", "3", "4", "5", " na"]),
    ],
)
def test_pre_tokenisers_split_as_llama_cpp_says(pre, words, tmp_path):
    write_tokenizer({"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre},
                    tmp_path, "x.gguf")  # fmt: skip
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    found = [WORDS[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(WORDS)]
    assert found[: len(words) - 1] == words[:-1]
    assert found[len(words) - 1].startswith(words[-1])


def test_gemma_4_has_merges_and_no_space_in_front(tmp_path):
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens += ["a", "b", "▁", "ab", "▁ab", "▁a"]
    write_tokenizer({"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.model": "gemma4",
                     "tokenizer.ggml.merges": ["a b", "▁ ab", "▁ a"],
                     "tokenizer.ggml.token_type": [3] * 4 + [6] * 256 + [1] * 6,
                     "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.unknown_token_id": 3,
                     "tokenizer.ggml.add_space_prefix": False}, tmp_path, "x.gguf")  # fmt: skip
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    encoded = tokenizer.encode("ab ab a ü")
    assert encoded.tokens == ["<bos>", "ab", "▁ab", "▁a", "▁", "<0xC3>", "<0xBC>"]
    assert tokenizer.decode(encoded.ids) == "ab ab a ü"


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_gemma_computes_in_bfloat16_whatever_the_file_has(kind, tmp_path):
    metadata = [lambda w: w.add_final_logit_softcapping(5.0), lambda w: w.add_sliding_window(16)]
    model = tiny_model(tmp_path / "m", "gemma2", layers=2, dtype="float32", config=WIDE)
    files = resolve(str(write_gguf(tmp_path / "tiny.gguf", model, kind, "gemma2", metadata=metadata)))
    assert describe(files).dtype == "bfloat16"
    assert np.isfinite(np.array(logits(files))).all()


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


def test_a_model_in_several_files(tmp_path):
    model = tiny_model(tmp_path / "m", "llama", dtype="float32")
    whole = resolve(str(write_gguf(tmp_path / "tiny.gguf", model, "Q4_0")))
    write_gguf(tmp_path / "parts.gguf", model, "Q4_0", split_max_tensors=15, small_first_shard=True)
    parts = sorted(tmp_path.glob("parts-*.gguf"))
    assert len(parts) == 4 and parts[0].name == "parts-00001-of-00004.gguf"
    files = resolve(str(parts[0]))
    assert files.name == "parts" and files.path != whole.path
    for name in ("config.json", "tokenizer.json"):
        assert (files.path / name).read_text() == (whole.path / name).read_text()
    loaded, want = (mx.load(str(one.path / "model.safetensors")) for one in (files, whole))
    assert loaded.keys() == want.keys() and all(mx.array_equal(loaded[name], want[name]).item() for name in want)
    assert resolve(str(parts[2])) == files, "each part names the model"
    with pytest.raises(BrokenModel, match=r"odd\.gguf: is a part of a model in 4 parts; give each the name"):
        resolve(str(parts[1].rename(tmp_path / "odd.gguf")))
    with pytest.raises(BrokenModel, match=r"parts-00002-of-00004\.gguf: is not there.*; put all 4 parts into one"):
        resolve(str(parts[0]))


def test_a_rank_takes_the_memory_of_its_slice_and_few_tensors(tmp_path):
    """From the file to what computes: conversion goes tensor by tensor, and ranks read their slices of the result. Of
    all types Q6_K takes the most."""
    config = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}
    model = tiny_model(tmp_path / "m", "llama", dtype="float32", config=config)
    path = write_gguf(tmp_path / "tiny.gguf", model, "Q6_K")
    tensor = 512 * 1024 * 4  # the largest, in float32
    tracemalloc.start()
    try:
        files = resolve(str(path))
        converting = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    description = describe(files)
    assert converting < 4 * tensor < sum(description.layer_bytes) / 2, converting / tensor
    shard = plan_shards(description, 2)[0]
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    stage = load_stage(files, description, range(4), dtype="float32", shard=shard, tensor_parallel=ThreadRank(ThreadGroup(2), 0))
    beyond = mx.get_peak_memory() - before - stage.nbytes
    assert beyond < tensor, (beyond / tensor, stage.nbytes / tensor)


def test_unsupported_tensor_type_is_named(tmp_path):
    model = tiny_model(tmp_path / "m", "llama", dtype="float32")
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, "F32", metadata=[lambda w: w.add_tensor("extra.weight", np.zeros(8, np.int32))])
    with pytest.raises(UnsupportedModel, match=r"tensor type I32 \(extra.weight\) is not supported; supported are F32"):
        resolve(str(path))


def test_unsupported_architecture_and_tokenizer(tmp_path):
    model = tiny_model(tmp_path / "m", "llama", dtype="float32")
    with pytest.raises(UnsupportedModel, match="architecture internlm2 is not supported"):
        resolve(str(write_gguf(tmp_path / "a.gguf", model, "F16", "internlm2")))
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
