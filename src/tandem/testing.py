"""Tiny random models in MLX format, for tests and experiments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.json_types import JsonMapping, JsonObject
from tandem.models.families.tiny import EOS, TINY, tiny_config

if TYPE_CHECKING:
    import mlx.core as mx

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
__all__ = ["EOS", "TINY", "tiny_config", "tiny_model", "write_tokenizer"]
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tiny_model(
    directory: Path | str,
    family: str = "llama",
    *,
    layers: int = 4,
    quantized: bool = False,
    seed: int = 0,
    vocab: int = 512,
    dtype: str = "bfloat16",
    shards: int = 1,
    config: JsonMapping | None = None,
    settings: JsonMapping | None = None,
) -> Path:
    """Write a tiny random model of `family` (see `TINY`) into `directory` and return its path.

    Weights are stored as `dtype` in `shards` files; `quantized` stores 4 bits in groups of 32 (gpt_oss: experts as mxfp4).
    `config` overrides entries of config.json; `settings` replaces all of it. The byte-level tokenizer has `vocab` entries
    (at least 300). Equal arguments give equal weights. Needs mlx.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    settings = dict(settings or tiny_config(family, layers=layers, vocab=vocab, overrides=config))
    arrays = random_weights(settings, quantized=quantized, seed=seed, dtype=dtype)
    _save(path, arrays, shards)
    (path / "config.json").write_text(json.dumps(settings, indent=2))
    write_tokenizer(path, vocab)
    return path


def random_weights(settings: JsonObject, *, quantized: bool, seed: int, dtype: str) -> dict[str, mx.array]:
    """Return the weights that `tiny_model` writes, by name; with `quantized` add the layout to `settings`."""
    # mlx is imported lazily: tests of packages without mlx import this module too.
    import mlx.core as mx
    import mlx.nn as nn
    import numpy as np
    from mlx.utils import tree_flatten, tree_unflatten

    from tandem.loading.build_model import build_model

    model = build_model(settings)
    rng = np.random.default_rng(seed)
    arrays = []
    for name, array in sorted(tree_flatten(model.parameters())):
        if not mx.issubdtype(array.dtype, mx.floating):  # experts by token are zeros as they are made
            arrays.append(
                (name, array if mx.any(array).item() else mx.array(rng.integers(0, 2, array.shape)).astype(array.dtype))
            )
            continue
        noise = rng.standard_normal(array.shape, dtype=np.float32)
        values = 1 + 0.1 * noise if array.ndim == 1 and name.endswith("weight") else noise / 4
        arrays.append((name, mx.array(values).astype(getattr(mx, dtype))))
    model.update(tree_unflatten(arrays))
    if quantized:
        settings["quantization"] = {"group_size": 32, "bits": 4}

        allowed = getattr(model, "quant_predicate", None) or (lambda path, leaf: True)

        def predicate(path: str, leaf: nn.Module) -> bool | JsonObject:
            if allowed(path, leaf) is False or not hasattr(leaf, "to_quantized") or leaf.weight.shape[-1] % 32:
                return False
            if settings["model_type"] == "gpt_oss" and ".experts." in path:
                settings["quantization"][path] = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
                return dict(settings["quantization"][path])
            return True

        nn.quantize(model, 32, 4, class_predicate=predicate)
    return dict(tree_flatten(model.parameters()))


def _save(path: Path, arrays: dict[str, mx.array], shards: int) -> None:
    import mlx.core as mx

    if shards == 1:
        mx.save_safetensors(str(path / "model.safetensors"), arrays, {"format": "mlx"})
        return
    names = sorted(arrays)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        mx.save_safetensors(str(path / file), {name: arrays[name] for name in part}, {"format": "mlx"})
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_tokenizer(path: Path, vocab: int = 512) -> None:
    """Write a byte-level BPE tokenizer with `vocab` entries and a ChatML template: special tokens, bytes, merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = "etaoinshrdlucmfwypvbgkjqxz"
    symbols = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = [(a, b) for a in ("Ġ", *letters) for b in letters]
    pairs = pairs[: max(0, vocab - len(symbols))]
    symbols += [a + b for a, b in pairs]
    extra = [f"<|reserved_{i}|>" for i in range(vocab - len(symbols))]
    symbols += extra
    tokenizer = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in (*_SPECIAL, *extra)])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL[0],
        "eos_token": _SPECIAL[2],
        "pad_token": _SPECIAL[0],
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
