"""Model types whose pictures are read. Plain data; the arithmetic is mlx-vlm's (runner/pictures.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.checkpoints.config import nested_text, section
from tandem.json_types import JsonMapping

if TYPE_CHECKING:
    from tandem.models.description import ModelDescription

FEATURE_BYTES = 256 * 2**20
"""Most bytes of features on each rank of the first stage."""
INPUT_BYTES = 64 * 2**20
"""Most bytes of one picture's inputs."""
OFF = "pictures are switched off on the server (--vision off)"
"""Reason why pictures of a model that is served for text alone are not read."""
_MROPE = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), (16, 24, 24)),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), (24, 20, 20)),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), (11, 11, 10)),
    **dict.fromkeys(("glm4v", "glm4v_moe"), (8, 12, 12)),
}
"""Types whose positions have three axes in pictures, and the rotary frequencies of each axis where config.json has none."""
_ONE_AXIS = "gemma3 gemma4 gemma4_unified idefics3 internvl kimi_k25 kimi_vl lfm2-vl llama4 mistral3 pixtral smolvlm"
SEES = (*_ONE_AXIS.split(), *_MROPE)
"""Model types whose encoder is in mlx-vlm's module of that name."""


def why_no_pictures(config: JsonMapping) -> str:
    """Return why a model's pictures are not read; empty if they are."""
    model_type, text = str(config.get("model_type")), nested_text(config) or config
    if not config.get("vision_config"):
        return f"it takes text alone (model_type {model_type})"
    if model_type not in SEES:
        return f"pictures are read by models of type {', '.join(SEES)}, and this one's is {model_type!r}"
    if model_type in _MROPE and not mrope_section(model_type, text):
        return "its rotary embedding is scaled (rope_scaling), which is not done for positions in pictures"
    if model_type.startswith("gemma4") and text.get("use_bidirectional_attention") not in (None, False, "vision"):
        return "all its text is read in both directions (use_bidirectional_attention), and here only pictures are"
    return ""


def mrope_section(model_type: str, config: JsonMapping) -> tuple[int, ...]:
    """Return the rotary frequencies of each axis of positions; empty if they have one axis, or are scaled."""
    rope = section(config, "rope_parameters") or section(config, "rope_scaling")
    if model_type not in _MROPE or (rope.get("rope_type") or rope.get("type") or "default") not in ("default", "mrope"):
        return ()
    found = rope.get("mrope_section")
    if isinstance(found, list) and len(found) == 3 and all(isinstance(one, int) for one in found):
        return tuple(found)
    return _MROPE[model_type]


def deepstack(config: JsonMapping) -> int:
    """Return the number of first layers behind which features of pictures are added."""
    found = section(config, "vision_config").get("deepstack_visual_indexes")
    return len(found) if isinstance(found, list) else 0


def rotary_axes(description: ModelDescription, count: int) -> list[int]:
    """Return the axis of positions (0 time, 1 row, 2 column) that each of `count` rotary frequencies turns by."""
    times, rows, columns = description.mrope_section
    if description.family in ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm4v_moe"):  # axis after axis; those of others alternate
        return ([0] * times + [1] * rows + [2] * columns + [0] * count)[:count]
    lengths = (0, 3 * rows, 3 * columns)
    return [i % 3 if i < lengths[i % 3] else 0 for i in range(count)]
