"""What each layer keeps of a sequence, told from config.json: one description for every kind of cache. No mlx.

A rank measures its own layers (`loading/stage.py`), which is exact for any model; this is for whoever plans before a
rank is there. Figures are numbers of elements; `tests/loading/test_loading_cache_bytes.py` holds them to what is
measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["positions", "latent", "state", "none"]


@dataclass(frozen=True)
class LayerCache:
    """One layer's cache of one sequence."""

    kind: Kind
    """positions: keys and values by head (also in a window, which is counted as if it were none); latent: one vector
    that all heads share; state: as large for any length; none."""
    position: int = 0
    """Elements of a position."""
    state: int = 0
    """Elements whatever the length."""

    @property
    def can_be_cut(self) -> bool:
        """Its last positions can be taken back, as speculation and prefixes of any length need; else snapshots serve.
        """
        return self.kind != "state"

    @property
    def replicated(self) -> bool:
        """Ranks of a stage each hold all of it: there are no heads to share out."""
        return self.kind == "latent"


def layer_caches(config: Mapping[str, Any], num_layers: int, plain: int) -> tuple[LayerCache, ...]:
    """Of each layer; `plain` is the elements of a position's keys and values where nothing is special.

    What is not known is taken for plain attention, which never is less than the truth.
    """
    attention = _attention(config, plain)
    state = _state(config)
    if state is None:
        return (attention,) * num_layers
    kinds = {"state": LayerCache("state", state=state), "none": LayerCache("none"), "attention": attention}
    return tuple(kinds[_layer_kind(config, i)] for i in range(num_layers))


def _attention(config: Mapping[str, Any], plain: int) -> LayerCache:
    latent, rope, kind = config.get("kv_lora_rank"), config.get("qk_rope_head_dim"), config.get("model_type")
    if not isinstance(latent, int) or not isinstance(rope, int):
        return LayerCache("positions", plain)
    if kind in _EXPANDED:
        head = rope + int(config.get("qk_nope_head_dim", 0)) + int(config.get("v_head_dim", 0))
        return LayerCache("positions", int(config.get("num_attention_heads", 1)) * head)
    if kind in _TWO_ATTENTIONS:
        return LayerCache("latent", 2 * (latent + rope))
    index = config.get("index_head_dim")  # deepseek_v32 has a second cache, with its index's keys and room for values
    return LayerCache("latent", latent + rope + (2 * index if isinstance(index, int) else 0))


_EXPANDED = frozenset(("deepseek_v2", "minicpm3", "youtu_llm"))
"""Latent attention whose cache holds keys and values by head all the same, in mlx-lm."""
_TWO_ATTENTIONS = frozenset(("longcat_flash", "longcat_flash_ngram"))
_LINEAR = frozenset(("linear_attention", "conv", "mamba", "recurrent", "M"))
_EMPTY = frozenset(("-", "E"))


def _layer_kind(config: Mapping[str, Any], i: int) -> str:
    """`state`, `none` or `attention`."""
    for key in ("layer_types", "hybrid_override_pattern"):
        listed = config.get(key)
        if isinstance(listed, list | str) and len(listed) > i:
            return "state" if listed[i] in _LINEAR else "none" if listed[i] in _EMPTY else "attention"
    linear = config.get("linear_attn_config")
    if isinstance(linear, dict):
        return "state" if i + 1 in linear.get("kda_layers", ()) else "attention"
    if isinstance(config.get("full_attn_idxs"), list):
        return "attention" if i in config["full_attn_idxs"] else "state"
    if isinstance(every := config.get("full_attention_interval"), int) and every > 0:
        return "attention" if (i + 1) % every == 0 else "state"
    if isinstance(every := config.get("attn_layer_period"), int) and every > 0:
        return "attention" if i % every == config.get("attn_layer_offset") else "state"
    return "state" if config.get("model_type") in ("mamba2", "rwkv7") else "attention"


def _state(config: Mapping[str, Any]) -> int | None:
    """Elements of the state of a layer that has one; None where no layer is known to have one."""

    def of(*keys: str) -> int:
        found = next((config[key] for key in keys if isinstance(config.get(key), int)), 0)
        return int(found)

    if (values := of("linear_num_value_heads")) and (keys := of("linear_num_key_heads")):
        k, v = keys * of("linear_key_head_dim"), values * of("linear_value_head_dim")
        taps = max(of("linear_conv_kernel_dim") - 1, 0)
        return taps * (2 * k + v) + v * of("linear_key_head_dim")
    if isinstance(linear := config.get("linear_attn_config"), dict):
        width = linear["num_heads"] * linear["head_dim"]
        return 3 * (linear.get("short_conv_kernel_size", 4) - 1) * width + width * int(linear["head_dim"])
    if taps := of("conv_L_cache"):
        return (taps - 1) * of("hidden_size")
    if of("attn_layer_period"):
        inner = of("mamba_expand") * of("hidden_size")
        return inner * (of("mamba_d_conv") - 1 + of("mamba_d_state"))
    if config.get("model_type") == "rwkv7":
        return of("hidden_size") * (2 + of("head_dim"))
    heads = of("mamba_n_heads", "mamba_num_heads") or (of("num_heads") if config.get("model_type") == "mamba2" else 0)
    if heads:
        inner = heads * of("mamba_d_head", "mamba_head_dim", "head_dim")
        size = of("mamba_d_state", "ssm_state_size", "state_size")
        taps = max(of("mamba_d_conv", "conv_kernel") - 1, 0)
        return taps * (inner + 2 * of("mamba_n_groups", "n_groups") * size) + inner * size
    return None
