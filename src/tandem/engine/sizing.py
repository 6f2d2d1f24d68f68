"""How much a gang of ranks can hold and do at once: the scheduler's limits, from settings and what ranks report."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from tandem.cache.budget import held_sequences, kv_capacity
from tandem.cache.prefix import BLOCK
from tandem.config.settings import Settings, SpeculationSettings
from tandem.config.speculation import with_speculative_config
from tandem.engine.layout import GangLayout
from tandem.errors import OutOfMemory, UnsupportedModel
from tandem.models.description import ModelDescription
from tandem.models.footprint import prefill_chunk
from tandem.models.kv_types import nothing_to_quantize
from tandem.protocol.control import Ready
from tandem.scheduler.limits import Limits
from tandem.speculation.proposers import SpeculationLimits

log = logging.getLogger(__name__)

METAL_QUERIES = 32
"""Most queries of one head of keys, over the tokens of a row, for which MLX's fused attention for short queries takes a
step on Metal (`sdpa_vector`: tokens times query heads per kv head); more of them are computed without it."""


def make_limits(settings: Settings, layout: GangLayout, ranks: Sequence[Ready], *, shrink: bool,
                shed: int = 0) -> Limits:
    """What the scheduler must keep to with these ranks. Raises OutOfMemory.

    `shrink`: fewer KV tokens than the settings ask for will do, if there is no room for more. `shed`: how often a
    GPU's memory has been full in spite of these limits; each time they are halved.
    """
    chosen = settings.scheduler
    chunk = prefill_chunk(chosen.prefill_chunk, gpu=ranks[0].gpu)
    kv_tokens = max(_kv_tokens(settings, layout, ranks, shrink=shrink) >> shed, 2)
    prefix_tokens = int(kv_tokens * chosen.prefix_cache)
    snapshot = max(-(-ready.state_bytes // max(_most(ranks), 1)) for ready in ranks)
    if 0 < prefix_tokens < snapshot + BLOCK:
        log.warning("prefix cache is off: a snapshot of this model's states takes as much memory as %d tokens of KV, "
                    "and %d are set aside; raise --kv-tokens or --prefix-cache", snapshot, prefix_tokens)
    return Limits(
        prefix_extra=snapshot,
        prefix_tokens=prefix_tokens,
        prefix_trimmable=all(ready.trimmable for ready in ranks),
        lanes=layout.lanes, max_batch_size=max(chosen.max_batch_size >> shed, 1),
        prefill_chunk=max(chunk >> shed, 1), kv_tokens=kv_tokens,
        prefill_time_s=None if chosen.prefill_time_ms is None else chosen.prefill_time_ms / 1000,
        max_context=layout.max_context, max_queue=chosen.max_queue, max_queue_tokens=chosen.max_queue_tokens,
        eos_token_ids=frozenset(layout.description.eos_token_ids), vocab_size=layout.description.vocab_size,
        speculation=_speculation(settings.speculation, layout.description, ranks),
        digests=chosen.canary and len(ranks) > 1)


def require_quantized(layout: GangLayout, ranks: Sequence[Ready]) -> None:
    """Raises UnsupportedModel where quantised KV was asked for, and no rank has a layer for it."""
    asked = layout.ranks[0].kv_dtype
    if asked != "auto" and not any(ready.quantized_layers for ready in ranks):
        raise UnsupportedModel(nothing_to_quantize(asked, layout.description.family), param="kv_dtype")


def _speculation(settings: SpeculationSettings, model: ModelDescription,
                 ranks: Sequence[Ready]) -> SpeculationLimits | None:
    chosen = with_speculative_config(settings)
    if chosen.speculative_method == "none":
        return None
    drafts = chosen.num_speculative_tokens
    if any(ready.metal for ready in ranks):
        group = max(model.num_heads // max(model.num_kv_heads, 1), 1)
        drafts = min(drafts, METAL_QUERIES // group - 1)
    if drafts < chosen.num_speculative_tokens:
        log.warning("Metal's fused attention does not take %d drafts at once with this model's heads; %d are made",
                    chosen.num_speculative_tokens, max(drafts, 0))
    if drafts < 1:
        return None
    return SpeculationLimits(drafts=drafts, shortest=chosen.prompt_lookup_min,
                             longest=chosen.prompt_lookup_max, model=chosen.speculative_method == "draft_model")


def _fixed(ready: Ready, sequences: int) -> int:
    """Bytes that a rank holds however many tokens there are: weights, and states."""
    return ready.weight_bytes + sequences * ready.state_bytes


def _most(ranks: Sequence[Ready]) -> int:
    """Bytes of a position on the rank where it takes most: by it snapshots are counted, on all ranks alike."""
    return max(ready.kv_bytes_per_token for ready in ranks)


def _position(ready: Ready, ranks: Sequence[Ready], prefixes: float) -> int:
    """Bytes for which a rank must have room for each position. The share that is for prefixes may be filled with
    states, which a rank has even where its layers keep no positions."""
    own = ready.kv_bytes_per_token
    return own + (math.ceil(prefixes * (_most(ranks) - own)) if ready.state_bytes else 0)


def _kv_tokens(settings: Settings, layout: GangLayout, ranks: Sequence[Ready], *, shrink: bool) -> int:
    """What the tightest memory has room for, or what the settings say if that is less."""
    chosen, pools = settings.scheduler, dict[tuple[str, int], list[Ready]]()
    for ready in ranks:
        pools.setdefault((ready.machine or ready.host, ready.rank if ready.own_memory else -1), []).append(ready)
    prefixes = chosen.prefix_cache if chosen.kv_tokens is None else 0.0  # else whoever chose has planned the memory
    sequences = held_sequences(chosen.max_batch_size, layout.lanes)
    room = [kv_capacity(together[0].memory_bytes, chosen.memory_fraction,
                        [(_fixed(ready, sequences), _position(ready, ranks, prefixes)) for ready in together],
                        kept=sum(ready.cache_bytes for ready in together))
            for together in pools.values()]
    useful = layout.max_context * chosen.max_batch_size
    tokens = min(*room, useful) if chosen.kv_tokens is None else chosen.kv_tokens
    if shrink:
        tokens = min(*room, tokens)
    if tokens > min(room) or tokens < 2:
        raise OutOfMemory(f"the KV cache has room for {min(room)} tokens beside the weights and would need "
                          f"{max(tokens, 2)}; lower --kv-tokens, use more stages, or raise --memory-fraction",
                          param="kv_tokens")
    return tokens
