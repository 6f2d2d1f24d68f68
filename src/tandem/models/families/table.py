"""The model families that Tandem runs: decoder stacks of mlx-lm that are embedding, layers in a row, norm, head.

Plain data, no mlx. What a family computes beyond the plain stack is in the mlx-side modules next to this one.
Every entry is held to mlx-lm's own forward pass, bit for bit, by `tests/loading/test_loading_parity.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Family:
    """Where a family's parts are in mlx-lm's module tree. Paths are those of the weights after `sanitize`."""

    module: str
    """Module of `mlx_lm.models`."""
    embed: str = "model.embed_tokens"
    """Path of the token embedding."""
    layers: str = "model.layers"
    """Path of the list of decoder layers."""
    norm: str = "model.norm"
    """Path of the final norm."""
    head: str = "lm_head"
    """Path of the output projection, where it is not tied to the embedding."""
    tied: Literal["config-true", "config-false", "always", "never", "file"] = "config-true"
    """Whether the head is the embedding: config's `tie_word_embeddings` with this default, or fixed, or tied when
    the files hold no head."""
    defaults: dict[str, int] = field(default_factory=dict)
    """Values that mlx-lm assumes for keys that `config.json` may leave out."""


_GEMMA3 = {
    "hidden_size": 1152,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 6912,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
}
_GPT_OSS = {
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 128,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(module="llama"),
    "mistral": Family(module="llama"),
    "qwen2": Family(module="qwen2"),
    "qwen3": Family(module="qwen3", tied="config-false"),
    "qwen3_moe": Family(module="qwen3_moe", tied="config-false"),
    "gemma3_text": Family(module="gemma3_text", tied="file", defaults=_GEMMA3),
    "gpt_oss": Family(module="gpt_oss", tied="never", defaults=_GPT_OSS),
    "phi3": Family(module="phi3", tied="config-false"),
    "apertus": Family(module="apertus"),
    "bailing_moe": Family(module="bailing_moe", embed="model.word_embeddings", tied="config-false"),
    "cohere": Family(module="cohere", tied="always"),
    "cohere2": Family(module="cohere2", tied="always"),
    "deepseek": Family(module="deepseek", tied="never"),
    "dots1": Family(module="dots1", tied="config-false"),
    "ernie4_5": Family(module="ernie4_5"),
    "ernie4_5_moe": Family(module="ernie4_5_moe"),
    "exaone": Family(module="exaone", embed="transformer.wte", layers="transformer.h", norm="transformer.ln_f"),
    "exaone4": Family(module="exaone4"),
    "gemma": Family(module="gemma", tied="always"),
    "gemma2": Family(module="gemma2", tied="always"),
    "glm": Family(module="glm"),
    "glm4": Family(module="glm4", tied="never"),
    "glm4_moe": Family(module="glm4_moe", tied="never"),
    "gpt_neox": Family(
        module="gpt_neox",
        embed="model.embed_in",
        layers="model.h",
        norm="model.final_layer_norm",
        head="model.embed_out",
        tied="never",
    ),
    "granite": Family(module="granite"),
    "granitemoe": Family(module="granitemoe"),
    "helium": Family(module="helium"),
    "hunyuan_v1_dense": Family(module="hunyuan_v1_dense", tied="config-false"),
    "internlm2": Family(module="internlm2", embed="model.tok_embeddings", head="output", tied="config-false"),
    "internlm3": Family(module="internlm3", tied="config-false"),
    "mimo": Family(module="mimo", tied="config-false"),
    "mixtral": Family(module="mixtral", tied="config-false"),
    "nemotron": Family(module="nemotron", tied="config-false"),
    "olmo2": Family(module="olmo2"),
    "olmo3": Family(module="olmo3", tied="config-false"),
    "olmoe": Family(module="olmoe"),
    "phi": Family(module="phi", norm="model.final_layernorm", tied="never"),
    "phimoe": Family(module="phimoe", tied="never"),
    "qwen2_moe": Family(module="qwen2_moe", tied="never"),
    "seed_oss": Family(module="seed_oss"),
    "smollm3": Family(module="smollm3"),
    "solar_open": Family(module="solar_open", tied="never"),
    "stablelm": Family(module="stablelm", tied="never"),
    "starcoder2": Family(module="starcoder2"),
    "telechat3": Family(module="telechat3", tied="config-false"),
}
"""By `model_type` of `config.json`."""
