"""Mapping of GGUF tensors to mlx-lm's models: names, and the order of rows. No mlx."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from tandem.json_types import JsonObject

_GLOBAL = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "token_embd_norm": "model.embedding_norm", "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}  # fmt: skip
_PARTS = ("gate", "up", "down")
_IN_LAYER = {
    "attn_norm": "input_layernorm", "attn_output": "self_attn.o_proj",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v", "qkv")},
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj", "attn_k_b": "self_attn.embed_q", "attn_v_b": "self_attn.unembed_out",
    "ffn_norm": "post_attention_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in _PARTS},
    **{f"ffn_{part}_exps": f"mlp.switch_mlp.{part}_proj" for part in _PARTS},
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in _PARTS},
}  # fmt: skip
_GEMMA = {"ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_DELTA = {
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b", "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in _PARTS},
}  # fmt: skip
_OWN = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma4": {
        **_GEMMA, "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm", "ffn_gate_inp": "router.proj",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        **{f"post_ffw_norm_{i}": f"post_feedforward_layernorm_{i}" for i in (1, 2)},
        **{f"ffn_{part}_exps": f"experts.switch_glu.{part}_proj" for part in _PARTS},
    },
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gpt-oss": {"ffn_gate_inp": "mlp.router", **{f"ffn_{part}_exps": f"mlp.experts.{part}_proj" for part in _PARTS}},
    "lfm2": {
        "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "output_norm": "model.embedding_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm",
        "ffn_gate": "feed_forward.w1", "ffn_down": "feed_forward.w2", "ffn_up": "feed_forward.w3",
        **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
    },
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _DELTA),
}  # fmt: skip
_BARE = {
    "attn_sinks.weight": "self_attn.sinks", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias", "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale",
}  # fmt: skip
"""Parameters that are not a module's weight or bias."""
_FUSED = {
    "ffn_gate_up_exps.weight": ("ffn_gate_exps", "ffn_up_exps"), "ssm_ba.weight": ("ssm_beta", "ssm_alpha"),
    "ssm_in.weight": ("attn_qkv", "attn_gate"),
}  # fmt: skip
"""Tensors that hold the rows of two modules."""
_LAYER = re.compile(r"blk\.(\d+)\.(.+)", re.DOTALL)
_IN_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
PAIRS = ("llama", "mistral3", "smollm3", "granite")
"""Architectures whose query and key rows llama.cpp stores in the order of its own rotary embedding."""


def mlx_names(name: str, architecture: str, rows: int, config: JsonObject) -> Iterator[tuple[str, np.ndarray | None]]:
    """Yield the MLX name of each parameter in a tensor of `rows` rows, with its rows in MLX's order (None: unchanged).

    Yields nothing for rotary factors, which become config entries, and for layers that mlx-lm does not load.
    """
    if name in _IN_CONFIG:
        return
    own = _OWN.get(architecture, {})
    root = "language_model." if own is _DELTA else ""
    match = _LAYER.fullmatch(name)
    if match is None:
        base, _, last = name.rpartition(".")
        known = own.get(base) or _GLOBAL.get(base)
        yield f"{root}{known}.{last}" if known else name, None  # an unknown name is refused at load
        return
    layer, inner = int(match[1]), match[2]
    if layer >= config["num_hidden_layers"]:
        return  # for multi-token prediction
    if inner.startswith(("attn_k", "attn_v")) and layer >= _first_shared(config):
        return
    if inner in _FUSED:
        names = [f"{one}.weight" for one in _FUSED[inner]]
        orders: tuple[np.ndarray | None, ...] = _apart(inner, rows, config)
    else:
        names, orders = [inner], (_order(inner, architecture, rows, config),)
    for one, order in zip(names, orders, strict=True):
        base, _, last = one.rpartition(".")
        known = own.get(base) or _IN_LAYER.get(base)
        found = _BARE.get(one) or (f"{known}.{last}" if known else one)
        yield f"{root}model.layers.{layer}.{found}", order


def _first_shared(config: JsonObject) -> int:
    """Return the number of the first layer that reuses keys and values of an earlier one."""
    return int(config["num_hidden_layers"]) - int(config.get("num_kv_shared_layers", 0))


def _order(inner: str, architecture: str, rows: int, config: JsonObject) -> np.ndarray | None:
    base = inner.rpartition(".")[0] or inner
    if architecture in PAIRS and base in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if base == "attn_q" else "num_key_value_heads"]
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel()
    if not architecture.startswith("qwen35"):
        return None
    if base in ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"):
        return grouped(rows, config)
    if base in ("attn_qkv", "ssm_conv1d"):
        before = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
        return np.concatenate([np.arange(before), before + grouped(rows - before, config)])
    return None


def grouped(size: int, config: JsonObject) -> np.ndarray:
    """Return, for each of `size` rows or columns of values in MLX's order, its position in the file.

    MLX stores all value heads of one key head together; llama.cpp stores the first value heads of all key heads, then
    the second ones.
    """
    keys = config["linear_num_key_heads"]
    return np.arange(size).reshape(config["linear_num_value_heads"] // keys, keys, -1).swapaxes(0, 1).ravel()


def _apart(inner: str, rows: int, config: JsonObject) -> tuple[np.ndarray, ...]:
    """Return the rows of each of the two fused tensors: halves, or interleaved per key head."""
    if inner == "ffn_gate_up_exps.weight":
        return tuple(np.split(np.arange(rows), 2))
    keys, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
    of_keys = np.arange(rows).reshape(keys, -1)
    if inner == "ssm_ba.weight":
        return tuple(half.ravel() for half in np.split(of_keys, 2, axis=1))
    values = (of_keys.shape[1] - 2 * width) // 2
    q, k, v, z = np.split(of_keys, [width, 2 * width, 2 * width + values], axis=1)
    return np.concatenate([q.ravel(), k.ravel(), v.ravel()]), z.ravel()
