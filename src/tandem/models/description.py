"""Description of a model, from `config.json` and the headers of its weight files. Reads no weights, needs no mlx."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Literal

from tandem.checkpoints.config import Watched, eos_token_ids, is_count, nested_text, read_config, section
from tandem.checkpoints.files import ModelFiles, read_tensors
from tandem.checkpoints.safetensors import TensorInfo
from tandem.errors import BrokenModel, UnsupportedModel
from tandem.json_types import JsonObject
from tandem.models.caches import index_heads, layer_caches
from tandem.models.families.axes import Axis
from tandem.models.families.cuts import Width
from tandem.models.families.sharding import SHARDING
from tandem.models.families.table import FAMILIES, REFUSED, UNREAD, Family, family_of, module_of
from tandem.models.kv_types import kv_groups
from tandem.models.mtp import head_tensors
from tandem.models.partition import uncut
from tandem.models.pictures import OFF, deepstack, mrope_section, why_no_pictures
from tandem.models.quantization import NGRAM_TABLE, loaded_bytes, read_quantization
from tandem.models.sources import has_mlx_vlm

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EMBEDDINGS = frozenset(
    (
        "embed_tokens",
        "wte",
        "wpe",
        "tok_embeddings",
        "word_embeddings",
        "embed_in",
        "embeddings",
        "ngram_embeddings",
        "embed_tokens_per_layer",
        "per_layer_model_projection",
        "per_layer_projection_norm",
        "embed",
        "embedding",
        "token_embeddings",
        "altup_projections",
    )
)
"""Modules that only the first stage needs, unless the head is tied."""
_HEADS = frozenset(("lm_head", "output", "embed_out"))
_PREDICTORS = frozenset(("mtp", "mtp_layers", "nextn"))
"""Modules for multi-token prediction, which mlx-lm does not load."""
_OTHER_SENSES = re.compile(
    r"^(?:model\.)?(?:vision|visual|audio|multi_modal|mm_|embed_vision|embed_audio|vit|connector|patch_merger)"
)
"""Vision and audio tensors, which mlx-lm does not load."""
_FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_CONTEXT_KEYS = (
    "max_position_embeddings",
    "max_sequence_length",
    "seq_length",
    "n_positions",
    "model_max_length",
    "n_ctx",
    "max_seq_len",
    "context_length",
    "block_size",
    "max_context_length",
)
_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers")
_HIDDEN_KEYS = ("hidden_size", "n_embd", "d_model", "model_dim")
_HEAD_KEYS = ("num_attention_heads", "n_head", "n_heads", "attention_heads", "num_query_heads", "num_heads")
_KV_KEYS = ("num_key_value_heads", "n_head_kv", "num_kv_heads", "n_kv_heads", "kv_n_heads", "num_attention_groups")
_WIDTH_KEYS = ("head_dim", "hidden_size_per_head", "kv_channels")
_VOCAB_KEYS = ("vocab_size", "padded_vocab_size", "num_vocab")
_DIVIDES = re.compile(
    r"(?:\w+_)?num_(?:\w+_)?(?:attention|key_value)_heads|(?:\w+_)?n_groups?|\w+_expert_groups?|"
    r"group_norm_size"
)
"""Keys with numbers of heads and groups. MLX divides by some of them, and a 0 kills its process without a message."""
_OF_SEVERAL = frozenset(("llava", "mistral3", "pixtral"))
"""Multimodal types whose nested text model can be of several types."""
_MODELOPT = "hf_quant_config.json"
"""File in which NVIDIA's ModelOpt describes its quantisation."""
_MAX_LAYERS = 10_000
_DEFAULT_CONTEXT = 4096  # tokens, for configs that name no limit
_EXPERT_COUNTS = "num_experts|n_routed_experts|num_local_experts|moe_num_experts"


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """Properties of a model that planning, admission and loading need."""

    family: str
    """`model_type` of config.json."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    """Rows of the embedding; may exceed the tokenizer's vocabulary."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    """Most tokens of prompt and output together that the model supports."""
    dtype: str
    """Stored type of weights that are not quantised: bfloat16, float16 or float32."""
    quantization: JsonObject | None
    """MLX's quantisation settings (group_size, bits, mode, per-layer exceptions); None if not quantised."""
    tied_head: bool
    """Whether the output projection reuses the embedding, so that the last stage needs the embedding too."""
    layer_bytes: tuple[int, ...]
    """Stored bytes of each layer; weights expanded at load (fp8) count at their expanded size, as in the next two
    fields."""
    embed_bytes: int
    head_bytes: int
    """Stored bytes of the final norm and the head, without the embedding even if it is tied."""
    eos_token_ids: tuple[int, ...]
    """Ids of end-of-sequence tokens, from config.json and generation_config.json."""
    mapped_bytes: int = 0
    """Stored bytes of n-gram tables. Ranks read rows of them by memory map, so no memory is counted for them."""
    whole_bytes: tuple[int, ...] = ()
    """Bytes of each layer that tensor parallelism replicates: latent projections, routers, norms. Empty if unknown."""
    mlp_width: int = 0
    """Intermediate width of the dense MLPs. This and the next three fields are 0 if the family has no such part, or
    cannot run tensor-parallel."""
    expert_width: int = 0
    """Intermediate width of one routed expert."""
    shared_width: int = 0
    """Intermediate width of the shared experts together."""
    num_experts: int = 0
    axes: Mapping[str, Axis] = field(default_factory=dict)
    """Split axes of the family's own kinds, by kind."""
    payload_elements: int = 0
    """Elements per position from stage to stage, where layers hand on several residual streams, or token ids. 0: those of
    `hidden_size`."""
    layer_type: str = ""
    """Type of the layers; differs from `family` where a text model of another type is nested in it. Empty if not
    tensor-parallel."""
    token_elements: float = 0.0
    """Cache elements of one token in one layer, averaged over the layers. If this and `state_elements` are 0, standard
    attention is assumed."""
    state_elements: float = 0.0
    """Elements of recurrent state of one sequence in one layer, averaged over the layers."""
    float32_elements: float = 0.0
    """Elements of `state_elements` stored as float32 whatever the model's type."""
    mtp_bytes: int = 0
    """Stored bytes of the draft head (MTP) behind the last layer, without what it shares; 0 if there is none."""
    vision_bytes: int = 0
    """Stored bytes of the vision tower and its projector, which the first stage has; 0 if no pictures are read here."""
    no_drafts: str = ""
    """Reason why rejected draft tokens cannot be dropped from the caches; empty if they can."""
    replicated_cache: bool = False
    """Whether every rank of a tensor-parallel stage holds the whole cache (a latent has no heads to split)."""
    whole_elements: float = 0.0
    """Elements of `token_elements` that every rank replicates beside its heads: the keys of an index."""
    index_heads: int = 0
    """Heads of an index that selects positions; their scores over all positions take memory."""
    kv_groups: tuple[tuple[int, float], ...] = ()
    """Per layer: group size in which its keys and values can be quantised (0: not at all), and its cache elements per
    token."""
    latent_layers: frozenset[int] = frozenset()
    """Numbers of layers that cache a latent."""
    uncut: frozenset[int] = frozenset()
    """Layers at which no stage can begin, since they reuse keys and values of earlier layers."""
    mrope_section: tuple[int, ...] = ()
    """Rotary frequencies of each axis (time, row, column) of positions in pictures; empty if positions have one axis."""
    deepstack: int = 0
    """Number of first layers behind which features of pictures are added."""
    whole_pictures: bool = False
    """Whether positions of a picture attend to each other in both directions, so that it is computed in one chunk."""
    left_out: tuple[str, ...] = ()
    """Modalities that config.json describes and that are not loaded: `vision`, `audio`."""
    no_pictures: str = ""
    """Reason why it takes no pictures; empty if it takes them."""
    generates: bool = True
    """Whether the model has an output projection. A model stored without one (as by sentence-transformers) only embeds;
    the embedding then serves as projection."""

    @cached_property
    def layer_sums(self) -> tuple[int, ...]:
        """Running sums of `layer_bytes`, from 0; `num_layers + 1` entries."""
        return tuple(accumulate(self.layer_bytes, initial=0))

    @cached_property
    def whole_sums(self) -> tuple[int, ...]:
        """Running sums of `whole_bytes`, from 0; `num_layers + 1` entries."""
        return tuple(accumulate(self.whole_bytes or (0,) * self.num_layers, initial=0))

    def cache_share(self, heads: float) -> float:
        """Return the fraction of a position's cache on a rank that holds the fraction `heads` of the kv heads."""
        if self.replicated_cache:
            return 1.0
        whole = self.whole_elements / self.token_elements if self.token_elements else 0.0
        return heads + (1 - heads) * whole


