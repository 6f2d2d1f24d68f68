"""Size of each layer's cache for one sequence, from config.json. No mlx.

Used for planning, before a rank exists; a rank measures its own layers exactly (`loading/stage.py`). Sizes are numbers
of elements; `tests/loading/test_loading_cache_bytes.py` compares them with measured ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from tandem.json_types import JsonMapping
from tandem.models.families.axes import glm_linear, number
from tandem.models.partition import indexers

Kind = Literal["positions", "latent", "state", "none"]


@dataclass(frozen=True)
class LayerCache:
    """Cache of one layer for one sequence."""

    kind: Kind
    """positions: keys and values per head (a sliding window counts as full attention). latent: one vector per position,
    shared by all heads. state: size independent of the length. none: no cache."""
    position: int = 0
    """Elements per position."""
    state: int = 0
    """Elements that do not depend on the length."""
    float32: int = 0
    """Elements of `state` stored as float32 whatever the model's type."""
    whole: int = 0
    """Elements of `position` without a head axis, which every rank of a stage replicates (an index's keys)."""

    @property
    def replicated(self) -> bool:
        """Whether every rank of a stage holds the whole cache, since it has no head axis to split."""
        return self.kind == "latent"


def layer_caches(config: JsonMapping, num_layers: int, plain: int) -> tuple[LayerCache, ...]:
    """Return the cache of each layer.

    `plain` is the number of elements of keys and values per position in standard attention. Unknown layers count as
    standard attention, which is an upper bound.
    """
    if isinstance(blocks := config.get("block_configs"), list):
        return tuple(_own_block(block, config) for block in blocks)
    if config.get("model_type") in _BY_LAYER:
        return tuple(_BY_LAYER[str(config["model_type"])](config, i, plain) for i in range(num_layers))
    attention = _attention(config, plain)
    state = _state(config)
    if state is None:
        return (attention,) * num_layers
    kinds = {"state": state, "none": LayerCache("none"), "attention": attention}
    return tuple(kinds[_layer_kind(config, i)] for i in range(num_layers))


