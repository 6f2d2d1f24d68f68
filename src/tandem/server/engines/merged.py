"""Several engines' states and metrics as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from tandem.protocol.control import EngineStatus

_ORDER = ("ready", "recovering", "starting", "draining", "failed")
"""The state of the whole is the first of these that an engine is in."""


def merged_status(parts: Sequence[tuple[int, EngineStatus]]) -> EngineStatus:
    """One status of the engines in `parts` (number and status, at least one): sums, all ranks, the tightest limits."""
    states = [status for _, status in parts]
    first = min(states, key=lambda status: _ORDER.index(status.state) if status.state in _ORDER else len(_ORDER))

    def total(name: str) -> int:
        return sum(getattr(status, name) for status in states)

    summed = ("queued", "running", "kv_tokens_used", "kv_tokens_total", "restarts", "prefix_tokens", "prefix_queries",
              "prefix_hits", "generated_tokens", "draft_tokens", "accepted_tokens")
    ranks = [msgspec.structs.replace(rank, replica=index) for index, status in parts for rank in status.ranks]
    limits = [status.max_context for status in states if status.max_context > 0]
    waits = [status.ttft_s for status in states if status.ttft_s]
    return msgspec.structs.replace(first, ttft_s=sum(waits) / max(len(waits), 1),
                                   max_context=min(limits, default=0), ranks=ranks,
                                   **{name: total(name) for name in summed})


def merged_metrics(texts: Mapping[int, bytes] | Mapping[str, bytes], label: str = "replica") -> bytes:
    """One text in Prometheus' format: each sample gets its text's name as `label`, each family stands in one piece."""
    families: dict[str, Metric] = {}
    for name, text in texts.items():
        for family in text_string_to_metric_families(text.decode()):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            whole.samples += [one._replace(labels={**one.labels, label: str(name)}) for one in family.samples]
    return generate_latest(_Merged(list(families.values())))


@dataclass(frozen=True)
class _Merged(Collector):
    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families