def describe(files: ModelFiles, *, vision: bool = True) -> ModelDescription:
    """Read and check a model; headers of its weights suffice. Without `vision` its pictures are not read.

    Raise `BrokenModel` for damaged files, `UnsupportedModel` for a model that cannot run. Unlisted types of mlx-lm are
    described too: call `require_dry_run` (models/dry_run.py) before serving one.
    """
    config = text_config(read_config(files.path))
    name = config.get("model_type")
    if isinstance(name, str) and name in REFUSED:
        raise UnsupportedModel(f"{files.name}: {name} is not supported: {REFUSED[name]}")
    if not isinstance(name, str) or (name not in FAMILIES and not in_mlx_lm(module_of(name))):
        raise UnsupportedModel(
            f"{files.name}: model_type {name!r:.60} is not supported{_nearest(name)}; docs/models-list.md lists the "
            f"{len(FAMILIES)} types that are, and others of mlx-lm are tried when they are served"
        )
    family, text = family_of(name), nested_text(config).get("model_type")
    if family.text and text != family.text:
        raise UnsupportedModel(f"{files.name}: {name} is computed with a text model of type {family.text}, not {text!r:.60}")
    if not config.keys() & {"quantization", "quantization_config"} and (files.path / _MODELOPT).is_file():
        config = {**config, "quantization_config": {"quant_method": "modelopt"}}
    quantization = read_quantization(config, files.name)
    tensors = read_tensors(files)
    facts = _Facts(files.path, family, config)
    loaded = loaded_bytes(tensors, quantization.foreign)
    layers, embed, norm, head = _bytes(loaded, facts.num_layers, files.path)
    tied = _tied(family, config, has_head=head > 0)
    headless = not tied and not head and stored_bare(tensors, family.layers)
    tied = tied or headless
    kv_heads = facts.kv_heads()
    head_dim = facts.number(facts.key(_WIDTH_KEYS), facts.hidden_size // facts.num_heads)
    layer_type = text if name in _OF_SEVERAL and isinstance(text, str) and text in SHARDING else name
    no_pictures = why_no_pictures(config) or ("" if vision else OFF)
    known = facts.config
    with known.named():
        caches = layer_caches(known, facts.num_layers, 2 * kv_heads * head_dim)
        return ModelDescription(
            family=str(name),
            num_layers=facts.num_layers,
            hidden_size=facts.hidden_size,
            vocab_size=facts.number(facts.key(_VOCAB_KEYS)),
            num_heads=facts.num_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            token_elements=sum(cache.position for cache in caches) / len(caches),
            state_elements=sum(cache.state for cache in caches) / len(caches),
            float32_elements=sum(cache.float32 for cache in caches) / len(caches),
            no_drafts=_no_drafts(family, known.get("rope_scaling")),
            mtp_bytes=sum(loaded[one] for one in head_tensors(str(name), facts.num_layers, loaded)),
            replicated_cache=any(cache.replicated for cache in caches),
            whole_elements=sum(cache.whole for cache in caches) / len(caches),
            index_heads=index_heads(known),
            kv_groups=tuple(zip(kv_groups(known, caches, head_dim), (cache.position for cache in caches), strict=True)),
            latent_layers=frozenset(i for i, cache in enumerate(caches) if cache.kind == "latent"),
            max_context=facts.max_context(),
            payload_elements=facts.payload(family),
            dtype=stored_dtype(tensors),
            quantization=quantization.settings,
            tied_head=tied,
            layer_bytes=layers,
            mapped_bytes=sum(info.nbytes for name, info in tensors.items() if NGRAM_TABLE.match(name)),
            embed_bytes=embed,
            head_bytes=norm if tied else norm + head,
            eos_token_ids=eos_token_ids(files.path),
            uncut=uncut(known, facts.num_layers),
            vision_bytes=sum(loaded[one] for one in loaded if of_vision(one)) if not no_pictures and has_mlx_vlm() else 0,
            mrope_section=mrope_section(str(name), known),
            deepstack=deepstack(config),
            whole_pictures=known.get("use_bidirectional_attention") == "vision",
            left_out=tuple(sense for sense in ("vision", "audio") if config.get(f"{sense}_config")),
            no_pictures=no_pictures,
            generates=not headless,
            whole_bytes=_whole_bytes(loaded, facts.num_layers, layer_type),
            **facts.shares(layer_type),
        )


def _no_drafts(family: Family, scaling: object) -> str:
    known = scaling if isinstance(scaling, dict) and "alpha" not in scaling else {}  # alpha: one base (Hunyuan)
    if "dynamic" in (known.get("type"), known.get("rope_type")):
        return "its rotary embedding changes with a sequence's length (dynamic rope scaling)"
    return "" if family.can_draft else family.one_by_one


def _nearest(name: object) -> str:
    near = difflib.get_close_matches(name, list(FAMILIES), 1) if isinstance(name, str) else []
    return f" (nearest is {near[0]})" if near else ""


def text_config(config: JsonObject) -> JsonObject:
    """Return a config merged with the entries of its nested text model, if any; `model_type` stays the outer one."""
    return {**config, **nested_text(config), "model_type": config.get("model_type")}


def in_mlx_lm(module: str) -> bool:
    """Return whether the installed mlx-lm has a model module of that name, without importing it."""
    spec = importlib.util.find_spec("mlx_lm") if re.fullmatch(r"[\w-]+", module) else None
    places = spec.submodule_search_locations if spec is not None else None
    return any((Path(place) / "models" / f"{module}.py").is_file() for place in places or ())


class _Facts:
    """Integers of config.json, under the key names of the various families."""

    def __init__(self, path: Path, family: Family, config: JsonObject) -> None:
        unread = UNREAD.get(str(config.get("model_type")), ())
        entries = {**family.defaults, **section(config, "attn_config"), **config}  # attn_config: dbrx
        entries = {key: value for key, value in entries.items() if key not in unread}
        self._path, self.config = path, Watched(entries, path)
        layers = self.key(_LAYER_KEYS)
        self.num_layers = self.number(layers)
        if self.num_layers > _MAX_LAYERS:
            raise BrokenModel(
                f"{path}/config.json: {layers} is {self.num_layers}; at most {_MAX_LAYERS} make sense", param=layers
            )
        for key, value in entries.items():
            if type(value) is int and _DIVIDES.fullmatch(key):
                self.number(key)
        self.hidden_size = self.number(self.key(_HIDDEN_KEYS))
        # Models without attention name none, though their states have heads.
        stateful = "state_size" in self.config and "num_attention_heads" not in self.config
        self.num_heads = 1 if stateful else self.number(self.key(_HEAD_KEYS))

    def key(self, keys: tuple[str, ...]) -> str:
        """Return the first of `keys` that the config has, or `keys[0]`."""
        return next((key for key in keys if self.config.get(key) is not None), keys[0])

    def number(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if isinstance(value, list) and value and all(type(one) is int for one in value):
            value = max(value)  # one entry a layer
        if not is_count(value):
            raise BrokenModel(f"{self._path}/config.json: {key} must be a positive whole number, is {value!r:.100}", param=key)
        return value

    def kv_heads(self) -> int:
        """Return the number of kv heads; with latent attention every head has its own keys and values."""
        if isinstance(self.config.get("kv_lora_rank"), int):
            return self.num_heads
        if self.config.get("multi_query") is True:
            return 1
        if isinstance(sharing := self.config.get("n_shared_head"), int) and sharing > 0:
            return -(-self.num_heads // sharing)
        return self.number(self.key(_KV_KEYS), self.num_heads)

    def payload(self, family: Family) -> int:
        """Return `payload_elements`; a token id takes three."""
        return self.hidden_size * self.number(family.streams) + 3 * len(family.gives) if family.streams else 0

    def shares(self, name: str) -> JsonObject:
        """Return the fields of `ModelDescription` for tensor parallelism besides heads, for layers of type `name`."""
        sharding = SHARDING.get(name)
        if sharding is None:
            return {}
        experts = self._product(sharding.experts) if self._product((_EXPERT_COUNTS,)) else 0
        return {
            "layer_type": name,
            "mlp_width": self._product(sharding.mlp),
            "expert_width": experts,
            "shared_width": self._product(sharding.shared),
            "num_experts": self._product((_EXPERT_COUNTS,)) if experts else 0,
            "axes": sharding.axes(self.config) if sharding.axes is not None else {},
        }

    def _product(self, width: Width) -> int:
        """Return a `Width` as a number; 0 if it is empty, or if its keys are missing or not integers."""
        if not isinstance(width, tuple):
            if (found := width(self.config)) and not is_count(found):
                raise ValueError(found)
            return found
        product = 1 if width else 0
        for factor in width:
            product *= self._width(factor.split("|")) if isinstance(factor, str) else factor
        return product

    def _width(self, keys: Sequence[str]) -> int:
        key = next((key for key in keys if self.config.get(key) is not None), keys[0])
        value = self.config.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value == 0:
            return 0
        return self.number(key)

    def max_context(self) -> int:
        return self.number(self.key(_CONTEXT_KEYS), _DEFAULT_CONTEXT)


def stored_bare(names: Iterable[str], layers: str) -> bool:
    """Return True if tensors have the names of a model without output projection: `norm.weight` instead of
    `model.norm.weight`. `layers` is the family's path of the layers."""
    root, _, inner = layers.partition(".")
    names = list(names)
    return not any(name.startswith(root + ".") for name in names) and any(name.startswith(inner + ".") for name in names)


def of_vision(name: str) -> bool:
    """Return whether a stored tensor is of the vision tower or its projector."""
    return _OTHER_SENSES.match(name) is not None and "audio" not in name


def part_of_tensor(name: str, num_layers: int) -> int | Literal["embed", "head", "rest"] | None:
    """Return the part that a stored tensor belongs to: a layer's number, the embedding, the head, or the rest (final norm).

    None for tensors that are not loaded (multi-token prediction, vision, audio).
    """
    if _OTHER_SENSES.match(name):
        return None
    parts = name.split(".")
    if match := _LAYER.search(name):
        number = int(match[1])
        return number if number < num_layers and not _PREDICTORS.intersection(parts) else None
    if _PREDICTORS.intersection(parts):
        return None
    if any(part in _EMBEDDINGS for part in parts):
        return "embed"
    return "head" if any(part in _HEADS for part in parts) else "rest"


def _bytes(sizes: dict[str, int], count: int, path: Path) -> tuple[tuple[int, ...], int, int, int]:
    """Stored bytes: per layer, of the embedding, of the rest (final norm), and of the head (0 if none)."""
    layers, others = [0] * count, {"embed": 0, "rest": 0, "head": 0}
    for name, nbytes in sizes.items():
        part = part_of_tensor(name, count)
        if isinstance(part, int):
            layers[part] += nbytes
        elif part is not None:
            others[part] += nbytes
    if 0 in layers:
        raise BrokenModel(f"{path}: no weights of layer {layers.index(0)} of {count}")
    return tuple(layers), others["embed"], others["rest"], others["head"]


def _whole_bytes(sizes: dict[str, int], count: int, name: str) -> tuple[int, ...]:
    """Return the stored bytes of each layer that tensor parallelism replicates, in layers of type `name`; empty if it
    has no rules."""
    if (sharding := SHARDING.get(name)) is None:
        return ()
    layers: list[dict[str, int]] = [{} for _ in range(count)]
    for tensor, nbytes in sizes.items():
        if isinstance(part := part_of_tensor(tensor, count), int) and (match := _LAYER.search(tensor)):
            layers[part][tensor[match.end() :].removeprefix(".")] = nbytes

    def whole(layer: dict[str, int]) -> int:
        rules = sharding.of(layer)
        return sum(nbytes for path, nbytes in layer.items() if rules.keeps(path))

    return tuple(whole(layer) for layer in layers)


def stored_dtype(tensors: dict[str, TensorInfo]) -> str:
    """Return the embedding's type, which activations use; if it is quantised without float scales, the most common type."""
    sizes: dict[str, int] = {}
    for name, info in tensors.items():
        if info.dtype in _FLOATS:
            if any(part in _EMBEDDINGS for part in name.split(".")):
                return _FLOATS[info.dtype]
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    return _FLOATS[max(sizes, key=lambda k: sizes[k])] if sizes else "bfloat16"


def _tied(family: Family, config: JsonObject, *, has_head: bool) -> bool:
    if family.tied == "file":
        return not has_head
    if family.tied in ("always", "never"):
        return family.tied == "always"
    return bool(config.get("tie_word_embeddings", family.tied == "config-true"))
