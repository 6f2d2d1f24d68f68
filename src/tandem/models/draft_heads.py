"""Draft heads with a directory of their own: what they read of a model, and whether they fit it. No mlx.

EAGLE-3: the head's first layer reads a token's embedding beside outputs of three of the model's earlier layers at the position
before. Its own vocabulary may be a part of the model's: `d2t` has what to add to each of its ids.

DFlash: the head's layers attend to outputs of several of the model's layers, and to a block of tokens: the last one, and masks in
place of those that it guesses, all at once.

Gemma 4's assistant: a small model without keys and values. Its layers attend to those of the model's last layer with a window and
of its last one without, which it reads as they are, for all tokens that it guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tandem.checkpoints.config import Watched, read_config, section
from tandem.checkpoints.files import ModelFiles, read_tensors
from tandem.checkpoints.safetensors import TensorInfo
from tandem.errors import UnsupportedModel
from tandem.json_types import JsonObject
from tandem.models.caches import layer_caches
from tandem.models.description import ModelDescription, describe, stored_dtype
from tandem.models.sources import require_mlx_vlm
from tandem.protocol.layout import StageSpec

Tensors = Mapping[str, TensorInfo]
"""Tensors of a head, by `part_name`."""
FAMILIES = {"llama": ("EAGLE-3",), "qwen3": ("EAGLE-3", "DFlash")}
FAMILIES |= dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified"), ("assistant",))
"""Types of models whose heads are read -> kinds of heads."""
_STATES = 3
"""Layers whose outputs a head reads."""
_LAYER = [f"layers.{{}}.{part}_proj" for part in ("self_attn.q", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")]
"""Weights of each layer, whose number stands in the braces."""
_WITH_KEYS = [*_LAYER, "layers.{}.self_attn.k_proj", "layers.{}.input_layernorm"]
_EMBEDDING, _HEAD, _KEYS = "embed_tokens.weight", "lm_head.weight", "layers.0.self_attn.k_proj.weight"
_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class DraftHead:
    """A head that fits its model."""

    kind: str
    """`eagle3`, `dflash`, or `mtp` for an assistant."""
    config: JsonObject
    """config.json in the words that mlx-vlm reads."""
    layers: tuple[int, ...]
    """Numbers of the model's layers whose outputs it reads; those whose keys and values, for an assistant."""
    description: ModelDescription
    """The head as a draft model, to count its memory; without an embedding if it uses the model's."""


def part_name(name: str) -> str:
    """Return a stored tensor's name in the words of Speculators; SGLang and SpecForge name the only layer otherwise."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)


def head_kind(config: JsonObject) -> str:
    """Return the kind of head that a config.json describes, as in `DraftHead.kind`; empty for a model."""
    kinds = f"{config.get('speculators_model_type')} {config.get('model_type')} {config.get('architectures')}".lower()
    if "dflash_config" in config or "dflash" in kinds:
        return "dflash"
    return "eagle3" if "eagle3" in kinds else "mtp" if str(config.get("model_type")).endswith("_assistant") else ""


def read_head(kind: str, files: ModelFiles, model: ModelDescription) -> DraftHead:
    """Return the head of this kind in `files`. Raise UnsupportedModel if it is none, incomplete, or another model's."""
    require_mlx_vlm("Heads with a directory of their own are computed")
    tensors = {part_name(name): info for name, info in read_tensors(files).items()}
    label, needed, read = _KINDS[kind]
    families = [name for name, labels in FAMILIES.items() if label in labels]
    with (config := Watched(read_config(files.path), files.path)).named():
        nested = {"eagle3": "transformer_layer_config", "mtp": "text_config"}.get(kind, "")
        text = section(config, nested) or config
        names = [name.format(i) for name in needed for i in range(_layers(tensors) if "{" in name else 1)]
        missing = [name for name in names if f"{name}.weight" not in tensors]
        rows = [text.get("vocab_size"), *(tensors[name].shape[0] for name in (_EMBEDDING, "t2d") if name in tensors)]
        if model.family not in families:
            head: DraftHead | str = f"{label} heads for {model.family} are not read, those for {' and '.join(families)} are"
        elif head_kind(config) != kind:
            head = f"is no {label} head, as its config.json tells"
        elif any(name.endswith(".scales") for name in tensors):
            head = "is quantised, and heads are read as bfloat16, float16 or float32"
        elif missing:
            head = f"weight {missing[0]}.weight is missing"
        elif others := [count for count in rows if count != model.vocab_size]:
            head = f"has a vocabulary of {others[0]} tokens, and the model's has {model.vocab_size}"
        else:
            head = read(config, text, tensors, model)
    if isinstance(head, DraftHead):
        return head
    message = f"--draft-model {files.name}: {head}; name a head that was made for this model, or leave out --draft-model"
    raise UnsupportedModel(message, param="draft_model")


