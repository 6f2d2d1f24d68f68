"""Tiny random models that see, their pictures, and what mlx-vlm alone answers."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from safetensors.numpy import save

from processors import see
from tandem.json_types import JsonObject
from tandem.loading.text_tower import build_whole
from tandem.models.families.tiny import tiny_config
from tandem.protocol.pictures import Picture
from tandem.testing import write_tokenizer

IMAGE = 500
"""Token id of placeholders."""
SEPARATOR = 501
"""Token id between rows of placeholders."""
START = 502
"""Token id before a picture, where mlx-vlm counts pictures by it."""
_TOWER: JsonObject = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2, "patch_size": 4,
}  # fmt: skip
_QWEN: JsonObject = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_heads": 2, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
_MOON: JsonObject = {
    "model_type": "moonvit",
    "embed_dim": 32,
    "num_heads": 2,
    "depth": 2,
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
}
GRIDS = ((1, 8, 6), (1, 4, 12), (1, 2, 8))
"""Patches (time, rows, columns) of pictures of models with positions of three axes, by seed."""
VISION: dict[str, JsonObject] = {
    "gemma3": {"vision_config": {**_TOWER, "model_type": "siglip_vision_model", "image_size": 16}},
    "mistral3": {"vision_config": {**_TOWER, "model_type": "pixtral", "head_dim": 16, "image_size": 16}},
    "pixtral": {"vision_config": {**_TOWER, "model_type": "pixtral", "head_dim": 16, "image_size": 16}},
    "gemma4": {"vision_config": {**_TOWER, "head_dim": 16, "num_key_value_heads": 2, "pooling_kernel_size": 2}},
    "gemma4_unified": {"vision_config": {"patch_size": 4, "model_patch_size": 8, "mm_embed_dim": 32, "output_proj_dims": 32}},
    "idefics3": {"vision_config": {**_TOWER, "model_type": "idefics3", "image_size": 16}},
    "internvl": {"vision_config": {**_TOWER, "model_type": "internvl_vision", "image_size": 16}},
    "kimi_k25": {"vision_config": {**_TOWER, **_MOON}},
    "kimi_vl": {"vision_config": {**_TOWER, **_MOON}},
    "lfm2-vl": {"vision_config": {**_TOWER, "model_type": "lfm2_vl", "num_patches": 16}, "projector_hidden_size": 48},
    "llama4": {
        "vision_config": {
            **_TOWER,
            "model_type": "llama4_vision_model",
            "image_size": 16,
            "initializer_range": 0.02,
            "norm_eps": 1e-5,
            "num_channels": 3,
            "pixel_shuffle_ratio": 0.5,
            "projector_dropout": 0.0,
            "projector_input_dim": 48,
            "projector_output_dim": 48,
            "rope_theta": 10000.0,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
            "vision_output_dim": 48,
            "intermediate_size": 128,
        }
    },
    "smolvlm": {"vision_config": {**_TOWER, "model_type": "smolvlm_vision", "image_size": 16}},
    "glm4v": {"vision_config": {**_QWEN, "model_type": "glm4v", "image_size": 16}},
    "glm4v_moe": {"vision_config": {**_QWEN, "model_type": "glm4v_moe", "image_size": 16}},
    "qwen2_vl": {"vision_config": {**_QWEN, "embed_dim": 32, "hidden_size": 64}},
    "qwen2_5_vl": {"vision_config": {**_QWEN, "fullatt_block_indexes": [1], "window_size": 16}},
    "qwen3_vl": {"vision_config": {**_QWEN, "depth": 3, "deepstack_visual_indexes": [0, 1, 2], "num_position_embeddings": 16}},
    "qwen3_vl_moe": {"vision_config": {**_QWEN, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}},
    "qwen3_5": {"vision_config": {**_QWEN, "num_position_embeddings": 16}},
    "qwen3_5_moe": {"vision_config": {**_QWEN, "num_position_embeddings": 16}},
}
PLACES = {
    "gemma3": (4, 0),
    "gemma4": (24, 0),
    "gemma4_unified": (24, 0),
    "idefics3": (4, 0),
    "internvl": (4, 0),
    "kimi_k25": (6, 0),
    "kimi_vl": (6, 0),
    "lfm2-vl": (4, 0),
    "llama4": (4, 3),
    "smolvlm": (4, 0),
    "mistral3": (2, 2),
    "pixtral": (4, 4),
}
"""Placeholders in a row of a picture of 16 x 16, and rows that end with a separator of their own; (n, 0): no rows. Those of
gemma4 are larger, beyond its window."""

_TEXT = {"language_model.lm_head": "lm_head", "language_model.model": "model.language_model"}
STORED = {
    "glm4v": {**_TEXT, "vision_tower": "model.visual"},
    "lfm2-vl": {**_TEXT, "vision_tower": "model.vision_tower", "multi_modal": "model.multi_modal"},
}
"""Types that are stored as by transformers: beginnings of names in mlx-vlm, and there."""


def seeing_model(directory: Path, family: str) -> Path:
    """Write a tiny random model with its vision tower, as mlx-vlm stores it."""
    config = tiny_config(family, layers=4, vocab=512)
    text = {key: value for key, value in config.items() if key not in ("text_config", "model_type")}
    config["text_config"] = {"model_type": "llama", **text, **config["text_config"], "mm_tokens_per_image": 4}
    config["text_config"]["rope_theta"] = 1e6  # mlx-vlm reads no other of gemma3
    config |= {
        **VISION[family],
        "image_token_index": IMAGE,
        "image_token_id": IMAGE,
        "media_placeholder_token_id": IMAGE,
        "vocab_size": 512,
        "hidden_size": 64,
        "pad_token_id": 0,
    }
    if family == "lfm2-vl":
        config["model_type"] = "lfm2_vl"  # as transformers spells it
        config["text_config"]["tie_word_embeddings"] = True
    if family == "gemma4":  # as its larger models are, and unified ones if nothing is said
        config["text_config"]["use_bidirectional_attention"] = "vision"
    if family == "gemma4_unified":
        config["text_config"] |= {"attention_k_eq_v": False, "use_double_wide_mlp": True}  # mlx-vlm assumes others of the unified
    if family not in PLACES:
        config["vision_start_token_id"] = START
        rope: JsonObject = {"type": "default", "mrope_section": [2, 3, 3]}
        if family.startswith("glm4v"):
            rope["mrope_section"] = [2, 1, 1]
        elif family.startswith("qwen3_5"):
            rope = {"type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        config["text_config"] |= {"rope_parameters" if "rope_theta" in rope else "rope_scaling": rope}
    if family.startswith("gemma4"):  # where it is not said, mlx-vlm rotates more than mlx-lm
        full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
        config["text_config"]["rope_parameters"] = {
            "full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }  # fmt: skip
    rng = np.random.default_rng(1)
    arrays = {}
    for name, array in sorted(
        tree_flatten(build_whole({**config["text_config"], **config}, family.replace("-", "_")).parameters())
    ):
        noise = rng.standard_normal(array.shape, dtype=np.float32)
        arrays[name] = mx.array(1 + 0.1 * noise if array.ndim == 1 and name.endswith("weight") else noise / 4)
    if family == "gemma3":  # features are divided by the root of the width
        arrays["multi_modal_projector.mm_input_projection_weight"] *= 16
    for name in arrays if family not in PLACES else ():
        if name.endswith("A_log"):
            arrays[name] -= 3  # states forget what was read a few tokens ago otherwise
        elif name.endswith(("self_attn.q_proj.weight", "self_attn.q_norm.weight")):
            arrays[name] *= 4  # attention hardly looks at positions otherwise
    for old, new in STORED.get(family, {}).items():
        arrays = {name.replace(old, new): array for name, array in arrays.items()}
    directory.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(directory / "model.safetensors"), arrays, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)
    return directory


def served_model(directory: Path, context: int = 0) -> Path:
    """Write a tiny random mistral3 with its processor and tokenizer. `context`: its longest prompt, if not as it is made."""
    model = seeing_model(directory, "mistral3")
    see(model, "mistral3", IMAGE)
    settings = {"image_processor_type": "PixtralImageProcessor", "patch_size": 4, "size": {"longest_edge": 16}}
    (model / "preprocessor_config.json").write_text(json.dumps(settings))
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = context or config["text_config"]["max_position_embeddings"]
    (model / "config.json").write_text(json.dumps(config))
    return model


def inputs(family: str, *seeds: int) -> dict[str, np.ndarray]:
    """What the processor makes of pictures of 16 x 16, each of noise."""
    if family not in PLACES:
        grids = np.array([GRIDS[seed % len(GRIDS)] for seed in seeds], np.int64)
        random = zip(map(np.random.default_rng, seeds), grids, strict=True)
        patches = [rng.standard_normal((grid.prod(), 96)) for rng, grid in random]
        return {"pixel_values": np.concatenate(patches).astype(np.float32), "image_grid_thw": grids}
    if family.startswith("gemma4"):  # patches in rows; the unified ones are as large as four
        width, height, size = (4, 6, 192) if family == "gemma4_unified" else (8, 12, 48)
        places = np.stack(np.meshgrid(np.arange(width), np.arange(height)), axis=-1).reshape(-1, 2)
        patches = [np.random.default_rng(seed).standard_normal((len(places), size)).astype(np.float32) for seed in seeds]
        return {"pixel_values": np.stack(patches), "image_position_ids": np.stack([places] * len(seeds))}
    if family.startswith("kimi"):
        patches = [np.random.default_rng(seed).standard_normal((24, 3, 4, 4)).astype(np.float32) for seed in seeds]
        return {"pixel_values": np.concatenate(patches), "image_grid_hws": np.array([[6, 4]] * len(seeds))}
    if family == "lfm2-vl":
        patches = [np.random.default_rng(seed).standard_normal((16, 48)).astype(np.float32) for seed in seeds]
        shapes = np.array([[4, 4]] * len(seeds), np.int32)
        return {
            "pixel_values": np.stack(patches),
            "pixel_attention_mask": np.ones((len(seeds), 16), np.int32),
            "spatial_shapes": shapes,
        }
    pixels = [np.random.default_rng(seed).standard_normal((3, 16, 16)).astype(np.float32) for seed in seeds]
    if family in ("idefics3", "smolvlm"):
        return {"pixel_values": np.stack(pixels)[None], "pixel_attention_mask": np.ones((1, len(seeds), 16, 16), np.int64)}
    if family == "llama4":  # two tiles and their overview
        return {"pixel_values": np.concatenate([np.stack([one, one[:, ::-1], one * 2]) for one in pixels])}
    sizes = {} if family in ("gemma3", "internvl") else {"image_sizes": np.array([[16, 16]] * len(seeds), np.int64)}
    return {"pixel_values": np.stack(pixels), **sizes}


def prompt_with(family: str, *parts: list[int] | int) -> tuple[list[int], tuple[Picture, ...]]:
    """Tokens of a prompt and its pictures: text as tokens, and the seeds of pictures."""
    tokens: list[int] = []
    pictures = []
    for part in parts:
        if isinstance(part, list):
            tokens += part
            continue
        if family not in PLACES or family.startswith("gemma4"):
            tokens.append(START)
        _, *grid = (0, 0, 0) if family in PLACES else (side // 2 for side in GRIDS[part % len(GRIDS)])
        row, rows = PLACES.get(family, (math.prod(grid), 0))
        span = [IMAGE] * row if not rows else ([IMAGE] * row + [SEPARATOR]) * rows
        span = span[:-1] if rows else span
        data = save(inputs(family, part))
        pictures.append(Picture(hashlib.sha256(data).hexdigest(), len(tokens), len(span), *grid, inputs=data, size=len(data)))
        tokens += span
    return tokens, tuple(pictures)


def alone(directory: Path, family: str, count: int, *parts: list[int] | int) -> list[int]:
    """What mlx-vlm's own model answers, greedily."""
    config = json.loads((directory / "config.json").read_text())
    model: Any = build_whole({**config["text_config"], **config}, family.replace("-", "_"))
    weights: Any = mx.load(str(directory / "model.safetensors"))
    model.load_weights(list((model.sanitize(weights) if family in STORED else weights).items()))
    tokens, _ = prompt_with(family, *parts)
    arrays = {name: mx.array(one) for name, one in inputs(family, *(one for one in parts if isinstance(one, int))).items()}
    ids = mx.array([tokens])
    embeds = model.get_input_embeddings(ids, arrays.pop("pixel_values"), mask=mx.ones(ids.shape, mx.int32), **arrays)
    cache, found = make_prompt_cache(model.language_model), list[int]()
    taken = {"inputs_embeds": embeds.inputs_embeds, "position_ids": embeds.position_ids}
    if family.startswith("gemma4"):
        taken["mm_token_type_ids"] = (ids == IMAGE).astype(mx.int32)
    taken |= {name: getattr(embeds, name) for name in ("visual_pos_masks", "deepstack_visual_embeds", "per_layer_inputs")}
    logits = model.language_model(ids, cache=cache, **{key: one for key, one in taken.items() if one is not None}).logits
    while len(found) < count:
        place = {}
        if embeds.rope_deltas is not None:
            place["position_ids"] = mx.broadcast_to(len(tokens) + len(found) + embeds.rope_deltas, (3, 1, 1))
        found.append(int(mx.argmax(logits[0, -1])))
        logits = model.language_model(mx.array([found[-1:]]), cache=cache, **place).logits
    return found
