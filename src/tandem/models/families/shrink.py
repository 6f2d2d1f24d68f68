"""Reduced copies of a config, whose models are small enough for a dry run of seconds. Plain data, no mlx."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator

from tandem.checkpoints.config import nested_text
from tandem.json_types import JsonObject

LAYERS, EXPERTS, CHOSEN, VOCABULARY = 8, 8, 2, 512
"""Upper limits in a reduced config: layers, experts, experts per token, and tokens of the vocabulary."""
_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_HEADS = ("num_attention_heads", "n_heads", "n_head")
_EXPERTS = re.compile(r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts)$")
_CHOSEN = re.compile(r"(num_experts_per_tok|num_experts_per_token|moe_topk|moe_top_k|moe_k|top_k_experts)$")
_WIDTH = re.compile(
    r"(hidden_size|\w*intermediate_size(_mlp)?|ffn_hidden_size|expert_ffn_hidden_size|\w*num_\w*heads|n_heads?|d_model|"
    r"n_embd|d_ff|num_attention_groups|mamba_n_heads|mamba_d_ssm|lru_width|share_expert_dim|block_dim|block_ff_dim|"
    r"num_heads)$"
)


def shrunk(config: JsonObject) -> Iterator[JsonObject]:
    """Yield reduced copies of `config`, smallest first: fewer layers, experts and tokens, and all widths and heads divided.

    One divisor for all widths preserves relations between them, such as heads * head_dim = hidden_size.
    """
    heads = next((text[key] for text in (_text(config),) for key in _HEADS if isinstance(text.get(key), int)), 1)
    divisor = 1 << max(int(heads) // 4, 1).bit_length() - 1
    while divisor >= 1:
        yield _cut(config, divisor)
        divisor //= 4


def _text(config: JsonObject) -> JsonObject:
    return nested_text(config) or config


def _cut(config: JsonObject, divisor: int) -> JsonObject:
    cut = copy.deepcopy(config)
    cut.pop("quantization", None)
    cut.pop("quantization_config", None)
    text = _text(cut)
    text.pop("quantization_config", None)
    layers = next((text[key] for key in _LAYER_KEYS if isinstance(text.get(key), int)), 0)
    for one in (text, cut) if text is not cut else (cut,):
        _cut_entries(one, layers, divisor)
    return cut


def _cut_entries(entries: JsonObject, layers: int, divisor: int) -> None:
    kept = min(layers, LAYERS)
    for key, value in entries.items():
        if isinstance(value, list | str) and layers > LAYERS and len(value) == layers:
            entries[key] = value[:kept]
        elif isinstance(value, dict) and key != "text_config":
            _cut_entries(value, layers, divisor)
        elif not isinstance(value, int) or isinstance(value, bool):
            continue
        elif key in _LAYER_KEYS:
            entries[key] = kept
        elif key in ("vocab_size", "vocab_size_per_layer_input"):
            entries[key] = min(value, VOCABULARY)
        elif _EXPERTS.fullmatch(key):
            entries[key] = min(value, EXPERTS)
        elif _CHOSEN.fullmatch(key) or key in ("n_group", "topk_group"):
            entries[key] = min(value, CHOSEN)
        elif _WIDTH.fullmatch(key):
            entries[key] = max(value // divisor, 1)
