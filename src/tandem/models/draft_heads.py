"""Draft heads with a directory of their own: what they read of a model, and whether they fit it. No mlx.

EAGLE-3: the head's first layer reads a token's embedding beside outputs of three of the model's earlier layers at the position
before. Its own vocabulary may be a part of the model's: `d2t` has what to add to each of its ids.

DFlash: the head's layers attend to outputs of several of the model's layers, and to a block of tokens: the last one, and masks in
place of those that it guesses, all at once.

Gemma 4's assistant: a small model without keys and values. Its layers attend to those of the model's last layer with a window and
of its last one without, which it reads as they are, for all tokens that it guesses.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tandem.checkpoints.config import Watched, read_config
from tandem.checkpoints.files import ModelFiles, read_tensors
from tandem.checkpoints.safetensors import TensorInfo
from tandem.errors import UnsupportedModel
from tandem.json_types import JsonObject
from tandem.models.caches import layer_caches
from tandem.models.description import ModelDescription, describe, stored_dtype
from tandem.protocol.layout import StageSpec

FAMILIES = {"llama": ("EAGLE-3",), "qwen3": ("EAGLE-3", "DFlash")}
FAMILIES |= dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified"), ("assistant",))
"""Types of models whose heads are read -> kinds of heads."""
_KINDS = ("full_attention", "sliding_attention")
"""Kinds of Gemma 4's layers."""
_STATES = 3
"""Layers whose outputs a head reads."""
_NEEDED = ("fc", "norm", "layers.0.hidden_norm", "layers.0.input_layernorm", "layers.0.self_attn.k_proj")
_DFLASH_NEEDED = ("fc", "hidden_norm", "norm", "layers.0.self_attn.k_proj", "layers.0.input_layernorm")
_ASSISTANT_NEEDED = ("pre_projection", "post_projection", "embed_tokens", "norm")
_ASSISTANT_LAYER = ("self_attn.q_proj", "self_attn.q_norm", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
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


def read_eagle3(files: ModelFiles, model: ModelDescription) -> DraftHead:
    """Return the head in `files`. Raise UnsupportedModel if it is none, incomplete, or another model's."""
    config, tensors = read_config(files.path), {part_name(name): info for name, info in read_tensors(files).items()}
    nested = config.get("transformer_layer_config")
    text = nested if isinstance(nested, dict) else config
    if why := _misfit(config, text, tensors, model):
        raise _not_fitting(files, why)
    own = sum(info.nbytes for name, info in tensors.items() if name not in (_EMBEDDING, "t2d", "d2t"))
    description = _as_model(tensors, own, model, tensors[_EMBEDDING].nbytes if _EMBEDDING in tensors else 0)
    vocabulary = tensors[_HEAD].shape[0] if _HEAD in tensors else model.vocab_size
    entries = {"model_type": "eagle3", "target_hidden_size": model.hidden_size, "draft_vocab_size": vocabulary}
    entries["transformer_layer_config"] = {**text, "num_hidden_layers": description.num_layers}
    return DraftHead("eagle3", config | entries, _layers(config, model.num_layers), description)


def _not_fitting(files: ModelFiles, why: str) -> UnsupportedModel:
    """Return the error about a head that does not fit its model."""
    message = f"--draft-model {files.name}: {why}; name a head that was made for this model, or another --speculative-method"
    return UnsupportedModel(message, param="draft_model")


def _as_model(tensors: Mapping[str, TensorInfo], own: int, model: ModelDescription, embed_bytes: int = 0) -> ModelDescription:
    """Return the description of a head as a draft model, whose layers have `own` bytes of weights."""
    count, keys = len({name.split(".")[1] for name in tensors if name.startswith("layers.")}), tensors.get(_KEYS)
    return replace(
        model, num_layers=count, layer_bytes=(own, *[0] * (count - 1)), whole_bytes=(), head_bytes=0, embed_bytes=embed_bytes,
        token_elements=2 * keys.shape[0] if keys else 0, num_kv_heads=0, state_elements=0, kv_groups=(),
        quantization=None, dtype=stored_dtype({**tensors}),
    )  # fmt: skip


def _unread(names: Collection[str], needed: Sequence[str]) -> str:
    """Return why a head with weights of these names cannot be read; empty if it can."""
    if missing := [name for name in needed if f"{name}.weight" not in names]:
        return f"weight {missing[0]}.weight is missing"
    quantised = any(name.endswith(".scales") for name in names)
    return "is quantised, and heads are read as bfloat16, float16 or float32" if quantised else ""


def head_kind(config: JsonObject) -> str:
    """Return the kind of head that a config.json describes, as in `DraftHead.kind`; empty for a model."""
    kinds = f"{config.get('speculators_model_type')} {config.get('model_type')} {config.get('architectures')}".lower()
    if "dflash_config" in config or "dflash" in kinds:
        return "dflash"
    return "eagle3" if "eagle3" in kinds else "mtp" if str(config.get("model_type")).endswith("_assistant") else ""


def _other_family(kind: str, model: ModelDescription) -> str:
    """Return why no head of this kind is read for the model; empty if one is."""
    read = [name for name, kinds in FAMILIES.items() if kind in kinds]
    return "" if model.family in read else f"{kind} heads for {model.family} are not read, those for {' and '.join(read)} are"


def _layers(config: JsonObject, count: int) -> tuple[int, ...]:
    """Return the numbers of the layers that a head reads. Speculators numbers layers by their input, SGLang by their output."""
    theirs = config.get("eagle_config")
    outputs = theirs.get(_IDS) if isinstance(theirs, dict) else None
    ids = outputs or config.get(_IDS) or (2, count // 2, count - 3)
    return tuple(one - (not outputs) for one in ids if isinstance(one, int)) if isinstance(ids, list | tuple) else ()


def _misfit(config: JsonObject, text: JsonObject, tensors: Mapping[str, TensorInfo], model: ModelDescription) -> str:
    """Return why a head does not fit the model; empty if it does."""
    shapes = {name: info.shape for name, info in tensors.items()}
    if why := _other_family("EAGLE-3", model):
        return why
    if head_kind(config) != "eagle3":
        return "is no EAGLE-3 head, as its config.json does not name eagle3"
    if why := _unread(shapes, _NEEDED):
        return why
    speculators = config.get("speculators_config")
    base = speculators.get("verifier") if isinstance(speculators, dict) else None
    bases = base.get("architectures") if isinstance(base, dict) else None
    if bases and f"{model.family}forcausallm" not in [str(one).lower() for one in bases]:
        return f"was made for {bases[0]}, and the model is a {model.family}"
    hidden, fc = shapes["norm.weight"][0], shapes["fc.weight"]
    if fc != (wanted := (hidden, _STATES * model.hidden_size)):
        return f"its fc.weight has shape {fc}, where {_STATES} hidden states of the model make {wanted}"
    if _EMBEDDING not in shapes and hidden != model.hidden_size:
        return f"has no embedding, and its hidden size is {hidden} where the model's is {model.hidden_size}"
    rows = [text.get("vocab_size"), *(shapes[name][0] for name in (_EMBEDDING, "t2d") if name in shapes)]
    if others := [count for count in rows if count != model.vocab_size]:
        return f"has a vocabulary of {others[0]} tokens, and the model's has {model.vocab_size}"
    own = shapes.get(_HEAD, (model.vocab_size,))[0]
    if own != model.vocab_size and shapes.get("d2t") != (own,):
        return f"has {own} tokens of its own, and no map d2t of as many to the model's"
    layers = _layers(config, model.num_layers)
    fits = len(layers) == _STATES and list(layers) == sorted({*layers} & {*range(model.num_layers)})
    return "" if fits else f"reads the layers {layers}, and must read {_STATES} in order of the model's {model.num_layers}"


def describe_draft(files: ModelFiles, spec: StageSpec, model: ModelDescription) -> ModelDescription:
    """Return the description of a rank's draft model, or of its head as one. Raises ModelError."""
    return READERS[spec.head](files, model).description if spec.head else describe(files)


def read_dflash(files: ModelFiles, model: ModelDescription) -> DraftHead:
    """Return the head in `files`. Raise UnsupportedModel if it is none, incomplete, or another model's."""
    config, tensors = read_config(files.path), {name.removeprefix("model."): one for name, one in read_tensors(files).items()}
    nested = config.get("dflash_config")
    entries = {**config, **nested} if isinstance(nested, dict) else config
    ids = entries.get("target_layer_ids")
    layers = tuple(one for one in ids if isinstance(one, int)) if isinstance(ids, list) else ()
    if why := _dflash_misfit(config, entries, layers, tensors, model):
        raise _not_fitting(files, why)
    fused = [one.nbytes for name, one in tensors.items() if name.endswith(("k_proj.weight", "v_proj.weight"))]  # a second time
    description = _as_model(tensors, sum(fused) + sum(one.nbytes for one in tensors.values()), model)
    return DraftHead("dflash", {**config, "num_hidden_layers": description.num_layers}, layers, description)


def _dflash_misfit(
    config: JsonObject, entries: JsonObject, layers: tuple[int, ...], tensors: Mapping[str, TensorInfo], model: ModelDescription
) -> str:
    """Return why a head does not fit the model; empty if it does."""
    if why := _other_family("DFlash", model):
        return why
    later = entries.get("projector_type") or entries.get("markov_rank") or "DFlash2" in str(entries.get("architectures"))
    if later or head_kind(config) != "dflash":
        return "is no DFlash head of the first version, as its config.json tells"
    if why := _unread(tensors, _DFLASH_NEEDED):
        return why
    if (count := entries.get("num_target_layers", model.num_layers)) != model.num_layers:
        return f"was made for a model of {count} layers, and the model has {model.num_layers}"
    if not layers or list(layers) != sorted({*layers} & {*range(model.num_layers)}):
        return f"reads the layers {layers}, and must read some in order of the model's {model.num_layers}"
    if (fc := tensors["fc.weight"].shape) != (wanted := (model.hidden_size, len(layers) * model.hidden_size)):
        return f"its fc.weight has shape {fc}, where {len(layers)} hidden states of the model make {wanted}"
    if (vocabulary := entries.get("vocab_size")) != model.vocab_size:
        return f"has a vocabulary of {vocabulary} tokens, and the model's has {model.vocab_size}"
    if (mask := entries.get("mask_token_id")) not in range(model.vocab_size):
        return f"has mask_token_id {mask}, which is none of the model's {model.vocab_size} tokens"
    windows = entries.get("draft_window_size") or "sliding_attention" in str(entries.get("layer_types"))
    return "has layers with a sliding window, which are not read" if windows else ""


def read_assistant(files: ModelFiles, model: ModelDescription) -> DraftHead:
    """Return the assistant in `files`. Raise UnsupportedModel if it is none, incomplete, or another model's."""
    config, tensors = read_config(files.path), {name.removeprefix("model."): one for name, one in read_tensors(files).items()}
    nested = config.get("text_config")
    text = Watched({"num_key_value_heads": 1, "head_dim": 256, **(nested if isinstance(nested, dict) else {})}, files.path)
    sources = {_KINDS[not group]: i for i, (group, elements) in enumerate(model.kv_groups) if elements}
    with text.named():
        why = _assistant_misfit(config, text, sources, tensors, model)
    if why:
        raise _not_fitting(files, why)
    own = sum(one.nbytes for one in tensors.values())
    return DraftHead("mtp", config, tuple(sources[kind] for kind in _KINDS), _as_model(tensors, own, model))


def _assistant_misfit(
    config: JsonObject, text: JsonObject, sources: Mapping[str, int], tensors: Mapping[str, TensorInfo], model: ModelDescription
) -> str:
    """Return why an assistant does not fit the model; empty if it does. `sources`: kind of a layer -> last one with keys."""
    if why := _other_family("assistant", model):
        return why
    if config.get("model_type") not in ("gemma4_assistant", "gemma4_unified_assistant"):
        return "is no assistant of a Gemma 4 model, as its config.json does not name gemma4_assistant"
    count, kinds = text.get("num_hidden_layers", 0), text.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != count or not sources.keys() >= {*kinds} or len(sources) != len(_KINDS):
        return f"its {count} layers are of the kinds {kinds}, and the model's with keys and values of {sorted(sources)}"
    if why := _unread(tensors, [*_ASSISTANT_NEEDED, *(f"layers.{i}.{name}" for i in range(count) for name in _ASSISTANT_LAYER)]):
        return why
    if (width := config.get("backbone_hidden_size")) != model.hidden_size:
        return f"its backbone_hidden_size is {width}, and the model's hidden size is {model.hidden_size}"
    if (rows := tensors[_EMBEDDING].shape[0]) != model.vocab_size:
        return f"has a vocabulary of {rows} tokens, and the model's has {model.vocab_size}"
    plain, entries = 2 * text["num_key_value_heads"] * text["head_dim"], {"model_type": "gemma4_text", "num_kv_shared_layers": 0}
    caches = layer_caches({**text, **entries}, count, plain)
    found, wanted = ([int(one.position) for one in caches], [int(model.kv_groups[sources[kind]][1]) for kind in kinds])
    return "" if found == wanted else f"its layers read {found} elements of keys and values a token, and the model has {wanted}"


READERS = {"eagle3": read_eagle3, "dflash": read_dflash, "mtp": read_assistant}
"""Kind of head -> reader of its description."""
