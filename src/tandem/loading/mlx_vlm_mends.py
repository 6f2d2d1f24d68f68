"""Mends of mlx-vlm's model modules, for the versions that models/sources.py allows (mlx).

`tests/loading/test_loading_mlx_vlm.py` fails for each of the first two once upstream needs it no more.

*hy_v4*: its indexer selects with `argpartition` inside a shapeless `mx.compile`, which keeps the place of the length it
was traced with first. At other lengths most of the selected positions are wrong, and logits depend on how a prompt is cut
into chunks. The mend compiles for each shape.

*deepseek_v4*: windows of compressed keys overlap, but the first of each chunk, and each in decode, is computed as if none
were before it. The mend keeps the last window in the cache.

*glm5_next*: it keeps the projected keys and values of all heads for the first 32,768 tokens beside the latent, 64 times as
much memory. The mend projects them anew for each chunk of a prompt, as upstream does beyond that length.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList


def compressed(theirs: Callable[..., mx.array], compressor: Any, x: mx.array, cache: Any, offset: Any) -> mx.array:
    """Return the compressed keys of all windows so far; `theirs` is upstream's, which `compressor` calls with `cache`."""
    if cache is None or not compressor.overlap:
        return theirs(compressor, x, cache, offset)
    kv, gate, base = cache.accumulate_windows(compressor.wkv(x), compressor.wgate(x), offset)
    if kv.size == 0:
        new = mx.zeros((x.shape[0], 0, compressor.head_dim), x.dtype)
    else:
        windows = [mx.unflatten(part, 1, (-1, compressor.compress_ratio)) for part in (kv, gate)]
        earlier = getattr(cache, "earlier", None)
        cache.earlier = tuple(part[:, -1:] for part in windows)
        if earlier is not None:
            windows = [mx.concatenate(list(parts), axis=1) for parts in zip(earlier, windows, strict=True)]
        compress = sys.modules[type(compressor).__module__]._overlap_compress_kv
        new = compress(*windows, compressor.ape, compressor.head_dim)[:, int(earlier is not None) :]
        new = compressor.rope(compressor.norm(new)[:, None], offset=base).squeeze(1)
    keys: mx.array = cache.update_and_fetch(new)
    return keys


def mend(name: str) -> None:
    """Mend the imported modules of one of mlx-vlm's model packages. Idempotent."""
    language = sys.modules.get(f"mlx_vlm.models.{name}.language")
    if name == "hy_v4":
        sys.modules["mlx_vlm.models.hy_v4.indexer"].__dict__["partial"] = lambda compile_, **_: compile_  # for `shapeless` alone
    elif name == "glm5_next":
        language.__dict__["_MAX_PROJECTED_PREFILL_TOKENS"] = 0
    elif name == "deepseek_v4" and language.__dict__["CacheList"] is not CacheList:
        language.__dict__["CacheList"] = CacheList  # ours are mlx-lm's, and the model asks for the class
        theirs = language.__dict__["Compressor"].__call__
        language.__dict__["Compressor"].__call__ = lambda *args: compressed(theirs, *args)
