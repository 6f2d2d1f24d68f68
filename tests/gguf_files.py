"""GGUF files of tiny models, written with the gguf package, under the names that it has for them."""

from __future__ import annotations

import json

import gguf
import mlx.core as mx
import numpy as np

PLAIN = {"F16": np.float16, "F32": np.float32}
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,),
          "IQ4_XS": (0,), "IQ2_XXS": (0,), "IQ3_S": (0,)}  # fmt: skip
"""Types that the package cannot write, and where a block has its scales of 16 bits."""


def gguf_name(name, arch="llama"):
    """The package's name of a tensor of mlx-lm's."""
    number = {text: key for key, text in gguf.MODEL_ARCH_NAMES.items()}[arch]
    for ours, theirs in (("switch_mlp", "experts"), ("embed_q", "k_b_proj"), ("unembed_out", "v_b_proj"),
                         ("e_score_correction_bias", "e_score_correction.bias")):  # fmt: skip
        name = name.replace(ours, theirs)
    base, _, last = name.rpartition(".")
    if last == "sinks":
        base, last = f"{base}.sinks", "weight"
    found = gguf.get_tensor_name_map(number, 99).get_name(base)
    assert found is not None, name
    return f"{found}.{last}"


def permute(array, heads):
    """llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute."""
    half = array.shape[0] // heads // 2
    return array.reshape(heads, 2, half, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def write_gguf(path, model, kind, arch="llama", extra=(), metadata=(), **split):
    """`model` (a tiny MLX directory in float32) as a GGUF file with its matrices as `kind`; `split` may say how large
    parts are, which then stand beside where the file would."""
    config = json.loads((model / "config.json").read_text())
    weights = {k: np.array(v) for k, v in mx.load(str(model / "model.safetensors")).items()}
    writer = gguf.GGUFWriter(str(path), arch, **split)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    write_vocabulary(writer, model)
    for add in metadata:
        add(writer)
    for name, array in weights.items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            array = permute(array, config[heads])
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        plain = array.ndim == 1 or name.endswith("bias") or "mlp.gate.w" in name
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
    if kind in SCALES:
        data = random_blocks(kind, array.shape)
    else:
        data = gguf.quants.quantize(np.ascontiguousarray(array), number)
    writer.add_tensor(name, data, raw_dtype=number)


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
