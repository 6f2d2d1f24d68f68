"""Supported model types, and how each differs from the defaults derived from mlx-lm's module.

A stage runs mlx-lm's own model (`loading/pipeline_model.py`), so most rows are empty. A row means that
`tests/loading/test_loading_parity.py` compares the type with mlx-lm's forward pass. A type without a row gets a dry run
before it is served. Plain data, no mlx.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from tandem.json_types import JsonMapping, JsonObject


@dataclass(frozen=True, kw_only=True)
class Family:
    """Deviations of one model type from the defaults."""

    source: Literal["mlx_lm", "mlx_vlm"] = "mlx_lm"
    """Package whose module computes the type. mlx-lm where both have it, unless the row says why not."""
    module: str = ""
    """Module of the package's `models`, if its name differs from the type."""
    nested: bool = False
    """Whether the module computes a text model alone, which stands below `language_model` here."""
    text: str = ""
    """The `model_type` of the one text model that the module computes; empty: any that it knows."""
    layers: str = "model.layers"
    """Path of the list of decoder layers. Adapters use it to name modules; so do checkpoints without an output
    projection."""
    tied: Literal["config-true", "config-false", "always", "never", "file"] = "config-true"
    """Whether the head reuses the embedding. config-true, config-false: config.json's `tie_word_embeddings`, with that
    default; file: tied if the weight files hold no head."""
    defaults: JsonMapping = field(default_factory=dict)
    """Values that mlx-lm assumes for keys missing from `config.json`."""
    extra_outputs: int = 0
    """Number of values besides the hidden states that each layer returns for the next one; also sent between stages."""
    hidden: int | str = 0
    """Position or name of the hidden states among the arguments of a layer."""
    gives: tuple[int | str, ...] = ()
    """Positions or names of other layer arguments that only the first stage can compute; they are sent to later stages."""
    streams: str = ""
    """Key of config.json with the number of residual streams that layers hand on (hyper-connections); empty: one."""
    counts: bool = False
    """Layers without positional caches read the offset from another layer's cache. Each stage then counts positions
    itself."""
    grouped_scores: bool = False
    """Attention scores have shape [rows, kv heads, queries per kv head, ...], so masks need an extra axis."""
    one_by_one: str = ""
    """Reason why sequences of a batch run one at a time (mlx-lm's module requires equal lengths); empty if they run
    together."""
    can_draft: bool = True
    """Whether its caches can drop the last positions, or be computed again without them."""


