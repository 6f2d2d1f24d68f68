"""Language models of mlx-vlm, called as mlx-lm's models are (mlx). The other towers are never computed nor loaded.

mlx-vlm's packages import processors, transformers, and what training, sound and video need. They are replaced by empty
ones that run their `__init__` only when it is asked for something. Submodules with model code import without it.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as mlx_lm_caches

from tandem.json_types import JsonObject
from tandem.loading.mlx_vlm_mends import mend

_CONFIGS = ("text", "vision", "audio")
_PLACES = (("Config", "config"), ("VisionModel", "vision"), ("LanguageModel", "language"))
"""Submodules of mlx-vlm's packages that have the classes whose names end so."""
_PLAIN = frozenset(("KVCache", "HyV4KVCache"))
"""Cache classes of mlx-vlm that compute as mlx-lm's KVCache, and differ from it in how they grow at most."""


class TextTower(nn.Module):
    """The language model of one of mlx-vlm's models, or one of mlx-lm's in its place."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.language_model = model.language_model
        object.__setattr__(self, "_whole", model)  # not a child, whose towers would be loaded
        self.cast_predicate = getattr(model.language_model, "cast_predicate", None)
        self.quant_predicate = getattr(model.language_model, "quant_predicate", None)

    def __call__(self, tokens: mx.array, cache: Any = None) -> Any:
        """Map tokens [B, L] to logits [B, L, V]."""
        positions = {}
        if hasattr(self.language_model, "_rope_deltas"):  # Qwen's modules keep those of one sequence unless they are given
            start = next((one.offset for one in cache or () if hasattr(one, "offset")), 0)
            positions["position_ids"] = mx.broadcast_to(start + mx.arange(tokens.shape[1])[None], tokens.shape)
            self.language_model._batch_invariant_decode = None  # a second forward pass, which walks the layers' insides
        logits: Any = self.language_model(tokens, cache=cache, **positions)
        return getattr(logits, "logits", logits)  # mlx-lm's models return no more

    @property
    def layers(self) -> list[nn.Module]:
        """Decoder layers."""
        layers: list[nn.Module] = self.language_model.layers
        return layers

    def make_cache(self) -> list[Any]:
        """Return fresh caches of one sequence, as mlx-lm's classes where these compute alike."""
        return [_shared(cache) for cache in self.own_caches()]

    def own_caches(self) -> list[Any]:
        """Return fresh caches of one sequence as the model makes them."""
        return list(mlx_lm_caches.make_prompt_cache(self.language_model))

    def sanitize(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return the language model's weights under its names."""
        found = self._whole.sanitize(dict(weights))
        return {name: array for name, array in found.items() if name.startswith("language_model.")}


def build_whole(config: JsonObject, name: str) -> Any:
    """Build all of a model as mlx-vlm's `load_model` does, by its module `name`, with random weights, which stay lazy."""
    import_lazily()
    arch = importlib.import_module(f"mlx_vlm.models.{name}.{name}")
    mend(name)
    configs = importlib.import_module(f"mlx_vlm.models.{name}.config")
    entries = {**{f"{part}_config": {} for part in _CONFIGS}, **copy.deepcopy(config)}
    made = configs.ModelConfig.from_dict(entries)
    for part in _CONFIGS:
        if hasattr(made, f"{part}_config") and hasattr(configs, f"{part.title()}Config"):
            setattr(made, f"{part}_config", getattr(configs, f"{part.title()}Config").from_dict(entries[f"{part}_config"]))
    return arch.Model(made)


def _shared(cache: Any) -> Any:
    """Return mlx-lm's cache for one of mlx-vlm's that computes alike, else the cache itself."""
    kind = type(cache).__name__
    if kind in _PLAIN:
        return mlx_lm_caches.KVCache()
    if kind == "RotatingKVCache":
        return mlx_lm_caches.RotatingKVCache(max_size=cache.max_size, keep=cache.keep)
    if kind == "CacheList":
        return mlx_lm_caches.CacheList(*map(_shared, cache.caches))
    if not isinstance(cache, mlx_lm_caches._BaseCache):
        cache.__class__ = _with_one_state(type(cache))  # type: ignore[arg-type]
    return cache


@functools.cache
def _with_one_state(kind: Any) -> type:
    """Return a subclass of one of mlx-vlm's cache classes whose `state` is all of it, as in mlx-lm."""

    def from_state(cls: Any, state: Any) -> Any:
        *theirs, earlier = state
        made = kind.from_state(*theirs)
        made.__class__, made.earlier = cls, earlier
        return made

    # `earlier` is kept by compressed keys of deepseek_v4, see mlx_vlm_mends.py.
    state = property(lambda self: (kind.state.fget(self), kind.meta_state.fget(self), getattr(self, "earlier", None)))
    return type(kind.__name__, (kind,), {"state": state, "from_state": classmethod(from_state), "merge": None})


def import_lazily() -> None:
    """Replace mlx-vlm's packages in `sys.modules`. No effect if mlx-vlm is already imported."""
    if "mlx_vlm" in sys.modules:
        return
    spec = importlib.util.find_spec("mlx_vlm")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    for file in (root / "__init__.py", *root.glob("models/*/__init__.py"), *root.glob("speculative/**/__init__.py")):
        name = ".".join(("mlx_vlm", *file.parent.relative_to(root).parts))
        own = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[str(file.parent)])
        assert own is not None
        module = sys.modules[name] = importlib.util.module_from_spec(own)
        module.__dict__["__getattr__"] = functools.partial(_executed, module)


def _executed(module: ModuleType, name: str) -> Any:
    """Return a package's submodule `name`, or run its `__init__` and return its attribute `name`."""
    if name.startswith("__") or "__getattr__" not in module.__dict__:
        raise AttributeError(name)
    if name.startswith("processing"):  # model code imports processors for what they register, and calls none
        return ModuleType(f"{module.__name__}.{name}")
    own = module.__name__.rpartition(".")[2]
    place = f"{module.__name__}.{own if name == 'Model' else next((place for end, place in _PLACES if name.endswith(end)), '-')}"
    if importlib.util.find_spec(place):
        return getattr(importlib.import_module(place), name)
    del module.__dict__["__getattr__"]
    assert module.__spec__ is not None and module.__spec__.loader is not None
    module.__spec__.loader.exec_module(module)
    return getattr(module, name)
