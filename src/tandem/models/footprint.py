"""Memory estimates for a model or a rank's part of it, from headers alone. No mlx.

The planner, the budget of several models, and a rank before loading use these. `item` is always the bytes of one number
in the type of computation.
"""

from __future__ import annotations

import math

from tandem.models.description import ModelDescription
from tandem.models.kv_types import element_bytes
from tandem.models.pictures import FEATURE_BYTES, INPUT_BYTES
from tandem.models.shard import held_kv_heads, rank_shard
from tandem.protocol.layout import StageSpec

GPU_PREFILL_CHUNK, CPU_PREFILL_CHUNK = 512, 192
"""Default prompt tokens per step."""
AHEAD_BYTES = 2**30
"""Upper limit, in bytes, on activations of the layer that a GPU starts before the previous one ends. MLX waits when
memory is full."""
MOST_EXPERTS = 8
"""Experts of a token that are counted where the description does not tell their number."""
_FUSED_HEAD_DIMS = (64, 80, 128)
"""Head dimensions for which MLX's GPU attention is fused and stores no scores."""
RUNTIME_BYTES = 512 * 2**20
"""Memory of Python, MLX and compiled kernels per process that computes, in bytes."""
_SCALE_BITS = {"mxfp4": 8, "mxfp8": 8, "nvfp4": 8}
"""Bits of scale per group; affine mode has a scale and a bias of the model's type."""


def compute_item(description: ModelDescription, dtype: str, *, gpu: bool) -> int:
    """Return the bytes of a number in the type of computation."""
    kind = dtype if dtype != "auto" else description.dtype if gpu else "float32"
    return 4 if kind == "float32" else 2


def dequantizes(dequantize: str, *, gpu: bool) -> bool:
    """Return whether packed weights are expanded at load, by the setting `dequantize` (auto, yes, no)."""
    return dequantize == "yes" or (dequantize == "auto" and not gpu)


def prefill_chunk(chosen: int | None, *, gpu: bool) -> int:
    """Return the prompt tokens per step: `chosen`, or the device's default."""
    return chosen or (GPU_PREFILL_CHUNK if gpu else CPU_PREFILL_CHUNK)


# ---- weights


def param_bytes(description: ModelDescription) -> float:
    """Return the average bytes of a parameter in the files."""
    quantization, plain = description.quantization, 4 if description.dtype == "float32" else 2
    if not quantization:
        return float(plain)
    scale = _SCALE_BITS.get(str(quantization.get("mode", "affine")), 16 * plain)
    return float((quantization["bits"] + scale / quantization["group_size"]) / 8)


def expansion(description: ModelDescription, dtype: str, dequantize: bool, *, gpu: bool) -> float:
    """Return bytes in memory per byte in the files: 1 unless weights are cast or expanded."""
    if description.quantization and not dequantize:
        return 1.0
    return compute_item(description, dtype, gpu=gpu) / param_bytes(description)


def stored_bytes(description: ModelDescription, start: int, stop: int, share: float) -> float:
    """Return the bytes in the files of a rank's `share` of layers start..stop, plus embedding or head at the ends.

    The embedding and the layers' `whole_bytes` are not divided.
    """
    layers, undivided = description.layer_sums, description.whole_sums
    whole = undivided[stop] - undivided[start]
    stored = whole + (layers[stop] - layers[start] - whole) * share
    stored += description.embed_bytes if start == 0 else 0
    if stop == description.num_layers:
        stored += (description.head_bytes + (description.embed_bytes if description.tied_head and start else 0)) * share
    return stored


def slice_bytes(description: ModelDescription, layers: range, dtype: str, dequantize: bool, share: float, *, gpu: bool) -> int:
    """Return the bytes in memory of a rank's `share` of `layers`, plus embedding or head at the ends."""
    stored = stored_bytes(description, layers.start, layers.stop, share)
    return int(stored * expansion(description, dtype, dequantize, gpu=gpu))


def mtp_stored(description: ModelDescription, start: int, ranks: int) -> int:
    """Return the stored bytes of the draft head, whole, on one of the `ranks` of the last stage, whose layers begin at `start`.
    With an embedding or output projection of its own where the rank has none or a part."""
    return description.mtp_bytes + own_embedding(description, start, ranks) + (description.head_bytes if ranks > 1 else 0)


def own_embedding(description: ModelDescription, start: int, ranks: int) -> int:
    """Return the stored bytes of the embedding that a draft head needs beside the last stage's: 0 if that has all of it."""
    return description.embed_bytes if start and (ranks > 1 or not description.tied_head) else 0


def mtp_position(description: ModelDescription, item: int) -> int:
    """Return the cache bytes of one position in the draft head: a layer with attention, unlike most of a hybrid's."""
    return int(max((elements for _, elements in description.kv_groups), default=token_elements(description)) * item)


def rank_weights(description: ModelDescription, spec: StageSpec, draft: ModelDescription | None, *, gpu: bool) -> int:
    """Return the bytes in memory of a rank's weights: with LoRA adapters, vision tower, and draft head's or draft model's."""
    expand = dequantizes(spec.dequantize, gpu=gpu)
    own = slice_bytes(description, range(*spec.layers), spec.dtype, expand, spec.share, gpu=gpu)
    own += tower_bytes(description, spec, gpu=gpu) if spec.layers[0] == 0 else 0
    own += spec.lora_elements * compute_item(description, spec.dtype, gpu=gpu)
    if spec.mtp and spec.samples:
        own += int(mtp_stored(description, spec.layers[0], spec.tp_size) * expansion(description, spec.dtype, expand, gpu=gpu))
    if draft is None:
        return own
    if spec.head and not draft.embed_bytes:
        shared = own_embedding(description, spec.layers[0], spec.tp_size)
        shared += description.head_bytes if spec.head == "dflash" and spec.tp_size > 1 else 0
        own += int(shared * expansion(description, spec.dtype, expand, gpu=gpu))
    return own + slice_bytes(draft, range(draft.num_layers), spec.dtype, expand, 1.0, gpu=gpu)