_NESTED = "language_model.model.layers"
_MLX_VLM = partial(Family, source="mlx_vlm", layers=_NESTED)
_STREAMS = partial(_MLX_VLM, streams="hc_mult", defaults={"hc_mult": 4})
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
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_EVERY_FOURTH = {"full_attention_interval": 4}
_GEMMA4 = {"head_dim": 256, "num_key_value_heads": 1}
_UNIFIED = {**_GEMMA4, "use_bidirectional_attention": "vision"}
_GLM4V: JsonObject = {
    "attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_scaling": None,
    "tie_word_embeddings": False, "use_qk_norm": False,
}  # fmt: skip
_TIED_BY_DEFAULT = (
    "llama", "qwen2", "apertus", "ernie4_5", "ernie4_5_moe", "exaone4", "glm", "granite", "granitemoe", "helium", "olmo2",
    "olmoe", "seed_oss", "smollm3", "starcoder2", "olmo_hybrid", "granitemoehybrid", "falcon_h1", "spark2_5", "gear", "jamba",
    "ministral3",
)  # fmt: skip
_UNTIED_BY_DEFAULT = (
    "qwen3", "qwen3_moe", "phi3", "dots1", "hunyuan_v1_dense", "internlm3", "mimo", "mixtral", "nemotron", "olmo3",
    "telechat3", "exaone_moe", "afmoe", "kimi_linear", "minimax", "llama4_text", "mellum", "minicpm", "minicpm3",
    "muse_glimmer", "nanbeige", "nemotron-nas", "bailing_moe", "internlm2", "mistral4", "laguna", "baichuan_m1",
)  # fmt: skip
_NEVER_TIED = (
    "deepseek", "glm4", "glm4_moe", "phimoe", "qwen2_moe", "solar_open", "stablelm", "phi", "step3p5", "Klear",
    "mimo_v2_flash", "longcat_flash", "glm_moe_dsa",
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(_TIED_BY_DEFAULT, Family()),
    **dict.fromkeys(_UNTIED_BY_DEFAULT, Family(tied="config-false")),
    **dict.fromkeys(_NEVER_TIED, Family(tied="never")),
    **dict.fromkeys(("cohere", "cohere2", "gemma", "lfm2", "lfm2_moe", "hunyuan"), Family(tied="always")),
    "mistral": Family(module="llama"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), Family(tied="never", defaults=_LATENT)),
    **dict.fromkeys(("kimi_k2", "joyai_llm_flash"), Family(module="deepseek_v3", tied="never", defaults=_LATENT)),
    "deepseek_v32": Family(tied="never", defaults={**_LATENT, "index_head_dim": 128}),
    "glm4_moe_lite": Family(tied="never", defaults={**_LATENT, "qk_nope_head_dim": 192, "v_head_dim": 256}),
    "bailing_moe_v3": Family(tied="config-false", defaults={**_LATENT, "head_dim": 128, "layer_group_size": 4}),
    "qwen3_next": Family(tied="config-false", defaults=_EVERY_FOURTH),
    "minimax_m2": Family(module="minimax", tied="config-false"),
    "gemma2": Family(tied="always", grouped_scores=True),
    "gemma3_text": Family(tied="file", defaults=_GEMMA3),
    "gpt_oss": Family(tied="never", defaults=_GPT_OSS),
    "exaone": Family(layers="transformer.h"),
    "gpt_neox": Family(layers="model.h", tied="never"),
    "nemotron_h": Family(layers="backbone.layers", tied="never"),
    "rwkv7": Family(tied="config-false", extra_outputs=1),
    "recurrent_gemma": Family(tied="file", defaults={"multi_query": True}),
    "youtu_llm": Family(defaults=_LATENT),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen2_vl"), Family(layers=_NESTED)),
    "llama4": Family(layers=_NESTED, tied="never", one_by_one="its masks are made for sequences of one length"),
    "mamba2": Family(layers="backbone.layers", tied="config-false"),
    "dbrx": Family(layers="transformer.blocks", tied="never"),
    "gptj": Family(layers="model.h", tied="never", hidden="inputs"),
    **dict.fromkeys(("bailing_hybrid", "bailing_moe_linear"), Family(tied="config-false", counts=True)),
    "kimi_k3": Family(layers=_NESTED, tied="config-false", extra_outputs=1),
    "gemma3n": Family(
        layers="model.language_model.layers",
        tied="always",
        gives=(3,),
        one_by_one="layers that share keys and values read them off the cache of one sequence",
    ),
    "gemma4": Family(layers=_NESTED, gives=("per_layer_input",), defaults=_GEMMA4),
    "gemma4_unified": Family(module="gemma4", layers=_NESTED, gives=("per_layer_input",), defaults=_UNIFIED),
    "gemma4_text": Family(gives=("per_layer_input",), defaults=_GEMMA4),
    "gpt2": Family(layers="model.h", tied="always"),
    "gpt_bigcode": Family(
        layers="transformer.h", defaults={"multi_query": True}, one_by_one="it counts positions for sequences of one length"
    ),
    "lille-130m": Family(layers="transformer.layers", tied="always"),
    **dict.fromkeys(("mamba", "falcon_mamba"), Family(module="mamba", layers="backbone.layers")),
    **dict.fromkeys(("nanochat", "qwen"), Family(layers="transformer.h", tied="never")),
    "openelm": Family(layers="transformer.layers", tied="file"),
    "phixtral": Family(layers="transformer.h", tied="never", defaults={"num_local_experts": 4}),
    "phi-msft": Family(module="phixtral", layers="transformer.h", tied="never", defaults={"num_local_experts": 4}),
    "plamo": Family(layers="model.layers.layers", tied="never"),
    "plamo2": Family(
        layers="model.layers.layers",
        defaults={"mamba_step": 2, "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_num_heads": 64, "hidden_size_per_head": 128},
    ),
    "plamo3": Family(layers="model.layers.layers"),
    "lfm2-vl": Family(module="lfm2", nested=True, layers=_NESTED, tied="always"),
    "longcat_flash_ngram": Family(
        tied="never", one_by_one="its n-grams are looked up for sequences of one length", can_draft=False
    ),
    "minimax_m3_vl": Family(
        layers=_NESTED,
        tied="config-false",
        one_by_one="its sparse attention chooses blocks by their place, which rows of unequal length do not share",
    ),
    "pixtral": Family(layers=_NESTED, tied="never"),
    "qwen2_5_vl": Family(module="qwen2_vl", layers=_NESTED),
    "glm4v": Family(module="glm4", nested=True, layers=_NESTED, tied="never", defaults=_GLM4V),
    "glm4v_moe": Family(module="glm4_moe", nested=True, layers=_NESTED, tied="never", defaults=_GLM4V),
    "gemma3": Family(layers=_NESTED, tied="file", defaults={**_GEMMA3, "num_attention_heads": 8, "num_key_value_heads": 4}),
    **dict.fromkeys(("mistral3", "llava"), Family(module="mistral3", layers=_NESTED, tied="config-false")),
    # mlx-lm's kimi_vl does not rename the projections of latent keys and values, as stored ones need.
    **dict.fromkeys(("kimi_k25", "kimi_vl"), Family(module="kimi_k25", layers=_NESTED, tied="never", defaults=_LATENT)),
    **dict.fromkeys(("k2_horizon", "kolibri1"), _MLX_VLM(tied="config-false")),
    "internvl": _MLX_VLM(text="qwen3", tied="config-false"),
    **dict.fromkeys(("idefics3", "smolvlm"), _MLX_VLM(layers="language_model.layers", tied="never")),
    "cohere2_moe": _MLX_VLM(tied="always"),
    **dict.fromkeys(("mimo_v2", "step3p7"), _MLX_VLM(tied="never")),
    "hy_v4": _STREAMS(tied="never"),
    "deepseek_v4": _STREAMS(
        tied="never", gives=(3,), one_by_one="its compressed keys are those of one sequence", can_draft=False
    ),
    "qwen4_exp": _MLX_VLM(
        tied="config-false",
        gives=(1,),
        streams="hc_count",
        defaults={"hc_count": 4, **_EVERY_FOURTH},
        one_by_one="its sparse attention and n-grams are computed for sequences of one length",
        can_draft=False,
    ),
    "glm5_next": _STREAMS(tied="config-false", one_by_one="its pools of index keys are those of one sequence", can_draft=False),
    "mistral_large3": _MLX_VLM(tied="never", defaults=_LATENT),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), Family(layers=_NESTED, tied="config-false", defaults=_EVERY_FOURTH)),
}
"""Rows by `model_type` of `config.json`."""

