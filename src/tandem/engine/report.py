"""How the engine says that it is: the status for apis, and the gauges that go with it."""

from __future__ import annotations

from tandem.engine.layout import GangLayout
from tandem.engine.metrics import EngineMetrics
from tandem.engine.recovery import Gang
from tandem.models.families.table import family_of
from tandem.protocol.control import EngineStatus, RankInfo, Ready, Stepped
from tandem.scheduler.scheduler import Scheduler
from tandem.speculation.proposers import SpeculationCounts

OLD = 0.9
"""Share of the old mean in the new one."""


def _speculation(layout: GangLayout) -> str:
    """In words of `/model/info`."""
    if layout.ranks[0].drafts:
        return "draft_model" if any(spec.draft_path for spec in layout.ranks) else "ngram"
    if layout.description.state_elements:
        return "off: the model's recurrent states cannot take back drafts"
    return f"off: {reason}" if (reason := family_of(layout.description.family).one_by_one) else "off"


class Report:
    """Keeps what ranks have said of their steps."""

    def __init__(self, gang: Gang, metrics: EngineMetrics) -> None:
        self._gang = gang
        self._metrics = metrics
        self._step_s: dict[int, float] = {}
        self._latest: dict[int, Stepped] = {}
        self._layout = gang.layout

    def stepped(self, report: Stepped) -> None:
        """A rank has done a step."""
        self._metrics.stepped(report)
        if self._layout is not self._gang.layout:
            self._layout = self._gang.layout
            self._latest.clear()
            self._step_s.clear()
        rank, busy = report.step.rank, report.step.busy_s
        self._step_s[rank] = OLD * self._step_s.get(rank, busy) + (1 - OLD) * busy
        self._latest[rank] = report

    def status(self, scheduler: Scheduler | None) -> EngineStatus:
        """Snapshot for the api; also refreshes the gauges. `scheduler` is None while the first ranks load."""
        gang, layout = self._gang, self._gang.layout
        queued = len(scheduler.waiting) if scheduler else 0
        running = scheduler.running if scheduler else 0
        used = scheduler.kv_positions if scheduler else 0
        self._metrics.running.set(running)
        self._metrics.waiting.set(queued)
        self._metrics.kv_used.set(used)
        counts = scheduler.speculation.counts if scheduler else SpeculationCounts()
        self._metrics.scheduled(scheduler.preemptions if scheduler else 0, counts)
        return EngineStatus(
            query_id=0, state=gang.state, detail=gang.detail, model=layout.served_name, source=str(layout.files.path),
            max_context=min(layout.max_context, scheduler.limits.kv_tokens) if scheduler else layout.max_context,
            vocab_size=layout.description.vocab_size, queued=queued, running=running, kv_tokens_used=used,
            kv_tokens_total=scheduler.limits.kv_tokens if scheduler else 0, restarts=gang.restarts,
            prefix_tokens=scheduler.prefixes.positions if scheduler else 0,
            prefix_queries=scheduler.prefixes.queries if scheduler else 0,
            prefix_hits=scheduler.prefixes.hits if scheduler else 0,
            prefix_cache=scheduler.prefixes.serves if scheduler else "", load_s=gang.load_s, degraded=gang.degraded,
            speculation=_speculation(layout), stages=layout.ranks[0].stages, lanes=layout.lanes,
            generated_tokens=self._metrics.generated,
            draft_tokens=counts.draft_tokens, accepted_tokens=counts.accepted_tokens,
            hidden_size=layout.description.hidden_size, pooling=layout.pooling,
            generates=layout.description.generates, defaults=layout.defaults, ttft_s=self._metrics.recent_ttft_s,
            ranks=[self._rank(ready) for ready in gang.ready])

    def _rank(self, ready: Ready) -> RankInfo:
        spec = self._gang.layout.ranks[ready.rank]
        latest = self._latest.get(ready.rank) if self._layout is self._gang.layout else None
        return RankInfo(rank=ready.rank, stage=spec.stage, layers=spec.layers, pid=ready.pid, host=ready.host,
                        weight_bytes=ready.weight_bytes, peak_bytes=latest.peak_bytes if latest else ready.peak_bytes,
                        step_s=self._step_s.get(ready.rank, 0.0) if latest else 0.0,
                        kv_bytes=latest.step.kv_bytes if latest else 0,
                        slowdown=self._slowdown(ready.rank), memory_bytes=ready.memory_bytes,
                        wired_bytes=ready.wired_bytes, used_bytes=latest.used_bytes if latest else 0)

    def _slowdown(self, rank: int) -> float:
        slowdowns = self._gang.executor.slowdowns
        slowdown = slowdowns[rank] if rank < len(slowdowns) else 1.0
        self._metrics.slowdown.labels(str(rank)).set(slowdown)
        return slowdown
