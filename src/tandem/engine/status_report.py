"""Status of the engine for apis, and the related Prometheus gauges."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import median

from tandem.engine.build_layout import RankGroupLayout
from tandem.engine.metrics import EngineMetrics
from tandem.engine.recovery import RankGroup
from tandem.kv.disk import DiskSpeed
from tandem.protocol.control import EngineStatus, RankInfo, Ready, Stepped
from tandem.protocol.step import RankStep
from tandem.scheduler.scheduler import Scheduler
from tandem.speculation.proposers import SpeculationCounts
from tandem.system.origin import build

KEPT_STEPS = 64
"""Samples per median, and maximum number of steps tracked at once."""
FEWEST = 4
"""Minimum samples for a median."""
OLD = 0.9
"""Weight of the old mean in a moving average of step times."""
PROOF = 8192
"""Minimum computed prompt tokens before their speed is reported."""


def _speculation(layout: RankGroupLayout) -> str:
    """Return the speculation method for `/model/info`, as it is named in the settings; `off` with the reason."""
    if layout.ranks[0].has_head:
        return layout.ranks[0].head or "mtp"
    if layout.ranks[0].drafts:
        return "draft_model" if any(spec.draft_path for spec in layout.ranks) else "ngram"
    return f"off: {layout.description.no_drafts}".removesuffix(": ")


class StageLatency:
    """Latency of transfers between the stages of a rank group, measured by the engine's clock alone.

    A rank reports when its output is done, and how long before that its input arrived. The latency is the time from the
    previous stage's output to this input. Reports arrive over control sockets, so it is accurate to a fraction of a
    millisecond.
    """

    def __init__(self, stages: Mapping[int, int]) -> None:
        """Set up for ranks whose stages are `stages[rank]`."""
        self._stages = stages
        self._done: dict[int, dict[int, float]] = {}
        """Time of the last report for each step and stage: step id -> stage -> seconds."""
        self._seconds: dict[int, deque[float]] = {}

    def note(self, step: RankStep, now: float) -> None:
        """Record a rank's report received at `now`, in seconds of any clock."""
        stage = self._stages.get(step.rank, 0)
        steps = self._done.setdefault(step.step_id, {})
        steps[stage] = max(now, steps.get(stage, now))
        if (before := steps.get(stage - 1)) is not None:
            seconds = now - step.busy_s - before
            self._seconds.setdefault(step.rank, deque(maxlen=KEPT_STEPS)).append(max(seconds, 0.0))
        while len(self._done) > KEPT_STEPS:
            del self._done[next(iter(self._done))]

    def seconds(self, rank: int) -> float:
        """Return the median seconds of the transfer from the previous stage to `rank`; 0 with fewer than `FEWEST` samples."""
        seconds = self._seconds.get(rank, ())
        return median(seconds) if len(seconds) >= FEWEST else 0.0


