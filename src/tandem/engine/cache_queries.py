"""Answer queries of apis about cached prefixes, after all ranks have listed their disk caches if there are any."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from tandem.engine.recovery import RankGroup
from tandem.engine.status_report import StatusReport
from tandem.kv.index import block_hashes
from tandem.protocol.cached_prefixes import MOST_PREFIXES, CachedPrefixState, CacheReport, DiskReport, QueryCache
from tandem.protocol.kv_blocks import Surveyed
from tandem.scheduler.scheduler import Scheduler

PATIENCE_S = 30.0
"""Seconds for ranks to finish queued writes and list their disks."""
REPLACED = "the ranks are being replaced; ask again when they are ready"

Reply = Callable[[CacheReport], None]


@dataclass(eq=False)
class _Question:
    query: QueryCache
    reply: Reply
    until: float
    dropped_tokens: int
    seen: dict[int, Surveyed] = field(default_factory=dict)
    """Surveys received so far, by rank."""


class CacheQueryHandler:
    """Answer `QueryCache` messages. Used only by the engine's thread."""

    def __init__(self, rank_group: RankGroup, report: StatusReport) -> None:
        self._rank_group, self._report = rank_group, report
        self._questions: list[_Question] = []

    def ask(self, query: QueryCache, reply: Reply, scheduler: Scheduler | None) -> None:
        """Drop the prefixes that `query` names, and call `reply` now or once all ranks have answered."""
        if scheduler is None or self._rank_group.state in ("starting", "recovering", "failed"):
            reply(CacheReport(query.query_id, trouble=REPLACED if scheduler else "the model is still being loaded"))
            return
        before = scheduler.prefixes.positions
        if query.drop:
            scheduler.prefixes.shrink(before)
        question = _Question(query, reply, time.monotonic() + PATIENCE_S, before - scheduler.prefixes.positions)
        self._questions.append(question)
        if not self._rank_group.ready or any(ready.disk_blocks is None for ready in self._rank_group.ready):
            self._answer(question, scheduler)
        else:
            question.seen = scheduler.disk.look(partial(self._answer, question, scheduler), drop=query.drop == "all")

    def look(self, scheduler: Scheduler) -> None:
        """Answer queries older than `PATIENCE_S`, naming the ranks that did not answer."""
        now = time.monotonic()
        for question in [question for question in self._questions if now > question.until]:
            silent = sorted({ready.rank for ready in self._rank_group.ready} - set(question.seen))
            self._answer(
                question, scheduler, f"the disk of rank {', '.join(map(str, silent))} has not answered for {PATIENCE_S:.0f} s"
            )

    def give_up(self) -> None:
        """Answer all open queries with an error, as the ranks are lost."""
        questions, self._questions = self._questions, []
        for question in questions:
            question.reply(CacheReport(question.query.query_id, trouble=REPLACED))

    def _answer(self, question: _Question, scheduler: Scheduler, trouble: str = "") -> None:
        if question not in self._questions:
            return  # already answered after `PATIENCE_S`
        self._questions.remove(question)
        query, prefixes, disk = question.query, scheduler.prefixes, scheduler.disk
        hashes = block_hashes(query.tokens)
        kept = prefixes.kept()
        report = CacheReport(
            query.query_id,
            trouble=trouble,
            serves=prefixes.serves,
            kv_disk=self._report.kv_disk,
            count=len(kept),
            prefixes=[
                CachedPrefixState(
                    cached_prefix.length, min(disk.has(cached_prefix.hashes), cached_prefix.length), cached_prefix.hits
                )
                for cached_prefix in kept[:MOST_PREFIXES]
            ],
            tokens=prefixes.positions,
            limit_tokens=prefixes.budget,
            nbytes=self._report.prefix_bytes,
            queries=prefixes.queries,
            hits=prefixes.hits,
            hit_tokens=prefixes.hit_tokens,
            memory_has=prefixes.peek(hashes),
            disk_has=disk.has(hashes),
            dropped_tokens=question.dropped_tokens,
        )
        if not question.seen:
            question.reply(report)
            return
        machines: dict[str, Surveyed] = {}
        for rank, seen in sorted(question.seen.items()):
            ready = self._rank_group.ready[rank]
            machines[ready.machine or ready.host] = seen
        spec, counts, drops = self._rank_group.layout.ranks[0], disk.counts, query.drop == "all"
        nbytes = sum(seen.nbytes for seen in (question.seen if drops else machines).values())
        total = sum(seen.total_bytes for seen in machines.values())
        question.reply(
            replace(
                report,
                dropped_bytes=nbytes if drops else 0,
                disk=DiskReport(
                    spec.kv_disk,
                    spec.kv_disk_bytes,
                    disk.positions,
                    0 if drops else nbytes,
                    total,
                    len(machines),
                    counts.hit_tokens,
                    counts.read_bytes,
                    counts.read_s,
                    counts.written_bytes,
                    counts.failures,
                ),
            )
        )