REFUSED = {
    "afm7": "its last layers stand in a list of their own and reuse the keys and values of the one before them",
    "deepseek_v41": "its layers read what earlier ones have compressed, which stages do not hand on yet",
    "iquestloopcoder": "it goes through its layers twice for a token, so that they cannot be stages",
    "olmo": "mlx-lm computes it with the package ai2-olmo alone; OLMo 2 and 3 are supported",
    "phi3small": "mlx-lm adds its masks to the scores of its sparse layers in place of applying them",
    "prism_hadamard_qwen35": "its packed layers are modules of a kind that is not loaded yet",
    "talkie": "its output projection is stored as a bare parameter, which has no module that a stage could hold",
}
"""Types of mlx-lm that are refused, and the reason."""

ALIASES = {"iquestcoder": "llama", "xverse": "llama", "deepseek_v41_text": "deepseek_v41"}
"""mlx-lm's module for types without a row whose names differ. Copied from its `utils.MODEL_REMAPPING`, for hosts
without mlx."""

_WITHOUT_HEAD_DIM = (
    "qwen2", "apertus", "granite", "granitemoe", "starcoder2", "granitemoehybrid", "phi3", "internlm3", "mimo", "mixtral",
    "minicpm", "nemotron-nas", "deepseek", "phimoe", "qwen2_moe", "stablelm", "phi", "Klear", "cohere", "lfm2", "lfm2_moe",
    "lfm2-vl", "bailing_moe", "gpt_neox", "internlm2", "recurrent_gemma", "baichuan_m1", "jamba", "dbrx", "gptj", "hunyuan",
    "gpt2", "gpt_bigcode", "lille-130m", "nanochat", "phixtral", "phi-msft", "plamo", "plamo2", "qwen", "qwen2_vl",
    "qwen2_5_vl", "idefics3", "smolvlm", "glm5_next",
)  # fmt: skip

UNREAD: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_WITHOUT_HEAD_DIM, ("head_dim",)),
    **dict.fromkeys(("longcat_flash", "longcat_flash_ngram"), ("num_hidden_layers", "head_dim")),
}
"""Entries of config.json that mlx-lm's module of a type ignores: head_dim is then hidden_size / heads, and the layer
count is `num_layers`."""

_UNLISTED = Family(tied="file", one_by_one="its type is unlisted, so that nothing is known of its batches", can_draft=False)


def family_of(model_type: str) -> Family:
    """Return the row of a type; for an unlisted type a row with safe defaults."""
    return FAMILIES.get(model_type) or _UNLISTED


def module_of(model_type: str) -> str:
    """Return the name of the type's module in its source's `models`, which may not exist."""
    return family_of(model_type).module or ALIASES.get(model_type, model_type)
