"""Draft heads with a directory of their own: what they read of a model, and whether they fit it. No mlx.

EAGLE-3: the head's first layer reads a token's embedding beside outputs of three of the model's earlier layers at the position
before. Its own vocabulary may be a part of the model's: `d2t` has what to add to each of its ids.

DFlash: the head's layers attend to outputs of several of the model's layers, and to a block of tokens: the last one, and masks in
place of those that it guesses, all at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tandem.checkpoints.config import read_config, section
from tandem.checkpoints.files import ModelFiles, read_tensors
from tandem.checkpoints.safetensors import TensorInfo
from tandem.errors import UnsupportedModel
from tandem.json_types import JsonObject
from tandem.models.description import ModelDescription, describe, stored_dtype
from tandem.protocol.layout import StageSpec

FAMILIES = {"llama": ("EAGLE-3",), "qwen3": ("EAGLE-3", "DFlash")}
"""Types of models whose heads are read -> kinds of heads."""
_STATES = 3
"""Layers whose outputs a head reads."""
_NEEDED = ("fc", "norm", "layers.0.hidden_norm", "layers.0.input_layernorm", "layers.0.self_attn.k_proj")
_DFLASH_NEEDED = ("fc", "hidden_norm", "norm", "layers.0.self_attn.k_proj", "layers.0.input_layernorm")
_EMBEDDING, _HEAD, _IDS = "embed_tokens.weight", "lm_head.weight", "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class DraftHead:
    """An EAGLE-3 or DFlash head that fits its model."""

    config: JsonObject
    """config.json in the words that mlx-vlm reads."""
    layers: tuple[int, ...]
    """Numbers of the model's layers whose outputs it reads."""
    description: ModelDescription
    """The head as a draft model, to count its memory; without an embedding if it uses the model's."""


def part_name(name: str) -> str:
    """Return a stored tensor's name in the words of Speculators; SGLang and SpecForge name the only layer otherwise."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)


def read_eagle3(files: ModelFiles, model: ModelDescription) -> DraftHead:
    """Return the head in `files`. Raise UnsupportedModel if it is none, incomplete, or another model's."""
    config, tensors = read_config(files.path), {part_name(name): info for name, info in read_tensors(files).items()}
    text = section(config, "transformer_layer_config") or config
    if why := _misfit(config, text, tensors, model):
        raise _not_fitting(files, why)
    own = sum(info.nbytes for name, info in tensors.items() if name not in (_EMBEDDING, "t2d", "d2t"))
    description = _as_model(tensors, own, model, tensors[_EMBEDDING].nbytes if _EMBEDDING in tensors else 0)
    vocabulary = tensors[_HEAD].shape[0] if _HEAD in tensors else model.vocab_size
    entries = {"model_type": "eagle3", "target_hidden_size": model.hidden_size, "draft_vocab_size": vocabulary}
    entries["transformer_layer_config"] = {**text, "num_hidden_layers": description.num_layers}
    return DraftHead(config | entries, _layers(config, model.num_layers), description)


def _not_fitting(files: ModelFiles, why: str) -> UnsupportedModel:
    """Return the error about a head that does not fit its model."""
    message = f"--draft-model {files.name}: {why}; name a head that was made for this model, or another --speculative-method"
    return UnsupportedModel(message, param="draft_model")


def _as_model(tensors: Mapping[str, TensorInfo], own: int, model: ModelDescription, embed_bytes: int = 0) -> ModelDescription:
    """Return the description of a head as a draft model, whose layers have `own` bytes of weights."""
    count = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    return replace(
        model, num_layers=count, layer_bytes=(own, *[0] * (count - 1)), whole_bytes=(), head_bytes=0, embed_bytes=embed_bytes,
        token_elements=2 * tensors["layers.0.self_attn.k_proj.weight"].shape[0], state_elements=0, kv_groups=(),
        quantization=None, dtype=stored_dtype({"fc.weight": tensors["fc.weight"]}),
    )  # fmt: skip


def _unread(names: Collection[str], needed: Sequence[str]) -> str:
    """Return why a head with weights of these names cannot be read; empty if it can."""
    if missing := [name for name in needed if f"{name}.weight" not in names]:
        return f"weight {missing[0]}.weight is missing"
    quantised = any(name.endswith(".scales") for name in names)
    return "is quantised, and heads are read as bfloat16, float16 or float32" if quantised else ""


def is_eagle3(config: JsonObject) -> bool:
    """Return whether a config.json describes an EAGLE-3 head, as Speculators, SGLang or SpecForge write it."""
    kinds = [config.get("speculators_model_type"), config.get("model_type"), config.get("architectures")]
    return any("eagle3" in str(kind).lower() for kind in kinds)


def _layers(config: JsonObject, count: int) -> tuple[int, ...]:
    """Return the numbers of the layers that a head reads. Speculators numbers layers by their input, SGLang by their output."""
    outputs = section(config, "eagle_config").get(_IDS)
    ids = outputs or config.get(_IDS) or (2, count // 2, count - 3)
    return tuple(one - (not outputs) for one in ids if isinstance(one, int)) if isinstance(ids, list | tuple) else ()


def _misfit(config: JsonObject, text: JsonObject, tensors: Mapping[str, TensorInfo], model: ModelDescription) -> str:
    """Return why a head does not fit the model; empty if it does."""
    shapes = {name: info.shape for name, info in tensors.items()}
    if model.family not in FAMILIES:
        return f"heads for {model.family} are not read, those for {' and '.join(FAMILIES)} are"
    if not is_eagle3(config):
        return "is no EAGLE-3 head, as its config.json does not name eagle3"
    if why := _unread(shapes, _NEEDED):
        return why
    bases = section(section(config, "speculators_config"), "verifier").get("architectures")
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
    return (read_dflash if spec.dflash else read_eagle3)(files, model).description if spec.captured_layers else describe(files)


def is_dflash(config: JsonObject) -> bool:
    """Return whether a config.json describes a DFlash head."""
    return "dflash_config" in config or "dflash" in f"{config.get('architectures')} {config.get('model_type')}".lower()


def read_dflash(files: ModelFiles, model: ModelDescription) -> DraftHead:
    """Return the head in `files`. Raise UnsupportedModel if it is none, incomplete, or another model's."""
    config, tensors = read_config(files.path), {name.removeprefix("model."): one for name, one in read_tensors(files).items()}
    entries = {**config, **section(config, "dflash_config")}
    ids = entries.get("target_layer_ids")
    layers = tuple(one for one in ids if isinstance(one, int)) if isinstance(ids, list) else ()
    if why := _dflash_misfit(entries, layers, tensors, model):
        raise _not_fitting(files, why)
    fused = [one.nbytes for name, one in tensors.items() if name.endswith(("k_proj.weight", "v_proj.weight"))]  # a second time
    description = _as_model(tensors, sum(fused) + sum(one.nbytes for one in tensors.values()), model)
    return DraftHead({**config, "num_hidden_layers": description.num_layers}, layers, description)


def _dflash_misfit(
    entries: JsonObject, layers: tuple[int, ...], tensors: Mapping[str, TensorInfo], model: ModelDescription
) -> str:
    """Return why a head does not fit the model; empty if it does."""
    if "DFlash" not in FAMILIES.get(model.family, ()):
        return f"DFlash heads for {model.family} are not read, those for qwen3 are"
    later = entries.get("projector_type") or entries.get("markov_rank") or "DFlash2" in str(entries.get("architectures"))
    if later or not is_dflash(entries):
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
