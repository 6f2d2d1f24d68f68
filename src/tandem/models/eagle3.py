"""EAGLE-3 draft heads, which have a directory of their own: what they read of a model, and whether they fit it. No mlx.

The head's first layer reads a token's embedding beside outputs of three of the model's earlier layers at the position before.
Its own vocabulary may be a part of the model's: `d2t` has what to add to each of its ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tandem.checkpoints.config import read_config
from tandem.checkpoints.files import ModelFiles, read_tensors
from tandem.checkpoints.safetensors import TensorInfo
from tandem.errors import UnsupportedModel
from tandem.json_types import JsonObject
from tandem.models.description import ModelDescription, describe, stored_dtype
from tandem.protocol.layout import StageSpec

FAMILIES = ("llama", "qwen3")
"""Types of models whose heads are read."""
_STATES = 3
"""Layers whose outputs a head reads."""
_NEEDED = ("fc", "norm", "layers.0.hidden_norm", "layers.0.input_layernorm", "layers.0.self_attn.k_proj")
_EMBEDDING, _HEAD, _IDS = "embed_tokens.weight", "lm_head.weight", "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Eagle3:
    """An EAGLE-3 head that fits its model."""

    config: JsonObject
    """config.json in the words of Speculators, which mlx-vlm reads."""
    layers: tuple[int, ...]
    """Numbers of the model's layers whose outputs it reads."""
    description: ModelDescription
    """The head as a draft model, to count its memory; without an embedding if it uses the model's."""


def part_name(name: str) -> str:
    """Return a stored tensor's name in the words of Speculators; SGLang and SpecForge name the only layer otherwise."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)


def describe_draft(files: ModelFiles, spec: StageSpec, model: ModelDescription) -> ModelDescription:
    """Return the description of a rank's draft model, or of its EAGLE-3 head as one. Raises ModelError."""
    return read_eagle3(files, model).description if spec.captured_layers else describe(files)


def read_eagle3(files: ModelFiles, model: ModelDescription) -> Eagle3:
    """Return the head in `files`. Raise UnsupportedModel if it is none, incomplete, or another model's."""
    config, tensors = read_config(files.path), {part_name(name): info for name, info in read_tensors(files).items()}
    nested = config.get("transformer_layer_config")
    text = nested if isinstance(nested, dict) else config
    if why := _misfit(config, text, tensors, model):
        message = f"--draft-model {files.name}: {why}; name a head that was made for this model, or another --speculative-method"
        raise UnsupportedModel(message, param="draft_model")
    count = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    own = sum(info.nbytes for name, info in tensors.items() if name not in (_EMBEDDING, "t2d", "d2t"))
    description = replace(
        model, num_layers=count, layer_bytes=(own, *[0] * (count - 1)), whole_bytes=(), head_bytes=0,
        embed_bytes=tensors[_EMBEDDING].nbytes if _EMBEDDING in tensors else 0, quantization=None,
        token_elements=2 * tensors["layers.0.self_attn.k_proj.weight"].shape[0], state_elements=0, kv_groups=(),
        dtype=stored_dtype({"fc.weight": tensors["fc.weight"]}),
    )  # fmt: skip
    vocabulary = tensors[_HEAD].shape[0] if _HEAD in tensors else model.vocab_size
    entries = {"model_type": "eagle3", "target_hidden_size": model.hidden_size, "draft_vocab_size": vocabulary}
    entries["transformer_layer_config"] = {**text, "num_hidden_layers": count}
    return Eagle3(config | entries, _layers(config, model.num_layers), description)


def is_eagle3(config: JsonObject) -> bool:
    """Return whether a config.json describes an EAGLE-3 head, as Speculators, SGLang or SpecForge write it."""
    kinds = [config.get("speculators_model_type"), config.get("model_type"), config.get("architectures")]
    return any("eagle3" in str(kind).lower() for kind in kinds)


def _layers(config: JsonObject, count: int) -> tuple[int, ...]:
    """Return the numbers of the layers that a head reads. Speculators numbers layers by their input, SGLang by their output."""
    theirs = config.get("eagle_config")
    outputs = theirs.get(_IDS) if isinstance(theirs, dict) else None
    ids = outputs or config.get(_IDS) or (2, count // 2, count - 3)
    return tuple(one - (not outputs) for one in ids if isinstance(one, int)) if isinstance(ids, list | tuple) else ()


def _misfit(config: JsonObject, text: JsonObject, tensors: Mapping[str, TensorInfo], model: ModelDescription) -> str:
    """Return why a head does not fit the model; empty if it does."""
    shapes = {name: info.shape for name, info in tensors.items()}
    if model.family not in FAMILIES:
        return f"heads for {model.family} are not read, those for {' and '.join(FAMILIES)} are"
    if not is_eagle3(config):
        return "is no EAGLE-3 head, as its config.json does not name eagle3"
    if missing := [name for name in _NEEDED if f"{name}.weight" not in shapes]:
        return f"weight {missing[0]}.weight is missing"
    if any(name.endswith(".scales") for name in shapes):
        return "is quantised, and heads are read as bfloat16, float16 or float32"
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
