"""Questions to the planner and its answers, as plain data. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tandem.errors import OutOfMemory

Goal = Literal["latency", "throughput", "capacity"]
GOALS: tuple[Goal, ...] = ("latency", "throughput", "capacity")


@dataclass(frozen=True, kw_only=True)
class ManualLayout:
    """Layout given by the user; the planner chooses what it leaves open."""

    stages: tuple[int, ...]
    """Machines of each stage: (1,) one machine, (2,) tensor parallel 2, (1, 1) two stages, (2, 1) unequal stages."""
    replicas: int = 1
    layers: tuple[int, ...] | None = None
    """Layers of each stage."""
    split: tuple[int, ...] | None = None
    """Shares of the machines of every stage, in any unit."""
    machines: tuple[str, ...] | None = None
    """Machines in order, replica after replica; by default as they were given."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Work that a layout must carry."""

    context: int | None = None
    """Tokens of prompt and output together that every stream may have; by default the model's limit, at most 8192."""
    streams: int = 1
    """Requests that are answered at once."""
    goal: Goal | None = None
    """latency: a single stream's time per token; throughput: tokens/s of all streams together; capacity: most KV
    tokens. By default latency for one stream, else throughput."""
    dtype: str = "auto"
    dequantize: str = "auto"
    kv_dtype: str = "auto"
    prefill_chunk: int | None = None
    """Prompt tokens computed at once; by default 512 on a GPU and 192 on a CPU."""
    memory_fraction: float = 0.85
    """Share of each machine's memory that may be planned with."""
    layouts: tuple[ManualLayout, ...] = ()
    """Layouts to check instead of searching."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Routed experts of a mixture-of-experts model."""

    count: int
    """Routed experts of a layer."""
    used: int
    """Experts that one token passes through."""
    layer_bytes: tuple[int, ...]
    """Stored bytes of the routed experts, per layer; 0 for a dense layer."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Consecutive layers on one machine, or on several that share them by kv heads (tensor parallel)."""

    machines: tuple[int, ...]
    """Positions in the list of machines."""
    start: int
    stop: int
    kv_heads: tuple[int, ...]
    """Kv heads of each machine; together all of the model's, or more where several machines hold the same one."""
    shares: tuple[float, ...]
    """Share of each machine in the layers' weights; together 1. Near the kv heads' shares, but not bound to whole
    heads: the MLP is divided more finely."""
    whole_experts: bool = False
    """Machines each hold some experts whole (`--expert-parallel`), since these are too narrow to be divided."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Replicas of stages."""

    replicas: tuple[tuple[Stage, ...], ...]

    @property
    def machines(self) -> tuple[int, ...]:
        """Positions of all machines used, in order of ranks."""
        return tuple(i for stages in self.replicas for stage in stages for i in stage.machines)


@dataclass(frozen=True, kw_only=True)
class MachineMemory:
    """Predicted bytes on one machine."""

    machine: int
    weights: int
    kv: int
    """Reserve for the wanted context and streams."""
    headroom: int
    """Activations of a prefill chunk, logits, and the runtime itself."""
    budget: int
    """Memory times `memory_fraction`."""

    @property
    def needed(self) -> int:
        """Sum of all that must be there at once."""
        return self.weights + self.kv + self.headroom

    @property
    def short(self) -> int:
        """Bytes missing; 0 if it fits."""
        return max(0, self.needed - self.budget)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Estimates for one layout, in seconds, tokens a second and bytes. They are not measurements."""

    step_single: float
    """Seconds per token of a single stream."""
    tokens_single: float
    """Tokens a second of a single stream."""
    step: float
    """Seconds in which every wanted stream gets one token."""
    tokens: float
    """Tokens a second of all wanted streams together."""
    prefill: float
    """Prompt tokens a second, of all replicas that have a stream."""
    first_token: float
    """Seconds until the first token of a prompt as long as the context, with nothing else running."""
    capacity: int
    """KV tokens that fit, over all streams."""
    micro_batches: int
    """Batches in flight with which `tokens` was computed."""
    collectives: int
    """All-reduces in a decode step of a single stream."""
    collective: float
    """Seconds of one of them."""
    communication: float
    """Seconds of `step_single` spent on the network."""
    memory: tuple[MachineMemory, ...]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout that was looked at."""

    label: str
    """Name, as `TP 2 (a + b)`."""
    layout: Layout | None
    """None where the model rules it out."""
    prediction: Prediction | None
    reason: str = ""
    """Why it won, or why it did not."""
    manual: bool = False

    @property
    def fits(self) -> bool:
        """True when every machine has enough memory."""
        return self.prediction is not None and not any(m.short for m in self.prediction.memory)

    @property
    def short(self) -> int:
        """Bytes missing on the machine that lacks most."""
        return max((m.short for m in self.prediction.memory), default=0) if self.prediction else 0


@dataclass(frozen=True, kw_only=True)
class LayoutPlan:
    """All layouts considered, best first, and the one to use."""

    goal: Goal
    context: int
    streams: int
    candidates: tuple[Candidate, ...]
    """Layouts that fit, best first, then the others, the least short first."""
    chosen: Candidate | None
    """None when nothing fits."""
    reasons: tuple[str, ...] = field(default=())
    """Why, in sentences."""
    remedies: tuple[str, ...] = field(default=())
    """Changes that would make the model fit, when nothing does."""


class NothingFits(OutOfMemory):
    """No layout has enough memory. `plan` holds the layouts considered and what would work."""

    def __init__(self, message: str, plan: LayoutPlan) -> None:
        super().__init__(message, param="hosts")
        self.plan = plan
