"""Scheduler limits from the ranks' memory, and the reaction to nearly full memory.

The KV capacity is computed when ranks start, from settings and their reports. Temporary buffers, other programs and rounding
are unknown then. So ranks report their memory use after every step. If one device is nearly full, cached prefixes and buffers
are dropped and no request joins a batch. If that is not enough, sequences are preempted, youngest first.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from tandem.config.settings import Settings, SpeculationSettings
from tandem.config.speculation import with_speculative_config
from tandem.engine.build_layout import RankGroupLayout
from tandem.errors import OutOfMemory, UnsupportedModel
from tandem.kv.budget import held_sequences, kv_capacity, rounded
from tandem.kv.index import CHECKPOINTS
from tandem.log import Seldom
from tandem.models.footprint import prefill_chunk
from tandem.models.kv_types import nothing_to_quantize
from tandem.protocol.control import Ready, Stepped
from tandem.protocol.kv_blocks import BLOCK_SIZE, DISK_BLOCK_SIZE
from tandem.scheduler.limits import Limits
from tandem.scheduler.scheduler import Scheduler
from tandem.speculation.proposers import SpeculationLimits

log = logging.getLogger(__name__)
seldom = Seldom(log)

METAL_QUERIES = 32
"""Maximum queries per kv head in one row for MLX's fused short-query attention on Metal (`sdpa_vector`): tokens times query
heads per kv head. Larger steps use the unfused kernels."""
EASE, SHED = 0.85, 0.95
"""Fractions of a device's memory above which caches are dropped (EASE) and sequences preempted (SHED)."""
CHECKPOINT_TOKENS = 2048
"""Least default distance of the checkpoints in a long prompt, as prefill stops at each."""
MARGIN = 0.03
"""Minimum distance of `EASE` above `--memory-fraction`, since a full KV cache is normal. Also the hysteresis: pressure ends
this far below `EASE`."""

DOUBLING, CPU_DOUBLING = 6, 1
"""`Limits.prefill_doubling` in hidden sizes: by arithmetic, and measured on x86 CPUs, whose softmax is slow."""