class StatusReport:
    """Build `EngineStatus` from the latest reports of the ranks."""

    def __init__(self, rank_group: RankGroup, metrics: EngineMetrics) -> None:
        self._rank_group = rank_group
        self._metrics = metrics
        self._step_s: dict[int, float] = {}
        self._latest: dict[int, Stepped] = {}
        self._layout = rank_group.layout
        self._stage_latency = self._new_stage_latency()
        self._slow: set[int] = set()
        """Ranks whose slowness the last event told."""

    def _new_stage_latency(self) -> StageLatency:
        return StageLatency({spec.rank: spec.stage for spec in self._layout.ranks})

    def stepped(self, report: Stepped) -> None:
        """Record a rank's report of a finished step."""
        self._metrics.stepped(report)
        if self._layout is not self._rank_group.layout:
            self._layout = self._rank_group.layout
            self._latest.clear()
            self._step_s.clear()
            self._stage_latency = self._new_stage_latency()
        self._stage_latency.note(report.step, time.monotonic())
        rank, busy = report.step.rank, report.step.busy_s
        self._step_s[rank] = OLD * self._step_s.get(rank, busy) + (1 - OLD) * busy
        self._latest[rank] = report

    @property
    def prefix_bytes(self) -> int:
        """Bytes of cached prefixes in the memory of all ranks."""
        latest = self._latest.values() if self._layout is self._rank_group.layout else ()
        return sum(report.step.prefix_bytes for report in latest)

    @property
    def kv_disk(self) -> str:
        """State of the disk cache for `/model/info`: `on`, or `off` with the reason."""
        return _kv_disk(self._rank_group.layout, self._rank_group.ready)

    def status(self, scheduler: Scheduler | None) -> EngineStatus:
        """Return the engine's status and refresh the gauges. `scheduler` is None while the first ranks load."""
        rank_group, layout = self._rank_group, self._rank_group.layout
        queued = len(scheduler.waiting) if scheduler else 0
        running = scheduler.batches.running if scheduler else 0
        used = scheduler.batches.kv_positions if scheduler else 0
        self._metrics.running.set(running)
        self._metrics.waiting.set(queued)
        self._metrics.kv_used.set(used)
        self._metrics.kv_usage.set(used / max(scheduler.limits.kv_tokens, 1) if scheduler else 0)
        counts = scheduler.speculation.counts if scheduler else SpeculationCounts()
        self._metrics.scheduled(scheduler.batches.preemptions if scheduler else 0, counts)
        return EngineStatus(
            query_id=0,
            build=build(),
            state=rank_group.state,
            detail=rank_group.detail,
            model=layout.served_name,
            source=str(layout.files.path),
            max_context=min(layout.max_context, scheduler.limits.kv_tokens) if scheduler else layout.max_context,
            vocab_size=layout.description.vocab_size,
            queued=queued,
            running=running,
            kv_tokens_used=used,
            kv_tokens_total=scheduler.limits.kv_tokens if scheduler else 0,
            restarts=rank_group.restarts,
            prefix_tokens=scheduler.prefixes.positions if scheduler else 0,
            prefix_queries=scheduler.prefixes.queries if scheduler else 0,
            prefix_hits=scheduler.prefixes.hits if scheduler else 0,
            prefix_cache=scheduler.prefixes.serves if scheduler else "",
            load_s=rank_group.load_s,
            degraded=rank_group.degraded,
            kv_disk=self.kv_disk,
            kv_store=_kv_store(rank_group.ready),
            disk_saves=scheduler.disk.saves if scheduler else 0.0,
            kv_reach=_kv_reach(rank_group),
            lent_saves=scheduler.disk.lent_saves if scheduler else 0.0,
            lends=list(rank_group.lends.items()) if rank_group.state in ("ready", "draining") else [],
            prefix_room=scheduler.limits.prefix_tokens if scheduler else 0,
            prompt_tokens_s=_proven(scheduler.disk.beginning) if scheduler else 0.0,
            kv_dtype=_kv_dtype(layout, rank_group.ready),
            kv_bytes_per_token=sum(ready.kv_bytes_per_token for ready in rank_group.ready),
            speculation=_speculation(layout),
            stages=layout.ranks[0].stages,
            micro_batches=layout.micro_batches,
            generated_tokens=self._metrics.generated,
            draft_tokens=counts.draft_tokens,
            accepted_tokens=counts.accepted_tokens,
            hidden_size=layout.description.hidden_size,
            pooling=layout.pooling,
            generates=layout.description.generates,
            no_pictures=layout.description.no_pictures,
            defaults=layout.defaults,
            ttft_s=self._metrics.recent_ttft_s,
            ranks=[self._rank(ready) for ready in rank_group.ready],
            num_layers=layout.description.num_layers,
            adapters=[adapter for name, adapter in self._rank_group.adapters.items() if name],
            events=rank_group.history.after(),
        )

    def _rank(self, ready: Ready) -> RankInfo:
        spec = self._rank_group.layout.ranks[ready.rank]
        latest = self._latest.get(ready.rank) if self._layout is self._rank_group.layout else None
        return RankInfo(
            rank=ready.rank,
            stage=spec.stage,
            layers=spec.layers,
            pid=ready.pid,
            host=ready.host,
            weight_bytes=ready.weight_bytes,
            peak_bytes=latest.peak_bytes if latest else ready.peak_bytes,
            step_s=self._step_s.get(ready.rank, 0.0) if latest else 0.0,
            kv_bytes=latest.step.kv_bytes if latest else 0,
            slowdown=self._slowdown(ready.rank),
            memory_bytes=ready.memory_bytes,
            wired_bytes=ready.wired_bytes,
            wiring=ready.wiring,
            build=ready.build,
            used_bytes=latest.used_bytes if latest else 0,
            state=self._state(ready.rank),
            stage_latency_s=self._stage_latency.seconds(ready.rank) if latest else 0.0,
            encoder_pid=self._rank_group.encoders.get(ready.rank, 0),
        )

    def _state(self, rank: int) -> str:
        if self._rank_group.state != "recovering":
            return "ready"
        return "lost" if rank == self._rank_group.lost else "waiting"

    def _slowdown(self, rank: int) -> float:
        slowdown, slow = self._rank_group.executor.watchdog.slowness(rank)
        self._metrics.slowdown.labels(str(rank)).set(slowdown)
        if slow != (rank in self._slow):
            self._slow ^= {rank}
            self._note_slowness(rank, slowdown, slow=slow)
        return slowdown

    def _note_slowness(self, rank: int, slowdown: float, *, slow: bool) -> None:
        """Add the event that a rank has been slow for long, or has recovered."""
        note = self._rank_group.history.note
        if not slow:
            note("rank_usual", f"part {rank + 1} is at its usual pace again", rank=rank)
            return
        alone = len({ready.host for ready in self._rank_group.ready}) == 1
        note(
            "rank_slow",
            f"part {rank + 1} is slow: steps take {slowdown:.1f} times the usual time; no action is taken while "
            "it makes progress",
            level="info" if alone else "warning",
            rank=rank,
            remedy="See what else runs on that machine, and whether it is hot or saves power.",
        )


