"""Requests to the planner and its results, as plain data. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tandem.errors import OutOfMemory

Goal = Literal["latency", "throughput", "capacity"]
GOALS: tuple[Goal, ...] = ("latency", "throughput", "capacity")


@dataclass(frozen=True, kw_only=True)
class ManualLayout:
    """Layout given by the user; the planner chooses all fields left open."""

    stages: tuple[int, ...]
    """Number of machines per stage: (1,) one machine, (2,) tensor parallel 2, (1, 1) two stages, (2, 1) unequal stages."""
    replicas: int = 1
    layers: tuple[int, ...] | None = None
    """Number of layers per stage."""
    split: tuple[int, ...] | None = None
    """Shares of the machines within every stage, in any unit."""
    machines: tuple[str, ...] | None = None
    """Names of machines in order, replica after replica; by default in the given order."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Workload that a layout must support."""

    context: int | None = None
    """Tokens of prompt and output together per stream; by default the model's limit, at most 8192."""
    streams: int = 1
    """Number of concurrent requests."""
    goal: Goal | None = None
    """latency: time per token of a single stream. throughput: tokens/s of all streams together. capacity: most KV
    tokens. By default latency for one stream, else throughput."""
    dtype: str = "auto"
    dequantize: str = "auto"
    kv_dtype: str = "auto"
    prefill_chunk: int | None = None
    """Prompt tokens per prefill step; by default 512 on a GPU and 192 on a CPU."""
    memory_fraction: float = 0.85
    """Fraction of each machine's memory available to the plan."""
    layouts: tuple[ManualLayout, ...] = ()
    """Layouts to check instead of searching."""
    max_loras: int = 0
    """LoRA adapters to set memory aside for."""
    max_lora_rank: int = 16
    lora_elements: float = 0.0
    """Average numbers in the A and B of a layer's adapters of rank 1."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Routed experts of a mixture-of-experts model."""

    count: int
    """Routed experts per layer."""
    used: int
    """Routed experts per token."""
    layer_bytes: tuple[int, ...]
    """Stored bytes of the routed experts, per layer; 0 for a dense layer."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Consecutive layers on one machine, or on several that split them tensor-parallel."""

    machines: tuple[int, ...]
    """Indices in the list of machines."""
    start: int
    stop: int
    kv_heads: tuple[int, ...]
    """Kv heads of each machine. Their sum is the model's number, or more if several machines hold the same head."""
    shares: tuple[float, ...]
    """Fraction of the layers' weights on each machine, with sum 1. Not bound to whole heads, since the MLP is split
    more finely."""
    whole_experts: bool = False
    """Whether machines hold whole experts (`--expert-parallel`), which are too narrow to be split."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Replicas, each with its stages."""

    replicas: tuple[tuple[Stage, ...], ...]

    @property
    def machines(self) -> tuple[int, ...]:
        """Indices of all machines used, in order of ranks."""
        return tuple(i for stages in self.replicas for stage in stages for i in stage.machines)


@dataclass(frozen=True, kw_only=True)
class MachineMemory:
    """Predicted bytes on one machine."""

    machine: int
    weights: int
    kv: int
    """KV and recurrent state for the requested context and streams."""
    headroom: int
    """Activations of a prefill chunk, logits, and the runtime."""
    budget: int
    """Memory times `memory_fraction`."""
    checkpoint: int = 0
    """Recurrent states of one sequence, part of `kv`; each checkpoint of a cached prefix takes as much."""

    @property
    def needed(self) -> int:
        """Weights, KV and headroom together."""
        return self.weights + self.kv + self.headroom

    @property
    def short(self) -> int:
        """Bytes missing; 0 if it fits."""
        return max(0, self.needed - self.budget)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Estimates (not measurements) for one layout, in seconds, tokens per second and bytes."""

    step_single: float
    """Seconds per token of a single stream."""
    tokens_single: float
    """Tokens per second of a single stream."""
    step: float
    """Seconds in which every requested stream gets one token."""
    tokens: float
    """Tokens per second of all requested streams together."""
    prefill: float
    """Prompt tokens per second, of all replicas with a stream."""
    first_token: float
    """Seconds to the first token of a prompt as long as the context, on idle machines."""
    capacity: int
    """KV tokens that fit, over all streams."""
    micro_batches: int
    """Micro-batches in flight for which `tokens` is predicted."""
    collectives: int
    """All-reduces per decode step of a single stream."""
    collective: float
    """Seconds per all-reduce."""
    communication: float
    """Seconds of `step_single` spent on the network."""
    memory: tuple[MachineMemory, ...]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout that was considered."""

    label: str
    """Name, such as `TP 2 (a + b)`."""
    layout: Layout | None
    """None if the model rules the layout out."""
    prediction: Prediction | None
    reason: str = ""
    """Reason why it was chosen, or was not."""
    manual: bool = False

    @property
    def fits(self) -> bool:
        """True if every machine has enough memory."""
        return self.prediction is not None and not any(m.short for m in self.prediction.memory)

    @property
    def short(self) -> int:
        """Bytes missing on the machine with the largest shortage."""
        return max((m.short for m in self.prediction.memory), default=0) if self.prediction else 0


@dataclass(frozen=True, kw_only=True)
class LayoutPlan:
    """Result of planning: all layouts considered, best first, and the chosen one."""

    goal: Goal
    context: int
    streams: int
    candidates: tuple[Candidate, ...]
    """Layouts that fit, best first; then the others, by least shortage."""
    chosen: Candidate | None
    """Layout to use; None if nothing fits."""
    reasons: tuple[str, ...] = field(default=())
    """Sentences that justify the choice."""
    remedies: tuple[str, ...] = field(default=())
    """Single changes that would make the model fit, if nothing does."""


class NothingFits(OutOfMemory):
    """Raised if no layout has enough memory. `plan` has the layouts considered and the remedies."""

    def __init__(self, message: str, plan: LayoutPlan) -> None:
        super().__init__(message, param="hosts")
        self.plan = plan