def make_limits(
    settings: Settings, layout: RankGroupLayout, ranks: Sequence[Ready], *, shrink: bool, halvings: int = 0
) -> Limits:
    """Compute the scheduler's limits for these ranks. Raises OutOfMemory.

    `shrink`: accept fewer KV tokens than the settings ask for if memory is short. `halvings`: number of times to halve all
    limits, because a GPU's memory was full.
    """
    chosen = settings.scheduler
    chunk = prefill_chunk(chosen.prefill_chunk, gpu=ranks[0].gpu)
    cuda = [ready.gpu and not ready.metal for ready in ranks]  # these plan attention and products for each shape
    doubling = (DOUBLING if ranks[0].gpu else CPU_DOUBLING) * layout.description.hidden_size
    kv_tokens = max(_kv_tokens(settings, layout, ranks, shrink=shrink) >> halvings, 2)
    prefix_tokens = int(kv_tokens * chosen.prefix_cache)
    cached_prefix = max(-(-ready.state_bytes // max(_most(ranks), 1)) for ready in ranks)
    if 0 < prefix_tokens < cached_prefix + BLOCK_SIZE:
        seldom.warning(
            "prefix cache is off: one cached prefix takes the memory of at least %d tokens of KV, and %d are set aside; "
            "raise --kv-tokens or --prefix-cache",
            cached_prefix + BLOCK_SIZE,
            prefix_tokens,
        )
    # An upper bound: as if all layers had the window.
    checkpoint = cached_prefix + max(ready.window for ready in ranks)
    every = chosen.prefix_checkpoint_tokens or max(math.ceil(checkpoint / CHECKPOINTS), CHECKPOINT_TOKENS)
    return Limits(
        prefix_extra=cached_prefix,
        prefix_checkpoint=checkpoint,
        prefix_every=rounded(every, DISK_BLOCK_SIZE),
        prefix_tokens=prefix_tokens,
        prefix_trimmable=all(ready.trimmable for ready in ranks),
        micro_batches=layout.micro_batches,
        stages=layout.ranks[0].stages,
        prefill_doubling=0 if any(cuda) or layout.ranks[0].stages == 1 else doubling,
        max_batch_size=max(chosen.max_batch_size >> halvings, 1),
        prefill_chunk=max(chunk >> halvings, 1),
        kv_tokens=kv_tokens,
        prefill_time_s=None if chosen.prefill_time_ms is None else chosen.prefill_time_ms / 1000,
        max_context=layout.max_context,
        max_queued_requests=chosen.max_queued_requests,
        max_queue_tokens=chosen.max_queue_tokens,
        eos_token_ids=frozenset(layout.description.eos_token_ids),
        vocab_size=layout.description.vocab_size,
        speculation=_speculation(settings.speculation, layout, ranks),
        whole_pictures=layout.description.whole_pictures,
        digests=chosen.self_check and len(ranks) > 1,
        pads_prompts=all(cuda),
    )


def require_quantized(layout: RankGroupLayout, ranks: Sequence[Ready]) -> None:
    """Raise UnsupportedModel if quantised KV is requested but no rank has a layer that supports it."""
    asked = layout.ranks[0].kv_dtype
    if asked != "auto" and not any(ready.quantized_layers for ready in ranks):
        raise UnsupportedModel(nothing_to_quantize(asked, layout.description.family), param="kv_dtype")


def _speculation(settings: SpeculationSettings, layout: RankGroupLayout, ranks: Sequence[Ready]) -> SpeculationLimits | None:
    chosen, model = with_speculative_config(settings, head=layout.ranks[0].mtp), layout.description
    if chosen.speculative_method == "none":
        return None
    drafts = chosen.num_speculative_tokens
    if any(ready.metal for ready in ranks):
        group = max(model.num_heads // max(model.num_kv_heads, 1), 1)
        drafts = min(drafts, METAL_QUERIES // group - 1)
    if drafts < chosen.num_speculative_tokens:
        log.warning(
            "Metal's fused attention does not take %d drafts at once with this model's heads; %d are made",
            chosen.num_speculative_tokens,
            max(drafts, 0),
        )
    if drafts < 1:
        return None
    return SpeculationLimits(
        drafts=drafts,
        shortest=chosen.prompt_lookup_min,
        longest=chosen.prompt_lookup_max,
        model=chosen.speculative_method in ("draft_model", "mtp", "eagle3", "dflash"),
    )


def _fixed(ready: Ready, sequences: int) -> int:
    """Return a rank's bytes independent of the number of tokens: weights, states, and room for pictures."""
    return ready.weight_bytes + ready.picture_bytes + sequences * ready.state_bytes


def _most(ranks: Sequence[Ready]) -> int:
    """Return the largest KV bytes per token of any rank; cached prefixes are accounted by it on all ranks."""
    return max(ready.kv_bytes_per_token for ready in ranks)


def _position(ready: Ready, ranks: Sequence[Ready], prefixes: float) -> int:
    """Return the bytes a rank reserves per KV position. The prefix cache's share may hold states, also on ranks without KV
    per position."""
    own = ready.kv_bytes_per_token
    return own + (math.ceil(prefixes * (_most(ranks) - own)) if ready.state_bytes else 0)


def _kv_tokens(settings: Settings, layout: RankGroupLayout, ranks: Sequence[Ready], *, shrink: bool) -> int:
    """Return the KV tokens that the tightest memory has room for, or the configured number. Raises OutOfMemory."""
    chosen, pools = settings.scheduler, dict[tuple[str, int], list[Ready]]()
    for ready in ranks:
        pools.setdefault(_device(ready), []).append(ready)
    prefixes = chosen.prefix_cache if chosen.kv_tokens is None else 0.0  # an explicit --kv-tokens includes the prefix cache
    # With drafts also the states before the step, from which accepted tokens are computed again.
    sequences = held_sequences(chosen.max_batch_size, layout.micro_batches) * (1 + (layout.ranks[0].drafts > 0))
    room = [
        kv_capacity(
            together[0].memory_bytes,
            chosen.memory_fraction,
            [(_fixed(ready, sequences), _position(ready, ranks, prefixes)) for ready in together],
            kept=sum(ready.cache_bytes for ready in together),
        )
        for together in pools.values()
    ]
    useful = layout.max_context * chosen.max_batch_size
    tokens = min(*room, useful) if chosen.kv_tokens is None else chosen.kv_tokens
    if shrink:
        tokens = min(*room, tokens)
    if tokens > min(room) or tokens < 2:
        raise OutOfMemory(
            f"the KV cache has room for {min(room)} tokens beside the weights and would need "
            f"{max(tokens, 2)}; lower --kv-tokens, use more stages, or raise "
            f"{'--max-memory' if chosen.max_memory else '--memory-fraction'}",
            param="kv_tokens",
        )
    return tokens


def _device(ready: Ready) -> tuple[str, int]:
    """Return the key of a rank's memory: its machine, and its rank if it has its own GPU, else -1."""
    return ready.machine or ready.host, ready.rank if ready.own_memory else -1


class MemoryGuard:
    """Monitor of the memory of an engine's ranks, across their replacements."""

    def __init__(self, memory_fraction: float) -> None:
        """Set the thresholds. `memory_fraction`: fraction of a device's memory for weights and KV."""
        self._ease = min(max(EASE, memory_fraction + MARGIN), SHED)
        self._ready: Sequence[Ready] = ()
        self._used: dict[int, int] = {}
        self._next = 0

    def watch(self, ready: Sequence[Ready], report: Stepped, scheduler: Scheduler) -> None:
        """Update memory pressure after a step of one of the `ready` ranks; free caches or preempt in `scheduler` if needed."""
        if ready is not self._ready:
            self._ready, self._next, scheduler.batches.pressed = ready, 0, False
            self._used.clear()
        self._used[report.step.rank] = report.used_bytes
        share, where = self._fullest()
        if share >= self._ease and not scheduler.batches.pressed:
            seldom.warning(
                "the device's memory on %s is %.0f %% full: dropping cached prefixes and buffers, and "
                "requests wait; lower --memory-fraction or --kv-tokens if this goes on",
                where,
                100 * share,
            )
        scheduler.batches.pressed = share >= self._ease - (MARGIN if scheduler.batches.pressed else 0)
        # The memory freed by a preemption shows only after the steps in progress.
        if share >= SHED and report.step.step_id >= self._next and scheduler.batches.relieve():
            self._next = scheduler.next_step + scheduler.limits.micro_batches
            seldom.warning("Device memory on %s is %.0f %% full: preempting a request", where, 100 * share)

    def _fullest(self) -> tuple[float, str]:
        """Return the largest used fraction of any device's memory, and the host name of its machine."""
        used: dict[tuple[str, int], int] = {}
        most = (0.0, "")
        for ready in self._ready:
            device = _device(ready)
            used[device] = used.get(device, 0) + self._used.get(ready.rank, 0)
            most = max(most, (used[device] / max(ready.memory_bytes, 1), ready.host))
        return most