def _kv_dtype(layout: RankGroupLayout, ranks: Sequence[Ready]) -> str:
    """Return the KV cache type for `/model/info`, with the layers that it applies to."""
    asked = layout.ranks[0].kv_dtype
    layers = sorted({layer for ready in ranks for layer in ready.quantized_layers})
    if asked == "auto" or not layers:
        return "auto"
    runs = [list(run) for _, run in groupby(layers, key=lambda layer: layer - layers.index(layer))]
    named = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    others = "" if len(layers) == layout.description.num_layers else "; others stay in the type of computation"
    return f"{asked} in layers {named}{others}"


def _proven(pace: DiskSpeed) -> float:
    """Return prompt tokens per second; 0 before `PROOF` tokens were computed."""
    return pace.tokens_s if pace.seen >= PROOF else 0.0


def _kv_store(ranks: Sequence[Ready]) -> str:
    """Return the ids of the ranks' KV directories, separated by spaces; empty if a rank has no disk cache."""
    stores = {ready.store if ready.disk_blocks is not None else "" for ready in ranks}
    return "" if "" in stores else " ".join(sorted(stores))


def _kv_reach(rank_group: RankGroup) -> list[str]:
    own = _kv_store(rank_group.ready).split()
    return sorted({*own, *rank_group.remote_stores}) if own else []


def _kv_disk(layout: RankGroupLayout, ranks: Sequence[Ready]) -> str:
    if not layout.ranks[0].kv_disk:
        return "off"
    if layout.ranks[0].draft_path and not layout.ranks[0].has_head:
        return "off: a draft model's KV is not kept"
    if trouble := next((ready.disk_trouble for ready in ranks if ready.disk_trouble), ""):
        return f"off: {trouble}"
    kept = all(ready.disk_blocks is not None for ready in ranks)
    return "on" if kept else "off: this model has caches of a kind that is not written to disk"
