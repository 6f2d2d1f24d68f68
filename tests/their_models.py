"""Models as their own package loads and computes them, mlx-lm or mlx-vlm, for tests to compare with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from tandem.loading.build_model import build_model
from tandem.loading.text_tower import import_lazily
from tandem.models.description import in_mlx_lm
from tandem.models.families.table import family_of


class Theirs(NamedTuple):
    """A loaded model, and what its package does with it."""

    model: Any
    logits: Callable[..., Any]
    """Maps tokens, and `cache=`, to logits."""
    make_caches: Callable[..., list[Any]]
    expanded: Callable[[Any], Any]
    """Expands a quantised model in place."""


def load_theirs(path: Path) -> Theirs:
    """The model in a directory."""
    kind = json.loads((path / "config.json").read_text())["model_type"]
    if family_of(kind).source == "mlx_vlm":
        import_lazily()
        from mlx_vlm.models import cache
        from mlx_vlm.quant_utils import dequantize_model
        from mlx_vlm.utils import load_model

        model = load_model(path, strict=False, lazy=True)  # weights of other towers are not there
        text = model.language_model
        return Theirs(
            model, lambda *args, **more: text(*args, **more).logits, lambda _: cache.make_prompt_cache(text), dequantize_model
        )
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import MODEL_REMAPPING, dequantize_model, load_model

    ours = (
        (lambda config: (build_model, SimpleNamespace(from_dict=dict)))
        if not in_mlx_lm(MODEL_REMAPPING.get(kind, kind))
        else None
    )
    model, _ = load_model(path, **({"get_model_classes": ours} if ours else {}))
    return Theirs(model, model, make_prompt_cache, dequantize_model)
