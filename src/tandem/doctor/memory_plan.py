"""What the planned layout asks of each machine's memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tandem.checkpoints.resolve import resolve
from tandem.doctor.findings import Evidence, Need, Planned
from tandem.doctor.messages import Facts
from tandem.errors import UsageError
from tandem.planner.hardware import CHIPS, LINKS, Machine, machine
from tandem.planner.layouts import parse_layout
from tandem.planner.plan import plan
from tandem.planner.presets import planned_files
from tandem.planner.types import NothingFits, Request
from tandem.system.metal import gpu_memory


@dataclass(frozen=True)
class PlanRequest:
    """What the cluster must carry."""

    layout: str | None = None
    """As `tandem plan --layout` takes it; by default one stage for each machine."""
    context: int | None = None
    streams: int = 1


def planned_for(evidence: Evidence, request: PlanRequest) -> Planned | str | None:
    """The layout's needs, or why there are none to be had."""
    if evidence.model is None:
        return None
    names = [one.name for one in evidence.carriers]
    if not set(names) <= evidence.facts.keys():
        return "the plan waits for the machines that do not answer"
    copy = evidence.facts[evidence.here].model if evidence.here in evidence.facts else None
    if copy is None or copy.path is None or copy.problem:
        return f"there is no copy of {evidence.model} on {evidence.here} to plan with"
    layout = request.layout or ("single" if len(names) == 1 else f"pp={len(names)}")
    try:
        model = planned_files(resolve(evidence.model if evidence.model == "demo" else copy.path))
        asked = Request(context=request.context, streams=request.streams, layouts=(parse_layout(layout),))
        machines = [machine_of(name, evidence.facts[name]) for name in names]
        answer = plan(model.description, machines, [LINKS["10gbe"]], asked, experts=model.experts)
    except NothingFits as refusal:
        answer = refusal.plan
    except UsageError as error:
        return error.message
    candidate = answer.chosen or answer.candidates[0]
    if candidate.prediction is None:
        return candidate.reason
    needs = {names[one.machine]: Need(one.needed, one.budget) for one in candidate.prediction.memory}
    hosts = " ".join(f"{one.name}={_memory(evidence.facts[one.name])}:{one.chip}" for one in machines)
    return Planned(layout, needs, f"tandem plan {evidence.model} --hosts {hosts}", answer.remedies)


def _memory(facts: Facts) -> str:
    return f"{facts.memory_bytes >> 20}MB"


def machine_of(name: str, facts: Facts) -> Machine:
    """A machine for the planner. Its speed does not matter here, its memory does."""
    chip = facts.chip.lower().removeprefix("apple ").replace(" ", "-")
    if facts.system == "Darwin":
        found = machine(name, facts.memory_bytes, chip if chip in CHIPS else "m4")
        return replace(found, memory=facts.mlx_bytes or gpu_memory(facts.memory_bytes))
    found = machine(name, facts.memory_bytes, "h200" if facts.mlx_bytes else "cpu")
    return replace(found, memory=facts.mlx_bytes or facts.memory_bytes)
