"""Measured speeds in place of assumed ones: what a profile knows of machines and links, and what it does not. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from tandem.models.description import ModelDescription
from tandem.models.footprint import compute_item
from tandem.planner.hardware import FAST_METAL_FENCE, METAL_FENCE, Link, Machine, with_fences
from tandem.planner.profile import HostProfile, LinkProfile, Profile, Step
from tandem.planner.types import Request

_SHOWN = 6
"""Names in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What to plan with."""

    machines: list[Machine]
    links: list[Link]
    notes: list[str]
    """Which figures were measured, and which were assumed, in sentences."""


def with_profile(machines: Sequence[Machine], links: Sequence[Link], profile: Profile | None, *,
                 description: ModelDescription, request: Request, fast: bool, backend: str | None = None,
                 names: Sequence[str] = (), source: str = "The profile") -> Cluster:
    """Machines and links with the profile's figures; without one, with the fences that ranks shall have (`fast`).

    Figures that somebody gave by hand for a machine (`Machine.measured`) or for two machines (`Link.between`) stay.
    `backend` is that of the collectives, by default `Profile.backend`. `names` are what the profile calls the machines,
    by default their own; several ranks of a machine may have one name. `source` begins the notes.
    """
    fenced, counted = with_fences(machines, fast)
    if profile is None:
        return Cluster(machines=fenced, links=list(links), notes=[counted] if counted else [])
    names = names or [one.name for one in machines]
    backend = backend or profile.backend
    notes: list[str] = []
    computing = [_computing(one, profile.host(name), description, request, notes)
                 for one, name in zip(fenced, names, strict=True)]
    taken = [name for one, was, name in zip(computing, fenced, names, strict=True) if one is not was]
    joined, said = _joined(machines, links, profile, backend, fast, names)
    if taken:
        notes.insert(0, f"{source} gives the speed of {_listed(taken)}.")
    notes += said
    if unknown := [name for name in names if profile.host(name) is None]:
        notes.append(f"{source} does not know {_listed(unknown)}: what is given or assumed of such a host is counted.")
    ends = {frozenset(one.between): one for one in joined if one.between}
    pairs = {frozenset((machines[a].name, machines[b].name)): f"{names[a]} - {names[b]}"
             for a, b in combinations(range(len(machines)), 2)}
    if missing := [words for pair, words in pairs.items() if pair not in ends]:
        notes.append(f"{source} has no link {_listed(missing)} over {backend}: what is given or assumed is counted.")
    if counted and any(pair not in ends or ends[pair].fence is None for pair in pairs):
        notes.append(counted)
    return Cluster(machines=computing, links=joined, notes=notes)


def measured_machine(host: HostProfile) -> Machine:
    """A machine of which nothing is known but its profile."""
    step = host.steps[0]
    return Machine(name=host.name, memory=host.memory_bytes, bandwidth=step.gb_per_s * 1e9, flops=step.tflops * 1e12,
                   gpu=host.gpu, fence=METAL_FENCE if host.metal else 0.0)


def _computing(machine: Machine, host: HostProfile | None, description: ModelDescription, request: Request,
               notes: list[str]) -> Machine:
    if host is None or machine.measured:
        return machine
    wanted = _weights(description, request, host.gpu)
    step = _nearest(host, wanted)
    if step.weights != wanted and {step.weights, wanted} != {"bfloat16", "float16"}:
        notes.append(f"{host.name} was measured with weights of {step.weights}, not of {wanted}.")
    return replace(machine, bandwidth=step.gb_per_s * 1e9, flops=step.tflops * 1e12, layer_overhead=step.layer_us / 1e6,
                   gpu=host.gpu, measured=True)


def _weights(description: ModelDescription, request: Request, gpu: bool) -> str:
    """Type in which weights are in memory."""
    expand = request.dequantize == "yes" or (request.dequantize == "auto" and not gpu)
    if description.quantization and not expand:
        return f"{description.quantization['bits']}bit"
    if compute_item(description, request.dtype, gpu=gpu) == 4:
        return "float32"
    return "float16" if "float16" in (request.dtype, description.dtype) else "bfloat16"


def _nearest(host: HostProfile, wanted: str) -> Step:
    """What was measured with this type, else with one whose products are computed alike."""
    quantised = wanted.endswith("bit")
    alike = ("8bit", "4bit") if wanted in ("6bit", "8bit") else ("4bit", "8bit")
    order = (wanted, *(alike if quantised else ("bfloat16", "float16", "float32")))
    return min(host.steps, key=lambda one: order.index(one.weights) if one.weights in order else len(order))


def _joined(machines: Sequence[Machine], links: Sequence[Link], profile: Profile, backend: str, fast: bool,
            names: Sequence[str]) -> tuple[list[Link], list[str]]:
    """The links, with a measured one for each pair that has one and was not given by hand; and what to say of them."""
    by_hand = {frozenset(one.between) for one in links if one.between}
    found, ways, others = [], [], []
    for a, b in combinations(range(len(machines)), 2):
        ends = machines[a].name, machines[b].name
        measured = profile.joining(names[a], names[b], backend)
        if frozenset(ends) in by_hand or not measured:
            continue
        metal = any(host is not None and host.metal for host in (profile.host(names[a]), profile.host(names[b])))
        one = next((x for x in measured if x.fast_sync == fast or not metal), measured[0])
        alike = one.fast_sync == fast or not metal
        ways.append(f"{names[a]} - {names[b]}")
        if not alike:
            others.append(ways[-1])
        link = replace(_link(one), between=ends)
        found.append(link if alike else replace(link, fence=None))
    said = []
    if found:
        said.append(f"Measured links over {backend}: {_listed(ways)}.")
    if others:
        had, wanted = ("without", "with") if fast else ("with", "without")
        said.append(f"{_listed(others)}: measured {had} fast fences, and planned {wanted} them; a fence of "
                    f"{(FAST_METAL_FENCE if fast else METAL_FENCE) * 1e6:.0f} us is assumed.")
    return [*links, *found], said


def _link(one: LinkProfile) -> Link:
    """A sum of two ranks takes two messages in a ring, and one in a mesh."""
    mesh = one.backend in ("jaccl", "nccl")
    rest = max(one.sum_us - one.fence_us, 0.1)
    return Link(name=f"{one.backend}, measured", latency=rest / (1 if mesh else 2) / 1e6,
                bandwidth=one.sum_gb_per_s * 1e9, mesh=mesh, fence=one.fence_us / 1e6, hop_latency=one.hop_us / 1e6,
                hop_bandwidth=one.hop_gb_per_s * 1e9)


def _listed(names: Sequence[str]) -> str:
    each = list(dict.fromkeys(names))
    return ", ".join(each[:_SHOWN]) + (f" and {len(each) - _SHOWN} more" if len(each) > _SHOWN else "")
