"""Measured speeds: the file of `tandem bench comm --write-profile`, and its use in place of assumed figures.

Pure, except for reading the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from tandem.errors import ConfigError
from tandem.models.description import ModelDescription
from tandem.models.footprint import compute_item, dequantizes
from tandem.planner.hardware import FAST_METAL_FENCE, METAL_FENCE, Link, Machine, with_fences
from tandem.planner.types import Request
from tandem.system.files import BY_HAND, file_errors, read_regular

VERSION: Final = 1
MOST_HOSTS: Final = 64
"""Most machines in a profile; planning time grows with their square."""
Weights = Literal["float32", "bfloat16", "float16", "8bit", "4bit"]
Backend = Literal["ring", "jaccl", "jaccl-ring", "nccl"]
Name = Annotated[str, Meta(min_length=1, max_length=255)]
Speed = Annotated[float, Meta(ge=1e-9, le=1e9)]
Time = Annotated[float, Meta(ge=0, le=1e9)]


class Step(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speed of a machine's layers with weights of one type."""

    weights: Weights
    gb_per_s: Speed
    """10**9 bytes of weights per second, in steps of one token."""
    tflops: Speed
    """10**12 FLOP per second, in prefill chunks."""
    layer_us: Time
    """Microseconds per layer and step besides reading and multiplying."""

    @property
    def speeds(self) -> dict[str, Any]:
        """Speeds as fields of `Machine`."""
        return {"bandwidth": self.gb_per_s * 1e9, "flops": self.tflops * 1e12}


class HostProfile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measurements of one machine, by its name (`ssh`) in a hosts file."""

    name: Name
    device: str
    """Name of the device that MLX computed on."""
    gpu: bool
    metal: bool
    """Whether the GPU is a Mac's."""
    memory_bytes: Annotated[int, Meta(gt=0)]
    """Memory available to MLX in bytes."""
    steps: Annotated[list[Step], Meta(min_length=1)]