def describe_draft(files: ModelFiles, spec: StageSpec, model: ModelDescription) -> ModelDescription:
    """Return the description of a rank's draft model, or of its head as one. Raises ModelError."""
    return read_head(spec.head, files, model).description if spec.head else describe(files)


def _layers(tensors: Tensors) -> int:
    """Return the number of a head's layers."""
    return len({name.split(".")[1] for name in tensors if name.startswith("layers.")})


def _as_model(tensors: Tensors, own: int, model: ModelDescription, embed_bytes: int = 0) -> ModelDescription:
    """Return the description of a head as a draft model, whose layers have `own` bytes of weights."""
    count, keys = _layers(tensors), tensors.get(_KEYS)
    return replace(
        model, num_layers=count, layer_bytes=(own, *[0] * (count - 1)), whole_bytes=(), head_bytes=0, embed_bytes=embed_bytes,
        token_elements=2 * keys.shape[0] if keys else 0, num_kv_heads=0, state_elements=0, kv_groups=(),
        quantization=None, dtype=stored_dtype({**tensors}),
    )  # fmt: skip


def _eagle3(config: JsonObject, text: JsonObject, tensors: Tensors, model: ModelDescription) -> DraftHead | str:
    """Return an EAGLE-3 head, or why it does not fit the model."""
    shapes = {name: info.shape for name, info in tensors.items()}
    bases = section(section(config, "speculators_config"), "verifier").get("architectures")
    if bases and f"{model.family}forcausallm" not in [str(one).lower() for one in bases]:
        return f"was made for {bases[0]}, and the model is a {model.family}"
    hidden, fc = shapes["norm.weight"][0], shapes["fc.weight"]
    if fc != (wanted := (hidden, _STATES * model.hidden_size)):
        return f"its fc.weight has shape {fc}, where {_STATES} hidden states of the model make {wanted}"
    if _EMBEDDING not in shapes and hidden != model.hidden_size:
        return f"has no embedding, and its hidden size is {hidden} where the model's is {model.hidden_size}"
    vocabulary = shapes.get(_HEAD, (model.vocab_size,))[0]
    if vocabulary != model.vocab_size and shapes.get("d2t") != (vocabulary,):
        return f"has {vocabulary} tokens of its own, and no map d2t of as many to the model's"
    # Speculators numbers layers by their input, SGLang by their output.
    outputs = section(config, "eagle_config").get(_IDS)
    ids = outputs or config.get(_IDS) or (2, model.num_layers // 2, model.num_layers - 3)
    layers = tuple(one - (not outputs) for one in ids if isinstance(one, int)) if isinstance(ids, list | tuple) else ()
    if len(layers) != _STATES or list(layers) != sorted({*layers} & {*range(model.num_layers)}):
        return f"reads the layers {layers}, and must read {_STATES} in order of the model's {model.num_layers}"
    own = sum(info.nbytes for name, info in tensors.items() if name not in (_EMBEDDING, "t2d", "d2t"))
    description = _as_model(tensors, own, model, tensors[_EMBEDDING].nbytes if _EMBEDDING in tensors else 0)
    entries = {"model_type": "eagle3", "target_hidden_size": model.hidden_size, "draft_vocab_size": vocabulary}
    entries["transformer_layer_config"] = {**text, "num_hidden_layers": description.num_layers}
    return DraftHead("eagle3", config | entries, layers, description)


def _dflash(config: JsonObject, _: JsonObject, tensors: Tensors, model: ModelDescription) -> DraftHead | str:
    """Return a DFlash head, or why it does not fit the model."""
    entries = {**config, **section(config, "dflash_config")}
    ids = entries.get("target_layer_ids")
    layers = tuple(one for one in ids if isinstance(one, int)) if isinstance(ids, list) else ()
    if entries.get("projector_type") or entries.get("markov_rank") or "DFlash2" in str(entries.get("architectures")):
        return "is no DFlash head of the first version, as its config.json tells"
    if (count := entries.get("num_target_layers", model.num_layers)) != model.num_layers:
        return f"was made for a model of {count} layers, and the model has {model.num_layers}"
    if not layers or list(layers) != sorted({*layers} & {*range(model.num_layers)}):
        return f"reads the layers {layers}, and must read some in order of the model's {model.num_layers}"
    if (fc := tensors["fc.weight"].shape) != (wanted := (model.hidden_size, len(layers) * model.hidden_size)):
        return f"its fc.weight has shape {fc}, where {len(layers)} hidden states of the model make {wanted}"
    if (mask := entries.get("mask_token_id")) not in range(model.vocab_size):
        return f"has mask_token_id {mask}, which is none of the model's {model.vocab_size} tokens"
    if entries.get("draft_window_size") or "sliding_attention" in str(entries.get("layer_types")):
        return "has layers with a sliding window, which are not read"
    fused = [one.nbytes for name, one in tensors.items() if name.endswith(("k_proj.weight", "v_proj.weight"))]  # a second time
    description = _as_model(tensors, sum(fused) + sum(one.nbytes for one in tensors.values()), model)
    return DraftHead("dflash", {**config, "num_hidden_layers": description.num_layers}, layers, description)


def _assistant(config: JsonObject, text: JsonObject, tensors: Tensors, model: ModelDescription) -> DraftHead | str:
    """Return a Gemma 4 model's assistant, or why it does not fit the model."""
    if (count := _layers(tensors)) != len(kinds := text["layer_types"]):
        return f"has {count} layers, and layer_types of its config.json describes {len(kinds)}"
    if (width := config.get("backbone_hidden_size")) != model.hidden_size:
        return f"its backbone_hidden_size is {width}, and the model's hidden size is {model.hidden_size}"
    sources = {("full" if group else "sliding") + "_attention": i for i, (group, some) in enumerate(model.kv_groups) if some}
    entries = {"num_key_value_heads": 1, "head_dim": 256, **text, "model_type": "gemma4_text", "num_kv_shared_layers": 0}
    found = [int(one.position) for one in layer_caches(entries, count, 2 * entries["num_key_value_heads"] * entries["head_dim"])]
    if found != (wanted := [int(model.kv_groups[sources[kind]][1]) if kind in sources else 0 for kind in kinds]):
        return f"its layers read {found} elements of keys and values a token, and the model has {wanted}"
    own = sum(one.nbytes for one in tensors.values())
    return DraftHead("mtp", config, tuple(sources.values()), _as_model(tensors, own, model))


_KINDS: dict[str, tuple[str, list[str], Callable[[JsonObject, JsonObject, Tensors, ModelDescription], DraftHead | str]]] = {
    "eagle3": ("EAGLE-3", ["fc", "norm", "layers.0.hidden_norm", *_WITH_KEYS], _eagle3),
    "dflash": ("DFlash", ["fc", "norm", "hidden_norm", *_WITH_KEYS], _dflash),
    "mtp": ("assistant", ["pre_projection", "post_projection", "embed_tokens", "norm", *_LAYER], _assistant),
}
"""Kind of head -> its name, weights that it must have, and the function that reads it."""
