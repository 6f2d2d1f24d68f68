"""Machines and links for the planner, with presets. Pure.

Bandwidth and FLOP/s of presets are nominal: published or commonly reported peaks, not reached in practice. The cost
model therefore scales them (`cost.py`). docs/planning.md names the source of each figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.errors import LayoutError
from tandem.system.metal import FAST_FENCE_S, FENCE_S, gpu_memory

GIB = 2**30
METAL_FENCE, FAST_METAL_FENCE = FENCE_S, FAST_FENCE_S
GPU_RUNTIME_OVERHEAD = 60e-6
"""Seconds per layer and step of a GPU for kernel launches."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine, which holds at most one rank of a layout."""

    name: str
    memory: int
    """Bytes available to MLX for weights and KV; on Apple silicon less than installed (`gpu_memory`)."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    flops: float
    """Matrix multiplication rate in FLOP/s, in the type of computation."""
    gpu: bool = True
    """Whether MLX computes on a GPU, where half precision and quantised products are fast; they are slow on a CPU."""
    fence: float = 0.0
    """Seconds per collective, beyond the link, that GPU synchronisation takes."""
    layer_overhead: float = GPU_RUNTIME_OVERHEAD
    """Seconds per layer and step besides reading and multiplying (kernel launches)."""
    measured: bool = False
    """Whether bandwidth and FLOP/s were measured with MLX, and are not scaled down."""
    chip: str = ""
    """Preset of the figures; empty if there is none."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Link between machines: time of a message = latency + bytes / bandwidth."""

    name: str
    latency: float
    """Seconds of a small message, software included."""
    bandwidth: float
    """Bytes per second in one direction."""
    mesh: bool = False
    """Whether every pair of machines has a direct link, all used at once (MLX's jaccl); otherwise collectives run in a
    ring."""
    between: tuple[str, str] | None = None
    """Names of the two machines it connects; None: default for all pairs without a link of their own."""
    fence: float | None = None
    """Measured seconds per collective, beyond the link, of GPU synchronisation; None: the machines' `fence`."""
    hop_latency: float | None = None
    """Measured seconds of a small message from stage to stage; None: `latency`."""
    hop_bandwidth: float | None = None


@dataclass(frozen=True, kw_only=True)
class Chip:
    """Nominal figures of a chip in its largest version."""

    bandwidth: float
    """Memory bandwidth in GB/s (10**9 bytes)."""
    tflops: float
    gpu: bool = True
    layer_overhead: float = GPU_RUNTIME_OVERHEAD
    apple: bool = True
    inferred: str = ""
    """Derivation of figures that are not published; empty if they are."""
    rdma: bool = False
    """Whether machines with this chip have Thunderbolt 5, over which macOS supports RDMA."""


CHIPS: dict[str, Chip] = {
    "m1": Chip(bandwidth=68, tflops=2.6),
    "m1-pro": Chip(bandwidth=200, tflops=5.2),
    "m1-max": Chip(bandwidth=400, tflops=10.4),
    "m1-ultra": Chip(bandwidth=800, tflops=21.0),
    "m2": Chip(bandwidth=100, tflops=3.6),
    "m2-pro": Chip(bandwidth=200, tflops=6.8),
    "m2-max": Chip(bandwidth=400, tflops=13.6),
    "m2-ultra": Chip(bandwidth=800, tflops=27.2),
    "m3": Chip(bandwidth=100, tflops=4.1),
    "m3-pro": Chip(bandwidth=150, tflops=7.4),
    "m3-max": Chip(bandwidth=400, tflops=14.2),
    "m3-ultra": Chip(bandwidth=819, tflops=28.4, rdma=True),
    "m4": Chip(bandwidth=120, tflops=4.6),
    "m4-pro": Chip(bandwidth=273, tflops=9.2, rdma=True),
    "m4-max": Chip(bandwidth=546, tflops=18.4, rdma=True),
    "m5": Chip(bandwidth=153, tflops=13.0),
    "m5-pro": Chip(bandwidth=307, tflops=27.0, rdma=True),
    "m5-max": Chip(bandwidth=614, tflops=55.0, rdma=True),
    "m5-ultra": Chip(bandwidth=1228, tflops=110.0, rdma=True, inferred="twice m5-max; no such Mac is known"),
    "gb10": Chip(bandwidth=273, tflops=125.0, layer_overhead=36e-6, apple=False),
    "h200": Chip(bandwidth=4800, tflops=989.0, layer_overhead=36e-6, apple=False),
    "cpu": Chip(bandwidth=20, tflops=0.1, gpu=False, layer_overhead=500e-6, apple=False),
}
"""Chips by name in `--hosts`. GPU FLOP/s of Apple chips are reported ones; `cpu` is a coarse guess for a few cores with
a fast BLAS."""

