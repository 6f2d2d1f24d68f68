"""The file of `tandem bench comm --write-profile`: measured speeds of machines and links. Pure, but for the file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from tandem.errors import ConfigError
from tandem.system.files import BY_HAND, read_regular

VERSION: Final = 1
MOST_HOSTS: Final = 64
"""A plan for so many takes seconds; the time grows with their square."""
Weights = Literal["float32", "bfloat16", "float16", "8bit", "4bit"]
Backend = Literal["ring", "jaccl", "jaccl-ring", "nccl"]
Name = Annotated[str, Meta(min_length=1, max_length=255)]
Speed = Annotated[float, Meta(ge=1e-9, le=1e9)]
Time = Annotated[float, Meta(ge=0, le=1e9)]


class Step(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a machine computes layers whose weights are kept in this type."""

    weights: Weights
    gb_per_s: Speed
    """10**9 bytes of weights a second, in steps of one token."""
    tflops: Speed
    """10**12 FLOP a second, in chunks of a prompt."""
    layer_us: Time
    """Microseconds that a layer takes besides, in a step."""


class HostProfile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine, by the name that a hosts file has for it (`ssh`)."""

    name: Name
    device: str
    """What MLX computed on."""
    gpu: bool
    metal: bool
    """That GPU is a Mac's."""
    memory_bytes: Annotated[int, Meta(gt=0)]
    """What MLX may use there."""
    steps: Annotated[list[Step], Meta(min_length=1)]


class Sum(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Medians for an all_sum of one size."""

    bytes: Annotated[int, Meta(gt=0)]
    alone_us: Time
    """Of an array that is there."""
    between_us: Time
    """Between two operations of the device, as a layer has it."""


class LinkProfile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What joins two machines, or two ranks of one machine. Latencies in microseconds, 10**9 bytes a second."""

    hosts: tuple[Name, Name]
    backend: Backend
    fast_sync: bool
    """Metal's fast fences were on."""
    sum_us: Speed
    """A small all_sum between two operations of the device, the fence included."""
    fence_us: Time
    """The part of it in which the CPU waited for the device, or the device for the CPU."""
    sum_gb_per_s: Speed
    """By which larger sums take longer."""
    hop_us: Speed
    """A small message from stage to stage."""
    hop_gb_per_s: Speed
    sums: list[Sum]


class Versions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What it was measured with."""

    tandem: str
    mlx: str


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    tandem_profile: Literal[1]
    """Version of the format."""
    versions: Versions
    hosts: list[HostProfile]
    links: list[LinkProfile]

    def host(self, name: str) -> HostProfile | None:
        """The machine of that name."""
        return next((one for one in self.hosts if one.name == name), None)

    def joining(self, a: str, b: str, backend: str) -> list[LinkProfile]:
        """What was measured between two machines, with either kind of fences."""
        return [one for one in self.links if sorted(one.hosts) == sorted((a, b)) and one.backend == backend]

    @property
    def backend(self) -> str:
        """That of the links to count where nothing names one: ring, unless others alone were measured."""
        backends = [one.backend for one in self.links]
        return "ring" if "ring" in backends or not backends else sorted(backends)[0]

    def knows(self, names: Sequence[str], backend: str | None) -> bool:
        """Every two of these machines have a link."""
        return all(self.joining(a, b, backend or self.backend) for a, b in combinations(names, 2))

    def merged(self, other: Profile) -> Profile:
        """With all of `other`, and what it does not have."""
        names = {one.name for one in other.hosts}
        links = {_key(one) for one in other.links}
        return Profile(tandem_profile=VERSION, versions=other.versions,
                       hosts=[*(one for one in self.hosts if one.name not in names), *other.hosts],
                       links=[*(one for one in self.links if _key(one) not in links), *other.links])


class _Head(Struct):
    tandem_profile: int


def read_profile(path: str, flag: str = "--profile") -> Profile:
    """Read and check. Raises ConfigError, in one line that names flag, file, field and remedy."""
    where = f"{flag} {path}"
    param = flag.removeprefix("--").replace("-", "_")
    try:
        data = read_regular(Path(path).expanduser(), BY_HAND)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror or error}; `tandem bench comm --write-profile "
                          "FILE` writes one", param=param) from None
    try:
        found = msgspec.json.decode(data, type=_Head).tandem_profile
        if found != VERSION:
            raise ConfigError(f"{where}: has version {found}, and this Tandem reads version {VERSION}; write it anew "
                              "with `tandem bench comm --write-profile`", param=param)
        profile = msgspec.json.decode(data, type=Profile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: is no profile of `tandem bench comm`: {error}", param=param) from None
    if trouble := _trouble(profile):
        raise ConfigError(f"{where}: {trouble}", param=param)
    return profile


def rounded(value: float) -> float:
    """To four digits: more were never measured."""
    return float(f"{value:.4g}")


def encode_profile(profile: Profile) -> str:
    """The file's text."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=2).decode() + "\n"


def _trouble(profile: Profile) -> str:
    """What is wrong with its names, if anything."""
    names = [one.name for one in profile.hosts]
    if len(names) > MOST_HOSTS:
        return f"has {len(names)} hosts; leave all out but the {MOST_HOSTS} that are wanted"
    if twice := next((name for name in names if names.count(name) > 1), None):
        return f"host {twice!r} is there twice; leave one out"
    if garbled := next((name for name in names if not name.isprintable()), None):
        return f"host {garbled!r}: the name has characters that cannot be printed; write it anew"
    for host in profile.hosts:
        kinds = [one.weights for one in host.steps]
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