def _own_block(block: object, config: JsonMapping) -> LayerCache:
    """Return the cache of one Nemotron layer from its entry in `block_configs`; layers may have no attention."""
    group = block.get("attention", {}).get("n_heads_in_group") if isinstance(block, dict) else None
    if not isinstance(group, int) or group < 1:
        return LayerCache("none")
    return LayerCache("positions", 2 * int(config.get("hidden_size", 0)) // group)


def _attention(config: JsonMapping, plain: int) -> LayerCache:
    latent, rope, kind = config.get("kv_lora_rank"), config.get("qk_rope_head_dim"), config.get("model_type")
    if kind == "baichuan_m1":  # plus the last keys and values before the convolution
        return LayerCache("positions", plain, state=plain * (int(config.get("conv_window", 2)) - 1))
    if not isinstance(latent, int) or not isinstance(rope, int):
        return LayerCache("positions", plain)
    if kind in _EXPANDED:
        head = rope + int(config.get("qk_nope_head_dim", 0)) + int(config.get("v_head_dim", 0))
        return LayerCache("positions", int(config.get("num_attention_heads", 1)) * head)
    if kind in ("longcat_flash", "longcat_flash_ngram"):
        return LayerCache("latent", 2 * (latent + rope))
    index = config.get("index_head_dim")  # deepseek_v32: a second cache, of the index's keys and values as wide
    keys = 2 * index if isinstance(index, int) else 0
    return LayerCache("latent", latent + rope + keys)


def index_heads(config: JsonMapping) -> int:
    """Return the number of heads of the index over a latent (deepseek_v32, glm_moe_dsa); 0 if there is none."""
    heads = config.get("index_n_heads")
    return max(heads, 0) if isinstance(heads, int) and isinstance(config.get("kv_lora_rank"), int) else 0


_EXPANDED = frozenset(("deepseek_v2", "minicpm3", "youtu_llm"))
"""Types whose latent attention caches expanded keys and values per head in mlx-lm."""
_LINEAR = frozenset(("linear_attention", "conv", "conv_mixer", "mamba", "recurrent", "M"))
_EMPTY = frozenset(("-", "E"))


def _layer_kind(config: JsonMapping, i: int) -> str:
    """Return `state`, `none` or `attention` for layer `i`."""
    for key in ("layer_types", "hybrid_override_pattern", "block_types"):
        listed = config.get(key)
        if isinstance(listed, list) and key == "block_types":
            listed = listed * (i // max(len(listed), 1) + 1)
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
    if isinstance(every := config.get("mamba_step"), int) and every > 1:
        return "attention" if i % every == every // 2 else "state"
    return "state" if config.get("model_type") in ("mamba", "falcon_mamba", "mamba2", "rwkv7") else "attention"


def _delta(linear: JsonMapping) -> LayerCache:
    """Return the cache of linear attention behind three convolutions: their inputs, and a matrix for each head."""
    width, taps = linear["num_heads"] * linear["head_dim"], linear.get("short_conv_kernel_size", 4) - 1
    return LayerCache("state", 0, width * (3 * taps + linear["head_dim"]), width * int(linear["head_dim"]))


def _state(config: JsonMapping) -> LayerCache | None:
    """Return the cache of a recurrent layer: convolution inputs in the model's type, and a recurrent state, mostly float32.

    None if no layer is known to be recurrent.
    """
    of = partial(number, config)

    def kept(convolution: int, recurrent: int, *, float32: bool = True) -> LayerCache:
        return LayerCache("state", state=convolution + recurrent, float32=recurrent if float32 else 0)

    if (values := of("linear_num_value_heads")) and (keys := of("linear_num_key_heads")):
        k, v = keys * of("linear_key_head_dim"), values * of("linear_value_head_dim")
        taps = max(of("linear_conv_kernel_dim") - 1, 0)
        return kept(taps * (2 * k + v), v * of("linear_key_head_dim"))
    if isinstance(linear := config.get("linear_attn_config"), dict):
        return _delta(linear)
    if config.get("model_type") == "gear":
        return kept(2 * (of("conv_L_cache") - 1) * of("num_key_value_heads") * of("head_dim"), 0)
    if taps := of("conv_L_cache"):
        return kept((taps - 1) * of("hidden_size"), 0)
    if config.get("model_type") in ("mamba", "falcon_mamba"):
        inner = of("intermediate_size", "d_inner")
        return kept(inner * (of("conv_kernel", "d_conv") - 1), inner * of("state_size", "d_state"), float32=False)
    if of("mamba_step"):
        inner = of("mamba_num_heads") * of("hidden_size_per_head")
        return kept(inner * (of("mamba_d_conv") - 1), inner * of("mamba_d_state"))
    if of("attn_layer_period"):
        inner = of("mamba_expand") * of("hidden_size")
        return kept(inner * (of("mamba_d_conv") - 1), inner * of("mamba_d_state"), float32=False)
    if config.get("model_type") == "recurrent_gemma":
        return kept((of("conv1d_width") - 1) * of("hidden_size"), of("hidden_size"), float32=False)
    if config.get("model_type") == "rwkv7":
        return kept(2 * of("hidden_size"), of("hidden_size") * of("head_dim"), float32=False)
    heads = of("mamba_n_heads", "mamba_num_heads") or (of("num_heads") if config.get("model_type") == "mamba2" else 0)
    if heads:
        inner = heads * of("mamba_d_head", "mamba_head_dim", "head_dim")
        size = of("mamba_d_state", "ssm_state_size", "state_size")
        taps = max(of("mamba_d_conv", "conv_kernel") - 1, 0)
        return kept(taps * (inner + 2 * of("mamba_n_groups", "n_groups") * size), inner * size)
    return None


def _falcon_h1(config: JsonMapping, i: int, plain: int) -> LayerCache:
    """Return the cache of a Falcon H1 layer, which runs attention and Mamba in parallel."""
    inner, size = config.get("mamba_d_ssm", 0), config.get("mamba_d_state", 0)
    taps = config.get("mamba_d_conv", 1) - 1
    convolution = taps * (inner + 2 * config.get("mamba_n_groups", 1) * size)
    return LayerCache("state", plain, convolution + inner * size, inner * size)


def _mimo_v2(config: JsonMapping, i: int, plain: int) -> LayerCache:
    """Return the cache of a MiMo V2 layer: windowed layers have own head counts, and values are narrower than keys."""
    own = "swa_" if config["hybrid_layer_pattern"][i] else ""
    width = config[f"{own}head_dim"] + config[f"{own}v_head_dim"]
    return LayerCache("positions", config[f"{own}num_key_value_heads"] * width)


def _minimax_m3(config: JsonMapping, i: int, plain: int) -> LayerCache:
    """Return the cache of a MiniMax M3 layer: sparse layers also store the index's keys, without values."""
    sparse = config.get("sparse_attention_config") or {}
    listed = sparse.get("sparse_attention_freq") or config.get("sparse_attention_freq")
    wide = sparse.get("sparse_index_dim") or config.get("index_head_dim") or 0
    index = wide if listed is None or listed[i] else 0
    return LayerCache("positions", plain + index, whole=index)


def _index_keys(config: JsonMapping, i: int) -> int:
    """Return the elements of an index's key; 0 for a layer that shares what another one selected."""
    return 0 if indexers(config, i + 1)[i] == "shared" else int(config.get("index_head_dim", 128))


def _hy_v4(config: JsonMapping, i: int, plain: int) -> LayerCache:
    """Return the cache of a hy_v4 layer: a latent, and the index's keys."""
    return LayerCache("latent", int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]) + _index_keys(config, i))


