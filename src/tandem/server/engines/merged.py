"""Several engines' states and metrics as one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from tandem.protocol.control import EngineStatus

_ORDER = ("ready", "recovering", "starting", "draining", "failed")
"""The state of the whole is the first of these that an engine is in."""
_SAMPLE = re.compile(rb"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{)?")


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
    headers: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for name, text in texts.items():
        family = b""
        for line in text.splitlines():
            if line.startswith(b"#"):
                words = line.split(None, 3)
                if len(words) < 3 or words[1] not in (b"HELP", b"TYPE"):
                    continue
                family = words[2]
                known = headers.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, label, str(name)))
    lines = [line for family in {**headers, **samples} for line in (*headers.get(family, ()), *samples.get(family, ()))]
    return b"".join(line + b"\n" for line in lines)


def _labelled(sample: bytes, name: str, value: str) -> bytes:
    """`metric{a="b"} 1` with a first label `name`, whose value needs no escapes."""
    found = _SAMPLE.match(sample)
    if found is None:
        return sample
    label = b'%b{%b="%b"' % (found[1], name.encode(), value.encode())
    rest = sample[found.end():]
    return label + (b"," + rest if found[2] and not rest.startswith(b"}") else rest if found[2] else b"}" + rest)