LINKS: dict[str, Link] = {
    "thunderbolt5-rdma": Link(name="thunderbolt5-rdma", latency=25e-6, bandwidth=8.0e9, mesh=True),
    "thunderbolt5-tcp": Link(name="thunderbolt5-tcp", latency=150e-6, bandwidth=6.5e9),
    "thunderbolt4-tcp": Link(name="thunderbolt4-tcp", latency=150e-6, bandwidth=2.5e9),
    "10gbe": Link(name="10gbe", latency=100e-6, bandwidth=1.17e9),
    "1gbe": Link(name="1gbe", latency=150e-6, bandwidth=0.117e9),
    "wifi": Link(name="wifi", latency=3e-3, bandwidth=0.05e9),
    "loopback": Link(name="loopback", latency=70e-6, bandwidth=2.0e9),
    "nvlink": Link(name="nvlink", latency=60e-6, bandwidth=100e9, mesh=True),
}
"""Links by name in `--link`."""


def chip_of(text: str) -> str:
    """Return the name in `CHIPS` for a device name such as `Apple M4 Max`; it may not exist there."""
    return text.strip().lower().removeprefix("apple ").replace(" ", "-")


def machine(name: str, installed: int, chip: str) -> Machine:
    """Return a machine with `installed` bytes of memory and a preset's figures. Raise `LayoutError` for an unknown chip."""
    preset = CHIPS.get(chip.lower())
    if preset is None:
        raise LayoutError(f"{name}: chip {chip!r} is not one of {', '.join(CHIPS)}", param="hosts")
    return Machine(
        name=name,
        memory=gpu_memory(installed) if preset.apple else installed,
        bandwidth=preset.bandwidth * 1e9,
        flops=preset.tflops * 1e12,
        gpu=preset.gpu,
        fence=METAL_FENCE if preset.apple else 0.0,
        layer_overhead=preset.layer_overhead,
        chip=chip.lower(),
    )


def with_fences(machines: Sequence[Machine], fast: bool) -> tuple[list[Machine], str]:
    """Return machines with MLX's default or `fast` fences, unless set by the user, and a note about the assumption.

    The note is empty if fences make no difference.
    """
    if not any(m.fence == METAL_FENCE for m in machines) or len(machines) == 1:
        return list(machines), ""
    if not fast:
        return list(machines), (
            f"A Mac that waits for another waits {METAL_FENCE * 1e6:.0f} us for its own GPU too; with "
            f"--fast-sync auto about {FAST_METAL_FENCE * 1e6:.0f} us (docs/two-machines.md says what that risks)."
        )
    note = f"--fast-sync: a Mac that waits for another waits {FAST_METAL_FENCE * 1e6:.0f} us for its own GPU too."
    return [replace(m, fence=FAST_METAL_FENCE) if m.fence == METAL_FENCE else m for m in machines], note


def link(name: str) -> Link:
    """Return a preset link. Raise `LayoutError` for an unknown name."""
    preset = LINKS.get(name.lower())
    if preset is None:
        raise LayoutError(f"--link {name}: is not one of {', '.join(LINKS)}", param="link")
    return preset


class Network:
    """Links between machines, by the machines' indices."""

    def __init__(self, machines: Sequence[Machine], links: Sequence[Link]) -> None:
        """Index the links. Raise `LayoutError` for a link that names an unknown machine."""
        names = [m.name for m in machines]
        default = None
        self._pairs: dict[frozenset[int], Link] = {}
        for item in links:
            if item.between is None:
                default = item
                continue
            missing = [n for n in item.between if n not in names]
            if missing:
                raise LayoutError(f"link {item.name} names {missing[0]}, which is not a host", param="link")
            self._pairs[frozenset(names.index(n) for n in item.between)] = item
        self._default = default
        facts = [(m.memory, m.bandwidth, m.flops, m.gpu, m.layer_overhead, m.measured) for m in machines]
        self.kinds = list(range(len(machines))) if self._pairs else [facts.index(f) for f in facts]
        """A number per machine, equal for machines that differ only in name. All differ if any link is specific to a
        pair."""

    def between(self, a: int, b: int) -> Link | None:
        """Return the link between two machines; None if there is none."""
        return self._pairs.get(frozenset((a, b)), self._default)

    def worst(self, group: Sequence[int]) -> Link | None:
        """Return a link with the worst properties of all links in a group of two or more; None if a pair has no link."""
        found = [self.between(a, b) for i, a in enumerate(group) for b in group[i + 1 :]]
        known = [x for x in found if x is not None]
        if len(known) < len(found):
            return None
        return Link(
            name=max(known, key=lambda x: x.latency).name,
            latency=max(x.latency for x in known),
            bandwidth=min(x.bandwidth for x in known),
            mesh=all(x.mesh for x in known),
            fence=None if None in (fences := [x.fence for x in known]) else max(x or 0.0 for x in fences),
        )
