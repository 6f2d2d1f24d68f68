"""Names of GGUF tensors as mlx-lm's models have them. No mlx."""

from __future__ import annotations

import re

_GLOBAL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_GEMMA = {
    **_ATTENTION,
    **_MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_IN_LAYER: dict[str, dict[str, str]] = {
    "qwen3moe": {
        **_ATTENTION,
        **_MLP,
        "ffn_gate_inp": "mlp.gate",
        **{f"ffn_{part}_exps": f"mlp.switch_mlp.{part}_proj" for part in ("gate", "up", "down")},
    },
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "phi3": {
        **_ATTENTION,
        "attn_qkv": "self_attn.qkv_proj",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    },
    "gpt-oss": {
        **_ATTENTION,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
        **{f"ffn_{part}_exps": f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")},
    },
}
_IN_LAYER["deepseek2"] = {
    **_ATTENTION,
    **_MLP,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.embed_q",
    "attn_v_b": "self_attn.unembed_out",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction",
    **{f"ffn_{part}_exps": f"mlp.switch_mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
_LAYER = re.compile(r"^blk\.(\d+)\.(\w+)\.(weight|bias)$")
_IN_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def mlx_name(name: str, architecture: str) -> str | None:
    """MLX's name of a tensor; None for rotary factors, which become part of the config."""
    if name in _IN_CONFIG:
        return None
    if match := _LAYER.match(name):
        layer = f"model.layers.{match[1]}"
        if match[2] == "attn_sinks":
            return f"{layer}.self_attn.sinks"
        if inner := _IN_LAYER.get(architecture, {**_ATTENTION, **_MLP}).get(match[2]):
            return f"{layer}.{inner}{'_' if inner.endswith('e_score_correction') else '.'}{match[3]}"
    base, _, last = name.rpartition(".")
    return f"{_GLOBAL[base]}.{last}" if base in _GLOBAL else name  # what is unknown is refused when it is loaded
