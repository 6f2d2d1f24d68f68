"""Types of keys and values in the KV cache: which layers can be quantised, from config.json, and bytes per element. No mlx.

Used for planning, before a rank exists; a rank inspects its own caches exactly (`loading/quantized_kv.py`). Unknown
layers count as not quantised.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tandem.errors import UnsupportedModel
from tandem.json_types import JsonMapping
from tandem.models.caches import LayerCache

if TYPE_CHECKING:
    from tandem.models.description import ModelDescription

KV_BITS = {"auto": 0, "8bit": 8, "4bit": 4}
"""Bits per element by name of the type; 0: the type of computation."""
GROUPS = (64, 32)
"""Group sizes of MLX's affine format, preferred first; the first that divides the head width is used."""
_LARGEST = {8: 64, 4: 32}
"""Largest group size, by bits. At 4 bits a group of 32 halves the loss of a group of 64 (docs/kv.md)."""
_WINDOWS = frozenset((
    "afmoe", "cohere2", "exaone4", "exaone_moe", "gear", "gemma3", "gemma3_text", "gemma3n", "gemma4", "gemma4_text",
    "gemma4_unified", "gpt_oss", "iquestloopcoder", "laguna", "llama", "llama4", "mellum", "mimo_v2_flash", "ministral3",
    "mistral3", "muse_glimmer", "olmo3", "plamo3", "recurrent_gemma", "spark2_5", "step3p5",
))  # fmt: skip
"""Model types whose windowed layers cache only the window in mlx-lm, if the config has one."""
_PLAIN = frozenset(("llama", "mistral3"))
"""Types of `_WINDOWS` without a window unless the config lists the layers that have one."""
_EVERY = {"cohere2": 4, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2}
"""Every n-th layer is full attention, where the config has no n."""


def group_size(widths: Iterable[int]) -> int:
    """Return the group size for heads of these widths; 0 if none divides them all."""
    return next((size for size in GROUPS if all(width % size == 0 for width in widths)), 0)


def group_for(bits: int, size: int) -> int:
    """Return the group size at `bits` bits, given the result of `group_size`."""
    return min(size, _LARGEST[bits])


def kv_groups(config: JsonMapping, caches: Sequence[LayerCache], width: int) -> tuple[int, ...]:
    """Return the group size of each layer; 0 for layers that cannot be quantised: windows, states, latents, and heads
    whose width no group divides. `width` is the default head width."""
    return tuple(group_size(_widths(config, width)) if _is_plain(config, i, cache) else 0 for i, cache in enumerate(caches))


def require_quantizable(description: ModelDescription, kv_dtype: str) -> None:
    """Raise UnsupportedModel if config.json shows that no layer's KV can be quantised."""
    if description.family not in _WINDOWS - _PLAIN and not any(group for group, _ in description.kv_groups):
        raise UnsupportedModel(nothing_to_quantize(kv_dtype, description.family), param="kv_dtype")


def nothing_to_quantize(kv_dtype: str, family: str) -> str:
    """Return the error text for a model whose KV cannot be quantised."""
    return (
        f"--kv-dtype {kv_dtype}: {family} has no layer that it would change: windows, states and latents stay as "
        "they are, and so do heads whose width is no multiple of 32; leave it out"
    )


def unsupported_role(role: str, family: str) -> str:
    """Return the error text for a replica `role` (disaggregated prefill) that the model does not support."""
    return f"role {role}: {family} has caches of a kind that does not go from replica to replica; leave roles out"


def element_bytes(kv_dtype: str, group: int, item: int) -> float:
    """Return the bytes per element of keys and values. `item`: bytes of a number in the type of computation, which
    scales and biases use."""
    bits = KV_BITS[kv_dtype]
    return bits / 8 + 2 * item / group_for(bits, group) if bits and group else float(item)


def _is_plain(config: JsonMapping, i: int, cache: LayerCache) -> bool:
    """Return True for a layer that caches keys and values of all positions per head, in a single cache."""
    single = cache.kind == "positions" and not cache.state and config.get("model_type") != "minimax_m3_vl"
    return single and not _is_window(config, i)


def _widths(config: JsonMapping, width: int) -> tuple[int, ...]:
    kind = config.get("model_type")
    if kind in ("gemma4", "gemma4_text", "gemma4_unified"):
        return (int(config.get("global_head_dim", 512)),)
    rope, plain, values = (config.get(key) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    if isinstance(rope, int) and isinstance(plain, int) and isinstance(values, int):
        return rope + plain, values
    return (width, values) if isinstance(values, int) else (width,)


def _is_window(config: JsonMapping, i: int) -> bool:
    kind = config.get("model_type")
    if kind not in _WINDOWS:
        return False
    if kind == "llama4":
        return bool((i + 1) % 4)
    if isinstance(pattern := config.get("hybrid_layer_pattern"), list):
        return i < len(pattern) and bool(pattern[i])
    listed = config.get("layer_types")
    if isinstance(listed, list) and i < len(listed):
        return bool(listed[i] != "full_attention")
    every = config.get("sliding_window_pattern", _EVERY.get(str(kind)))
    if isinstance(every, int) and every > 0:
        return bool((i + 1) % every)
    return kind not in _PLAIN
