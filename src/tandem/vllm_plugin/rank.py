"""One worker's rank: its slice of the model and its runner, on the thread that owns MLX (mlx)."""

from __future__ import annotations

import math
import os
import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from tandem.checkpoints.resolve import resolve
from tandem.comm.group import StageGroup
from tandem.crash_guard import start_thread
from tandem.errors import OutOfMemory
from tandem.loading.memory import choose_device, limit_memory, memory_bytes, on_gpu, wire_weights
from tandem.loading.prefix import last_positions, members, trimmable
from tandem.loading.stage import CacheBytes, StageModel, load_stage
from tandem.models.description import ModelDescription, describe
from tandem.models.dry_run import require_dry_run
from tandem.models.footprint import layer_state_bytes, slice_bytes, token_elements
from tandem.models.partition import split_layers
from tandem.models.shard import held_kv_heads, plan_shards
from tandem.protocol.layout import RankPosition
from tandem.runner.links import ChannelLink
from tandem.runner.ragged_attention import chosen_attention
from tandem.runner.runner import Runner
from tandem.transport.channel import TcpChannel

T = TypeVar("T")


class MlxThread:
    """The thread that runs all of a worker's MLX work, since MLX's streams are thread-local.

    The worker's main thread stays free for vLLM's next message while a step is being built.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = start_thread(self._run, name="mlx")

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call; return a future of its result or exception."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - the exception is raised in the thread that awaits the future
                future.set_exception(error)

        self._work.put(work)
        return future

    def stop(self, timeout_s: float) -> None:
        """Stop after the queued calls, or after `timeout_s` seconds; a step that hangs on a lost peer is abandoned."""
        self._work.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class WorkerLayout(RankPosition, frozen=True, kw_only=True):
    """Part of the model that a worker runs."""

    layer_split: tuple[int, ...] | None = None
    expert_parallel: bool = False
    """True if the stage's ranks divide whole experts among themselves."""


@dataclass(frozen=True, kw_only=True)
class LoadedRank:
    """A loaded rank."""

    runner: Runner
    stage: StageModel
    description: ModelDescription
    trimmable: bool
    """True if the model's caches can be truncated; equal on all ranks, which run the same plans."""
    cached_prefix_positions: int
    """KV positions that take as much memory as a sequence's SSM states."""
    window: int
    """Positions of the model's largest sliding window or chunk."""
    memory_bytes: int
    """Memory of the machine or device."""
    kv_heads: int
    """Maximum of KV heads on a rank of the stage."""

    @property
    def counted_heads(self) -> tuple[int, int]:
        """Number and width of KV heads that vLLM uses to count a token's bytes per layer."""
        return counted_heads(self.description, self.kv_heads)

    def counted_room(self, nbytes: int) -> int:
        """Convert a KV budget of `nbytes` to the bytes to report to vLLM, see `counted_room`."""
        heads, width = self.counted_heads
        counted = 2 * heads * width * self.stage.dtype.size * len(self.stage.layers)
        return counted_room(nbytes, counted, self.stage.cache_bytes, self.cached_prefix_positions)


def counted_heads(description: ModelDescription, heads: int) -> tuple[int, int]:
    """Return the number and width of KV heads for vLLM's count, on ranks with `heads` KV heads. Plain attention uses its own;
    other caches (latents, states, an index) count as one head as wide as a layer's average cache."""
    each = token_elements(description)
    if each == 2 * description.num_kv_heads * description.head_dim:
        return heads, description.head_dim
    own = each * description.cache_share(heads / description.num_kv_heads)
    return 1, max(math.ceil(own / 2), 1)


def counted_room(nbytes: int, counted: int, own: CacheBytes, cached_prefix_positions: int) -> int:
    """Convert a KV budget of `nbytes` to bytes that make vLLM allocate as many tokens as really fit.

    vLLM counts `counted` bytes per token. This rank's layers may need more than the average, `own.position` per token or
    `own.state` per cached prefix, which counts as `cached_prefix_positions` tokens.
    """
    each = max(own.position or counted, -(-own.state // cached_prefix_positions) if cached_prefix_positions else 0)
    return nbytes * counted // each


def load(
    model: str,
    revision: str | None,
    layout: WorkerLayout,
    *,
    dtype: str | None,
    memory_share: float,
    micro_batches: int,
    group: StageGroup | None,
    channel: TcpChannel | None,
    drafts: int = 0,
    sharing: int = 1,
) -> LoadedRank:
    """Load this rank's slice.

    `dtype` None is the device's default. `memory_share` is a fraction of the memory. `drafts` is the maximum of draft tokens per
    sequence and step. `sharing` is the number of ranks on this machine. Raises ModelError and OutOfMemory.
    """
    choose_device("auto")
    limit_memory(memory_share, sharing)
    files = resolve(model, revision=revision if "/" in model and not os.path.isdir(model) else None)
    description = describe(files)
    require_dry_run(files.path, description)
    layers = split_layers(
        description.num_layers,
        layout.stages,
        layer_bytes=description.layer_bytes,
        explicit=layout.layer_split,
        uncut=description.uncut,
    )[layout.stage]
    dequantize = not on_gpu()
    kind = dtype or "auto"
    need = slice_bytes(description, layers, kind, dequantize, 1 / layout.tp_size, gpu=on_gpu())
    total = memory_bytes()
    if need > total * memory_share:
        raise OutOfMemory(
            f"layers {layers.start}-{layers.stop - 1} need {need / 2**20:.0f} MiB for their weights, and "
            f"may use {total * memory_share / 2**20:.0f} MiB here; add stages (--pipeline-parallel-size),"
            " use a smaller or quantised model, or raise --gpu-memory-utilization",
            param="memory_fraction",
        )
    shards = plan_shards(
        description, layout.tp_size, dequantize=dequantize, expert_parallel=layout.expert_parallel and layout.tp_size > 1
    )
    stage = load_stage(
        files,
        description,
        layers,
        dtype=kind,
        dequantize=dequantize,
        shard=shards[layout.tp_rank],
        tensor_parallel=group,
        fuse=on_gpu(),
    )
    link = ChannelLink(channel) if channel is not None else None
    runner = Runner(
        stage,
        micro_batches=micro_batches,
        vocab_size=description.vocab_size,
        eos_token_ids=description.eos_token_ids,
        link=link,
        group=group,
        samples=layout.samples,
        drafts=drafts,
        attention=chosen_attention(),
    )
    wire_weights(stage.arrays(), None, memory_share)
    return LoadedRank(
        runner=runner,
        stage=stage,
        description=description,
        trimmable=trimmable(stage.caches_of_all_stages()),
        cached_prefix_positions=math.ceil(
            layer_state_bytes(description, stage.dtype.size) / max(token_elements(description) * stage.dtype.size, 1)
        ),
        window=max(map(last_positions, members(stage.caches_of_all_stages())), default=0),
        memory_bytes=total,
        kv_heads=max(held_kv_heads(description, shard) for shard in shards),
    )