def tower_bytes(description: ModelDescription, spec: StageSpec, *, gpu: bool) -> int:
    """Return the bytes in memory of the vision tower, which each rank of the first stage has whole."""
    return int(description.vision_bytes * expansion(description, spec.dtype, dequantizes(spec.dequantize, gpu=gpu), gpu=gpu))


def picture_bytes(description: ModelDescription, spec: StageSpec | None = None) -> int:
    """Return the most bytes of pictures on a rank of the first stage: cached features, the inputs of one under way, and the
    encoder's process, if `spec` has one."""
    process = RUNTIME_BYTES if spec is not None and spec.encoder_seconds else 0
    return process + FEATURE_BYTES + INPUT_BYTES if description.vision_bytes else 0


# ---- keys, values and states


def kv_bytes_per_token(description: ModelDescription, layers: int, dtype: str, *, gpu: bool, kv_dtype: str = "auto") -> int:
    """Return the cache bytes of one position in `layers` layers, over all ranks of the stage."""
    return int(token_bytes(description, compute_item(description, dtype, gpu=gpu), kv_dtype) * layers)


def token_bytes(description: ModelDescription, item: int, kv_dtype: str = "auto") -> float:
    """Return the cache bytes of one position in one layer, averaged over the layers."""
    less = sum(elements * (item - element_bytes(kv_dtype, group, item)) for group, elements in description.kv_groups)
    return token_elements(description) * item - less / description.num_layers


def token_elements(description: ModelDescription) -> float:
    """Return the cache elements of one position in one layer, averaged over the layers."""
    if description.token_elements or description.state_elements:
        return description.token_elements
    return 2 * description.num_kv_heads * description.head_dim


def state_bytes(description: ModelDescription, layers: int, dtype: str, *, gpu: bool) -> int:
    """Return the bytes of a sequence's recurrent state in `layers` layers, over all ranks of the stage."""
    return int(layer_state_bytes(description, compute_item(description, dtype, gpu=gpu)) * layers)


def layer_state_bytes(description: ModelDescription, item: int) -> float:
    """Return the bytes of a sequence's recurrent state in one layer, averaged over the layers."""
    float32 = description.float32_elements
    return (description.state_elements - float32) * item + float32 * 4


def rank_position(description: ModelDescription, spec: StageSpec, draft: ModelDescription | None, *, gpu: bool) -> int:
    """Return the cache bytes of one position on a rank, including its draft head's or draft model's."""
    whole = kv_bytes_per_token(description, len(range(*spec.layers)), spec.dtype, gpu=gpu, kv_dtype=spec.kv_dtype)
    more = kv_bytes_per_token(draft, draft.num_layers, spec.dtype, gpu=gpu) if draft else 0
    more += mtp_position(description, compute_item(description, spec.dtype, gpu=gpu)) if spec.mtp and spec.samples else 0
    shard = rank_shard(description, spec, dequantize=dequantizes(spec.dequantize, gpu=gpu))
    share = held_kv_heads(description, shard) / description.num_kv_heads
    return more + math.ceil(whole * description.cache_share(share))


def rank_states(description: ModelDescription, spec: StageSpec, sequences: int, *, gpu: bool) -> int:
    """Return the bytes of the recurrent states of `sequences` sequences on a rank; with drafts also of those before a step."""
    return int(
        (1 + (spec.drafts > 0)) * sequences * spec.share * state_bytes(description, len(range(*spec.layers)), spec.dtype, gpu=gpu)
    )


# ---- activations


def rank_activations(description: ModelDescription, spec: StageSpec, tokens: int, context: int, *, gpu: bool) -> float:
    """Return the bytes of activations on a rank for `tokens` prompt tokens. A mixture counts with `MOST_EXPERTS` a token."""
    used = MOST_EXPERTS if description.expert_width else 0
    return activation_bytes(
        description,
        tokens=tokens,
        context=context,
        item=compute_item(description, spec.dtype, gpu=gpu),
        share=spec.share,
        kv=1.0,
        mlp_width=max(description.mlp_width, description.expert_width * used + description.shared_width)
        or 4 * description.hidden_size,
        experts_used=used,
        gpu=gpu,
        alone=len(range(*spec.layers)) == 1,
    )


def activation_bytes(
    description: ModelDescription,
    *,
    tokens: int,
    context: int,
    item: int,
    share: float,
    kv: float,
    mlp_width: float,
    experts_used: int,
    gpu: bool,
    alone: bool,
) -> float:
    """Return the bytes of a layer's activations for `tokens` prompt tokens on a rank.

    `share` is the rank's fraction of the weights, `kv` its fraction of the heads. A GPU starts a layer before the
    previous one ends, unless the layer is `alone` in its stage.
    """
    # Residual, normed input, query, output, and the MLP's gate, up and product are alive together at most; with experts
    # also their gathered inputs and outputs.
    residual = description.payload_elements or description.hidden_size
    wide = residual + 3 * description.hidden_size + 3 * share * mlp_width + 2 * experts_used * description.hidden_size
    # Scores before and after the mask; for an index also those multiplied by its head weights.
    scores = 3.0 * description.index_heads
    if not gpu or description.head_dim not in _FUSED_HEAD_DIMS:
        scores += 2 * description.num_heads * kv
    layer = tokens * (wide + scores * context) * item
    return layer + (min(layer, AHEAD_BYTES) if gpu and not alone else 0)
