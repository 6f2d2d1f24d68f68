"""Processors of checkpoints that see, with small settings, and pictures for them."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from tandem.testing import write_tokenizer

QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text }}{% endif %}{% endfor %}\n{% endfor %}"
)
WORDS = {
    "qwen2_5_vl": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
    "mistral3": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    "gemma3": ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
    "smolvlm": ["<fake_token_around_image>", "<image>", "<row_1_col_1>", "<row_1_col_2>", "<global-img>"],
    "internvl": ["<IMG_CONTEXT>", "<img>", "</img>", "<video>"],
    "kimi_vl": ["<|media_pad|>"],
    "lfm2-vl": ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", "<|img_row_1_col_1|>", "<|img_row_1_col_2|>"],
    "glm4v": ["<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>"],
    "llama4": [f"<|{name}|>" for name in ("patch", "image", "image_start", "image_end", "tile_x_separator", "tile_y_separator")],
    **dict.fromkeys(("gemma4", "gemma4_unified"), ["<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>"]),
}
TOKENIZER = {
    "qwen2_5_vl": {"chat_template": QWEN},
    "mistral3": {"chat_template": GEMMA.replace("<start_of_image>", "[IMG]")},
    "kimi_vl": {"chat_template": GEMMA.replace("<start_of_image>", "image:<|media_pad|>")},
    **dict.fromkeys(("smolvlm", "lfm2-vl"), {"chat_template": GEMMA.replace("<start_of_image>", "<image>")}),
    "glm4v": {"chat_template": GEMMA.replace("<start_of_image>", "<|begin_of_image|><|image|><|end_of_image|>")},
    "llama4": {"chat_template": GEMMA.replace("<start_of_image>", "<|image|>")},
    "internvl": {
        "chat_template": GEMMA.replace("<start_of_image>", "<IMG_CONTEXT>"),
        "extra_special_tokens": {
            **{"start_image_token": "<img>", "end_image_token": "</img>"},
            **{"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"},
        },
    },
    "gemma3": {
        "chat_template": GEMMA,
        "extra_special_tokens": {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
    },
    **dict.fromkeys(
        ("gemma4", "gemma4_unified"),
        {
            "chat_template": GEMMA.replace("<start_of_image>", "<|image|>"),
            "extra_special_tokens": {
                **{"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"},
                **{"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"},
            },
        },
    ),
}
PROCESSOR = {
    "qwen2_5_vl": {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "min_pixels": 64, "max_pixels": 65536},
    "mistral3": {"image_processor_type": "PixtralImageProcessor", "patch_size": 4, "size": {"longest_edge": 32}},
    "smolvlm": {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 16},
    },
    "kimi_vl": {"in_token_limit": 40, "patch_size": 4, "pad_input": True, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5] * 3},
    "llama4": {"size": {"height": 8, "width": 8}, "max_patches": 4, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5] * 3},
    "lfm2-vl": {
        **{"image_processor_type": "Lfm2VlImageProcessor", "tile_size": 16, "encoder_patch_size": 4, "downsample_factor": 2},
        **{"min_image_tokens": 1, "max_image_tokens": 4, "max_pixels_tolerance": 1.0},
    },
    "glm4v": {
        "image_processor_type": "Glm46VImageProcessor",
        "patch_size": 4,
        "size": {"shortest_edge": 64, "longest_edge": 65536},
    },
    "gemma4": {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "max_soft_tokens": 70},
    "internvl": {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": 8, "width": 8},
        "crop_to_patches": True,
        "max_patches": 4,
    },
    "gemma4_unified": {"image_processor_type": "Gemma4UnifiedImageProcessor", "patch_size": 4, "max_soft_tokens": 70},
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 8, "width": 8}},
}


def see(path: Path, kind: str, vocab: int = 480) -> None:
    """Write what the api reads of a checkpoint that sees; the tokens of pictures have ids from `vocab` on."""
    write_tokenizer(path, vocab)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in WORDS[kind]])
    tokenizer.save(str(path / "tokenizer.json"))
    config = json.loads((path / "tokenizer_config.json").read_text()) | TOKENIZER[kind]
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR[kind]))
    (path / "processor_config.json").write_text(
        json.dumps({"image_seq_length": 3, "image_seq_len": 4, "patch_size": 4, "spatial_merge_size": 2})
    )
    if not (path / "config.json").exists():
        vision = {"model_type": kind, "patch_size": 4, "pixel_shuffle_ratio": 0.5}
        tokens = {"media_placeholder_token_id": vocab, "image_token_index": vocab}
        config = {"model_type": kind, "vision_config": vision, **tokens}
        (path / "config.json").write_text(json.dumps(config))


def encoded(image: Any, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def noise(width: int = 32, height: int = 16, seed: int = 0) -> Any:
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def mutants(count: int, seed: int = 7) -> Iterator[tuple[str, bytes]]:
    """Damaged files of all kinds: bytes changed, cut out, doubled, or cut off."""
    rng = random.Random(seed)
    image = noise(24, 24)
    kinds = {
        "PNG": encoded(image),
        "JPEG": encoded(image, "JPEG"),
        "WEBP": encoded(image, "WEBP"),
        "GIF": encoded(image, "GIF"),
        "AVIF": encoded(image, "AVIF"),
    }
    for number in range(count):
        kind = list(kinds)[number % len(kinds)]
        raw = bytearray(kinds[kind])
        for _ in range(rng.choice((1, 1, 2, 8))):
            place = rng.randrange(min(len(raw), 64) if rng.random() < 0.5 else len(raw))
            how = rng.randrange(4)
            if how == 0:
                raw[place] ^= 1 << rng.randrange(8)
            elif how == 1:
                raw[place : place + 4] = rng.randbytes(4)
            elif how == 2:
                del raw[place : place + rng.randrange(1, 40)]
            else:
                raw[place:place] = raw[place : place + rng.randrange(1, 40)]
            if not raw:
                raw = bytearray(b"x")
        yield kind, bytes(raw)