def _glm5_next(config: JsonMapping, i: int, plain: int) -> LayerCache:
    """Return the cache of a GLM-5-Next layer: a state, or a latent with one index key for `index_kpool` positions."""
    kinds = config.get("layer_types") or ["linear_attention"] * 3 + ["full_attention"]
    if kinds[i % len(kinds)] != "linear_attention":
        return LayerCache("latent", int(config["kv_lora_rank"]) + _index_keys(config, i) // int(config.get("index_kpool", 16)))
    return _delta(glm_linear(config))


def _deepseek_v4(config: JsonMapping, i: int, plain: int) -> LayerCache:
    """Return the cache of a DeepSeek V4 layer: a window of keys, and compressed ones, with an index where windows overlap."""
    head, index = int(config["head_dim"]), int(config.get("index_head_dim", 128))
    listed, count = config.get("compress_ratios"), int(config["num_hidden_layers"])
    ratio = listed[i] if listed else 0 if i in (0, count - 1) else 4 if i % 2 else 128
    if ratio != 4:
        return LayerCache("latent", head + (head // ratio if ratio else 0))
    return LayerCache("latent", head + (head + index) // 4, 2 * 2 * 4 * (head + index))


def _qwen4_exp(config: JsonMapping, i: int, plain: int) -> LayerCache:
    """Return the cache of a Qwen4 layer: keys, values and those of an index, whole and in blocks; or a state, and with
    n-grams the inputs of one more convolution."""
    if _layer_kind(config, i) == "attention":
        index = int(config.get("indexer_head_dim", 128))
        index += index // int(config.get("indexer_compress_ratio", 4))
        return LayerCache("positions", plain + index, whole=index)
    state = _state(config)
    assert state is not None
    taps = int(config.get("ple_conv_kernel_size", 4)) - 1
    inputs = int(config.get("ngram_size", 3)) * taps * int(config.get("hc_count", 4)) * int(config["hidden_size"])
    return replace(state, state=state.state + (inputs if i + 1 in (config.get("ple_layer_ids") or ()) else 0))


def _gemma4(config: JsonMapping, i: int, plain: int) -> LayerCache:
    """Return the cache of a Gemma 4 layer. The last `num_kv_shared_layers` reuse earlier layers' keys and values and
    have none. Full attention may have other head counts and widths than windows."""
    if i >= config["num_hidden_layers"] - int(config.get("num_kv_shared_layers", 20)):
        return LayerCache("none")
    kinds = config.get("layer_types")
    full = kinds[i] == "full_attention" if kinds else (i + 1) % int(config.get("sliding_window_pattern", 5)) == 0
    if not full or config.get("model_type") == "gemma3n":
        return LayerCache("positions", plain)
    heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
    return LayerCache("positions", 2 * (heads or config["num_key_value_heads"]) * config.get("global_head_dim", 512))


def _bailing(config: JsonMapping, i: int, plain: int) -> LayerCache:
    """Return the cache of a Ling layer: attention at the end of each group and after the last whole group. Others have one
    state matrix per head, float32 but for `bailing_moe_linear`, and in v3 the inputs of convolutions."""
    size, heads = config["layer_group_size"], config["num_attention_heads"]
    if (i + 1) % size == 0 or i >= config["num_hidden_layers"] // size * size:
        return _attention(config, plain)
    if config.get("model_type") == "bailing_moe_v3":
        return _delta({**config, "num_heads": heads})
    dim = config.get("head_dim") or config["hidden_size"] // heads
    matrices = heads * dim * dim
    return LayerCache("state", 0, matrices, matrices if config.get("model_type") == "bailing_hybrid" else 0)


_BY_LAYER: dict[str, Callable[[JsonMapping, int, int], LayerCache]] = {
    **dict.fromkeys(("gemma3n", "gemma4", "gemma4_text", "gemma4_unified"), _gemma4),
    **dict.fromkeys(("bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3"), _bailing),
    "falcon_h1": _falcon_h1,
    **dict.fromkeys(("mimo_v2", "mimo_v2_flash"), _mimo_v2),
    "minimax_m3_vl": _minimax_m3,
    "hy_v4": _hy_v4,
    "qwen4_exp": _qwen4_exp,
    "deepseek_v4": _deepseek_v4,
    "glm5_next": _glm5_next,
}