class Sum(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Medians for an all_sum of one size."""

    bytes: Annotated[int, Meta(gt=0)]
    alone_us: Time
    """Time for an already computed array, in microseconds."""
    between_us: Time
    """Time between two operations of the device, as in a layer, in microseconds."""


class LinkProfile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measurements between two machines, or two ranks of one. Latencies in microseconds, rates in 10**9 bytes per
    second."""

    hosts: tuple[Name, Name]
    backend: Backend
    fast_sync: bool
    """Whether Metal's fast fences were on."""
    sum_us: Speed
    """Time of a small all_sum between two operations of the device, fence included."""
    fence_us: Time
    """Part of `sum_us` in which CPU and device wait for each other."""
    sum_gb_per_s: Speed
    """Rate at which time grows with the size of larger sums."""
    hop_us: Speed
    """Time of a small message from stage to stage."""
    hop_gb_per_s: Speed
    sums: list[Sum]


class Versions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Versions of the software used for the measurements."""

    tandem: str
    mlx: str


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a profile file."""

    tandem_profile: Literal[1]
    """Version of the format."""
    versions: Versions
    hosts: list[HostProfile]
    links: list[LinkProfile]

    def host(self, name: str) -> HostProfile | None:
        """Return the measurements of the machine with this name; None if there are none."""
        return next((host for host in self.hosts if host.name == name), None)

    def joining(self, a: str, b: str, backend: str) -> list[LinkProfile]:
        """Return the measurements between two machines, with either kind of fences."""
        return [link for link in self.links if sorted(link.hosts) == sorted((a, b)) and link.backend == backend]

    @property
    def backend(self) -> str:
        """Default backend of the links: ring, unless only other backends were measured."""
        backends = [link.backend for link in self.links]
        return "ring" if "ring" in backends or not backends else sorted(backends)[0]

    def knows(self, names: Sequence[str], backend: str | None) -> bool:
        """Return True if every pair of these machines was measured over `backend`."""
        return all(self.joining(a, b, backend or self.backend) for a, b in combinations(names, 2))

    def merged(self, other: Profile) -> Profile:
        """Return a profile with all of `other`, plus entries only in this one."""
        names = {host.name for host in other.hosts}
        links = {_key(link) for link in other.links}
        return Profile(
            tandem_profile=VERSION,
            versions=other.versions,
            hosts=[*(host for host in self.hosts if host.name not in names), *other.hosts],
            links=[*(link for link in self.links if _key(link) not in links), *other.links],
        )


class _Head(Struct):
    tandem_profile: int


def read_profile(path: str, flag: str = "--profile") -> Profile:
    """Read and check a profile. Raise ConfigError, in one line that names flag, file, field and remedy."""
    where = f"{flag} {path}"
    param = flag.removeprefix("--").replace("-", "_")
    remedy = "`tandem bench comm --write-profile FILE` writes one"
    with file_errors(f"{where}: cannot be read", remedy, param=param, kind=ConfigError):
        data = read_regular(Path(path).expanduser(), BY_HAND)
    try:
        found = msgspec.json.decode(data, type=_Head).tandem_profile
        if found != VERSION:
            raise ConfigError(
                f"{where}: has version {found}, and this Tandem reads version {VERSION}; write it anew "
                "with `tandem bench comm --write-profile`",
                param=param,
            )
        profile = msgspec.json.decode(data, type=Profile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: is no profile of `tandem bench comm`: {error}", param=param) from None
    if trouble := _trouble(profile):
        raise ConfigError(f"{where}: {trouble}", param=param)
    return profile


def rounded(value: float) -> float:
    """Round to four digits, the precision of measurements."""
    return float(f"{value:.4g}")


def encode_profile(profile: Profile) -> str:
    """Return the file's text."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=2).decode() + "\n"


def _trouble(profile: Profile) -> str:
    """Return the first error in a profile's hosts and links; empty if there is none."""
    names = [host.name for host in profile.hosts]
    if len(names) > MOST_HOSTS:
        return f"has {len(names)} hosts; leave all out but the {MOST_HOSTS} that are wanted"
    if twice := next((name for name in names if names.count(name) > 1), None):
        return f"host {twice!r} is there twice; leave one out"
    if garbled := next((name for name in names if not name.isprintable()), None):
        return f"host {garbled!r}: the name has characters that cannot be printed; write it anew"
    for host in profile.hosts:
        kinds = [step.weights for step in host.steps]
        if double := next((kind for kind in kinds if kinds.count(kind) > 1), None):
            return f"host {host.name} has {double} twice in steps; leave one out"
    seen = set()
    for link in profile.links:
        if stranger := next((name for name in link.hosts if name not in names), None):
            return f"a link names {stranger}, which is not one of its hosts ({', '.join(names) or 'none'})"
        if _key(link) in seen:
            return f"the link {'-'.join(link.hosts)} over {link.backend} is there twice; leave one out"
        seen.add(_key(link))
    return ""


def _key(link: LinkProfile) -> tuple[str, ...]:
    return (*sorted(link.hosts), link.backend, str(link.fast_sync))


# ---- use in place of assumed figures

_SHOWN = 6
"""Most names listed in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines and links to plan with."""

    machines: list[Machine]
    links: list[Link]
    notes: list[str]
    """Sentences that state which figures were measured, and which were assumed."""


def with_profile(
    machines: Sequence[Machine],
    links: Sequence[Link],
    profile: Profile | None,
    *,
    description: ModelDescription,
    request: Request,
    fast: bool,
    backend: str | None = None,
    names: Sequence[str] = (),
    source: str = "The profile",
) -> Cluster:
    """Return machines and links with the profile's figures; without a profile, with default or `fast` fences.

    Figures that the user gave for a machine (`Machine.measured`) or for two machines (`Link.between`) take precedence.
    `backend` is that of the collectives, by default `Profile.backend`. `names` are the machines' names in the profile,
    by default their own; several ranks of a machine may share one. `source` is the subject of the notes.
    """
    fenced, counted = with_fences(machines, fast)
    if profile is None:
        return Cluster(machines=fenced, links=list(links), notes=[counted] if counted else [])
    names = names or [machine.name for machine in machines]
    backend = backend or profile.backend
    notes: list[str] = []
    computing = [
        _computing(machine, profile.host(name), description, request, notes) for machine, name in zip(fenced, names, strict=True)
    ]
    taken = [name for machine, was, name in zip(computing, fenced, names, strict=True) if machine is not was]
    joined, said = _joined(machines, links, profile, backend, fast, names)
    if taken:
        notes.insert(0, f"{source} gives the speed of {_listed(taken)}.")
    notes += said
    if unknown := [name for name in names if profile.host(name) is None]:
        notes.append(f"{source} does not know {_listed(unknown)}: what is given or assumed of such a host is counted.")
    ends = {frozenset(link.between): link for link in joined if link.between}
    pairs = {
        frozenset((machines[a].name, machines[b].name)): f"{names[a]} - {names[b]}"
        for a, b in combinations(range(len(machines)), 2)
    }
    if missing := [words for pair, words in pairs.items() if pair not in ends]:
        notes.append(f"{source} has no link {_listed(missing)} over {backend}: what is given or assumed is counted.")
    if counted and any(pair not in ends or ends[pair].fence is None for pair in pairs):
        notes.append(counted)
    return Cluster(machines=computing, links=joined, notes=notes)


def measured_machine(host: HostProfile) -> Machine:
    """Return a machine with the figures of its profile alone."""
    fence = METAL_FENCE if host.metal else 0.0
    return Machine(name=host.name, memory=host.memory_bytes, gpu=host.gpu, fence=fence, **host.steps[0].speeds)


def _computing(
    machine: Machine, host: HostProfile | None, description: ModelDescription, request: Request, notes: list[str]
) -> Machine:
    if host is None or machine.measured:
        return machine
    wanted = _weights(description, request, host.gpu)
    step = _nearest(host, wanted)
    if step.weights != wanted and {step.weights, wanted} != {"bfloat16", "float16"}:
        notes.append(f"{host.name} was measured with weights of {step.weights}, not of {wanted}.")
    return replace(machine, layer_overhead=step.layer_us / 1e6, gpu=host.gpu, measured=True, **step.speeds)


def _weights(description: ModelDescription, request: Request, gpu: bool) -> str:
    """Return the type of the weights in memory."""
    if description.quantization and not dequantizes(request.dequantize, gpu=gpu):
        return f"{description.quantization['bits']}bit"
    if compute_item(description, request.dtype, gpu=gpu) == 4:
        return "float32"
    return "float16" if "float16" in (request.dtype, description.dtype) else "bfloat16"


def _nearest(host: HostProfile, wanted: str) -> Step:
    """Return the step measured with weights of type `wanted`, else of a type with similar products."""
    quantised = wanted.endswith("bit")
    alike = ("8bit", "4bit") if wanted in ("6bit", "8bit") else ("4bit", "8bit")
    order = (wanted, *(alike if quantised else ("bfloat16", "float16", "float32")))
    return min(host.steps, key=lambda step: order.index(step.weights) if step.weights in order else len(order))


def _joined(
    machines: Sequence[Machine], links: Sequence[Link], profile: Profile, backend: str, fast: bool, names: Sequence[str]
) -> tuple[list[Link], list[str]]:
    """Return the links, plus a measured one for each pair without a link from the user, and notes about them."""
    by_hand = {frozenset(link.between) for link in links if link.between}
    found, ways, others = [], [], []
    for a, b in combinations(range(len(machines)), 2):
        ends = machines[a].name, machines[b].name
        measured = profile.joining(names[a], names[b], backend)
        if frozenset(ends) in by_hand or not measured:
            continue
        metal = any(host is not None and host.metal for host in (profile.host(names[a]), profile.host(names[b])))
        figures = next((x for x in measured if x.fast_sync == fast or not metal), measured[0])
        alike = figures.fast_sync == fast or not metal
        ways.append(f"{names[a]} - {names[b]}")
        if not alike:
            others.append(ways[-1])
        link = replace(_link(figures), between=ends)
        found.append(link if alike else replace(link, fence=None))
    said = []
    if found:
        said.append(f"Measured links over {backend}: {_listed(ways)}.")
    if others:
        had, wanted = ("without", "with") if fast else ("with", "without")
        said.append(
            f"{_listed(others)}: measured {had} fast fences, and planned {wanted} them; a fence of "
            f"{(FAST_METAL_FENCE if fast else METAL_FENCE) * 1e6:.0f} us is assumed."
        )
    return [*links, *found], said


def _link(figures: LinkProfile) -> Link:
    """Convert measurements to a link: a sum over two ranks takes two messages in a ring, and one in a mesh."""
    mesh = figures.backend in ("jaccl", "nccl")
    rest = max(figures.sum_us - figures.fence_us, 0.1)
    return Link(
        name=f"{figures.backend}, measured",
        latency=rest / (1 if mesh else 2) / 1e6,
        bandwidth=figures.sum_gb_per_s * 1e9,
        mesh=mesh,
        fence=figures.fence_us / 1e6,
        hop_latency=figures.hop_us / 1e6,
        hop_bandwidth=figures.hop_gb_per_s * 1e9,
    )


def _listed(names: Sequence[str]) -> str:
    each = list(dict.fromkeys(names))
    return ", ".join(each[:_SHOWN]) + (f" and {len(each) - _SHOWN} more" if len(each) > _SHOWN else "")
