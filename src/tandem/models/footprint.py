"""What a model, or a part of it, needs of a machine's memory: estimates from headers alone. No mlx."""

from __future__ import annotations

from tandem.models.description import ModelDescription
from tandem.models.kv_types import element_bytes


def slice_bytes(description: ModelDescription, layers: range, dtype: str, dequantize: bool, share: float, *,
                gpu: bool) -> int:
    """Bytes in memory, estimated, of a rank's `share` of `layers`, with embedding and head at the ends.

    The embedding is not divided, nor are the layers' `whole_bytes`.
    """
    whole = sum(description.whole_bytes[i] for i in layers) if description.whole_bytes else 0
    stored = whole + (sum(description.layer_bytes[i] for i in layers) - whole) * share
    stored += description.embed_bytes if layers.start == 0 else 0
    if layers.stop == description.num_layers:
        tied = description.embed_bytes if description.tied_head and layers.start else 0
        stored += (description.head_bytes + tied) * share
    item = compute_item(description, dtype, gpu=gpu)
    if description.quantization:
        bits = description.quantization["bits"] + 32 / description.quantization["group_size"]
        return int(stored * (item * 8 / bits if dequantize else 1))
    return int(stored * item / (4 if description.dtype == "float32" else 2))


def kv_bytes_per_token(description: ModelDescription, layers: int, dtype: str, *, gpu: bool,
                       kv_dtype: str = "auto") -> int:
    """Bytes of the cache of one position in so many layers, over all ranks of the stage."""
    return int(token_bytes(description, compute_item(description, dtype, gpu=gpu), kv_dtype) * layers)


def token_bytes(description: ModelDescription, item: int, kv_dtype: str = "auto") -> float:
    """Bytes of the cache of one position in one layer, on average; `item`: of a number in the type of computation."""
    less = sum(elements * (item - element_bytes(kv_dtype, group, item)) for group, elements in description.kv_groups)
    return token_elements(description) * item - less / description.num_layers


def state_bytes(description: ModelDescription, layers: int, dtype: str, *, gpu: bool) -> int:
    """Bytes that a sequence takes in so many layers whatever its length, over all ranks of the stage."""
    return int(layer_state_bytes(description, compute_item(description, dtype, gpu=gpu)) * layers)


def layer_state_bytes(description: ModelDescription, item: int) -> float:
    """Bytes of a sequence's state in one layer, on average; `item`: of a number in the type of computation."""
    float32 = description.float32_elements
    return (description.state_elements - float32) * item + float32 * 4


def token_elements(description: ModelDescription) -> float:
    """Elements of the cache of one position in one layer."""
    if description.token_elements or description.state_elements:
        return description.token_elements
    return 2 * description.num_kv_heads * description.head_dim


def compute_item(description: ModelDescription, dtype: str, *, gpu: bool) -> int:
    """Bytes of a number in the type of computation."""
    kind = dtype if dtype != "auto" else description.dtype if gpu else "float32"
    return 4 if kind == "float32" else 2
