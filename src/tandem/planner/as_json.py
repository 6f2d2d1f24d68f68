"""A plan in types that JSON has."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tandem.planner.hardware import Machine
from tandem.planner.types import Candidate, LayoutPlan


def plan_json(plan: LayoutPlan, machines: Sequence[Machine]) -> dict[str, Any]:
    """What was compared and chosen, and why: seconds, bytes, tokens a second."""
    return {
        "goal": plan.goal,
        "context": plan.context,
        "streams": plan.streams,
        "chosen": None if plan.chosen is None else plan.chosen.label,
        "reasons": list(plan.reasons),
        "remedies": list(plan.remedies),
        "candidates": [_candidate_json(c, machines) for c in plan.candidates],
        "estimate": True,
    }


def _candidate_json(candidate: Candidate, machines: Sequence[Machine]) -> dict[str, Any]:
    prediction = None
    if candidate.prediction is not None:
        prediction = dataclasses.asdict(candidate.prediction)
        for entry, memory in zip(prediction["memory"], candidate.prediction.memory, strict=True):
            entry |= {"machine": machines[memory.machine].name, "needed": memory.needed, "short": memory.short}
    replicas = candidate.layout.replicas if candidate.layout else ()
    return {
        "label": candidate.label,
        "fits": candidate.fits,
        "reason": candidate.reason,
        "replicas": [
            [
                {
                    "machines": [machines[i].name for i in s.machines],
                    "layers": [s.start, s.stop],
                    "kv_heads": list(s.kv_heads),
                    "shares": list(s.shares),
                    "expert_parallel": s.whole_experts,
                }
                for s in stages
            ]
            for stages in replicas
        ],
        "prediction": prediction,
    }
