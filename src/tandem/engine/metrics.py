"""Prometheus metrics of the engine. Names are vLLM's with the prefix `tandem_`."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from tandem.kv.disk import DiskCounts
from tandem.protocol.control import Output, Stepped, Timing
from tandem.protocol.step import StepPlan
from tandem.speculation.proposers import SpeculationCounts

LENGTH_BUCKETS = tuple(float(digit * 10**zeros) for zeros in range(6) for digit in (1, 2, 5)) + (1e6,)
LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
SAMPLE_S = 1.0
"""Seconds between two samples of the drain rate."""
MEMORY = 0.8
"""Weight of the old drain rate in the moving average."""
UNKNOWN_S, LONGEST_S = 5.0, 120.0
"""`Retry-After` in seconds before any measurement, and its maximum."""


@dataclass(slots=True)
class _Live:
    """Times of a live request, and its numbers of tokens."""

    arrived: float
    prompt_tokens: int
    admitted: float | None = None
    """When it last joined a batch, until a token comes."""
    first: float | None = None
    last: float | None = None
    """When its last token came, or when it came here with tokens of another engine."""
    tokens: int = 0


class _Histogram(Histogram):
    def observe_all(self, amount: float, count: int) -> None:
        """Observe `amount` `count` times at the cost of once: the rows of a step share the time since the last one."""
        self._sum.inc(amount * count)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(count)


class EngineMetrics:
    """Prometheus metrics, and time stamps of live requests."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._live: dict[str, _Live] = {}
        self._counted: dict[Counter, float] = {}
        self._by_rank: dict[int, list[Any]] = {}
        """Series of each rank that its steps change."""
        self.generated = 0
        """Tokens produced since the engine started."""
        self.recent_ttft_s = 0.0
        """Moving average of the seconds from arrival to first token; 0 before the first."""
        self._define()

    def _define(self) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tandem_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"tandem_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...] = LATENCY_BUCKETS) -> _Histogram:
            return _Histogram(f"tandem_{name}", text, labels, registry=self.registry, buckets=buckets)

        self.ttft = histogram("time_to_first_token_seconds", "From arrival at the engine to the first token.")
        self.itl = histogram("inter_token_latency_seconds", "Between two tokens of one request.")
        self.e2e = histogram("e2e_request_latency_seconds", "From arrival at the engine to the last token.")
        self.queue = histogram("request_queue_time_seconds", "From arrival at the engine until a request joins a batch.")
        self.prefill = histogram("request_prefill_time_seconds", "From joining a batch to the first token.")
        self.decode = histogram("request_decode_time_seconds", "From the first token to the last.")
        self.prompt_lengths = histogram("request_prompt_tokens", "Prompt tokens of finished requests.", buckets=LENGTH_BUCKETS)
        self.generation_lengths = histogram(
            "request_generation_tokens", "Tokens produced for finished requests.", buckets=LENGTH_BUCKETS
        )
        self.step = histogram("rank_step_seconds", "Work of one rank in one step.", "rank")
        self.running = gauge("num_requests_running", "Requests in a batch.")
        self.waiting = gauge("num_requests_waiting", "Requests in the queue.")
        self.kv_used = gauge("kv_cache_tokens_used", "KV positions in use.")
        self.kv_usage = gauge("kv_cache_usage_perc", "KV positions in use, as a fraction of 1.")
        self.kv_total = gauge("kv_cache_tokens_max", "KV positions that there is room for.")
        self.kv_bytes = gauge("kv_cache_bytes", "Bytes of KV held by a rank.", "rank")
        self.rank_peak = gauge("rank_peak_memory_bytes", "Most memory that a rank has used.", "rank")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that began to answer.")
        self.generation_tokens = counter("generation_tokens", "Tokens produced.")
        self.embeddings = counter("embeddings", "Prompts that were embedded.")
        self.finished = counter("request_success", "Requests finished.", "finished_reason")
        self.refused = counter("request_refused", "Requests refused or failed.", "status")
        self.aborted = counter("request_aborted", "Requests ended by the client.")
        self.preemptions = counter("num_preemptions", "Sequences put back into the queue for want of KV memory.")
        self.spec_drafts = counter("spec_decode_num_drafts", "Times that a sequence's tokens were guessed.")
        self.spec_draft_tokens = counter("spec_decode_num_draft_tokens", "Tokens that were guessed.")
        self.spec_accepted = counter("spec_decode_num_accepted_tokens", "Guessed tokens that became output.")
        self.prefix_queries = counter("prefix_cache_queries", "Prompt tokens that were looked for in the prefix cache.")
        self.prefix_hits = counter("prefix_cache_hits", "Prompt tokens that were not computed, by where their KV was.", "tier")
        begun = ((self.prefix_hits, "memory disk"), (self.finished, "stop length"), (self.refused, "400 429 503"))
        for known, values in begun:  # a series that begins with its first event hides that event from rate()
            for value in values.split():
                known.labels(value)
        self.prefix_bytes = gauge("prefix_cache_bytes", "Bytes of prefixes in the memory of a rank.", "rank")
        self.disk_hits = counter("kv_disk_hit_tokens", "Prompt tokens whose KV was read from disk.")
        self.disk_read = counter("kv_disk_read_bytes", "Bytes of KV that ranks have read from disk.")
        self.disk_written = counter("kv_disk_written_bytes", "Bytes of KV that ranks have written to disk.")
        self.disk_brought = counter("kv_disk_brought_bytes", "Bytes of KV that came from disks of other machines.")
        self.disk_seconds = counter("kv_disk_read_seconds", "What reading took, of the slowest rank each time.")
        self.disk_written_seconds = counter("kv_disk_write_seconds", "What writing took, of all ranks together.")
        self.disk_failures = counter("kv_disk_failures", "Prefixes on disk that could not be used.")
        self.restarts = counter("gang_restarts", "Times that the ranks were replaced.")
        self.failures = counter("gang_failures", "Failures of a rank group by what was found.", "cause")
        self.recovery_seconds = histogram("gang_recovery_seconds", "From a failure noticed to ranks that are ready.")
        self.degraded = gauge("degraded", "1 while fewer machines serve than the layout names.")
        self.load_seconds = gauge("gang_load_seconds", "What the last start of the ranks took, loading included.")
        self.slowdown = gauge("rank_slowdown", "A rank's time for a unit of work, as a multiple of its usual one.", "rank")

    def disk(self, counts: DiskCounts) -> None:
        """Raise the disk cache counters to these totals."""
        self._count_up_to(
            {
                self.disk_hits: counts.hit_tokens,
                self.disk_read: counts.read_bytes,
                self.disk_written: counts.written_bytes,
                self.disk_seconds: counts.read_s,
                self.disk_written_seconds: counts.written_s,
                self.disk_brought: counts.brought_bytes,
                self.disk_failures: counts.failures,
            }
        )

    def cached(self, tokens: int, from_disk: int) -> None:
        """Count a prompt's `tokens` taken from the prefix cache, `from_disk` of them read from disk."""
        self.prefix_hits.labels("memory").inc(tokens - from_disk)
        self.prefix_hits.labels("disk").inc(from_disk)

    def scheduled(self, preemptions: int, counts: SpeculationCounts) -> None:
        """Raise the counters of preemptions and drafts to the scheduler's totals."""
        self._count_up_to(
            {
                self.preemptions: preemptions,
                self.spec_drafts: counts.drafts,
                self.spec_draft_tokens: counts.draft_tokens,
                self.spec_accepted: counts.accepted_tokens,
            }
        )

    def _count_up_to(self, counts: dict[Counter, float]) -> None:
        for counter, count in counts.items():
            if more := count - self._counted.get(counter, 0):
                counter.inc(more)
        self._counted |= counts

    def arrived(self, request_id: str, prompt_tokens: int, *, begun: bool = False) -> None:
        """Record a queued request. `begun`: another engine already produced part of its output."""
        now = time.monotonic()
        self._live[request_id] = _Live(now, prompt_tokens, last=now if begun else None)

    def admitted(self, plan: StepPlan) -> None:
        """Record that the plan's new sequences join a batch."""
        now = time.monotonic()
        for insert in plan.inserts:
            if (live := self._live.get(insert.request_id)) is not None:
                live.admitted = now

    def produced(self, outputs: Iterable[Output]) -> dict[str, Timing]:
        """Record outputs that came together. Return the times of requests that joined a batch since their last output."""
        now, tokens, gaps, timings = time.monotonic(), 0, Tally[float](), dict[str, Timing]()
        for output in outputs:
            count = len(output.tokens)
            tokens += count
            live = self._live.get(output.request_id)
            if live is None:
                continue
            live.tokens += count
            if live.last is None:
                if output.cached_tokens:
                    self.cached(output.cached_tokens, output.disk_tokens)
                if output.vector:
                    self.embeddings.inc()
                self.prompt_tokens.inc(live.prompt_tokens)
                waited = now - live.arrived
                if count:
                    live.first = now
                    self.ttft.observe(waited)
                    self.recent_ttft_s = 0.8 * self.recent_ttft_s + 0.2 * waited if self.recent_ttft_s else waited
            elif count:
                gaps[(now - live.last) / count] += count  # several tokens arrive at once with accepted drafts
            if live.admitted is not None:
                timing = Timing(live.admitted - (live.arrived if live.last is None else live.last), now - live.admitted)
                timings[output.request_id] = timing
                if live.last is None:
                    self.queue.observe(timing.queue_s)
                    self.prefill.observe(timing.prefill_s)
                    self.prefix_queries.inc(live.prompt_tokens)
            live.last, live.admitted = now, None
            if output.finish_reason:
                self.ended(output.request_id, output.finish_reason)
        self.generation_tokens.inc(tokens)
        self.generated += tokens
        for gap, count in gaps.items():
            self.itl.observe_all(gap, count)
        return timings

    def ended(self, request_id: str, finish_reason: str) -> None:
        """Record a finished request with its latency and lengths."""
        self.finished.labels(finish_reason).inc()
        live = self._live.pop(request_id, None)
        if live is None:
            return
        now = time.monotonic()
        self.e2e.observe(now - live.arrived)
        if live.first is not None:
            self.decode.observe(now - live.first)
        self.prompt_lengths.observe(live.prompt_tokens)
        self.generation_lengths.observe(live.tokens)

    def forget(self, request_id: str) -> None:
        """Drop the times of a request that is no longer here."""
        self._live.pop(request_id, None)

    def stepped(self, report: Stepped) -> None:
        """Record a rank's report of a step."""
        step, rank = report.step, report.step.rank
        if rank not in self._by_rank:
            every = self.step, self.kv_bytes, self.prefix_bytes, self.rank_peak
            self._by_rank[rank] = [one.labels(str(rank)) for one in every]
        seconds, kv_bytes, prefix_bytes, peak = self._by_rank[rank]
        seconds.observe(step.busy_s)
        kv_bytes.set(step.kv_bytes)
        prefix_bytes.set(step.prefix_bytes)
        peak.set(report.peak_bytes)

    def text(self) -> bytes:
        """Return the Prometheus text exposition. Thread-safe."""
        return generate_latest(self.registry)


class DrainRate:
    """Moving average of the tokens per second leaving the queue, measured while requests wait.

    Used for the `Retry-After` of refused requests.
    """

    def __init__(self) -> None:
        self._rate: float | None = None
        self._sample: tuple[float, int] | None = None

    def observe(self, now: float, admitted_tokens: int, *, waiting: bool) -> None:
        """Record at `now` (seconds) the total tokens ever admitted. Call often, at least once a second."""
        if not waiting:
            self._sample = None
        elif self._sample is None:
            self._sample = (now, admitted_tokens)
        elif (seconds := now - self._sample[0]) >= SAMPLE_S:
            rate = (admitted_tokens - self._sample[1]) / seconds
            self._rate = rate if self._rate is None else MEMORY * self._rate + (1 - MEMORY) * rate
            self._sample = (now, admitted_tokens)

    def retry_after(self, queued_tokens: int) -> float:
        """Return the estimated seconds until half of the queue is processed, 1 to `LONGEST_S`."""
        if self._rate is None:
            return UNKNOWN_S
        seconds = queued_tokens / 2 / self._rate if self._rate > 0 else LONGEST_S
        return min(max(seconds, 1.0), LONGEST_S)
