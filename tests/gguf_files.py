"""GGUF files of tiny models, written with the gguf package, under the names that it has for them."""

from __future__ import annotations

import json
from functools import cache

import gguf
import mlx.core as mx
import numpy as np

PLAIN = {"F16": np.float16, "F32": np.float32}
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,),
          "IQ4_XS": (0,), "IQ2_XXS": (0,), "IQ3_S": (0,)}  # fmt: skip
"""Types that the package cannot write, and where a block has its scales of 16 bits."""


@cache
def names_of(arch):
    """The package's table of names, which takes it long to make."""
    return gguf.get_tensor_name_map({text: key for key, text in gguf.MODEL_ARCH_NAMES.items()}[arch], 99)


def gguf_name(name, arch="llama"):
    """The package's name of a tensor of mlx-lm's."""
    for ours, theirs in (("switch_mlp", "experts"), ("embed_q", "k_b_proj"), ("unembed_out", "v_b_proj"),
                         ("e_score_correction_bias", "e_score_correction.bias"), ("language_model.", ""),
                         ("switch_glu", "experts"), ("experts.experts", "experts"), ("q_layernorm", "q_norm"),
                         ("k_layernorm", "k_norm"), ("dt_bias", "dt_proj.bias"),
                         ("layer_scalar", "layer_scalar.weight"), ("sinks", "sinks.weight")):  # fmt: skip
        name = name.replace(ours, theirs)
    for ending, scaled in ((".router.scale", "ffn_gate_inp"), (".per_expert_scale", "ffn_down_exps")):
        if name.endswith(ending):
            return f"blk.{name.split('.')[2]}.{scaled}.scale"
    if name.endswith("A_log"):
        return f"blk.{name.split('.')[2]}.ssm_a"
    base, _, last = name.rpartition(".")
    found = names_of(arch).get_name(base)
    assert found is not None, name
    return f"{found}.{last}"


def permute(array, heads):
    """llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute."""
    half = array.shape[0] // heads // 2
    return array.reshape(heads, 2, half, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def tiled(array, config, axis=0):
    """llama.cpp's qwen.py, _reorder_v_heads: heads of values by their place among those of a key."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    shape = array.shape
    apart = array.reshape(*shape[:axis], keys, values // keys, -1, *shape[axis + 1 :])
    return apart.swapaxes(axis, axis + 1).reshape(shape)


def as_llama_cpp(name, array, arch, config):
    """A tensor's values as llama.cpp's converter stores them."""
    if arch in ("llama", "mistral3", "smollm3", "granite") and ("q_proj" in name or "k_proj" in name):
        return permute(array, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
    if arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return array + 1
    if name.endswith("A_log"):
        array = -np.exp(array)
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        array = array[..., 0]
    if name.endswith("shared_expert_gate.weight"):
        array = array[0]
    if not arch.startswith("qwen35") or "linear_attn." not in name or "norm" in name:
        return array
    if "out_proj" in name:
        return tiled(array, config, 1)
    before = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    before = before if "qkv" in name or "conv" in name else 0
    return np.concatenate([array[:before], tiled(array[before:], config)])


def merged(weights, arch, config):
    """Tensors that are one in a file: experts' gates beside their values, and Qwen3-Next's by key head."""
    weights = dict(weights)
    for name in list(weights):
        if arch == "gemma4" and name.endswith("switch_glu.gate_proj.weight"):
            up = weights.pop(name.replace("gate_proj", "up_proj"))
            weights[name.replace("gate_proj", "gate_up_proj")] = np.concatenate([weights.pop(name), up], axis=1)
        if arch == "qwen3next" and name.endswith("in_proj_b.weight"):
            keys = config["linear_num_key_heads"]
            both = [
                weights.pop(one).reshape(keys, -1, config["hidden_size"])
                for one in (name, name.replace("in_proj_b", "in_proj_a"))
            ]
            weights[name.replace("in_proj_b", "in_proj_ba")] = np.concatenate(both, axis=1).reshape(-1, config["hidden_size"])
    return weights


def write_gguf(path, model, kind, arch="llama", extra=(), metadata=(), **split):
    """`model` (a tiny MLX directory in float32) as a GGUF file with its matrices as `kind`; `split` may say how large
    parts are, which then stand beside where the file would."""
    config = json.loads((model / "config.json").read_text())
    config = config.get("text_config", config)
    weights = {k: np.array(v) for k, v in mx.load(str(model / "model.safetensors")).items()}
    writer = gguf.GGUFWriter(str(path), arch, **split)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or {}).get("rope_theta") or config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    write_vocabulary(writer, model)
    for add in metadata:
        add(writer)
    for name, array in merged(weights, arch, config).items():
        array = as_llama_cpp(name, array, arch, config)
        plain = array.ndim == 1 or name.endswith(("bias", "conv1d.weight", "conv.conv.weight")) or "mlp.gate.w" in name
        put(writer, gguf_name(name, arch), array, "F32" if plain or "router" in name else kind)
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
        return
    number = gguf.GGMLQuantizationType[kind]
    made = random_blocks(kind, array.shape) if kind in SCALES else None
    writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(array), number) if made is None else made, raw_dtype=number)


def random_blocks(kind, shape):
    """Bytes of a tensor of random numbers, with scales of ordinary size."""
    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // size, nbytes), dtype=np.uint8)
    for at in SCALES[kind]:
        scales = rng.uniform(0.0005, 0.002, (len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


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
